"""A file in, a file out: what is removed, what stays, and what the file still says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from PIL import Image

import neuron_merging as nm
from neuron_merging.cli import app
from neuron_merging.graph import batch_size
from neuron_merging.onnx import write_model
from neuron_merging.onnx.model_file import open_ort_session
from neuron_merging.onnx.network import OnnxNetwork
from neuron_merging.onnx.open_model import make_ort_feed, measure_rounding_error, open_onnx_file
from neuron_merging.onnx.write_model import _agrees_step_by_step, write_onnx_file
from tests.onnx import small_files
from tests.onnx.small_files import node, weights


def constants(path: Path) -> dict[str, Any]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_nothing_removed_is_the_same_file_to_onnxruntime() -> None:
    source = small_files.classifier(Path("m.onnx"))
    network, _ = open_onnx_file(source)
    written = write_onnx_file(network, "same.onnx")
    assert written.batches == (1, 3, 16) and written.difference < 1e-5
    for batch in (1, 3, 16):
        x = small_files.images(batch)
        np.testing.assert_allclose(small_files.run(Path("same.onnx"), x)[0], small_files.run(source, x)[0], atol=1e-5)
    assert {name: value.shape for name, value in constants(Path("same.onnx")).items()} == {
        name: value.shape for name, value in constants(source).items()
    }


def test_an_expensive_file_is_compared_on_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = open_onnx_file(small_files.classifier(Path("m.onnx")))
    monkeypatch.setattr(batch_size, "MAX_CHECK_MACS", 1000)
    assert write_onnx_file(network, "same.onnx").batches == (1, 3)


def test_a_smaller_file_says_what_the_larger_one_did() -> None:
    source = small_files.classifier(Path("m.onnx"))
    result = nm.compress(source, ratio=0.5)
    result.save("small.onnx")
    old, new = onnx.load(str(source)), onnx.load("small.onnx")
    assert constants(Path("small.onnx"))["first.weight"].shape == (4, 3, 3, 3)
    assert [(v.name, str(v.type)) for v in new.graph.input] == [(v.name, str(v.type)) for v in old.graph.input]
    assert [v.name for v in new.graph.output] == ["y"]
    assert new.opset_import == old.opset_import and new.metadata_props == old.metadata_props
    assert [n.name for n in new.graph.node] == [n.name for n in old.graph.node]
    assert result.summary.verified is not None and result.summary.verified.precision == "float64"
    for batch in (1, 3, 16):
        x = small_files.images(batch)
        want = result.model(torch.from_numpy(x))[0].numpy()
        np.testing.assert_allclose(small_files.run(Path("small.onnx"), x)[0], want, atol=1e-5)
    again = nm.compress("small.onnx", ratio=0.5)  # a smaller file is a file
    assert [group.after for group in again.summary.groups] == [2, 2] or len(again.summary.groups) == 2


def test_dead_channels_go_without_a_trace() -> None:
    first = weights(8, 3, 3, 3)
    bias = np.linspace(0.1, 0.3, 8).astype(np.float32)
    first[[1, 4]], bias[[1, 4]] = 0, 0
    source = small_files.classifier(Path("m.onnx"), constants={"first.weight": first, "first.bias": bias})
    nm.compress(source, ratio={"*": 0.0, "first": 0.25}, merger="none").save("small.onnx")
    assert constants(Path("small.onnx"))["first.weight"].shape[0] == 6
    x = small_files.images(5)
    np.testing.assert_allclose(small_files.run(Path("small.onnx"), x)[0], small_files.run(source, x)[0], atol=1e-5)


def test_planted_duplicates_merge_exactly() -> None:
    first = weights(8, 3, 3, 3)
    bias = np.linspace(0.1, 0.3, 8).astype(np.float32)
    first[4:], bias[4:] = 0.5 * first[:4], 0.5 * bias[:4]
    source = small_files.classifier(Path("m.onnx"), constants={"first.weight": first, "first.bias": bias})
    nm.compress(source, ratio={"*": 0.0, "first": 0.5}, merger=nm.Cosine(threshold=0.9)).save("small.onnx")
    assert constants(Path("small.onnx"))["first.weight"].shape[0] == 4
    x = small_files.images(5)
    np.testing.assert_allclose(small_files.run(Path("small.onnx"), x)[0], small_files.run(source, x)[0], atol=1e-5)


I = np.array  # noqa: E741
LAST = [node("GlobalAveragePool", ["c"], "p"), node("Flatten", ["p"], "f"), node("MatMul", ["f", "w3"], "y")]
BOTH = {"w1": weights(8, 3, 1, 1), "w2": weights(6, 8, 1, 1), "w3": weights(6, 4)}
SIZED = {
    "a reshape to and fro": (
        [
            node("Reshape", ["r", "to"], "s"),
            node("Transpose", ["s"], "t", perm=[0, 2, 1, 3, 4]),
            node("Reshape", ["t", "back"], "m"),
        ],
        {"to": np.array([0, 2, 4, 8, 8]), "back": np.array([-1, 8, 8, 8])},
    ),
    "a shape that is computed": (
        [
            node("Shape", ["r"], "shape"),
            node("Gather", ["shape", "zero"], "batch"),
            node("Concat", ["batch", "rest"], "to", axis=0),
            node("Reshape", ["r", "to"], "s"),
            node("Relu", ["s"], "t"),
            node("Reshape", ["t", "back"], "m"),
        ],
        {"zero": np.array([0]), "rest": np.array([8, 64]), "back": np.array([0, 0, 8, 8])},
    ),
    "channels beside the batch": (
        [
            node("Shape", ["r"], "shape"),
            node("Gather", ["shape", "zero"], "batch"),
            node("Mul", ["batch", "eight"], "both"),
            node("Concat", ["both", "rest"], "to", axis=0),
            node("Reshape", ["r", "to"], "s"),
            node("Relu", ["s"], "t"),
            node("Reshape", ["t", "back"], "m"),
        ],
        {"zero": I([0]), "eight": I([8]), "rest": I([64, 1]), "back": I([-1, 8, 8, 8])},
    ),
    "a view by its strides": (
        [
            node("Shape", ["r"], "shape"),
            node("Gather", ["shape", "zero"], "batch"),
            node("Range", ["zero", "batch", "one"], "samples"),
            node("Mul", ["samples", "entries"], "starts"),
            node("Unsqueeze", ["starts", "axes"], "begin"),
            node("Add", ["begin", "all"], "places"),
            node("Reshape", ["r", "flat"], "list"),
            node("Gather", ["list", "places"], "m"),
        ],
        {
            **{"zero": I(0), "one": I(1), "entries": I(512), "axes": I([1, 2, 3]), "flat": I([-1])},
            "all": np.arange(512).reshape(1, 8, 8, 8),
        },
    ),
    "pieces": (
        [node("Split", ["r", "sizes"], ["s1", "s2"], axis=1), node("Concat", ["s2", "s1"], "m", axis=1)],
        {"sizes": np.array([4, 4])},
    ),
    "ranges": (
        [
            node("Slice", ["r", "from", "half", "axis"], "s1"),
            node("Slice", ["r", "half", "end", "axis"], "s2"),
            node("Concat", ["s2", "s1"], "m", axis=1),
        ],
        {
            "from": np.array([0]),
            "half": np.array([4]),
            "end": np.array([np.iinfo(np.int64).max]),
            "axis": np.array([1]),
        },
    ),
    "a sum in another layout": (
        [
            node("Transpose", ["r"], "s", perm=[0, 2, 3, 1]),
            node("Add", ["s", "shift"], "t"),
            node("Transpose", ["t"], "m", perm=[0, 3, 1, 2]),
        ],
        {"shift": np.linspace(0, 1, 8).astype(np.float32)},
    ),
    "a filter for each channel": (
        [node("Conv", ["r", "own"], "m", group=8, pads=[1, 1, 1, 1])],
        {"own": weights(8, 1, 3, 3)},
    ),
    "groups": (
        [
            node("Conv", ["r", "own"], "n", group=2),
            node("Relu", ["n"], "m"),
        ],
        {"own": weights(8, 4, 1, 1)},
    ),
}


@pytest.mark.parametrize("name", SIZED)
def test_sizes_that_hold_channels_are_rewritten(name: str) -> None:
    middle, more = SIZED[name]
    nodes = [node("Conv", ["x", "w1"], "a"), node("Relu", ["a"], "r"), *middle, node("Conv", ["m", "w2"], "c"), *LAST]
    source = small_files.write(Path("m.onnx"), nodes, {**BOTH, **more})
    result = nm.compress(source, ratio=0.5)
    result.save("small.onnx")
    assert constants(Path("small.onnx"))["w1"].shape[0] == 4, result.summary
    for batch in (1, 3):
        x = small_files.images(batch)
        want = result.model(torch.from_numpy(x))[0].numpy()
        np.testing.assert_allclose(small_files.run(Path("small.onnx"), x)[0], want, atol=1e-5)


def test_channels_beside_the_batch_are_verified_with_other_batches() -> None:
    """The example has two samples, those that a result is verified with are more."""
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Reshape", ["a", "to"], "r"),
        node("Relu", ["r"], "s"),
        node("Reshape", ["s", "back"], "m"),
        node("Conv", ["m", "w2"], "c"),
        *LAST,
    ]
    source = small_files.write(Path("m.onnx"), nodes, {**BOTH, "to": I([-1, 64]), "back": I([-1, 8, 8, 8])})
    small = nm.compress(source, torch.from_numpy(small_files.images(2)), ratio=0.5, merger="none")
    assert small.summary.groups[0].after == 4 and small.summary.verified is not None


def test_old_files_with_sizes_as_attributes() -> None:
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Split", ["a"], ["s1", "s2"], axis=1, split=[4, 4]),
        node("Slice", ["a"], "s3", axes=[1], starts=[4], ends=[8]),
        node("Add", ["s1", "s2"], "s"),
        node("Add", ["s", "s3"], "m"),
        node("Conv", ["m", "w2"], "c"),
        *LAST,
    ]
    stored = {**BOTH, "w2": weights(6, 4, 1, 1)}
    source = small_files.write(Path("m.onnx"), nodes, stored, opset=9, ir=3)
    nm.compress(source, ratio=0.5, scope="all").save("small.onnx")
    small = onnx.load("small.onnx")
    assert small.opset_import[0].version == 9 and constants(Path("small.onnx"))["w1"].shape[0] == 4
    assert [v.name for v in small.graph.input] == [v.name for v in onnx.load(str(source)).graph.input]
    assert small_files.run(Path("small.onnx"), small_files.images(3))[0].shape == (3, 4)


def test_a_bias_behind_its_layer_goes_into_it_and_takes_the_mean() -> None:
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Reshape", ["b1", "to"], "shift"),
        node("Add", ["a", "shift"], "b"),
        node("Sigmoid", ["b"], "r"),
        node("Conv", ["r", "w2"], "c"),
        *LAST,
    ]
    more = {"b1": np.linspace(-1, 1, 8).astype(np.float32), "to": np.array([1, 8, 1, 1])}
    result = nm.compress(small_files.write(Path("m.onnx"), nodes, {**BOTH, **more}), ratio=0.5)
    result.save("small.onnx")
    small = onnx.load("small.onnx")
    (first, second) = (n for n in small.graph.node if n.op_type == "Conv")
    assert len(first.input) == 3 and len(second.input) == 3  # the mean of four sigmoids is not nothing
    assert "bias added" not in str(result.summary) and "mean not restored" not in str(result.summary)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_group_norm_that_was_taken_apart_loses_whole_groups(fixed: bool) -> None:
    """As torch's exporters write it; the ones and zeros may serve several norms, and the sizes may be numbers."""
    nodes = [node("Conv", ["x", "first"], "a")]
    for i, (given, made_) in enumerate((("a", "b"), ("b", "c"))):
        nodes += [
            node("Reshape", [given, "to"], f"g{i}"),
            node("InstanceNormalization", [f"g{i}", "ones", "zeros"], f"n{i}", epsilon=1e-5),
            node("Shape", [given], f"s{i}"),
            node("Reshape", [f"n{i}", "sizes" if fixed else f"s{i}"], f"r{i}"),
            node("Mul", [f"r{i}", f"gain{i}"], f"m{i}"),
            node("Add", [f"m{i}", "shift"], made_),
        ]
    nodes += [node("Conv", ["c", "second"], "y")]
    one, zero = np.ones(4, np.float32), np.zeros(4, np.float32)
    gains = {f"gain{i}": np.linspace(0.5, 1 + i, 16, dtype=np.float32).reshape(16, 1, 1) for i in (0, 1)}
    tensors = {"first": weights(16, 3, 3, 3), "second": weights(4, 16, 3, 3), "shift": weights(16, 1, 1)}
    sizes = {"to": I([0, 4, -1]), "sizes": I([3, 16, 6, 6])}
    inputs = {"x": (3, 3, 8, 8) if fixed else small_files.FREE}
    small_files.write(Path("m.onnx"), nodes, {**tensors, **gains, **sizes, "ones": one, "zeros": zero}, inputs=inputs)
    small = nm.compress("m.onnx", ratio=0.5, effort="fast")
    (group,) = small.summary.groups
    assert (group.before, group.after) == (4, 2)
    small.save("s.onnx")
    assert constants(Path("s.onnx"))["first"].shape[0] == 8
    assert small_files.run(Path("s.onnx"), small_files.images(3))[0].shape == (3, 4, 4, 4)


