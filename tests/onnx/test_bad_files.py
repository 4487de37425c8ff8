"""Files that cannot be used: one clear error, nothing written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import neuron_merging as nm
from neuron_merging.cli import app
from neuron_merging.graph.macs import count_graph_macs
from tests.onnx import small_files
from tests.onnx.small_files import node, weights


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def truncated() -> None:
    whole = small_files.classifier(Path("m.onnx")).read_bytes()
    Path("m.onnx").write_bytes(whole[: len(whole) // 2])


def empty() -> None:
    Path("m.onnx").touch()


def something_else() -> None:
    Path("m.onnx").write_bytes(b"PK\x03\x04" + bytes(range(256)) * 4)


def beginning(text: bytes) -> Callable[[], None]:
    return lambda: Path("m.onnx").write_bytes(text * 9) and None


def missing() -> None:
    pass


def apart(location: str) -> Callable[[], None]:
    def write() -> None:
        model = onnx.load(str(small_files.classifier(Path("m.onnx"))))
        onnx.save(model, "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
        model = onnx.load("m.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                entry.value = location if entry.key == "location" else entry.value
        Path("m.onnx").write_bytes(model.SerializeToString())
        Path("w.bin").unlink()

    return write


def half_of_the_weights() -> None:
    model = onnx.load(str(small_files.classifier(Path("m.onnx"))))
    onnx.save(model, "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    Path("w.bin").write_bytes(Path("w.bin").read_bytes()[:999])


def quantised() -> None:
    more = {"scale": np.float32(0.1), "zero": np.uint8(0)}
    nodes = [node("QuantizeLinear", ["x", "scale", "zero"], "q"), node("DequantizeLinear", ["q", "scale", "zero"], "y")]
    small_files.write(Path("m.onnx"), nodes, more)


def sizes_that_nothing_fits() -> None:
    nodes = [node("Reshape", ["x", "to"], "f"), node("MatMul", ["f", "w"], "y")]
    constants = {"to": np.array([1, 7 * 11 * 13]), "w": weights(7 * 11 * 13, 2)}
    small_files.write(Path("m.onnx"), nodes, constants, inputs={"x": ("a", "b", "c")})


def all_in_a_branch() -> None:
    inner = [node("Conv", ["x", "w"], "inside")]
    branch = onnx.helper.make_graph(inner, "branch", [], [onnx.helper.make_empty_tensor_value_info("inside")])
    nodes = [
        node("ReduceSum", ["x"], "s", keepdims=0),
        node("Greater", ["s", "zero"], "which"),
        node("If", ["which"], "z", then_branch=branch, else_branch=branch),
        node("Identity", ["z"], "y"),
    ]
    small_files.write(Path("m.onnx"), nodes, {"w": weights(4, 3, 1, 1), "zero": np.float32(0)})


def strings() -> None:
    small_files.write(Path("m.onnx"), [node("Identity", ["x"], "y")], {}, kind=onnx.TensorProto.STRING)


def list_as_output() -> None:
    model = onnx.load(str(small_files.classifier(Path("m.onnx"))))
    last = model.graph.output[0]
    model.graph.node.append(node("SequenceConstruct", [last.name], "list"))
    model.graph.output.append(helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, None))
    onnx.save(model, "m.onnx")


def operators_of_ones_own() -> None:
    own = onnx.helper.make_node("Mine", ["x"], ["y"], name="mine", domain="com.acme")
    model = onnx.load(str(small_files.write(Path("m.onnx"), [own], {})))
    model.opset_import.append(onnx.helper.make_opsetid("com.acme", 1))
    onnx.save(model, "m.onnx")


def stored_twice() -> None:
    model = onnx.load(str(small_files.classifier(Path("m.onnx"))))
    model.graph.initializer.append(model.graph.initializer[0])
    onnx.save(model, "m.onnx")


def size_of_zero() -> None:
    small_files.classifier(Path("m.onnx"), inputs={"x": (0, 3, 8, 8)})


BAD: dict[str, tuple[Callable[[], None], str]] = {
    "cut off": (truncated, "not an ONNX file, or cut off"),
    "empty": (empty, "not an ONNX file, or cut off"),
    "not ONNX": (something_else, "not an ONNX file, or cut off"),
    "a pointer to it": (beginning(b"version https://git-lfs.github.com/spec/v1\noid "), "git lfs pull"),
    "a page about it": (beginning(b"<!doctype html>"), "HTML page"),
    "an archive": (beginning(b"PK\x03\x04"), "as torch.save writes them"),
    "missing": (missing, "there is no such file"),
    "a folder": (lambda: Path("m.onnx").mkdir(), "that is a folder"),
    "a size of zero": (size_of_zero, "fixes a size of its input 'x' as zero"),
    "weights missing": (apart("w.bin"), "which is missing"),
    "weights cut off": (half_of_the_weights, "beyond the end of 'w.bin'"),
    "weights above": (apart("../../etc/passwd"), "outside of the file's folder"),
    "weights anywhere": (apart("/etc/passwd"), "outside of the file's folder"),
    "quantised": (quantised, "the file is quantised"),
    "all in a branch": (all_in_a_branch, "inside or behind If, which is not pruned (at /z/If)"),
    "a weight twice": (stored_twice, "stores 'first.weight' 2 times"),
    "strings": (strings, "not a numeric tensor (at x)"),
    "a list as output": (list_as_output, "the output 'list' is not a tensor"),
    "operators of one's own": (operators_of_ones_own, "com.acme:Mine(-1) is not a registered function/op"),
    "open sizes": (sizes_that_nothing_fits, "--input 1,3,224,224: x (a, b, c)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_an_error_and_nothing_is_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write, says = BAD[name]
    write()
    before = sorted(Path().iterdir())
    assert app.main(["compress", "m.onnx", "small.onnx"]) == 3
    assert says in " ".join(capsys.readouterr().err.split())
    assert sorted(Path().iterdir()) == before


def test_names_of_files_are_taken_as_other_systems_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    small_files.classifier(Path("m.onnx")).rename("M.ONNX")
    assert app.main(["compress", "M.ONNX", "SMALL.ONNX", "--effort", "fast"]) == 0
    x = small_files.images()
    assert small_files.run(Path("SMALL.ONNX"), x)[0].shape == small_files.run(Path("M.ONNX"), x)[0].shape
    capsys.readouterr()


@pytest.mark.parametrize("name", ["m.onx", "m.pkl", "net.py"])
def test_what_looks_like_a_file_is_not_looked_up_among_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["inspect", name]) == 3
    said = capsys.readouterr().err
    assert "lenet" not in said and ("net:FUNCTION" in said if name == "net.py" else ".onnx or .pt2" in said)


def test_an_unknown_operator_refuses_what_reaches_it_and_the_rest_goes_on() -> None:
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "w2"], "c"),
        node("LRN", ["c"], "d", size=3),
        node("Conv", ["d", "w3"], "y"),
    ]
    constants = {"w1": weights(8, 3, 1, 1), "w2": weights(6, 8, 1, 1), "w3": weights(4, 6, 1, 1)}
    result = nm.compress(small_files.write(Path("m.onnx"), nodes, constants), ratio=0.5)
    result.save("small.onnx")
    assert [group.name for group in result.summary.groups] == ["w1"]
    assert any("LRN" in str(refusal) and "/d/LRN" in str(refusal) for refusal in result.summary.refusals)


def test_behind_control_flow_the_file_is_left_as_it_is() -> None:
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "w2"], "c"),
        node("NonZero", ["c"], "n"),
        node("Cast", ["n"], "y", to=1),
    ]
    constants = {"w1": weights(8, 3, 1, 1), "w2": weights(6, 8, 1, 1)}
    result = nm.compress(small_files.write(Path("m.onnx"), nodes, constants), ratio=0.5)
    result.save("small.onnx")
    assert [group.name for group in result.summary.groups] == ["w1"]
    assert [str(refusal) for refusal in result.summary.refusals] == [
        "w2: NonZero is not known to act channel by channel (/n/NonZero)"
    ]
    assert small_files.run(Path("small.onnx"), small_files.images())[0].shape[0] == 4


@pytest.mark.parametrize("way", ["written out", "looked up"])
def test_text_is_left_as_it_is(way: str) -> None:
    """The names of classes, or numbers as text: no tensor of torch's holds them."""
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "w2"], "y"),
        node("ArgMax", ["y"], "best", axis=1),
        node("Cast", ["best"], "text", to=TensorProto.STRING)
        if way == "written out"
        else node("Gather", ["names", "best"], "text"),
    ]
    names = np.array(["cat", "dog", "owl", "yak"], dtype=object)
    constants = {"w1": weights(8, 3, 1, 1), "w2": weights(4, 8, 1, 1), "names": names}
    source = small_files.write(Path("m.onnx"), nodes, constants, outputs=("y", "text"))
    model = onnx.load(source)
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.STRING
    onnx.save(model, source)
    result = nm.compress(source, ratio=0.5)
    result.save("small.onnx")
    assert [group.name for group in result.summary.groups] == ["w1"]
    scores, text = small_files.run(Path("small.onnx"), small_files.images())
    best = scores.argmax(1, keepdims=True)
    assert (text == (best.astype(str) if way == "written out" else names[best])).all()


