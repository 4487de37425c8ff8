"""Rules of operators that only move data: they are executed on the labels themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.labels import ANY, FIXED, AxisLabels, Labels, make_fixed_labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules.common import dim_of, keep_labels, refuse_all_labels, unite_blocks, unite_broadcast
from neuron_merging.graph.graph import Node, Ref, Shape

WINDOWS_REASON = "takes windows over channels"
INFERRED_SIZE = -1
"""In sizes that a view is given: what the others leave."""


def move_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """The rule of an operator that only moves data: it is itself run on the labels.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator.

    Returns
    -------
    Labels | list[Labels]
        Of its output, or of each of its outputs.

    Examples
    --------
    >>> operator("my_permutation", moves=True)(move_rule)                  # doctest: +SKIP
    """
    return _execute_single_input(walk, node, range(len(walk.shape(node.args["self"]))))


def rearrange_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Whole dimensions change places, or are repeated: their sizes do not matter."""
    return _execute_single_input(walk, node, ())


def along_dim_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """One dimension is cut or spread, the others stay as they are."""
    return _execute_single_input(walk, node, [dim_of(node, walk)])


def repeat_interleave_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Without a dimension, the repeated tensor is flattened."""
    return along_dim_rule(walk, node) if node.args.get("dim") is not None else move_rule(walk, node)


def pixel_shuffle_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Channels become places, or places channels: all three dimensions must divide."""
    ndim = len(walk.shape(node.args["self"]))
    return _execute_single_input(walk, node, range(ndim - 3, ndim))


def _execute_single_input(walk: LabelWalk, node: Node, touched: Collection[int]) -> Labels | list[Labels]:
    """A second operand could move data in a way that is not known here."""
    if len(list(node.refs())) > 1:
        return refuse_all_labels(walk, node)
    return execute_on_labels(walk, node, walk.labels_of(node.args["self"]), touched)


def execute_on_labels(walk: LabelWalk, node: Node, labels: Labels, touched: Collection[int]) -> Labels | list[Labels]:
    """The labels of all results; the operator treats every index of dimensions that it does not touch alike."""
    results: list[Labels] = [{} for _ in node.shapes]
    for dim, line in labels.items():
        layouts = _run_on_few_indices(node, line, dim, walk.shape(node.args["self"]), touched)
        for result, layout, shape in zip(results, layouts, node.shapes, strict=True):
            if 0 not in shape:  # in an empty piece stands no channel
                _place_labels(walk, node, result, layout, line)
    return results if node.has_several_outputs else results[0]


@dataclass(frozen=True)
class LabelLayout:
    """Where channels stand in a tensor: along `dim`, with every label that occurs at each of its indices.

    A channel can be cut out of a tensor only as a whole slice. So labels that share an index are tied together.
    """

    dim: int
    labels: AxisLabels

    @property
    def line(self) -> AxisLabels:
        return self.labels[:, 0].copy()

    def unite_rows(self, walk: LabelWalk) -> None:
        for others in self.labels.T[1:]:
            walk.unite(self.labels[:, 0], others)


def _place_labels(walk: LabelWalk, node: Node, result: Labels, layout: LabelLayout | None, line: AxisLabels) -> None:
    """Add what became of a line to the labels of a result."""
    if layout is None:
        walk.refuse(line, node, "takes single channels out by their position")
        return
    layout.unite_rows(walk)
    if layout.dim not in result:
        result[layout.dim] = layout.line
        return
    both = (result.pop(layout.dim), layout.line)
    heads = [line for line in both if walk.are_split_blocks(line)]
    for other in both:
        if len(heads) != 1 or other is not heads[0]:
            walk.refuse(other, node, "mixes two channel axes")
    if len(heads) == 1:
        result[layout.dim] = heads[0]


def _run_on_few_indices(
    node: Node, line: AxisLabels, dim: int, shape: Shape, touched: Collection[int]
) -> list[LabelLayout | None]:
    """The operator run on labels; of dimensions that it treats alike, two indices stand for all."""
    alike = set(range(len(shape))) - {dim, *touched}
    few = tuple(min(size, 2) if d in alike else size for d, size in enumerate(shape))
    layouts = _run_on_labels(node, _expand_labels(line, dim, few))
    whole = all(not f or len(f.labels) == after[f.dim] for f, after in zip(layouts, node.shapes, strict=True))
    return layouts if whole else _run_on_labels(node, _expand_labels(line, dim, shape))