def colours_last(path: Path) -> Path:
    """A network as TensorFlow's exporters write them: colours come last at both ends, not in between."""
    nodes = [
        node("Transpose", ["x"], "t", perm=[0, 3, 1, 2]),
        node("Conv", ["t", "first"], "a", pads=[1, 1, 1, 1]),
        node("Relu", ["a"], "b"),
        node("Transpose", ["b"], "c", perm=[0, 2, 3, 1]),
        node("Mul", ["c", "gain"], "d"),
        node("Transpose", ["d"], "e", perm=[0, 3, 1, 2]),
        node("Conv", ["e", "second"], "f"),
        node("Transpose", ["f"], "y", perm=[0, 2, 3, 1]),
    ]
    gain = np.linspace(0.5, 1, 8).astype(np.float32)
    constants = {"first": weights(8, 3, 3, 3), "gain": gain, "second": weights(4, 8, 3, 3)}
    return small_files.write(path, nodes, constants, inputs={"x": ("batch", 16, 16, 3)})


def test_colours_that_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    colours_last(Path("m.onnx"))
    np.savez("photos.npz", x=small_files.rng().integers(0, 255, (40, 16, 16, 3), np.uint8))
    Path("photos").mkdir()
    for i in range(8):
        Image.fromarray(small_files.rng().integers(0, 255, (20, 24, 3), np.uint8)).save(f"photos/{i}.png")
    small = nm.compress("m.onnx", ratio=0.5, effort="fast")
    assert small.summary.verdict is not None and small.summary.verdict.inputs == "64 synthetic images"
    for data in ("photos.npz", "photos"):
        command = ["compress", "m.onnx", "s.onnx", "--ratio", "0.5", "--calibrate", data, "--overwrite"]
        assert app.main(command) == 0, capsys.readouterr().err
        assert small_files.run(Path("s.onnx"), np.zeros((3, 16, 16, 3), np.float32))[0].shape == (3, 14, 14, 4)