def chosen(name: str, *weight_shape: int) -> Any:
    """A node that chooses between two products with weights of their own."""
    branches = []
    for side in ("then", "else"):
        stored = numpy_helper.from_array(weights(*weight_shape), f"{name}.{side}")
        product = helper.make_node("Conv", [name, stored.name], [f"{name}_{side}"])
        returned = [helper.make_tensor_value_info(f"{name}_{side}", TensorProto.FLOAT, None)]
        branches.append(helper.make_graph([product], side, [], returned, [stored]))
    return node("If", ["choice"], f"{name}_chosen", then_branch=branches[0], else_branch=branches[1])


@pytest.mark.parametrize("beside", [False, True])
def test_weights_inside_of_control_flow_are_counted_and_refused(beside: bool) -> None:
    """Also where that reads nothing that the rest of the network makes."""
    nodes = [
        node("Conv", ["x", "w1"], "a"),
        node("Conv", ["a", "w2"], "b"),
        chosen("x" if beside else "b", 5, 3 if beside else 6, 1, 1),
        node("Conv", ["x_chosen" if beside else "b_chosen", "w3"], "y"),
    ]
    constants = {"w1": weights(8, 3, 1, 1), "w2": weights(6, 8, 1, 1), "w3": weights(2, 5, 1, 1), "choice": np.bool_(1)}
    source = small_files.write(Path("m.onnx"), nodes, constants, outputs=("b", "y") if beside else ("y",))
    found = nm.inspect(source).account
    behind = 2 * (15 if beside else 30) + 10
    assert found.parameters == 8 * 3 + 8 + 6 * 8 + 6 + 2 + behind  # three biases are made
    assert sum(count for _, count, _ in found.lines) == found.parameters
    assert {part.why: part.parameters for part in found.refused}["If is not known to act channel by channel"] >= behind
    nm.compress(source, ratio=0.5, merger="none").save("small.onnx")
    assert small_files.run(Path("small.onnx"), small_files.images())[-1].shape[1] == 2


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_hidden_units_are_refused_in_full_view(op: str) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    shapes = {"7": (1, gates * 5, 6), "8": (1, gates * 5, 5), "9": (1, 2 * gates * 5)}
    nodes = [
        node("MatMul", ["x", "w1"], "a"),
        node("Relu", ["a"], "b"),
        node("MatMul", ["b", "w2"], "c"),
        node(op, ["c", *shapes], ["d"], hidden_size=5),
        node("Squeeze", ["d", "axes"], "e"),
        node("MatMul", ["e", "w3"], "y"),
    ]
    constants = {"w1": weights(4, 8), "w2": weights(8, 6), "w3": weights(5, 2), "axes": np.array([1])}
    constants |= {name: weights(*shape) for name, shape in shapes.items()}
    found = nm.inspect(small_files.write(Path("m.onnx"), nodes, constants, inputs={"x": ("time", 1, 4)}))
    assert [group.name for group in found.groups] == ["w1"]
    assert sum(count for _, count, _ in found.account.lines) == found.account.parameters
    (units,) = [part for part in found.account.refused if part.why.startswith(op)]
    assert units.parameters >= sum(int(np.prod(shape)) for shape in shapes.values())
    assert {"7", "8", "9"} <= set(units.layers)  # not as a pattern that would stand for any number
    assert count_graph_macs(nm.analyse("m.onnx", (torch.zeros(11, 1, 4),)).graph) == 11 * (
        4 * 8 + 8 * 6 + gates * 5 * (6 + 5) + 5 * 2
    )


