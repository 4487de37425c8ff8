"""Sizes that follow the channels, in networks that hold them as data: reshapes, pieces, ranges, numbers of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import nn

from neuron_merging.channels.groups import Channels, stays_at
from neuron_merging.channels.labels import Mask
from neuron_merging.channels.operators.table import row_of
from neuron_merging.graph.resizing import Resizable, Sizes, size_key
from neuron_merging.graph.values import Graph, Node, Ref

SHAPES = ("view", "reshape", "_unsafe_view", "expand")
PIECES = ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")


def sizes_after(model: nn.Module, graph: Graph, channels: Channels, stays: Mask) -> dict[str, Sizes]:
    """By operator, the sizes that change where only some units stay; none where they are the model's own code."""
    if not isinstance(model, Resizable):
        return {}
    found = {}
    for node in graph.nodes:
        kind, sizes = _sizes(node, graph, channels, stays) if channels.touched(node) else ("", ())
        if any(size is not None for size in sizes):
            found[size_key(node.module, kind)] = sizes
    return found


def _sizes(node: Node, graph: Graph, channels: Channels, stays: Mask) -> tuple[str, Sizes]:
    if node.op in SHAPES or row_of(node).fills:
        return "size", _changed(node.shape, channels.new_shape(node.name, node.shape, stays))
    if node.op == "layer_norm":
        width = len(node.args["normalized_shape"])
        return "size", _changed(node.shape, channels.new_shape(node.name, node.shape, stays))[-width:]
    if node.op in PIECES and isinstance(node.args.get("split_sizes", node.args.get("split_size")), list):
        return "pieces", _cut_at(node, channels, stays, _pieces)
    if node.op == "slice":
        return f"range.{_dim(node, graph)}", _cut_at(node, channels, stays, _range)
    if row_of(node).convolves or row_of(node).norm == "group":
        return "groups", _groups(node, graph, channels, stays)
    return "", ()


def _changed(old: Sequence[int], new: Sequence[int]) -> Sizes:
    return tuple(None if a == b else b for a, b in zip(old, new, strict=True))


def _dim(node: Node, graph: Graph) -> int:
    return int(node.args.get("dim", 0)) % len(graph.shapes[next(node.refs()).name])


def _cut_at(node: Node, channels: Channels, stays: Mask, count: Callable[[Node, Mask], Sizes]) -> Sizes:
    """Sizes along the dimension at which an operator cuts a value with channels."""
    before = next(node.refs()).name
    units = channels.units.get(before, {})
    dim = int(node.args.get("dim", 0))
    dims = [d for d in units if d == dim or (dim < 0 and d == dim + _ndim(node))]
    return count(node, stays_at(stays, units[dims[0]])) if dims else ()


def _ndim(node: Node) -> int:
    return len(node.shape)


def _pieces(node: Node, kept: Mask) -> Sizes:
    sizes = node.args.get("split_sizes", node.args.get("split_size"))
    ends = np.cumsum(sizes)
    new = [int(kept[end - size : end].sum()) for end, size in zip(ends, sizes, strict=True)]
    return _changed(sizes, new)


def _range(node: Node, kept: Mask) -> Sizes:
    start, end = int(node.args.get("start") or 0), node.args.get("end")
    stop = len(kept) if end is None else min(int(end), len(kept))
    new = (int(kept[:start].sum()), int(kept[:stop].sum()))
    return (None if new[0] == start else new[0], None if stop == len(kept) or new[1] == stop else new[1])


def _groups(node: Node, graph: Graph, channels: Channels, stays: Mask) -> Sizes:
    """As many groups as channels go on to be; elsewhere groups stay and become narrower."""
    name = "num_groups" if row_of(node).norm == "group" else "groups"
    groups = int(node.args.get(name, 1))
    x = node.args.get("input")
    if groups == 1 or not isinstance(x, Ref):
        return (None,)
    before = graph.shapes[x.name]
    after = channels.new_shape(x.name, before, stays)
    dim = _channel_dim(node, before, graph)
    if name == "groups" and groups != before[dim]:
        return (None,)
    return _changed([groups], [groups * after[dim] // before[dim]])


def _channel_dim(node: Node, shape: Sequence[int], graph: Graph) -> int:
    weight = node.args.get("weight")
    if not row_of(node).convolves or not isinstance(weight, Ref):
        return 1
    return len(shape) - len(graph.shapes[weight.name]) + 1


def set_sizes(model: nn.Module, sizes: Mapping[str, Sizes]) -> None:
    """Give a copy its sizes."""
    if isinstance(model, Resizable):
        model.sizes = {**model.sizes, **sizes}