def test_the_page_of_a_file_shows_float_and_int8(capsys: pytest.CaptureFixture[str]) -> None:
    small_files.classifier(Path("m.onnx"))
    command = ["compress", "m.onnx", "s.onnx", "--ratio", "0.25", "--int8", "--effort", "fast", "--page", "page.html"]
    assert app.main(command) == 0, capsys.readouterr().err
    page = Path("page.html").read_text()
    assert "Float and int8" in page and "latency in onnxruntime" in page


def test_half_precision() -> None:
    source = small_files.classifier(Path("m.onnx"), dtype=np.float16, kind=TensorProto.FLOAT16)
    nm.compress(source, ratio=0.5).save("small.onnx")
    assert constants(Path("small.onnx"))["first.weight"].dtype == np.float16
    assert small_files.run(Path("small.onnx"), small_files.images(3, np.float16))[0].dtype == np.float16


def test_weights_beside_the_file_stay_beside_it() -> None:
    source = small_files.classifier(Path("m.onnx"), width=64)
    Path("apart").mkdir()
    onnx.save(onnx.load(str(source)), "apart/m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    nm.compress("apart/m.onnx", ratio=0.5).save("apart/small.onnx")
    assert sorted(path.name for path in Path("apart").iterdir()) == [
        "m.onnx",
        "small.onnx",
        "small.onnx.data",
        "w.bin",
    ]
    assert small_files.run(Path("apart/small.onnx"), small_files.images(3))[0].shape == (3, 4)


def test_weights_of_others_are_not_replaced() -> None:
    model = onnx.load(str(small_files.classifier(Path("plain.onnx"), width=64)))
    onnx.save(model, "m.onnx", save_as_external_data=True, location="small.onnx.data", size_threshold=0)
    Path("small.onnx.1.data").write_text("of someone else")
    want = small_files.run(Path("m.onnx"), small_files.images(3))[0]
    for _ in range(2):  # the second time, the result's own are replaced
        nm.compress("m.onnx", ratio=0.5, merger="none").save("small.onnx", overwrite=True)
        np.testing.assert_array_equal(small_files.run(Path("m.onnx"), small_files.images(3))[0], want)
        assert small_files.run(Path("small.onnx"), small_files.images(3))[0].shape == (3, 4)
    assert Path("small.onnx.1.data").read_text() == "of someone else"


def test_what_is_too_large_for_one_file_gets_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_files.classifier(Path("m.onnx"), width=64)
    monkeypatch.setattr(write_model, "MAX_PROTOBUF_BYTES", 1000)
    nm.compress(source, ratio=0.5, merger="none").save("small.onnx")
    assert Path("small.onnx.data").stat().st_size > Path("small.onnx").stat().st_size
    assert small_files.run(Path("small.onnx"), small_files.images(3))[0].shape == (3, 4)


def test_layers_that_only_share_a_vector_of_zeros_are_cut_apart() -> None:
    zeros = {"first.bias": np.zeros(6, np.float32)}
    source = small_files.classifier(Path("m.onnx"), width=6, constants=zeros)
    model = onnx.load(str(source))
    (second,) = (n for n in model.graph.node if n.output[0] == "c")
    second.input[2] = "first.bias"
    onnx.save(model, str(source))
    write_onnx_file(open_onnx_file(source)[0], "same.onnx")
    assert [n.input[2] for n in onnx.load("same.onnx").graph.node if n.op_type == "Conv"] == ["first.bias"] * 2
    nm.compress(source, ratio={"*": 0.0, "first": 0.5}, merger="none").save("small.onnx")
    assert constants(Path("small.onnx"))["first.weight"].shape[0] == 3
    assert constants(Path("small.onnx"))["second.weight"].shape == (6, 3, 3, 3)


def test_a_shared_weight_is_cut_once() -> None:
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "w2"], "c1"),
        node("Sigmoid", ["a"], "d"),
        node("Conv", ["d", "w2"], "c2"),
        node("Add", ["c1", "c2"], "c"),
        *LAST,
    ]
    source = small_files.write(Path("m.onnx"), nodes, BOTH)
    result = nm.compress(source, ratio={"*": 0.0, "w1": 0.5})
    result.save("small.onnx")
    assert constants(Path("small.onnx"))["w2"].shape == (6, 4, 1, 1)


