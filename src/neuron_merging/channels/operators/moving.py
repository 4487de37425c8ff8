"""Operators that move data: they are executed on the labels themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.labels import ANY, FIXED, Labels, Line, fixed
from neuron_merging.channels.operators.common import dim_of, meet, same, tie_across, unknown
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Node, Ref


def move(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Execute the operator itself on label tensors."""
    if len(list(node.refs())) > 1:
        return unknown(walk, node)
    return execute(walk, node, walk.of(node.args["self"]))


def execute(walk: Walk, node: Node, labels: Labels) -> Labels | list[Labels]:
    shape = walk.shape(node.args["self"])
    results: list[Labels] = [{} for _ in node.shapes]
    for dim, line in labels.items():
        moved = node.compute({**node.args, "self": _spread(line, dim, shape)})
        for result, tensor in zip(results, _as_list(moved), strict=True):
            where, found = _factorise(walk, node, tensor, line)
            if where is None:
                continue
            if where in result:
                walk.refuse(np.concatenate([result.pop(where), found]), node, "mixes two channel axes")
            else:
                result[where] = found
    return results if len(node.shapes) != 1 else results[0]


def _as_list(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _spread(line: Line, dim: int, shape: Sequence[int]) -> Tensor:
    """The label of every entry of a tensor, without allocating it (strides of zero)."""
    view = [1] * len(shape)
    view[dim] = -1
    return torch.from_numpy(line).to(torch.float64).view(view).expand(tuple(shape))


def _factorise(walk: Walk, node: Node, tensor: Tensor, source: Line) -> tuple[int | None, Line]:
    """Write a tensor of labels as one line along one dimension, tying labels where it must.

    A channel can be cut out of a tensor only as a whole slice. Where labels vary along several
    dimensions the labels that share an index of the chosen dimension are tied together. A view that
    splits the channel axis usually fixes the leading sizes (groups, heads): the last dimension is
    chosen, and the probe checks it. Otherwise it is the dimension that leaves the most units.
    """
    dims = [d for d in range(tensor.ndim) if _varies(tensor, d)]
    if not dims:
        walk.refuse(source, node, "takes single channels out by their position")
        return None, source
    if len(dims) == 1:
        return dims[0], _line(tensor, dims[0])
    ties = {d: _slices(tensor, d, dims) for d in dims}
    best = max(dims, key=lambda d: d if node.fn is torch.reshape else _classes(ties[d]))
    for other in range(1, ties[best].shape[1]):
        walk.unite(ties[best][:, 0], ties[best][:, other])
    return best, ties[best][:, 0].copy()


def _varies(tensor: Tensor, dim: int) -> bool:
    if tensor.shape[dim] < 2 or tensor.stride(dim) == 0:
        return False
    return not bool((tensor == tensor.narrow(dim, 0, 1)).all())


def _line(tensor: Tensor, dim: int) -> Line:
    index = tuple(slice(None) if d == dim else 0 for d in range(tensor.ndim))
    return tensor[index].to(torch.int64).numpy().copy()


def _slices(tensor: Tensor, dim: int, dims: Sequence[int]) -> Line:
    """One row per index of `dim`, with every label that occurs there."""
    index = tuple(slice(None) if d in dims else 0 for d in range(tensor.ndim))
    small = tensor[index].movedim(list(dims).index(dim), 0)
    return small.reshape(small.shape[0], -1).to(torch.int64).numpy()


def _classes(rows: Line) -> int:
    """How many units remain when the labels of each row are tied."""
    seen: dict[int, int] = {}
    for i, row in enumerate(rows):
        first = next((seen[label] for label in row.tolist() if label in seen), i)
        seen.update(dict.fromkeys(row.tolist(), first))
    return len(set(seen.values()))


def reshape(walk: Walk, node: Node) -> Labels:
    """A view; sizes written as numbers may be constants of the model's code, so they are probed."""
    view = replace(node, fn=torch.reshape, args={"self": node.args["self"], "shape": node.shape})
    result = execute(walk, view, walk.of(node.args["self"]))
    assert isinstance(result, dict)
    sizes = node.args.get("size", node.args.get("shape", node.args.get("sizes", [])))
    offset = dim_of(node, walk) if node.op == "unflatten" else 0
    if any(0 <= dim - offset < len(sizes) and sizes[dim - offset] != -1 for dim in result):
        walk.doubt(node)
    return result


def expand(walk: Walk, node: Node) -> Labels:
    """Broadcast dimensions adapt to what they meet; the others keep their labels."""
    before, after = walk.shape(node.args["self"]), node.shape
    shift = len(after) - len(before)
    result = {dim + shift: line for dim, line in walk.of(node.args["self"]).items()}
    for dim, size in enumerate(after):
        if size > 1 and (dim < shift or before[dim - shift] == 1):
            result[dim] = np.full(size, ANY)
            if node.op == "expand":
                walk.doubt(node)
    sizes = node.args.get("size", [])
    if any(sizes[dim] != -1 for dim in result if dim < len(sizes)):
        walk.doubt(node)
    return result


def cat(walk: Walk, node: Node) -> Labels:
    parts = [walk.of(ref) for ref in node.args["tensors"]]
    shapes = [walk.shape(ref) for ref in node.args["tensors"]]
    along = int(node.args.get("dim", 0)) % len(node.shape)
    result = meet(walk, node, list(zip(parts, shapes, strict=True)), skip={along})
    if any(along in part for part in parts):
        lines = [
            part.get(along, fixed(shape[along]))
            for part, shape in zip(parts, shapes, strict=True)
            if len(shape) == len(node.shape)
        ]
        result[along] = np.concatenate(lines)
    return result


def stack(walk: Walk, node: Node) -> Labels:
    parts = [(walk.of(ref), walk.shape(ref)) for ref in node.args["tensors"]]
    along = int(node.args.get("dim", 0)) % len(node.shape)
    met = meet(walk, node, parts, shape=parts[0][1])
    return {dim + (dim >= along): line for dim, line in met.items()}


def split(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Pieces by size. The sizes may be constants of the model's code, so they are probed."""
    dim, labels = dim_of(node, walk), walk.of(node.args["self"])
    if dim in labels:
        sizes = [shape[dim] for shape in node.shapes]
        _balance_pieces(walk, node, labels[dim], sizes)
        walk.doubt(node)
    return move(walk, node)


def chunk(walk: Walk, node: Node) -> Labels | list[Labels]:
    dim, labels = dim_of(node, walk), walk.of(node.args["self"])
    if dim in labels:
        _balance_pieces(walk, node, labels[dim], [shape[dim] for shape in node.shapes])
    return move(walk, node)


def _balance_pieces(walk: Walk, node: Node, line: Line, sizes: Iterable[int]) -> None:
    block = math.gcd(*sizes, len(line))
    if block == 1:
        walk.refuse(line, node, "cuts the channels at positions that no smaller network shares")
    else:
        walk.balance(line, len(line) // block)


def take_slice(walk: Walk, node: Node) -> Labels | list[Labels]:
    dim, labels = dim_of(node, walk), walk.of(node.args["self"])
    if dim in labels and node.shape[dim] != len(labels[dim]):
        size = len(labels[dim])
        start = int(node.args.get("start") or 0)
        start = max(start + size, 0) if start < 0 else start
        if int(node.args.get("step") or 1) != 1:
            walk.refuse(labels[dim], node, "takes every k-th channel")
        else:
            _balance_pieces(walk, node, labels[dim], [s for s in (start, node.shape[dim]) if s])
        walk.doubt(node)
    return move(walk, node)


def position(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Select and unbind: fine on other dimensions, by fixed position on the channels'."""
    dim, labels = dim_of(node, walk), walk.of(node.args["self"])
    if dim in labels:
        walk.refuse(labels.pop(dim), node, "takes single channels out by their position")
    return execute(walk, node, labels)


def index(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Indexing with tensors: channels may not be indexed, other dimensions may."""
    labels = walk.of(node.args["self"])
    indices = node.args["indices"] if "indices" in node.args else None
    if indices is None:
        indexed = {dim_of(node, walk)}
        stand_in: dict[str, Any] = {"index": torch.zeros(walk.shape(node.args["index"]), dtype=torch.int64)}
    else:
        indexed = _indexed_dims(walk, indices)
        stand_in = {"indices": [_stand_in(walk, item) for item in indices]}
    for dim in indexed & set(labels):
        walk.refuse(labels.pop(dim), node, "picks channels with an index tensor")
    if any(isinstance(i, Ref) and walk.is_mask(i) for i in indices or []):
        for dim in list(labels):
            walk.refuse(labels.pop(dim), node, "indexes with a mask")
        return {}
    return execute(walk, replace(node, args={**node.args, **stand_in}), labels)


def _indexed_dims(walk: Walk, indices: Sequence[Any]) -> set[int]:
    dims: set[int] = set()
    at = 0
    for item in indices:
        width = len(walk.shape(item)) if item is not None and walk.is_mask(item) else 1
        if item is not None:
            dims |= set(range(at, at + width))
        at += width
    return dims


def _stand_in(walk: Walk, item: Any) -> Any:
    return torch.zeros(walk.shape(item), dtype=torch.int64) if isinstance(item, Ref) else item


def pad(walk: Walk, node: Node) -> Labels:
    """Padding keeps channels in place; constant padding of the channel axis adds fixed entries."""
    labels, amounts = same(walk, node), [int(a) for a in node.args.get("pad", node.args.get("padding"))]
    constant = node.op == "constant_pad_nd" or node.args.get("mode", "constant") == "constant"
    constant &= not node.op.startswith(("reflection", "replication"))
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = len(node.shape) - 1 - i
        if dim in labels and (before or after):
            if not constant or min(before, after) < 0:
                walk.refuse(labels.pop(dim), node, "pads or crops channels by position")
            else:
                labels[dim] = np.pad(labels[dim], (before, after), constant_values=FIXED)
    return labels


def flip(walk: Walk, node: Node) -> Labels:
    labels = same(walk, node)
    dims = {d % len(node.shape) for d in node.args["dims"]}
    return {dim: line[::-1].copy() if dim in dims else line for dim, line in labels.items()}


def roll(walk: Walk, node: Node) -> Labels:
    labels = same(walk, node)
    dims = node.args.get("dims") or range(len(node.shape))
    for dim in {d % len(node.shape) for d in dims} & set(labels):
        walk.refuse(labels.pop(dim), node, "rolls channels by a fixed number")
    return labels


def channel_shuffle(walk: Walk, node: Node) -> Labels | list[Labels]:
    labels = walk.of(node.args["self"])
    if 1 in labels:
        tie_across(walk, labels[1], int(node.args["groups"]))
    return move(walk, node)


def getitem(walk: Walk, node: Node) -> Labels:
    return dict(walk.item(node.args["self"], int(node.args["index"])))
