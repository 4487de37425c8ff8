"""Evaluating single operators on known numbers: sizes, and what is made of constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_merging.errors import ModelError, told
from neuron_merging.files.needed import onnx, reference

Array = NDArray[Any]


def evaluate(node: Any, inputs: Sequence[Array | None], opsets: Mapping[str, int]) -> list[Array]:
    """What an operator of the file returns."""
    names = [name for name in node.input if name]
    feed = {name: value for name, value in zip(node.input, inputs, strict=False) if name and value is not None}
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in dict.fromkeys(names)],
        [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output if name],
    )
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports)
    try:
        with np.errstate(all="ignore"):
            return [np.asarray(value) for value in reference.ReferenceEvaluator(model).run(None, feed)]
    except Exception as error:  # whatever the operator's own definition raises
        what = f"{node.op_type} cannot be computed: {told(error)}"
        raise ModelError(what, where=node.name or node.output[0], fix="Is the file sound?") from error