def test_names_that_a_file_has_already_are_not_given_again() -> None:
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Add", ["a", "b_bias"], "b"),  # the sum goes into the layer, under a name that is taken
        node("Relu", ["b"], "r"),
        node("Conv", ["r", "w2", "zero"], "c1"),
        node("Conv", ["r", "w2", "zero"], "c2"),
        node("Conv", ["r", "w2", "zero_copy_1"], "c3"),  # as a file that was cut before has them
        node("Sum", ["c1", "c2", "c3"], "c"),
        *LAST,
    ]
    more = {"b_bias": weights(1, 8, 1, 1), "zero": np.zeros(6, np.float32), "zero_copy_1": np.ones(6, np.float32)}
    source = small_files.write(Path("m.onnx"), nodes, {**BOTH, **more})
    network, _ = open_onnx_file(source)
    assert not any(step.runs_in_ort for step in network.program.steps)
    write_onnx_file(network, "same.onnx")
    x = small_files.images(3)
    np.testing.assert_allclose(small_files.run(Path("same.onnx"), x)[0], small_files.run(source, x)[0], atol=1e-5)
    nm.compress(source, ratio=0.5).save("small.onnx")
    nm.compress("small.onnx", ratio=0.5).save("smaller.onnx")


def test_rounding_that_grows_behind_a_step_is_no_fault_of_the_step() -> None:
    nodes = [
        node("Add", ["x", "far"], "a"),
        node("Conv", ["a", "w1"], "b"),
        node("Relu", ["b"], "r"),
        node("Conv", ["r", "w2"], "c"),
        node("Add", ["c", "away"], "s"),
        node("Sub", ["s", "away"], "t"),  # what is left is what rounding made of it
        node("Mul", ["t", "many"], "y"),
    ]
    more = {"far": np.float32(9), "away": np.float32(3e5), "many": np.float32(1e3)}
    source = small_files.write(Path("m.onnx"), nodes, {**BOTH, **more})
    network, _ = open_onnx_file(source)
    assert not any(step.runs_in_ort for step in network.program.steps)
    nm.compress(source, ratio=0.5).save("small.onnx")