def _run_on_labels(node: Node, labels: Tensor) -> list[LabelLayout | None]:
    moved = node.compute({**node.args, "self": labels})
    return [_find_layout(tensor, _choose_most_units) for tensor in ([moved] if isinstance(moved, Tensor) else moved)]


def _expand_labels(line: AxisLabels, dim: int, shape: Sequence[int]) -> Tensor:
    """The label of every entry of a tensor, without allocating it (strides of zero)."""
    view = [1] * len(shape)
    view[dim] = len(line)
    return torch.from_numpy(line).to(torch.float64).view(view).expand(tuple(shape))


def _find_layout(tensor: Tensor, choose: Callable[[Sequence[LabelLayout]], LabelLayout]) -> LabelLayout | None:
    """Write a tensor of labels as lines along one of the dimensions that they vary along."""
    dims = [d for d in range(tensor.ndim) if _varies_along(tensor, d)] if tensor.numel() else []
    if not dims:
        return None
    index = tuple(slice(None) if d in dims else 0 for d in range(tensor.ndim))
    varying = tensor[index].to(torch.int64)
    layouts = [LabelLayout(d, varying.movedim(i, 0).reshape(tensor.shape[d], -1).numpy()) for i, d in enumerate(dims)]
    return choose(layouts)


def _varies_along(tensor: Tensor, dim: int) -> bool:
    if tensor.shape[dim] < 2 or tensor.stride(dim) == 0:
        return False
    return not bool((tensor == tensor.narrow(dim, 0, 1)).all())


def _choose_last_dim(layouts: Sequence[LabelLayout]) -> LabelLayout:
    """A view that splits channels usually fixes the leading sizes (groups, heads); a trial cut checks it."""
    return layouts[-1]


def _choose_head_dim(walk: LabelWalk, node: Node, layouts: Sequence[LabelLayout]) -> LabelLayout:
    """Of the dimensions that a line is parted into, the one that counts heads: the last but one, unless told."""
    if len(layouts) == 1 or walk.head_dims is None:
        return layouts[-1]
    place = min(walk.head_dims.get(node.name, len(layouts) - 2), len(layouts) - 1)
    walk.note_head_split(node, place, layouts[place].line)
    return layouts[place]


def _choose_most_units(layouts: Sequence[LabelLayout]) -> LabelLayout:
    return max(layouts, key=lambda layout: _count_units(layout.labels)) if len(layouts) > 1 else layouts[0]


def _count_units(rows: AxisLabels) -> int:
    """How many units remain when the labels of each row are tied."""
    seen: dict[int, int] = {}
    for i, row in enumerate(rows):
        first = next((seen[label] for label in row.tolist() if label in seen), i)
        seen.update(dict.fromkeys(row.tolist(), first))
    return len(set(seen.values()))


def unflatten_rule(walk: LabelWalk, node: Node) -> Labels:
    """A view whose sizes are those that one dimension is split into."""
    return reshape_rule(walk, node, dim_of(node, walk))


def reshape_rule(walk: LabelWalk, node: Node, offset: int = 0) -> Labels:
    """A view; sizes written as numbers may be constants of the model's code, so they are tried."""
    before, result = walk.shape(node.args["self"]), Labels()
    if math.prod(before) != math.prod(node.shape):
        return refuse_all_labels(walk, node)
    for dim, line in walk.labels_of(node.args["self"]).items():
        old, new = _find_segment(before, node.shape, dim)
        labels = _expand_labels(line, dim - old.start, before[old]).reshape(node.shape[new])
        layout = _find_layout(
            labels, _choose_last_dim if walk.head_dims is None else lambda found: _choose_head_dim(walk, node, found)
        )
        _place_labels(walk, node, result, layout and LabelLayout(layout.dim + new.start, layout.labels), line)
    sizes = node.args.get("size", node.args.get("shape", node.args.get("sizes", [])))
    if any(0 <= dim - offset < len(sizes) and sizes[dim - offset] != INFERRED_SIZE for dim in result):
        walk.mark_size_uncertain(node)
    return result


def _find_segment(before: Shape, after: Shape, dim: int) -> tuple[slice, slice]:
    """The dimensions around `dim`, and those that a view makes of them alone."""
    old, new = slice(0, 0), slice(0, 0)
    while old.stop <= dim:
        old, new = slice(old.stop, old.stop + 1), slice(new.stop, new.stop + 1)
        while (missing := math.prod(after[new]) - math.prod(before[old])) and 0 not in before:
            grows = slice(old.start, old.stop + 1), slice(new.start, new.stop + 1)
            old, new = (grows[0], new) if missing > 0 else (old, grows[1])
    return (old, new) if 0 not in before else (slice(0, len(before)), slice(0, len(after)))


