"""Recognise channel shuffles, and other nodes that pick channels by position, as selections of channels.

Exporters write a shuffle as a reshape, a transpose and a reshape, often with the batch size or the number of channels
as a constant, and take its halves with `Gather`, `Split` or `Slice`. Each end of such a chain is run on numbered
entries. If it picks whole channels and changes nothing else, it becomes a `Gather` along the channels. Its indices are
the `ArgMax` of a matrix with a row for each picked channel and a column for each channel that it picks from: removing
channels removes rows and columns, and the indices of the smaller network follow. The written file has plain indices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuron_merging.onnx import Array, onnx
from neuron_merging.onnx.model_file import evaluate_node
from neuron_merging.onnx.normalize import (
    FIRST_IR_WITHOUT_INITIALIZER_INPUTS,
    collect_constant_tensors,
    count_uses,
    is_larger_than,
    read_constants,
    read_opset_versions,
)

MOVING_OPS = ("Reshape", "Transpose", "Gather", "Split", "Slice", "Squeeze", "Unsqueeze", "Flatten", "Identity")
"""Operators that move entries of their first input; their other inputs are sizes and positions."""
PICKING_OPS = ("Transpose", "Gather", "Slice")
"""Moving operators without which a chain can only return neighbouring channels in their order."""
MATRIX_SUFFIX = "_channel_selection"
"""The suffix of the constants that hold which channels are picked."""
CHANNEL_DIM = 1
TRIED_BATCH_SIZE = 7
"""Stands for a dynamic batch size: a chain that mixes samples is then seen to do so. Hardly any constant is a seven."""
MAX_NUMBERED_ENTRIES = 1 << 24
MAX_SHAPE_INFERENCE_BYTES = 2**31 - 2**20
"""Bytes of the largest model whose shapes are inferred: protobuf's limit of 2 GiB, less what is not weights."""


@dataclass(frozen=True)
class _Selection:
    """The end of a chain of moving nodes that picks channels of the value that the chain starts from."""

    node: Any
    output: str
    source: str
    indices: Array
    channels: int


def rewrite_channel_selections(model: Any) -> None:
    """Replace chains of nodes that pick channels by `Gather` nodes whose indices are computed from a matrix."""
    picks = any(node.op_type in PICKING_OPS for node in model.graph.node)
    # Older files list every initialiser as an input, which callers could then set.
    old = model.ir_version < FIRST_IR_WITHOUT_INITIALIZER_INPUTS
    if old or not picks or is_larger_than(model, MAX_SHAPE_INFERENCE_BYTES):
        return
    found = list(_SelectionFinder(model).find())
    for selection in found:
        _insert_selection(model, selection)
    if found:
        _drop_unused_nodes(model)


def write_plain_indices(model: Any) -> None:
    """Replace the matrices of selections, and the `ArgMax` nodes that read them, by the indices themselves."""
    constants = collect_constant_tensors(model)
    nodes = [n for n in model.graph.node if n.op_type == "ArgMax" and n.input[0].endswith(MATRIX_SUFFIX)]
    for node in nodes:
        matrix = constants[node.input[0]]
        indices = onnx.numpy_helper.to_array(matrix).argmax(1).astype(np.int64)
        matrix.CopyFrom(onnx.numpy_helper.from_array(indices, node.output[0]))
        for constant in model.graph.node:  # where constants are nodes, the node takes the new name as well
            if constant.op_type == "Constant" and constant.output[0] == node.input[0]:
                constant.output[0] = node.output[0]
        model.graph.node.remove(node)