def test_layers_that_onnxruntime_runs_are_counted() -> None:
    known = {"first": weights(8, 3, 3, 3), "up": weights(8, 4, 3, 3), "last": weights(2, 4, 1, 1)}
    nodes = [
        node("Conv", ["x", "first"], "a"),
        node("ConvTranspose", ["a", "up"], "b", pads=[0, 0, 1, 1]),
        node("Conv", ["b", "last"], "y"),
    ]
    analysis = nm.analyse(small_files.write(Path("m.onnx"), nodes, known))  # holds the nodes that are counted
    assert "ConvTranspose" in [step.op for step in analysis.graph.nodes]
    assert count_graph_macs(analysis.graph) == 36 * 8 * 27 + 36 * 8 * 4 * 9 + 49 * 8


def test_a_folder_can_be_made_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    small_files.classifier(Path("m.onnx"))
    assert app.main(["compress", "m.onnx", "out", "--no-report", "--merger", "none"]) == 0
    assert app.main(["verify", "out"]) == 0
    assert app.main(["export", "out", "small.onnx", "--json"]) == 0
    assert onnx.load("small.onnx").metadata_props[0].value == "someone", capsys.readouterr().err


def test_a_file_is_not_replaced_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    small_files.classifier(Path("m.onnx"))
    Path("small.onnx").write_text("mine")
    assert app.main(["compress", "m.onnx", "small.onnx", "--no-report"]) == 2
    assert "the file exists" in capsys.readouterr().err
    assert app.main(["compress", "m.onnx", "m.onnx", "--overwrite", "--no-report"]) == 2
    assert "OUT is the path of the input network" in " ".join(capsys.readouterr().err.split())


