"""int8 files: made by onnxruntime's quantiser, calibrated without data, compared with the float network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import pipeline, report
from neuron_merging.errors import ModelError
from neuron_merging.onnx import quantize
from neuron_merging.onnx.export import quantize_model
from neuron_merging.onnx.model_file import open_ort_session
from neuron_merging.onnx.open_model import open_onnx_file
from neuron_merging.onnx.quantize import Int8Network, OrtNetwork, compute_rounding_offset, keep_outputs_float
from neuron_merging.onnx.write_model import write_onnx_file
from tests.onnx import small_files


def build_classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(200, 4),
    ).eval()  # fmt: skip


X = torch.randn(1, 3, 12, 12)


class Attention(nn.Module):
    """Multiplies two activations, so that only its weights are quantised."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.up, self.down = (nn.Linear(a, b) for a, b in ((8, 8), (8, 8), (8, 32), (32, 8)))

    def forward(self, x: Tensor) -> Tensor:
        mixed = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1) @ x
        out: Tensor = self.down(self.up(mixed).relu())
        return out


def list_operators(file: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(file)).graph.node]


def test_a_network_is_quantised_without_data(tmp_path: Path) -> None:
    net = build_classifier()
    made = nm.quantize(net, tmp_path / "int8.onnx", X, effort="fast")
    assert made.method == "static" and made.samples > 1 and made.error < 0.02
    assert len(repr(made)) < 300 and "static quantisation" in str(made)  # a notebook shows it
    assert list_operators(tmp_path / "int8.onnx").count("QuantizeLinear") >= 3
    x = torch.randn(8, 3, 12, 12)
    want, got = net(x).detach(), OrtNetwork((tmp_path / "int8.onnx").read_bytes())(x)[0]
    assert float((want - got).square().sum() / (want - want.mean(0)).square().sum()) < 0.1


def test_compressed_networks_are_written_in_int8(tmp_path: Path) -> None:
    small = nm.compress(build_classifier(), X, ratio=0.25, effort="fast", int8=True)
    assert small.int8 is not None and small.compared is not None and small.summary.verdict is not None
    assert [score.network for score in small.compared.scores][-1] == "int8"
    assert small.summary.verdict.fidelity == small.compared.scores[-1].fidelity
    small.save(tmp_path / "small.onnx")
    assert (tmp_path / "small.onnx").read_bytes() == small.int8.data
    assert small.figures is not None and small.figures.int8 is not None
    assert small.figures.int8.bytes[1] == len(small.int8.data)
    assert "Float and int8" in report.render_report(small, build_classifier(), X)
    nm.compress(build_classifier(), X, ratio=0.25, effort="fast").export(tmp_path / "other.onnx", int8=True)
    assert "QuantizeLinear" in list_operators(tmp_path / "other.onnx")


def test_the_users_batches_calibrate_the_ranges(tmp_path: Path) -> None:
    for scale in (1.0, 100.0):
        data = [scale * torch.randn(8, 3, 12, 12)]
        # With a loss of 1, the first layer is quantised on every processor, also where int8 products saturate.
        nm.quantize(build_classifier(), tmp_path / f"{scale}.onnx", X, calibration=data, int8_loss=1)
    scales = [_read_first_scale(tmp_path / f"{scale}.onnx") for scale in (1.0, 100.0)]
    assert scales[1] > 50 * scales[0]


def _read_first_scale(file: Path) -> float:
    model = onnx.load(str(file))
    first = next(
        n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == model.graph.input[0].name
    )
    values = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    return float(values[first.input[1]])


def test_networks_with_attention_are_quantised_dynamically(tmp_path: Path) -> None:
    made = nm.quantize(Attention().eval(), tmp_path / "int8.onnx", torch.randn(1, 5, 8), effort="fast")
    assert made.method == "dynamic" and made.error < 0.02
    assert "MatMulInteger" in " ".join(list_operators(tmp_path / "int8.onnx"))