def test_steps_whose_sizes_depend_on_numbers_keep_those_of_the_example() -> None:
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Relu", ["a"], "r"),
        node("Conv", ["r", "w2"], "c"),
        node("Cast", ["c"], "i", to=7),
        node("Mod", ["i", "three"], "at"),
        node("ScatterElements", ["c", "at", "c"], "y", axis=1),
    ]
    source = small_files.write(Path("m.onnx"), nodes, {**BOTH, "three": np.array(3)})
    result = nm.compress(source, ratio=0.5)
    result.save("small.onnx")
    assert [group.name for group in result.summary.groups] == ["w1"]


def test_sound_and_states_are_given_sizes_that_run() -> None:
    nodes = [
        node("Pad", ["x", "by"], "p", mode="reflect"),
        node("Unsqueeze", ["p", "one"], "u"),
        node("Conv", ["u", "w1"], "a", strides=[64]),
        node("Relu", ["a"], "r"),
        node("GlobalAveragePool", ["r"], "g"),
        node("Squeeze", ["g", "two"], "f"),
        node("MatMul", ["f", "w3"], "m"),
        node("Reshape", ["state", "four"], "s"),
        node("Add", ["m", "s"], "y"),
    ]
    constants = {"by": np.array([0, 64, 0, 64]), "one": np.array([1]), "two": np.array([2]), "four": np.array([1, 4])}
    more = {"w1": weights(8, 1, 64), "w3": weights(8, 4)}
    inputs = {"x": ("n", "samples"), "state": (1, "other", 4)}
    source = small_files.write(Path("m.onnx"), nodes, {**constants, **more}, inputs=inputs)
    _, (sound, state) = open_onnx_file(source)
    assert sound.shape == (1, 128) and state.shape == (1, 1, 4)


