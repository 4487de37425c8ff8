"""Small ONNX files, written node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FREE = ("batch", 3, 8, 8)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def weights(*shape: int, dtype: Any = np.float32) -> Any:
    """Values that keep the size of a signal."""
    made = rng().standard_normal(shape) / max(np.prod(shape[1:]), 1) ** 0.5
    return made.astype(dtype)


def node(op: str, inputs: Sequence[str], output: str | Sequence[str], **attributes: Any) -> Any:
    outputs = [output] if isinstance(output, str) else list(output)
    return helper.make_node(op, list(inputs), outputs, name=f"/{outputs[0]}/{op}", **attributes)


def write(
    path: Path,
    nodes: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    inputs: Mapping[str, Sequence[Any]] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
    kind: int = TensorProto.FLOAT,
    ir: int = 8,
) -> Path:
    """A file with these nodes; `inputs` are shapes by name."""
    given = [helper.make_tensor_value_info(name, kind, shape) for name, shape in (inputs or {"x": FREE}).items()]
    returned = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    if ir < 4:
        given += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in stored]
    graph = helper.make_graph(list(nodes), "graph", given, returned, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    helper.set_model_props(model, {"author": "someone"})
    onnx.save(model, str(path))
    return path


def run(path: Path, *inputs: Any) -> list[Any]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return list(session.run(None, dict(zip(names, inputs, strict=True))))


def images(batch: int = 2, dtype: Any = np.float32) -> Any:
    return rng().standard_normal((batch, 3, 8, 8)).astype(dtype)


def classifier(path: Path, width: int = 8, dtype: Any = np.float32, **more: Any) -> Path:
    """Two convolutions and a linear layer, taken apart as exporters do."""
    constants = {
        "first.weight": weights(width, 3, 3, 3, dtype=dtype),
        "first.bias": np.linspace(-0.1, 0.3, width).astype(dtype),
        "second.weight": weights(6, width, 3, 3, dtype=dtype),
        "second.bias": np.zeros(6, dtype),
        "last.weight": weights(6, 4, dtype=dtype),
        "last.bias": np.ones(4, dtype),
    }
    nodes = [
        node("Conv", ["x", "first.weight", "first.bias"], "a", pads=[1, 1, 1, 1]),
        node("Relu", ["a"], "b"),
        node("Conv", ["b", "second.weight", "second.bias"], "c", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], "d"),
        node("GlobalAveragePool", ["d"], "e"),
        node("Flatten", ["e"], "f"),
        node("MatMul", ["f", "last.weight"], "g"),
        node("Add", ["g", "last.bias"], "y"),
    ]
    return write(path, nodes, {**constants, **more.pop("constants", {})}, **more)