def test_a_network_of_linear_layers_alone_is_quantised(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    made = nm.quantize(net, tmp_path / "int8.onnx", torch.randn(2, 8), effort="fast")
    assert made.method == "dynamic" and nm.compare(net, tmp_path / "int8.onnx", torch.randn(2, 8)).verdict.fidelity


def test_layers_that_lose_most_stay_in_float() -> None:
    net = build_classifier()
    with torch.no_grad():
        net[0].weight[0] *= 300  # one channel takes the whole range of the activations
        net[2].weight[:, 0] /= 300
    data = [(torch.randn(16, 3, 12, 12),)]
    loose, strict = (quantize_model(net, (X,), data, max_loss=loss) for loss in (1e9, 1e-5))
    assert not loose.float_layers and strict.float_layers and strict.error < loose.error


def test_scores_beyond_the_calibrated_range_are_not_cut_off() -> None:
    made = quantize_model(build_classifier(), (X,), [(torch.randn(4, 3, 12, 12),)], max_loss=1.0)
    model = onnx.load_from_string(made.data)
    values = {t.name: t for t in model.graph.initializer}
    layer = next(n for n in model.graph.node if n.op_type == "Gemm")
    bias = next(n for n in model.graph.node if layer.input[2] in n.output)
    shifted = onnx.numpy_helper.to_array(values[bias.input[0]]) + 2**20
    values[bias.input[0]].CopyFrom(onnx.numpy_helper.from_array(shifted.astype(np.int32), bias.input[0]))
    before, after = (OrtNetwork(data)(X)[0] for data in (made.data, model.SerializeToString()))
    moved = (after - before).flatten()
    assert float(moved.min()) > 5 * float(before.abs().max())


def test_outputs_keep_their_names_and_values_without_rounding() -> None:
    made = quantize_model(build_classifier(), (X,), [(torch.randn(4, 3, 12, 12),)])
    model = onnx.load_from_string(made.data)
    again = onnx.load_from_string(made.data)
    keep_outputs_float(again)  # nothing is left to remove
    assert len(again.graph.node) == len(model.graph.node)
    session = open_ort_session(made.data)
    assert [value.name for value in session.get_outputs()] == [value.name for value in model.graph.output]
    assert np.isfinite(session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]).all()


@pytest.mark.parametrize("path", ["small.pt2", "small"])
def test_other_targets_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(nm.MergingError, match=r"\.onnx"):
        nm.quantize(build_classifier(), tmp_path / path, X)


def test_an_onnx_file_of_one_fixed_batch_size_is_quantised(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body: Any = build_classifier()[:6]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x).reshape(1, 8, 25).sum(2)
            return out

    nm.compress(Fixed(), X, ratio=0.1, effort="fast").save(tmp_path / "float.onnx")
    made = nm.quantize(tmp_path / "float.onnx", tmp_path / "int8.onnx", effort="fast")
    assert made.error < 0.05
    assert OrtNetwork((tmp_path / "int8.onnx").read_bytes())(torch.randn(3, 3, 12, 12))[0].shape == (3, 8)


@pytest.mark.long
def test_budgets_count_and_time_the_int8_file() -> None:
    plain, small = (
        nm.compress(build_classifier(), X, budget={"weights": 0.2}, effort="fast", int8=int8) for int8 in (False, True)
    )
    assert plain.summary.parameters[1] <= 0.2 * plain.summary.parameters[0]
    assert 0.5 * small.summary.parameters[0] < small.summary.parameters[1] <= 0.8 * small.summary.parameters[0]
    nm.compress(build_classifier(), X, budget={"latency@onnxruntime": "10s"}, effort="fast", int8=True)


def test_convolutions_without_biases_are_quantised(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)).eval()
    assert nm.quantize(net, tmp_path / "int8.onnx", X, effort="fast").method == "static"


def test_slower_int8_files_are_called_so() -> None:
    texts = [str(Int8Network(b"", "static", (2, 1), 0.0, seconds=(0.002, own))) for own in (0.001, 0.0021, 0.006)]
    assert ["slower" in text for text in texts] == [False, False, True]


def test_biases_make_up_for_rounded_weights() -> None:
    torch.manual_seed(0)
    weight, mean = torch.randn(6, 2, 3, 3).double(), torch.randn(4).double()
    step = weight.abs().amax((1, 2, 3), keepdim=True) / 127
    x = mean[None, :, None, None].expand(1, 4, 3, 3)
    change = nn.functional.conv2d(x, weight - (weight / step).round() * step, groups=2).flatten()
    assert np.allclose(compute_rounding_offset(weight.numpy(), mean.numpy(), 2), change.numpy())


def test_half_precision_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = small_files.classifier(tmp_path / "half.onnx", dtype=np.float16, kind=TensorProto.FLOAT16)
    monkeypatch.setattr(pipeline.compress, "prepare_inputs", None)
    for run in (
        lambda: nm.compress(file, budget={"macs": 0.8}, int8=True),
        lambda: nm.quantize(file, tmp_path / "int8.onnx"),
    ):
        with pytest.raises(nm.MergingError, match="weights are float16") as caught:
            run()
        assert "float32" in (caught.value.fix or "")


def test_old_files_that_list_their_weights_as_inputs_are_quantised(tmp_path: Path) -> None:
    file = small_files.classifier(tmp_path / "old.onnx", width=16, opset=7, ir=3)
    assert nm.quantize(file, tmp_path / "int8.onnx").method == "static"