def test_infinities_that_hide_what_comes_later_are_no_weights() -> None:
    nodes = [
        node("MatMul", ["x", "w1"], "a"),
        node("Relu", ["a"], "b"),
        node("MatMul", ["b", "w2"], "c"),
        node("Add", ["c", "hidden"], "d"),
        node("Softmax", ["d"], "y"),
    ]
    hidden = np.triu(np.full((5, 5), -np.inf, np.float32), 1)
    inputs = {"x": ("batch", 5, 4)}
    source = small_files.write(
        Path("m.onnx"), nodes, {"w1": weights(4, 8), "w2": weights(8, 5), "hidden": hidden}, inputs=inputs
    )
    nm.compress(source, ratio=0.5, merger="none").save("small.onnx")
    assert constants(Path("small.onnx"))["w1"].shape == (4, 4)


def test_how_far_rounding_takes_a_network_with_biases() -> None:
    (apart,) = measure_rounding_error(*open_onnx_file(small_files.classifier(Path("m.onnx"))))
    assert 0 < apart < 1e-5


def test_a_state_whose_size_follows_the_batch() -> None:
    """Its size is a number in the captured graph, which does not run with another batch then: that is no error."""
    nodes = [
        node("Transpose", ["x"], "t", perm=[1, 0, 2]),
        node("MatMul", ["t", "w1"], "a"),
        node("Relu", ["a"], "b"),
        node("MatMul", ["b", "w2"], "c"),
        node("Shape", ["x"], "shape"),
        node("Slice", ["shape", "zero", "one"], "batch"),
        node("Concat", ["one", "batch", "five"], "sizes", axis=0),
        node("ConstantOfShape", ["sizes"], "start"),
        node("GRU", ["c", "w", "r", "", "", "start"], ["d"], hidden_size=5),
        node("Squeeze", ["d", "axes"], "y"),
    ]
    tensors = {"w1": weights(4, 8), "w2": weights(8, 6), "w": weights(1, 15, 6), "r": weights(1, 15, 5)}
    sizes = {"axes": I([1]), "zero": I([0]), "one": I([1]), "five": I([5])}
    source = small_files.write(Path("m.onnx"), nodes, {**tensors, **sizes}, inputs={"x": ("batch", 7, 4)})
    nm.compress(source, budget={"macs": 0.8}, effort="fast").save("small.onnx")
    assert constants(Path("small.onnx"))["w1"].shape[1] < 8