def expand_rule(walk: LabelWalk, node: Node) -> Labels:
    """Broadcast dimensions adapt to what they meet; the others keep their labels."""
    before, after = walk.shape(node.args["self"]), node.shape
    shift = len(after) - len(before)
    result = {dim + shift: line for dim, line in walk.labels_of(node.args["self"]).items()}
    for dim, size in enumerate(after):
        if size > 1 and (dim < shift or before[dim - shift] == 1):
            result[dim] = np.full(size, ANY)
    sizes = node.args.get("size", [])
    if any(sizes[dim] != INFERRED_SIZE for dim in result if dim < len(sizes)):
        walk.mark_size_uncertain(node)
    return result


def cat_rule(walk: LabelWalk, node: Node) -> Labels:
    parts = [walk.labels_of(ref) for ref in node.args["tensors"]]
    shapes = [walk.shape(ref) for ref in node.args["tensors"]]
    along = int(node.args.get("dim", 0)) % len(node.shape)
    result = unite_broadcast(walk, node, list(zip(parts, shapes, strict=True)), skip={along})
    if any(along in part for part in parts):
        lines = [
            walk.fix_axis_labels(part[along]) if along in part else make_fixed_labels(shape[along])
            for part, shape in zip(parts, shapes, strict=True)
            if len(shape) == len(node.shape)
        ]
        result[along] = np.concatenate(lines)
    return result


def stack_rule(walk: LabelWalk, node: Node) -> Labels:
    parts = [(walk.labels_of(ref), walk.shape(ref)) for ref in node.args["tensors"]]
    along = int(node.args.get("dim", 0)) % len(node.shape)
    met = unite_broadcast(walk, node, parts, shape=parts[0][1])
    return {dim + (dim >= along): line for dim, line in met.items()}


def split_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Pieces by size. The sizes may be constants of the model's code, so they are tried."""
    dim, labels = dim_of(node, walk), walk.labels_of(node.args["self"])
    if dim in labels:
        sizes = [shape[dim] for shape in node.shapes]
        _balance_pieces(walk, node, labels[dim], sizes)
        walk.mark_size_uncertain(node)
    return along_dim_rule(walk, node)


def chunk_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    dim, labels = dim_of(node, walk), walk.labels_of(node.args["self"])
    if dim in labels:
        _balance_pieces(walk, node, labels[dim], [shape[dim] for shape in node.shapes])
    return along_dim_rule(walk, node)