@pytest.mark.parametrize("count", [3, 9])
def test_samples_that_do_not_fill_the_batches_of_a_file(tmp_path: Path, count: int) -> None:
    """The file takes four samples at a time; the last batch is filled up, and only its samples are compared."""
    file = small_files.classifier(tmp_path / "four.onnx", width=16, inputs={"x": (4, 3, 8, 8)})
    given = torch.from_numpy(small_files.images(count))
    small = nm.compress(file, ratio=0.25, int8=True, calibration=[given], evaluate=[given])
    assert small.summary.verdict is not None and small.summary.verdict.fidelity is not None
    assert small.summary.verdict.inputs == f"{count} samples of your data" and small.summary.verdict.fidelity > 0.5


def store_weights_quantised(path: Path, *, per_channel: bool, from_float: bool = False, external: bool = False) -> Path:
    """Write a classifier whose first two weights are stored as int8 with scales, its activations in float."""
    source = onnx.load(str(small_files.classifier(path.with_name("float.onnx"))))
    nodes, tensors = [], {tensor.name: tensor for tensor in source.graph.initializer}
    for name in ("first.weight", "second.weight"):
        values = numpy_helper.to_array(tensors[name])
        largest = np.abs(values).max((1, 2, 3) if per_channel else None)
        scale = np.asarray(largest / 127, np.float32)
        shaped = scale.reshape(-1, 1, 1, 1) if per_channel else scale
        stored = values if from_float else np.round(values / shaped).astype(np.int8)
        source.graph.initializer.remove(tensors[name])
        parts = {"stored": stored, "scale": scale, "zero": np.zeros(scale.shape, np.int8)}
        source.graph.initializer.extend(numpy_helper.from_array(own, f"{name}_{key}") for key, own in parts.items())
        first, *others = [f"{name}_{key}" for key in parts]
        if from_float:
            nodes.append(small_files.node("QuantizeLinear", [first, *others], f"{name}_packed", axis=0))
            first = f"{name}_packed"
        nodes.append(small_files.node("DequantizeLinear", [first, *others], name, axis=0))
    nodes += list(source.graph.node)
    del source.graph.node[:]
    source.graph.node.extend(nodes)
    onnx.save(source, str(path), save_as_external_data=external, location="w.bin", size_threshold=0)
    return path


@pytest.mark.parametrize(
    "options",
    [{"per_channel": True}, {"per_channel": False, "external": True}, {"per_channel": True, "from_float": True}],
)
def test_weights_that_are_only_stored_in_int8_become_float(options: dict[str, bool], tmp_path: Path) -> None:
    source = store_weights_quantised(tmp_path / "stored.onnx", **options)
    network, _ = open_onnx_file(source)
    written = write_onnx_file(network, tmp_path / "float.onnx")
    assert written.difference < 1e-5 and "DequantizeLinear" not in list_operators(tmp_path / "float.onnx")
    x = small_files.images(3)
    (before,), (after,) = small_files.run(source, x), small_files.run(tmp_path / "float.onnx", x)
    np.testing.assert_allclose(before, after, atol=1e-5)
    small = nm.compress(source, ratio=0.5, effort="fast")
    small.save(tmp_path / "small.onnx")
    assert (tmp_path / "small.onnx").stat().st_size < (tmp_path / "float.onnx").stat().st_size
    small.export(tmp_path / "small-int8.onnx", int8=True)
    assert "DequantizeLinear" in list_operators(tmp_path / "small-int8.onnx")


def test_quantised_activations_are_an_error_with_the_way_out(tmp_path: Path) -> None:
    nm.quantize(small_files.classifier(tmp_path / "float.onnx"), tmp_path / "int8.onnx", effort="fast")
    with pytest.raises(nm.MergingError, match=r"quantised \(QuantizeLinear\)") as error:
        nm.compress(tmp_path / "int8.onnx", ratio=0.5)
    assert "--int8 quantises the result" in error.value.fix


def test_an_unusable_file_of_the_quantiser_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_float_file(model: str | bytes, *threads: int, **options: bool) -> Any:
        if isinstance(model, str) and Path(model).name.startswith("int8-"):
            raise ModelError("nodes are not sorted", where=model, fix="Give another file.")
        return open_ort_session(model, *threads, **options)

    monkeypatch.setattr(quantize, "open_ort_session", open_float_file)
    source = small_files.classifier(tmp_path / "m.onnx")
    with pytest.raises(nm.MergingError, match="quantiser wrote is unusable: nodes are not sorted") as error:
        nm.quantize(source, tmp_path / "int8.onnx", effort="fast")
    assert "leave --int8 out" in error.value.fix and "int8-" not in error.value.where
    assert not (tmp_path / "int8.onnx").exists()