class _SelectionFinder:
    """Runs chains of moving nodes on numbered entries."""

    def __init__(self, model: Any) -> None:
        self.model, self.constants, self.opsets = model, read_constants(model), read_opset_versions(model)
        self.nodes = list(model.graph.node)
        self.output_names = {value.name for value in model.graph.output}
        self.consumers: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)
        self.shapes = _infer_shapes(model)

    def find(self) -> Iterator[_Selection]:
        chained: dict[str, str] = {}
        """The value that the chain of each moved value starts from."""
        for node in self.nodes:
            if self._is_move(node):
                source = chained.get(node.input[0], node.input[0])
                chained |= dict.fromkeys(node.output, source)
        for source in dict.fromkeys(chained.values()):
            yield from self._find_behind(source, {name for name, start in chained.items() if start == source})

    def _is_move(self, node: Any) -> bool:
        known = node.domain in ("", "ai.onnx") and node.op_type in MOVING_OPS and node.input[0] not in self.constants
        return known and all(name in self.constants for name in node.input[1:] if name)

    def _find_behind(self, source: str, moved: set[str]) -> Iterator[_Selection]:
        """Yield the selections among the ends of the chains that start from a value."""
        shape = self.shapes.get(source, ())
        chain = [node for node in self.nodes if moved.intersection(node.output)]
        if len(shape) < 3 or not any(node.op_type in PICKING_OPS for node in chain):
            return
        if not 0 < math.prod(shape) <= MAX_NUMBERED_ENTRIES:
            return
        values = {source: np.arange(math.prod(shape)).reshape(shape)}
        for node in chain:
            inputs = [values.get(name, self.constants.get(name)) for name in node.input]
            try:
                outputs = evaluate_node(node, inputs, self.opsets)
            except Exception:  # noqa: BLE001 (sizes may not fit the tried batch size, and evaluators raise anything)
                return
            values |= dict(zip(node.output, outputs, strict=False))
            for name in node.output:
                indices = find_picked_channels(values[name], shape) if name and self._is_end(name, moved) else None
                if indices is not None:
                    yield _Selection(node, name, source, indices, shape[CHANNEL_DIM])

    def _is_end(self, name: str, moved: set[str]) -> bool:
        """Return whether other than moving nodes read a value, and only these."""
        readers = self.consumers.get(name, [])
        return (
            bool(readers) and name not in self.output_names and not any(moved.intersection(n.output) for n in readers)
        )


def find_picked_channels(entries: Array, shape: tuple[int, ...]) -> Array | None:
    """Return the channels that a value holds, if it picks whole channels by position; else None.

    Neighbouring channels in their order are left to `Split` and `Slice`, which other rules know.

    Parameters
    ----------
    entries
        The value, computed from a tensor of this shape whose entries are numbered.
    shape
        The shape of that tensor: samples, channels, and at least one dimension of positions.
    """
    same = entries.ndim == len(shape) and entries.shape[:1] == shape[:1] and entries.shape[2:] == shape[2:]
    if not same or not entries.size:
        return None
    positions = math.prod(shape[2:])
    rows = entries.reshape(shape[0], -1, positions)
    indices = rows[0, :, 0] // positions
    samples = np.arange(shape[0])[:, None, None] * shape[CHANNEL_DIM] * positions
    if not np.array_equal(rows, samples + indices[:, None] * positions + np.arange(positions)):
        return None
    return None if (np.diff(indices) == 1).all() or len(set(indices)) < len(indices) else indices


def _infer_shapes(model: Any) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of all values whose sizes are known; a dynamic batch size counts as `TRIED_BATCH_SIZE`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    for value in copy.graph.input:
        first = value.type.tensor_type.shape.dim[:1]
        for dim in first:
            if not dim.HasField("dim_value"):
                dim.dim_value = TRIED_BATCH_SIZE
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        found = onnx.shape_inference.infer_shapes(copy, data_prop=True)
    except Exception:  # noqa: BLE001 (shape inference raises errors of several kinds; nothing is rewritten then)
        return {}
    return {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in (*found.graph.value_info, *found.graph.input)
        if all(dim.dim_value > 0 for dim in value.type.tensor_type.shape.dim)
    }


def _insert_selection(model: Any, selection: _Selection) -> None:
    """Let the readers of a chain's end read a `Gather` of the value that the chain starts from."""
    matrix = np.zeros((len(selection.indices), selection.channels), np.float32)
    matrix[np.arange(len(selection.indices)), selection.indices] = 1
    name = f"{selection.output}{MATRIX_SUFFIX}"
    model.graph.initializer.append(onnx.numpy_helper.from_array(matrix, name))
    indices, picked = f"{selection.output}_indices", f"{selection.output}_channels"
    place = list(model.graph.node).index(selection.node)
    for node in model.graph.node:
        for slot, read in enumerate(node.input):
            if read == selection.output:
                node.input[slot] = picked
    new = [
        onnx.helper.make_node("ArgMax", [name], [indices], name=f"{indices}_node", axis=1, keepdims=0),
        onnx.helper.make_node("Gather", [selection.source, indices], [picked], name=picked, axis=CHANNEL_DIM),
    ]
    for node in reversed(new):
        model.graph.node.insert(place, node)


def _drop_unused_nodes(model: Any) -> None:
    """Remove the nodes that nothing reads any more, and the constants that only they read."""
    outputs, graph = {value.name for value in model.graph.output}, model.graph
    before = {name for node in graph.node for name in node.input}
    while True:
        read = {*count_uses(list(graph.node)), *outputs}
        unused = [node for node in graph.node if not read.intersection(node.output)]
        if not unused:
            break
        for node in unused:
            graph.node.remove(node)
    for tensor in [tensor for tensor in graph.initializer if tensor.name in before and tensor.name not in read]:
        graph.initializer.remove(tensor)