def test_a_full_disk_is_named_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(model: Any, path: str, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    small_files.classifier(Path("m.onnx"))
    monkeypatch.setattr(onnx, "save_model", full)
    assert app.main(["compress", "m.onnx", "small.onnx", "--ratio", "0.2", "--merger", "none"]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "small.onnx" in said
    assert [path.name for path in Path().iterdir() if "lock" not in path.name] == ["m.onnx"]


@pytest.mark.parametrize(
    "location", ["w\0.bin", "w" * 5000, "w" * 300, "/".join(["w" * 200] * 40), "w" * 300 + "/../w.bin"]
)
def test_weights_in_an_impossible_place_are_one_clear_error(location: str) -> None:
    apart(location)()
    with pytest.raises(nm.ModelError, match=r"lie in .*(no possible file|which is missing)") as raised:
        nm.inspect("m.onnx")
    assert len(str(raised.value)) < 800


def test_a_declared_input_that_fits_no_memory_is_one_clear_error() -> None:
    model = onnx.load(str(small_files.classifier(Path("m.onnx"))))
    sizes = model.graph.input[0].type.tensor_type.shape.dim
    for dim in sizes[2:]:
        dim.dim_value = 60_000
    sizes[0].dim_value = 1
    del model.graph.value_info[:]
    Path("m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(nm.ModelError, match=r"would take \d+ GiB"):
        nm.inspect("m.onnx")


def write_pictures(folder: str, count: int = 3) -> None:
    Path(folder).mkdir()
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (12, 10, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(f"{folder}/{i}.png")


def two_inputs() -> None:
    """A file that takes pictures and vectors."""
    nodes = [
        node("Conv", ["picture", "first"], "a"),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "second"], "c"),
        node("GlobalAveragePool", ["c"], "d"),
        node("Flatten", ["d"], "e"),
        node("MatMul", ["v", "side"], "s"),
        node("Add", ["e", "s"], "y"),
    ]
    stored = {"first": weights(16, 3, 3, 3), "second": weights(4, 16, 3, 3), "side": weights(5, 4)}
    small_files.write(Path("m.onnx"), nodes, stored, inputs={"picture": ("batch", 3, 8, 8), "v": ("batch", 5)})


def five_channels() -> None:
    small_files.classifier(
        Path("m.onnx"), constants={"first.weight": weights(8, 5, 3, 3)}, inputs={"x": ("batch", 5, 8, 8)}
    )


@pytest.mark.parametrize(
    ("make_file", "options", "words"),
    [
        (small_files.classifier, ["--layout", "NHWC"], ("8 channels in the layout NHWC", "other layout")),
        (five_channels, [], ("5 channels, pictures have 1 or 3", ".npz")),
        (two_inputs, [], ("2 inputs (picture, v), not 1", "array for each input")),
    ],
)
def test_pictures_that_do_not_suit_a_file(
    make_file: Callable[..., Any], options: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    make_file(*([Path("m.onnx")] if make_file is small_files.classifier else []))
    write_pictures("photos")
    command = ["compress", "m.onnx", "s.onnx", "--budget", "macs=80%", "--calibrate", "photos", *options]
    assert app.main(command) != 0 and not Path("s.onnx").exists()
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_a_picture_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    small_files.classifier(Path("m.onnx"))
    write_pictures("photos")
    Path("photos/1.png").write_bytes(Path("photos/1.png").read_bytes()[:200])
    assert app.main(["compress", "m.onnx", "s.onnx", "--budget", "macs=80%", "--calibrate", "photos"]) != 0
    assert "photos/1.png" in capsys.readouterr().err and not Path("s.onnx").exists()


@pytest.mark.parametrize("first", ["x", "picture"])
def test_arrays_of_a_file_with_two_inputs(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The arrays are found by name, in any order; `x` may stand for the first input."""
    two_inputs()
    rng = np.random.default_rng(0)
    vectors, pictures = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 5), (16, 3, 8, 8)))
    np.savez("inputs.npz", v=vectors, y=np.arange(16) % 4, **{first: pictures})
    command = ["compress", "m.onnx", "s.onnx", "--budget", "macs=80%", "--effort", "fast", "--overwrite"]
    assert app.main([*command, "--calibrate", "inputs.npz"]) == 0, capsys.readouterr().err
    assert app.main([*command, "--eval", "inputs.npz"]) == 0, capsys.readouterr().err
    assert "accuracy" in capsys.readouterr().out


def test_a_file_whose_groups_all_take_no_part(capsys: pytest.CaptureFixture[str]) -> None:
    """The only channels lie on a residual stream, and a budget was asked for, no ratio."""
    nodes = [
        node("Conv", ["x", "first"], "a", pads=[1, 1, 1, 1]),
        node("Conv", ["a", "inner"], "b", pads=[1, 1, 1, 1]),
        node("Add", ["a", "b"], "c"),
        node("Conv", ["c", "last"], "y"),
    ]
    stored = {"first": weights(8, 3, 3, 3), "inner": weights(8, 8, 3, 3), "last": weights(2, 8, 3, 3)}
    small_files.write(Path("m.onnx"), nodes, stored)
    assert app.main(["compress", "m.onnx", "s.onnx", "--budget", "macs=80%"]) != 0
    error = capsys.readouterr().err
    assert "no group takes part" in error and "--scope all" in error and "ratio" not in error


def test_a_classifier_that_returns_text_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    """As scikit-learn's converter writes a support vector machine: nothing but one node with names of classes."""
    machine = helper.make_node(
        "SVMClassifier",
        ["x"],
        ["label", "y"],
        domain="ai.onnx.ml",
        name="SVM",
        classlabels_strings=["cat", "dog"],
        coefficients=[1.0, -1.0],
        kernel_params=[0.5, 0.0, 3.0],
        kernel_type="RBF",
        rho=[0.1],
        support_vectors=[0.0, 1.0, 1.0, 0.0],
        vectors_per_class=[1, 1],
    )
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 2))]
    returned = [
        helper.make_tensor_value_info("label", TensorProto.STRING, (1,)),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 2)),
    ]
    imports = [helper.make_opsetid("ai.onnx.ml", 1), helper.make_opsetid("", 17)]
    graph = helper.make_graph([machine], "graph", given, returned)
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), "m.onnx")
    assert app.main(["compress", "m.onnx", "s.onnx", "--budget", "macs=80%"]) != 0
    error = capsys.readouterr().err
    assert "all layers of the file are inside or behind SVMClassifier" in error and "matrix products" in error


@pytest.mark.parametrize("kind", ["pictures", "bytes"])
def test_a_file_that_takes_bytes_gets_pixels_as_they_are(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = onnx.load(str(small_files.classifier(Path("m.onnx"))))
    source.graph.node[0].input[0] = "float"
    source.graph.node.insert(0, node("Cast", ["x"], "float", to=TensorProto.FLOAT))
    source.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    onnx.save(source, "m.onnx")
    write_pictures("photos")
    np.savez("photos.npz", x=np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3)).astype(np.uint8))
    data = nm.images("photos" if kind == "pictures" else "photos.npz").adapt_to(torch.zeros(1, 3, 8, 8).byte())
    assert all(x.dtype == torch.uint8 and x.shape[1:] == (3, 8, 8) and int(x.max()) > 200 for x in data)
    place = "photos" if kind == "pictures" else "photos.npz"
    command = ["compress", "m.onnx", "s.onnx", "--budget", "macs=80%", "--calibrate", place, "--eval", place]
    assert app.main(command) == 0, capsys.readouterr().err