def test_a_file_that_onnxruntime_changes_by_optimising_is_compared_as_it_stands() -> None:
    """Zeros around what is negative are larger than it; onnxruntime makes them a pooling's own padding."""
    known = {
        "first": weights(8, 3, 3, 3),
        "low": np.full(8, -5, np.float32),
        "last": weights(4, 8, 1, 1),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    }
    nodes = [
        node("Conv", ["x", "first", "low"], "a"),
        node("Pad", ["a", "pads"], "b"),
        node("MaxPool", ["b"], "c", kernel_shape=[3, 3]),
        node("Conv", ["c", "last"], "y"),
    ]
    path = small_files.write(Path("padded.onnx"), nodes, known)
    small = nm.compress(path, ratio=0.25, merger="none").model
    assert isinstance(small, OnnxNetwork)
    written = write_onnx_file(small, "small.onnx")
    assert "optimisation" in written.note and written.difference < 1e-4


def test_steps_are_compared_where_rounding_is_amplified() -> None:
    known = {"first": weights(8, 3, 3, 3), "last": weights(4, 8, 1, 1)}
    nodes = [node("Conv", ["x", "first"], "a"), node("Relu", ["a"], "b"), node("Conv", ["b", "last"], "y")]
    network = nm.analyse(small_files.write(Path("right.onnx"), nodes, known)).model
    assert isinstance(network, OnnxNetwork)
    wrong = small_files.write(Path("wrong.onnx"), nodes, {**known, "last": 1.1 * known["last"]})
    inputs = network.origin.inputs
    for file, agrees in ((Path("right.onnx"), True), (Path(wrong), False)):
        found = open_ort_session(str(file)).run(["y"], make_ort_feed(network.origin.file, inputs))
        assert _agrees_step_by_step(network, inputs, {"y": found[0]}, file) is agrees


def test_layers_of_which_only_the_sizes_are_asked_for_get_no_bias() -> None:
    known = {"w": weights(8, 6), "v": weights(6), "one": np.ones(1, np.float32), "last": weights(6, 2)}
    nodes = [
        node("MatMul", ["x", "w"], "a"),
        node("MatMul", ["x", "w"], "unasked"),
        node("Add", ["unasked", "v"], "moved"),
        node("Add", ["a", "v"], "b"),
        node("Shape", ["moved"], "sizes"),
        node("Expand", ["one", "sizes"], "ones"),
        node("Add", ["b", "ones"], "c"),
        node("MatMul", ["c", "last"], "y"),
    ]
    found = nm.inspect(small_files.write(Path("m.onnx"), nodes, known, inputs={"x": ("batch", 8)}))
    assert found.account.unused.parameters == 0
    assert found.account.parameters == 8 * 6 + 6 + 6 * 2 + 2  # the last layer's bias was made


def test_results_that_nothing_reads_stand_in_nobodys_way() -> None:
    known = {"first": weights(8, 3, 3, 3), "last": weights(4, 8, 1, 1)}
    nodes = [
        node("Conv", ["x", "first"], "a"),
        node("MaxPool", ["a"], ["b", "places"], kernel_shape=[2, 2]),
        node("Dropout", ["b"], ["c", "mask"]),
        node("Conv", ["c", "last"], "y"),
    ]
    path = small_files.write(Path("m.onnx"), nodes, known, opset=9)
    assert [group.name for group in nm.inspect(path).groups] == ["first"]
    nm.compress(path, ratio=0.25, merger="none").save("small.onnx")
    assert small_files.run(Path("small.onnx"), small_files.images())[0].shape == (2, 4, 5, 5)


