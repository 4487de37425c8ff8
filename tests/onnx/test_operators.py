"""Every operator that torch computes is compared with onnxruntime."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto

import neuron_merging as nm
from neuron_merging.graph.digests import compute_graph_digest
from neuron_merging.onnx import network as networks
from neuron_merging.onnx.export import open_ort_callable
from neuron_merging.onnx.model_file import evaluate_node
from neuron_merging.onnx.open_model import open_onnx_file
from neuron_merging.onnx.operators import OnnxOperator
from neuron_merging.onnx.operators.table import ONNX_OPERATORS
from tests.onnx import small_files
from tests.onnx.small_files import node, weights

I = np.array  # noqa: E741
PLAIN = (
    "Relu Sigmoid Tanh Softplus Softsign HardSwish Mish HardSigmoid LeakyRelu Elu Selu Celu ThresholdedRelu Abs Neg "
    "Exp Erf Floor Ceil Round Sign Sin Cos Tan Sinh Cosh Atan Identity Dropout IsNaN Softmax LogSoftmax "
    "GlobalAveragePool GlobalMaxPool Shape Size Flatten Transpose ReduceMean ReduceSum ReduceMax ReduceMin ReduceL1 "
    "ReduceL2 ReduceLogSumExp ReduceSumSquare ArgMax ArgMin Shrink Gelu"
).split()
PAIRS = "Add Mul Sub Div Pow Max Min Sum Mean Equal Greater GreaterOrEqual Less LessOrEqual PRelu".split()
BOOLEAN = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "And", "Or", "Xor", "Not"}
WHOLE = {"Shape", "Size", "ArgMax", "ArgMin"}
C, V = weights(1, 3, 1, 1), weights(3)
SHAPED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "conv": ("Conv", {"w": weights(4, 3, 3, 3), "b": weights(4)}, {"strides": [2, 1], "dilations": [1, 2]}),
    "conv, uneven": ("Conv", {"w": weights(4, 3, 3, 3)}, {"pads": [0, 1, 1, 0]}),
    "conv, same": ("Conv", {"w": weights(4, 3, 3, 3)}, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "conv, lower": ("Conv", {"w": weights(4, 3, 2, 2)}, {"auto_pad": "SAME_LOWER"}),
    "conv transpose": ("ConvTranspose", {"w": weights(3, 4, 2, 2), "b": weights(4)}, {"strides": [2, 2]}),
    "batch norm": ("BatchNormalization", {"s": V, "b": V, "m": V, "v": V**2 + 1}, {}),
    "instance norm": ("InstanceNormalization", {"s": V, "b": V}, {"epsilon": 1e-3}),
    "layer norm": ("LayerNormalization", {"s": weights(8), "b": weights(8)}, {}),
    "layer norm, wide": ("LayerNormalization", {"s": weights(8, 8), "b": weights(8, 8)}, {"axis": 2}),
    "matmul": ("MatMul", {"w": weights(8, 5)}, {}),
    "reshape": ("Reshape", {"to": I([0, -1, 4])}, {}),
    "squeeze": ("Squeeze", {}, {}),
    "unsqueeze": ("Unsqueeze", {"at": I([0, -1])}, {}),
    "split": ("Split", {"sizes": I([3, 5])}, {"axis": 3}),
    "slice": ("Slice", {"a": I([1, -3]), "b": I([7, 100]), "d": I([2, -1]), "s": I([2, 1])}, {}),
    "slice, backwards": ("Slice", {"a": I([-1]), "b": I([-100]), "d": I([2]), "s": I([-1])}, {}),
    "expand": ("Expand", {"to": I([2, 1, 1, 8, 8])}, {}),
    "tile": ("Tile", {"by": I([1, 2, 1, 3])}, {}),
    "pad": ("Pad", {"by": I([0, 0, 1, 2, 0, 0, 3, 0]), "v": np.float32(2)}, {}),
    "pad, reflect": ("Pad", {"by": I([0, 0, 1, 2, 0, 0, 3, 0])}, {"mode": "reflect"}),
    "pad, edge": ("Pad", {"by": I([0, 0, 1, 2, 0, 0, 3, 0])}, {"mode": "edge"}),
    "clip": ("Clip", {"a": np.float32(-0.5), "b": np.float32(1)}, {}),
    "cast": ("Cast", {}, {"to": 1}),
    "gather one": ("Gather", {"i": I(1)}, {"axis": 1}),
    "gather": ("Gather", {"i": I([[2, 0], [-1, 1]])}, {"axis": 1}),
    "space to depth": ("SpaceToDepth", {}, {"blocksize": 2}),
    "max pool": ("MaxPool", {}, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "max pool, uneven": ("MaxPool", {}, {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}),
    "max pool, ceiling": ("MaxPool", {}, {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "average pool": ("AveragePool", {}, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "average pool, counting": (
        "AveragePool",
        {},
        {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "count_include_pad": 1},
    ),
    "reduce": ("ReduceSum", {"d": I([1, -1])}, {"keepdims": 0}),
    "cumsum": ("CumSum", {"d": I(2)}, {}),
    "trilu": ("Trilu", {}, {"upper": 0}),
    "einsum": ("Einsum", {"w": weights(3, 5)}, {"equation": "bchw,ck->bkhw"}),
}
RESIZED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{mode} {where}{rounding} {scale}": (
        {"roi": np.zeros(0, np.float32), "by": np.float32([1, 1, scale, scale])},
        {"mode": mode, "coordinate_transformation_mode": where, **({"nearest_mode": rounding} if rounding else {})},
    )
    for mode, where, rounding, scale in [
        ("nearest", "asymmetric", "floor", 2),
        ("nearest", "half_pixel", "round_prefer_floor", 2),
        ("nearest", "half_pixel", "round_prefer_ceil", 0.5),
        ("nearest", "align_corners", "ceil", 1.5),
        ("linear", "half_pixel", "", 2),
        ("linear", "align_corners", "", 1.5),
        ("cubic", "half_pixel", "", 2),
    ]
}


def check(
    path: Path, nodes: list[Any], constants: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **more: Any
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("left to onnxruntime")

    monkeypatch.setattr(networks, "run_with_ort", refuse)
    more = {"inputs": {"x": (2, 3, 8, 8)}, **more}
    network, inputs = open_onnx_file(small_files.write(path, nodes, constants, **more))
    assert not any(step.runs_in_ort for step in network.program.steps)
    want = small_files.run(path, *(value.numpy() for value in inputs))
    for mine, theirs in zip(network(*inputs), want, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("op", PLAIN)
def test_one_operand(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node(op, ["x"], "z"), node("Cast", ["z"], "y", to=1)]
    check(tmp_path / "m.onnx", nodes, {}, monkeypatch, opset=20 if op in ("Gelu", "Mish") else 17)


@pytest.mark.parametrize("op", PAIRS)
@pytest.mark.parametrize("other", ["channels", "number", "itself"])
def test_two_operands(op: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = {"w": {"channels": V.reshape(3, 1, 1), "number": np.float32(0.7), "itself": C}[other]}
    nodes = [node("Abs", ["x"], "a"), node(op, ["a", "w"], "z"), node("Cast", ["z"], "y", to=1)]
    check(tmp_path / "m.onnx", nodes, constants, monkeypatch)
    if op in ("Sub", "Div", "Add"):
        nodes[1] = node(op, ["w", "a"], "z")
        check(tmp_path / "m.onnx", nodes, constants, monkeypatch)


WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clip": ("Clip", {"low": I(-1), "high": I(1)}, {}),
    "clip below alone": ("Clip", {"low": I(-1), "high": I(2**63 - 1)}, {}),
    "pow": ("Pow", {"w": I(2)}, {}),
    "div": ("Div", {"w": I(-2)}, {}),
    "sum": ("ReduceSum", {"d": I([1])}, {}),
    "max": ("ReduceMax", {}, {"axes": [1]}),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("kind", [TensorProto.INT32, TensorProto.INT64])
def test_whole_numbers_stay_whole(name: str, kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op, constants, attributes = WHOLE[name]
    own = np.int32 if kind == TensorProto.INT32 else np.int64
    known = {key: value if key == "d" else value.astype(own) for key, value in constants.items()}
    nodes = [
        node("Mul", ["x", "ten"], "a"),
        node("Cast", ["a"], "b", to=kind),
        node(op, ["b", *known], "c", **attributes),
        node("Add", ["c", "one"], "e"),  # which takes two of a kind
        node("Cast", ["e"], "y", to=TensorProto.FLOAT),
    ]
    more = {"ten": np.float32(-10), "one": own(1)}
    check(tmp_path / "m.onnx", nodes, {**known, **more}, monkeypatch)
    network, (x,) = open_onnx_file(tmp_path / "m.onnx")
    values = network.compute_values(x, every=True)
    assert values["c"].dtype == values["e"].dtype == values["b"].dtype


def test_means_of_whole_numbers_are_left_to_onnxruntime(tmp_path: Path) -> None:
    nodes = [
        node("Cast", ["x"], "a", to=TensorProto.INT64),
        node("ReduceMean", ["a"], "b", axes=[1]),
        node("Cast", ["b"], "y", to=TensorProto.FLOAT),
    ]
    path = small_files.write(tmp_path / "m.onnx", nodes, {})
    network, (x,) = open_onnx_file(path)
    np.testing.assert_array_equal(network(x)[0].numpy(), small_files.run(path, x.numpy())[0])


@pytest.mark.parametrize("name", SHAPED)
def test_operators_with_shapes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op, constants, attributes = SHAPED[name]
    outputs = ["y", "y2"] if op == "Split" else ["y"]
    nodes = [node(op, ["x", *constants], outputs, **attributes)]
    check(tmp_path / "m.onnx", nodes, constants, monkeypatch, outputs=outputs)


@pytest.mark.parametrize("name", RESIZED)
def test_resampling(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants, attributes = RESIZED[name]
    check(tmp_path / "m.onnx", [node("Resize", ["x", *constants], "y", **attributes)], constants, monkeypatch)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("DepthToSpace", ["x"], "y", blocksize=2, mode=mode)]
    check(tmp_path / "m.onnx", nodes, {}, monkeypatch, inputs={"x": (2, 8, 4, 4)})


@pytest.mark.parametrize("flags", [{}, {"transB": 1}, {"transB": 1, "alpha": 0.5, "beta": 2.0}])
def test_gemm(flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = {"w": weights(4, 6) if flags else weights(6, 4), "b": weights(4)}
    nodes = [node("Gemm", ["x", "w", "b"], "y", **flags)]
    check(tmp_path / "m.onnx", nodes, constants, monkeypatch, inputs={"x": (3, 6)})


def test_an_old_softmax_spans_all_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path / "m.onnx", [node("Softmax", ["x"], "y", axis=1)], {}, monkeypatch, opset=11)


def test_what_torch_computes_otherwise_is_left_to_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ONNX_OPERATORS, "Sigmoid", OnnxOperator(lambda call: call.get_tensor(0) * 2))
    nodes = [node("Conv", ["x", "w"], "a"), node("Sigmoid", ["a"], "b"), node("Relu", ["b"], "y")]
    path = small_files.write(tmp_path / "m.onnx", nodes, {"w": weights(4, 3, 1, 1)})
    network, (x,) = open_onnx_file(path)
    assert [step.name for step in network.program.steps if step.runs_in_ort] == ["/b/Sigmoid"]
    np.testing.assert_allclose(network(x)[0].numpy(), small_files.run(path, x.numpy())[0], atol=1e-5)


def test_known_numbers_that_the_definition_fails_on_are_left_to_onnxruntime() -> None:
    picked = node("GatherElements", ["a", "b"], "c", axis=1)  # the definition fails where few are picked of many
    (found,) = evaluate_node(picked, [np.arange(64)[None], np.array([[5, 3, 8]])], {"": 18})
    assert found.tolist() == [[5, 3, 8]]


def open_with_ort_steps(path: Path) -> tuple[networks.OnnxNetwork, tuple[Any, ...]]:
    """A network of which onnxruntime runs a step."""
    nodes = [node("Conv", ["x", "w"], "a"), node("Hardmax", ["a"], "b"), node("GlobalAveragePool", ["b"], "y")]
    network, inputs = open_onnx_file(small_files.write(path, nodes, {"w": weights(4, 3, 1, 1)}))
    network(*inputs)
    return network, inputs


@pytest.mark.long
def test_what_onnxruntime_runs_lives_as_long_as_its_networks(tmp_path: Path) -> None:
    gc.collect()
    before = len(networks._ORT_NODES)
    network, inputs = open_with_ort_steps(tmp_path / "m.onnx")
    twin, _ = open_with_ort_steps(tmp_path / "m.onnx")
    analysis, copied = nm.analyse(network, inputs), copy.deepcopy(network)
    graphs = [nm.analyse(own, inputs).graph for own in (network, twin)]
    assert compute_graph_digest(graphs[0]) == compute_graph_digest(graphs[1])
    assert len(networks._ORT_NODES) == before + 1
    del network, twin, analysis, graphs
    gc.collect()
    copied(*inputs)
    assert len(networks._ORT_NODES) == before + 1
    del copied
    gc.collect()
    assert len(networks._ORT_NODES) == before


def test_onnxruntime_is_given_arrays_whatever_the_tensor_is(tmp_path: Path) -> None:
    """A tensor on an accelerator has no array of its own either; one with a gradient stands for it here."""
    path = small_files.write(tmp_path / "m.onnx", [node("Relu", ["x"], "y")], {})
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    (found,) = open_ort_callable(str(path))(x)
    np.testing.assert_allclose(found, x.detach().relu().numpy())