def _balance_pieces(walk: LabelWalk, node: Node, line: AxisLabels, sizes: Iterable[int]) -> None:
    block = math.gcd(*sizes, len(line))
    if block == 1:
        walk.refuse(line, node, "cuts the channels at positions that no smaller network shares")
    else:
        walk.balance(line, len(line) // block)


def slice_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    dim, labels = dim_of(node, walk), walk.labels_of(node.args["self"])
    if dim in labels and node.shape[dim] != len(labels[dim]):
        size = len(labels[dim])
        start = int(node.args.get("start") or 0)
        start = max(start + size, 0) if start < 0 else start
        if int(node.args.get("step") or 1) != 1:
            walk.refuse(labels[dim], node, "takes every k-th channel")
        else:
            _balance_pieces(walk, node, labels[dim], [s for s in (start, node.shape[dim]) if s])
        walk.mark_size_uncertain(node)
    return along_dim_rule(walk, node)


def select_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Select and unbind: fine on other dimensions, by fixed position on the channels'."""
    dim, labels = dim_of(node, walk), walk.labels_of(node.args["self"])
    if dim in labels:
        walk.refuse(labels.pop(dim), node, "takes single channels out by their position")
    return execute_on_labels(walk, node, labels, [dim])


def index_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Indexing with tensors: channels may not be indexed, other dimensions may."""
    labels = walk.labels_of(node.args["self"])
    indices = node.args["indices"] if "indices" in node.args else None
    if indices is None:
        indexed = {dim_of(node, walk)}
        stand_in: dict[str, Any] = {"index": _create_zero_index(walk.shape(node.args["index"]))}
    else:
        indexed = _find_indexed_dims(walk, indices)
        stand_in = {"indices": [_replace_index(walk, item) for item in indices]}
    for dim in indexed & set(labels):
        walk.refuse(labels.pop(dim), node, "picks channels with an index tensor")
    if any(isinstance(i, Ref) and walk.is_mask(i) for i in indices or []):
        for dim in list(labels):
            walk.refuse(labels.pop(dim), node, "indexes with a mask")
        return {}
    return execute_on_labels(walk, replace(node, args={**node.args, **stand_in}), labels, indexed)


def _find_indexed_dims(walk: LabelWalk, indices: Sequence[Any]) -> set[int]:
    dims: set[int] = set()
    at = 0
    for item in indices:
        width = len(walk.shape(item)) if item is not None and walk.is_mask(item) else 1
        if item is not None:
            dims |= set(range(at, at + width))
        at += width
    return dims


def _replace_index(walk: LabelWalk, item: Any) -> Any:
    return _create_zero_index(walk.shape(item)) if isinstance(item, Ref) else item


def _create_zero_index(shape: Sequence[int]) -> Tensor:
    return torch.zeros(tuple(shape), dtype=torch.int64, device="cpu")


def edge_pad_rule(walk: LabelWalk, node: Node) -> Labels:
    """Padding with entries that lie elsewhere: not along channels."""
    return pad_rule(walk, node, fixed=False)


def pad_rule(walk: LabelWalk, node: Node, fixed: bool = True) -> Labels:
    """Padding keeps channels in place; constant padding of the channel axis adds fixed entries."""
    labels, amounts = keep_labels(walk, node), [int(a) for a in node.args.get("pad", node.args.get("padding"))]
    constant = fixed and node.args.get("mode", "constant") == "constant"
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = len(node.shape) - 1 - i
        if dim in labels and (before or after):
            if not constant or min(before, after) < 0:
                walk.refuse(labels.pop(dim), node, "pads or crops channels by position")
            else:
                labels[dim] = np.pad(walk.fix_axis_labels(labels[dim]), (before, after), constant_values=FIXED)
    return labels


def flip_rule(walk: LabelWalk, node: Node) -> Labels:
    labels = keep_labels(walk, node)
    dims = {d % len(node.shape) for d in node.args["dims"]}
    return {dim: line[::-1].copy() if dim in dims else line for dim, line in labels.items()}


def roll_rule(walk: LabelWalk, node: Node) -> Labels:
    labels = keep_labels(walk, node)
    dims = node.args.get("dims") or range(len(node.shape))
    for dim in {d % len(node.shape) for d in dims} & set(labels):
        walk.refuse(labels.pop(dim), node, "rolls channels by a fixed number")
    return labels


def tensor_unfold_rule(walk: LabelWalk, node: Node) -> Labels:
    """Windows along one dimension become a new last one."""
    labels = walk.labels_of(node.args["self"])
    dim = int(node.args["dimension"]) % len(walk.shape(node.args["self"]))
    if dim in labels:
        walk.refuse(labels.pop(dim), node, WINDOWS_REASON)
    return labels


def im2col_rule(walk: LabelWalk, node: Node) -> Labels:
    """Windows of an image: every channel is followed by its neighbours."""
    labels, last = walk.labels_of(node.args["self"]), len(walk.shape(node.args["self"])) - 1
    for dim in {last - 1, last} & set(labels):
        walk.refuse(labels.pop(dim), node, WINDOWS_REASON)
    times = math.prod(node.args["kernel_size"])
    return {dim: np.repeat(line, times) if dim == last - 2 else line for dim, line in labels.items()}


def col2im_rule(walk: LabelWalk, node: Node) -> Labels:
    """Windows are summed up to an image: a channel is made of as many as a window has places."""
    labels, last = walk.labels_of(node.args["self"]), len(walk.shape(node.args["self"])) - 1
    if last in labels:
        walk.refuse(labels.pop(last), node, WINDOWS_REASON)
    if last - 1 in labels:
        channels = labels[last - 1].reshape(-1, math.prod(node.args["kernel_size"]))
        unite_blocks(walk, channels.T.ravel(), channels.shape[1])
        labels[last - 1] = channels[:, 0].copy()
    return labels


def channel_shuffle_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    labels = walk.labels_of(node.args["self"])
    if 1 in labels:
        unite_blocks(walk, labels[1], int(node.args["groups"]))
    return _execute_single_input(walk, node, [1])


def getitem_rule(walk: LabelWalk, node: Node) -> Labels:
    return dict(walk.labels_of_item(node.args["self"], int(node.args["index"])))