@pytest.mark.parametrize("returned", ["w1", "b1", "w3"])
def test_a_weight_that_is_also_an_output_keeps_its_shape(returned: str, tmp_path: Path) -> None:
    steps = [node("MatMul", ["x", "w1"], "m"), node("Add", ["m", "b1"], "h"), node("Relu", ["h"], "r")]
    layers = [node("MatMul", ["r", "w2"], "s"), node("Relu", ["s"], "t"), node("MatMul", ["t", "w3"], "y")]
    constants = {"w1": weights(4, 8), "b1": weights(8), "w2": weights(8, 6), "w3": weights(6, 3)}
    file = small_files.write(
        tmp_path / "net.onnx", [*steps, *layers], constants, inputs={"x": ("batch", 4)}, outputs=("y", returned)
    )
    small = nm.compress(file, ratio=0.5, merger="none")
    small.save(tmp_path / "small.onnx")
    assert small.summary.parameters[1] < small.summary.parameters[0]
    x = small_files.rng().standard_normal((2, 4)).astype(np.float32)
    np.testing.assert_array_equal(small_files.run(tmp_path / "small.onnx", x)[1], constants[returned])


@pytest.mark.parametrize("ir", [3, 8])
def test_tables_that_a_file_computes_are_computed_again(ir: int) -> None:
    """A table of cosines comes from eight numbers; stored, it would be most of the file."""
    nodes = [
        node("Reshape", ["steps", "column"], "rows"),
        node("Mul", ["rows", "wide"], "angles"),
        node("Cos", ["angles"], "table"),
        node("Conv", ["x", "first.weight"], "a", pads=[1, 1, 1, 1]),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "second.weight"], "c", pads=[1, 1, 1, 1]),
        node("MatMul", ["c", "table"], "y"),
    ]
    stored = {
        "steps": np.linspace(0, 3, 8).astype(np.float32),
        "column": np.array([8, 1]),
        "wide": np.linspace(0, 1, 500).astype(np.float32),
        "first.weight": weights(16, 3, 3, 3),
        "second.weight": weights(4, 16, 3, 3),
    }
    source = small_files.write(Path("m.onnx"), nodes, stored, ir=ir)
    nm.compress(source, ratio=0.5).save("small.onnx")
    assert Path("small.onnx").stat().st_size < source.stat().st_size
    assert [n.op_type for n in onnx.load("small.onnx").graph.node].count("Cos") == 1
    assert open_ort_session("small.onnx").run(None, {"x": small_files.images(2)})[0].shape == (2, 4, 8, 500)


def test_sizes_at_which_a_file_gives_numbers_are_preferred() -> None:
    """Sixteen samples are too few for this file: it divides by their number beyond 64, and takes a root."""
    nodes = [
        node("Shape", ["x"], "shape"),
        node("Gather", ["shape", "last"], "length"),
        node("Cast", ["length"], "float", to=TensorProto.FLOAT),
        node("Sub", ["float", "least"], "beyond"),
        node("Sqrt", ["beyond"], "root"),
        node("Conv", ["x", "first.weight"], "a"),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "second.weight"], "c"),
        node("Div", ["c", "root"], "y"),
    ]
    stored = {
        "last": np.array(2),
        "least": np.float32(64.5),
        "first.weight": weights(8, 2, 3),
        "second.weight": weights(4, 8, 3),
    }
    source = small_files.write(Path("m.onnx"), nodes, stored, inputs={"x": ("batch", 2, "time")})
    assert open_onnx_file(source)[1][0].shape == (1, 2, 128)


def test_a_file_that_takes_its_samples_in_fours() -> None:
    """Four rotated copies of a map belong together: their scores are averaged."""
    nodes = [
        node("Conv", ["x", "first.weight"], "a"),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "second.weight"], "c"),
        node("GlobalAveragePool", ["c"], "d"),
        node("Reshape", ["d", "fours"], "e"),
        node("ReduceMean", ["e"], "y", axes=[1], keepdims=0),
    ]
    stored = {"first.weight": weights(8, 3, 3, 3), "second.weight": weights(4, 8, 3, 3), "fours": np.array([-1, 4, 4])}
    source = small_files.write(Path("m.onnx"), nodes, stored)
    small = nm.compress(source, ratio=0.5)
    assert small.inputs[0].shape[0] == 4
    small.save("small.onnx")
    assert small_files.run(Path("small.onnx"), small_files.images(8))[0].shape == (2, 4)
