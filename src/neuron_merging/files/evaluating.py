"""Evaluating single operators on known numbers: sizes, and what is made of constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_merging.errors import ModelError, told
from neuron_merging.files.needed import onnx, reference
from neuron_merging.files.reading import session

Array = NDArray[Any]


def evaluate(node: Any, inputs: Sequence[Array | None], opsets: Mapping[str, int]) -> list[Array]:
    """What an operator of the file returns."""
    feed = {name: value for name, value in zip(node.input, inputs, strict=False) if name and value is not None}
    plain = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in feed]
    try:
        with np.errstate(all="ignore"):
            found = reference.ReferenceEvaluator(_alone(node, plain, opsets)).run(None, feed)
    except Exception:  # noqa: BLE001 (the definition of some operators does not know all of its own cases)
        found = _by_runtime(node, feed, opsets)
    return [np.asarray(value) for value in found]


def _alone(node: Any, given: Sequence[Any], opsets: Mapping[str, int]) -> Any:
    """A model of this node and nothing else."""
    make = onnx.helper
    made = [make.make_value_info(name, onnx.TypeProto()) for name in node.output if name]
    imports = [make.make_opsetid(domain, version) for domain, version in opsets.items()]
    return make.make_model(make.make_graph([node], "one", given, made), opset_imports=imports, ir_version=8)


def _by_runtime(node: Any, feed: Mapping[str, Array], opsets: Mapping[str, int]) -> Sequence[Any]:
    make = onnx.helper
    try:
        given = [
            make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in feed.items()
        ]
        found: Sequence[Any] = session(_alone(node, given, opsets).SerializeToString()).run(None, feed)
    except Exception as error:  # onnxruntime has a class for every fault, and no common one
        what = f"{node.op_type} cannot be computed: {told(error)}"
        raise ModelError(what, where=node.name or node.output[0], fix="Is the file sound?") from error
    return found
