"""Compute new sizes for operators that store their sizes as data (ONNX files, captured graphs): shapes of reshapes,
sizes of splits, bounds of slices, numbers of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import nn

from neuron_merging.channels.groups import Channels, select_kept_indices
from neuron_merging.channels.labels import Mask
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.graph_module import ResizableModule, SizeOverrides, build_size_key


def compute_operator_sizes(model: nn.Module, graph: Graph, channels: Channels, stays: Mask) -> dict[str, SizeOverrides]:
    """Return, by operator, the sizes that change when only the units in `stays` are kept.

    The result is empty for an ordinary module: its own code computes the sizes.
    """
    if not isinstance(model, ResizableModule):
        return {}
    overrides = {}
    for node in graph.nodes:
        kind, sizes = _compute_node_sizes(node, graph, channels, stays) if channels.touches_node(node) else ("", ())
        if any(size is not None for size in sizes):
            overrides[build_size_key(node.module, kind)] = sizes
    return overrides


def _compute_node_sizes(node: Node, graph: Graph, channels: Channels, stays: Mask) -> tuple[str, SizeOverrides]:
    """Return which kind of size an operator stores, and its new values; None for each that does not change."""
    kind = lookup_operator(node).sizes
    if kind in ("shape", "normalized shape"):
        sizes = _select_changed_sizes(node.shape, channels.shape_after_pruning(node.name, node.shape, stays))
        return "size", sizes if kind == "shape" else sizes[-len(node.args["normalized_shape"]) :]
    if kind == "pieces" and isinstance(node.args.get("split_sizes", node.args.get("split_size")), list):
        return "pieces", _count_kept_along_dim(node, channels, stays, _count_split_sizes)
    if kind == "range":
        return f"range.{_get_slice_dim(node, graph)}", _count_kept_along_dim(node, channels, stays, _count_slice_bounds)
    if kind == "groups":
        return "groups", _count_channel_groups(node, graph, channels, stays)
    return "", ()


def _select_changed_sizes(old: Sequence[int], new: Sequence[int]) -> SizeOverrides:
    return tuple(None if a == b else b for a, b in zip(old, new, strict=True))


def _get_slice_dim(node: Node, graph: Graph) -> int:
    return int(node.args.get("dim", 0)) % len(graph.shapes[next(node.refs()).name])


def _count_kept_along_dim(
    node: Node, channels: Channels, stays: Mask, count: Callable[[Node, Mask], SizeOverrides]
) -> SizeOverrides:
    """Apply `count` to the kept indices along the dimension at which an operator splits or slices its input."""
    before = next(node.refs()).name
    units = channels.units.get(before, {})
    dim = int(node.args.get("dim", 0))
    # `dim` may count from the end, while `units` are indexed from the front.
    dims = [d for d in units if d == dim or (dim < 0 and d == dim + _count_dims(node))]
    return count(node, select_kept_indices(stays, units[dims[0]])) if dims else ()


def _count_dims(node: Node) -> int:
    return len(node.shape)


def _count_split_sizes(node: Node, kept: Mask) -> SizeOverrides:
    sizes = node.args.get("split_sizes", node.args.get("split_size"))
    ends = np.cumsum(sizes)
    # Each piece keeps as many entries as there are kept indices in its own interval.
    new = [int(kept[end - size : end].sum()) for end, size in zip(ends, sizes, strict=True)]
    return _select_changed_sizes(sizes, new)


def _count_slice_bounds(node: Node, kept: Mask) -> SizeOverrides:
    start, end = int(node.args.get("start") or 0), node.args.get("end")
    # Exporters write INT64_MAX for "to the end".
    stop = len(kept) if end is None else min(int(end), len(kept))
    new = (int(kept[:start].sum()), int(kept[:stop].sum()))
    return (None if new[0] == start else new[0], None if stop == len(kept) or new[1] == stop else new[1])


def _count_channel_groups(node: Node, graph: Graph, channels: Channels, stays: Mask) -> SizeOverrides:
    """Return the new number of groups: it shrinks with the channels of a depthwise convolution or a group norm.

    Other grouped convolutions keep their number of groups; each group becomes narrower.
    """
    name = "num_groups" if lookup_operator(node).norm == "group" else "groups"
    groups = int(node.args.get(name, 1))
    x = node.args.get("input")
    if groups == 1 or not isinstance(x, Ref):
        return (None,)
    before = graph.shapes[x.name]
    after = channels.shape_after_pruning(x.name, before, stays)
    dim = _find_channel_dim(node, before, graph)
    if name == "groups" and groups != before[dim]:  # not depthwise
        return (None,)
    return _select_changed_sizes([groups], [groups * after[dim] // before[dim]])


def _find_channel_dim(node: Node, shape: Sequence[int], graph: Graph) -> int:
    """Return the channel dimension of an operator's input: 1, or 0 where a convolution reads an unbatched sample."""
    weight = node.args.get("weight")
    if not lookup_operator(node).convolves or not isinstance(weight, Ref):
        return 1
    return len(shape) - len(graph.shapes[weight.name]) + 1


def set_operator_sizes(model: nn.Module, sizes: Mapping[str, SizeOverrides]) -> None:
    """Set the new sizes on a copy of the network; an ordinary module has none to set."""
    if isinstance(model, ResizableModule):
        model.sizes = {**model.sizes, **sizes}
