"""From merges to a run at full size: the tensors, biases and columns that they give the original's graph."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from neuron_merging.channels.groups import Axis
from neuron_merging.channels.masked_run import GraphEdits, MergedColumns
from neuron_merging.graph.graph import Graph
from neuron_merging.merging.protocol import MergeResult


def build_graph_edits(graph: Graph, merged: MergeResult, zeroed: Mapping[Axis, Tensor] | None = None) -> GraphEdits:
    """What merges change in the original, each tensor in the precision in which the smaller network stores it.

    `zeroed` are positions along axes of weights that become zero. A run needs them only where it does not mask the
    channels that are read there.
    """
    tensors = {name: _cast_like(graph.tensors[name], tensor) for name, tensor in merged.tensors.items()}
    biases: dict[str, Tensor] = {}
    columns: dict[str, list[MergedColumns]] = {}
    for read, positions in (zeroed or {}).items():
        columns.setdefault(read.tensor, []).append(_make_zero_columns(graph, read, positions))
    for merge in merged.merges:
        axis = merge.consumer.axis
        if axis is None:
            continue
        stored = graph.tensors[axis.tensor]
        if merge.columns is not None:
            own = MergedColumns(axis, merge.positions, _cast_like(stored, merge.columns))
            columns.setdefault(axis.tensor, []).append(own)
        if merge.bias is not None:
            biases[axis.tensor] = _cast_like(stored, merge.bias)
    return GraphEdits(tensors, biases, columns)


def _make_zero_columns(graph: Graph, axis: Axis, positions: Tensor) -> MergedColumns:
    shape = list(axis.join_blocks(graph.tensors[axis.tensor]).shape)
    shape[axis.dim] = len(positions)
    return MergedColumns(axis, positions, graph.tensors[axis.tensor].new_zeros(shape))


def _cast_like(old: Tensor, new: Tensor) -> Tensor:
    return new.detach().to(old.device, old.dtype)
