"""Rules of operators that only move data: they are executed on tensors of labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.groups import ANY, FIXED, AxisLabels, Labels, make_fixed_labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules.common import dim_of, keep_labels, refuse_all_labels, unite_blocks, unite_broadcast
from neuron_merging.graph.graph import Node, Ref, Shape

WINDOWS_REASON = "takes windows over channels"
INFERRED_SIZE = -1
"""In the sizes of a view: torch infers this size from the others."""


def move_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of an operator that only moves data, by running it on the labels.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator.

    Returns
    -------
    Labels | list[Labels]
        The labels of its output, or of each of its outputs.

    Examples
    --------
    >>> operator("my_permutation", moves=True)(move_rule)                  # doctest: +SKIP
    """
    return _execute_single_input(walk, node, range(len(walk.shape(node.args["self"]))))


def rearrange_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of an operator that permutes or repeats whole dimensions, whatever their sizes."""
    return _execute_single_input(walk, node, ())


def along_dim_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of an operator that cuts or repeats entries along `dim` and keeps the other dimensions."""
    return _execute_single_input(walk, node, [dim_of(node, walk)])


def repeat_interleave_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of `repeat_interleave`, which flattens the tensor if `dim` is not given."""
    return along_dim_rule(walk, node) if node.args.get("dim") is not None else move_rule(walk, node)


def pixel_shuffle_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of pixel shuffle and unshuffle, which exchange channels with the last two dimensions."""
    ndim = len(walk.shape(node.args["self"]))
    return _execute_single_input(walk, node, range(ndim - 3, ndim))


def _execute_single_input(walk: LabelWalk, node: Node, touched: Collection[int]) -> Labels | list[Labels]:
    """Run the operator on its labels. Refuse all if it has a second operand: how that moves data is unknown."""
    if len(list(node.refs())) > 1:
        return refuse_all_labels(walk, node)
    return execute_on_labels(walk, node, walk.labels_of(node.args["self"]), touched)


def execute_on_labels(walk: LabelWalk, node: Node, labels: Labels, touched: Collection[int]) -> Labels | list[Labels]:
    """Return the labels of all results, by running the operator on the labels of each dimension.

    All indices of a dimension that is not `touched` are treated alike, so a few of them are enough.
    """
    results: list[Labels] = [{} for _ in node.shapes]
    for dim, line in labels.items():
        layouts = _run_on_few_indices(node, line, dim, walk.shape(node.args["self"]), touched)
        for result, layout, shape in zip(results, layouts, node.shapes, strict=True):
            if 0 not in shape:  # an empty piece has no channels
                _place_labels(walk, node, result, layout, line)
    return results if node.has_several_outputs else results[0]


@dataclass(frozen=True)
class LabelLayout:
    """The labels along one dimension of a tensor: row i holds every label that occurs at index i of `dim`.

    A channel can only be removed from a tensor as a whole slice. So labels that share an index are coupled.
    """

    dim: int
    labels: AxisLabels

    @property
    def line(self) -> AxisLabels:
        """One label for each index."""
        return self.labels[:, 0].copy()

    def unite_rows(self, walk: LabelWalk) -> None:
        """Unite the labels that share an index."""
        for others in self.labels.T[1:]:
            walk.unite(self.labels[:, 0], others)


def _place_labels(walk: LabelWalk, node: Node, result: Labels, layout: LabelLayout | None, line: AxisLabels) -> None:
    """Add the new layout of the labels `line` to the labels of a result. Refuse them if there is none."""
    if layout is None:
        walk.refuse(line, node, "takes single channels out by their position")
        return
    layout.unite_rows(walk)
    if layout.dim not in result:
        result[layout.dim] = layout.line
        return
    # Two channel axes were flattened into one. Only heads may stay, since they are blocks of this axis.
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
    """Run the operator on labels, with at most two indices of each dimension that it treats alike."""
    untouched = set(range(len(shape))) - {dim, *touched}
    small_shape = tuple(min(size, 2) if d in untouched else size for d, size in enumerate(shape))
    layouts = _run_on_labels(node, _expand_labels(line, dim, small_shape))
    # If the channel dimension of a result got shorter, it contains a reduced dimension: run at full size.
    complete = all(not f or len(f.labels) == after[f.dim] for f, after in zip(layouts, node.shapes, strict=True))
    return layouts if complete else _run_on_labels(node, _expand_labels(line, dim, shape))


def _run_on_labels(node: Node, labels: Tensor) -> list[LabelLayout | None]:
    results = node.compute({**node.args, "self": labels})
    tensors = [results] if isinstance(results, Tensor) else results
    return [_find_layout(tensor, _choose_most_units) for tensor in tensors]


def _expand_labels(line: AxisLabels, dim: int, shape: Sequence[int]) -> Tensor:
    """Return a tensor with the label of every entry, without allocating it (strides of zero).

    float64 represents all labels exactly, and every operator that moves data supports it.
    """
    view = [1] * len(shape)
    view[dim] = len(line)
    return torch.from_numpy(line).to(torch.float64).view(view).expand(tuple(shape))


def _find_layout(tensor: Tensor, choose: Callable[[Sequence[LabelLayout]], LabelLayout]) -> LabelLayout | None:
    """Return the layout of labels along one of the dimensions that they vary along; None if they vary along none."""
    dims = [d for d in range(tensor.ndim) if _varies_along(tensor, d)] if tensor.numel() else []
    if not dims:
        return None
    # All entries along the other dimensions are equal: the first stands for them.
    index = tuple(slice(None) if d in dims else 0 for d in range(tensor.ndim))
    varying = tensor[index].to(torch.int64)
    layouts = [LabelLayout(d, varying.movedim(i, 0).reshape(tensor.shape[d], -1).numpy()) for i, d in enumerate(dims)]
    return choose(layouts)


def _varies_along(tensor: Tensor, dim: int) -> bool:
    # A stride of zero repeats the same memory, so there is nothing to compare.
    if tensor.shape[dim] < 2 or tensor.stride(dim) == 0:
        return False
    return not bool((tensor == tensor.narrow(dim, 0, 1)).all())


def _choose_last_dim(layouts: Sequence[LabelLayout]) -> LabelLayout:
    """Choose the last dimension: a view that splits channels usually fixes the leading sizes (groups, heads).

    A trial cut tests this choice.
    """
    return layouts[-1]


def _choose_head_dim(walk: LabelWalk, node: Node, layouts: Sequence[LabelLayout]) -> LabelLayout:
    """Choose the dimension that counts heads: the last but one, unless `head_dims` names another."""
    if len(layouts) == 1 or walk.head_dims is None:
        return layouts[-1]
    position = min(walk.head_dims.get(node.name, len(layouts) - 2), len(layouts) - 1)
    walk.note_head_split(node, position, layouts[position].line)
    return layouts[position]


def _choose_most_units(layouts: Sequence[LabelLayout]) -> LabelLayout:
    """Choose the dimension along which most units can be removed one by one."""
    return max(layouts, key=lambda layout: _count_units(layout.labels)) if len(layouts) > 1 else layouts[0]


def _count_units(rows: AxisLabels) -> int:
    """Return the number of units when the labels of each row are coupled."""
    seen: dict[int, int] = {}
    for i, row in enumerate(rows):
        first = next((seen[label] for label in row.tolist() if label in seen), i)
        seen.update(dict.fromkeys(row.tolist(), first))
    return len(set(seen.values()))


def unflatten_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of `unflatten`, whose sizes are those that one dimension is split into."""
    return reshape_rule(walk, node, dim_of(node, walk))


def reshape_rule(walk: LabelWalk, node: Node, offset: int = 0) -> Labels:
    """Apply the rule of a view. Its sizes may be constants of the model's code, so a trial cut tests them.

    `offset` is the dimension of the result that the first of the sizes is for.
    """
    before, result = walk.shape(node.args["self"]), Labels()
    if math.prod(before) != math.prod(node.shape):
        return refuse_all_labels(walk, node)
    for dim, line in walk.labels_of(node.args["self"]).items():
        # Only the dimensions that the view merges or splits together with `dim`: the full tensor may be huge.
        old, new = _find_segment(before, node.shape, dim)
        labels = _expand_labels(line, dim - old.start, before[old]).reshape(node.shape[new])
        layout = _find_layout(
            labels,
            _choose_last_dim if walk.head_dims is None else lambda layouts: _choose_head_dim(walk, node, layouts),
        )
        _place_labels(walk, node, result, layout and LabelLayout(layout.dim + new.start, layout.labels), line)
    sizes = node.args.get("size", node.args.get("shape", node.args.get("sizes", [])))
    if any(0 <= dim - offset < len(sizes) and sizes[dim - offset] != INFERRED_SIZE for dim in result):
        walk.mark_size_uncertain(node)
    return result


def _find_segment(before: Shape, after: Shape, dim: int) -> tuple[slice, slice]:
    """Return the smallest run of dimensions around `dim` that a view maps onto a run of its own, and that run.

    Both have the same number of entries. The side with the smaller product grows until they agree.
    """
    old, new = slice(0, 0), slice(0, 0)
    while old.stop <= dim:
        old, new = slice(old.stop, old.stop + 1), slice(new.stop, new.stop + 1)
        while (missing := math.prod(after[new]) - math.prod(before[old])) and 0 not in before:
            longer = slice(old.start, old.stop + 1), slice(new.start, new.stop + 1)
            old, new = (longer[0], new) if missing > 0 else (old, longer[1])
    return (old, new) if 0 not in before else (slice(0, len(before)), slice(0, len(after)))


def expand_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of `expand`: expanded dimensions take any size, the others keep their labels."""
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
    """Apply the rule of `cat`: labels are concatenated along `dim` and united along the others."""
    parts = [walk.labels_of(ref) for ref in node.args["tensors"]]
    shapes = [walk.shape(ref) for ref in node.args["tensors"]]
    along = int(node.args.get("dim", 0)) % len(node.shape)
    result = unite_broadcast(walk, node, list(zip(parts, shapes, strict=True)), skip={along})
    if any(along in part for part in parts):
        lines = [
            walk.fix_axis_labels(part[along]) if along in part else make_fixed_labels(shape[along])
            for part, shape in zip(parts, shapes, strict=True)
            if len(shape) == len(node.shape)  # torch.cat skips empty tensors of one dimension
        ]
        result[along] = np.concatenate(lines)
    return result


def stack_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of `stack`: labels at equal indices are united, and dimensions move behind the new one."""
    parts = [(walk.labels_of(ref), walk.shape(ref)) for ref in node.args["tensors"]]
    along = int(node.args.get("dim", 0)) % len(node.shape)
    united = unite_broadcast(walk, node, parts, shape=parts[0][1])
    return {dim + (dim >= along): line for dim, line in united.items()}


def split_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of a split by sizes. They may be constants of the model's code, so a trial cut tests them."""
    dim, labels = dim_of(node, walk), walk.labels_of(node.args["self"])
    if dim in labels:
        sizes = [shape[dim] for shape in node.shapes]
        _balance_pieces(walk, node, labels[dim], sizes)
        walk.mark_size_uncertain(node)
    return along_dim_rule(walk, node)


def chunk_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of a split into a number of pieces, which adapts to fewer channels."""
    dim, labels = dim_of(node, walk), walk.labels_of(node.args["self"])
    if dim in labels:
        _balance_pieces(walk, node, labels[dim], [shape[dim] for shape in node.shapes])
    return along_dim_rule(walk, node)


def _balance_pieces(walk: LabelWalk, node: Node, line: AxisLabels, sizes: Iterable[int]) -> None:
    """Require equally many channels in every block, so that the borders between pieces stay proportional.

    The block length is the greatest common divisor of all pieces: every border is then a border of blocks.
    """
    block = math.gcd(*sizes, len(line))
    if block == 1:
        walk.refuse(line, node, "cuts the channels at positions that no smaller network shares")
    else:
        walk.balance(line, len(line) // block)


def slice_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of a slice. Along channels, its borders must scale with the number of channels."""
    dim, labels = dim_of(node, walk), walk.labels_of(node.args["self"])
    if dim in labels and node.shape[dim] != len(labels[dim]):
        size = len(labels[dim])
        start = int(node.args.get("start") or 0)
        start = max(start + size, 0) if start < 0 else start  # counted from the end, as in Python
        if int(node.args.get("step") or 1) != 1:
            walk.refuse(labels[dim], node, "takes every k-th channel")
        else:
            _balance_pieces(walk, node, labels[dim], [s for s in (start, node.shape[dim]) if s])
        walk.mark_size_uncertain(node)
    return along_dim_rule(walk, node)


def select_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of select and unbind, which take single indices: not allowed along channels."""
    dim, labels = dim_of(node, walk), walk.labels_of(node.args["self"])
    if dim in labels:
        walk.refuse(labels.pop(dim), node, "takes single channels out by their position")
    return execute_on_labels(walk, node, labels, [dim])


def index_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of indexing with tensors: not allowed along channels.

    The other dimensions are executed with zeros in place of the index tensors, whose values are unknown.
    """
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
    start = 0
    for item in indices:
        # A mask indexes as many dimensions as it has; an index tensor one.
        width = len(walk.shape(item)) if item is not None and walk.is_mask(item) else 1
        if item is not None:
            dims |= set(range(start, start + width))
        start += width
    return dims


def _replace_index(walk: LabelWalk, item: Any) -> Any:
    return _create_zero_index(walk.shape(item)) if isinstance(item, Ref) else item


def _create_zero_index(shape: Sequence[int]) -> Tensor:
    return torch.zeros(tuple(shape), dtype=torch.int64, device="cpu")


def edge_pad_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of reflection and replication padding: not allowed along channels."""
    return pad_rule(walk, node, fixed=False)


def pad_rule(walk: LabelWalk, node: Node, fixed: bool = True) -> Labels:
    """Apply the rule of padding. Constant padding along channels adds fixed indices; other kinds are refused."""
    labels, amounts = keep_labels(walk, node), [int(a) for a in node.args.get("pad", node.args.get("padding"))]
    constant = fixed and node.args.get("mode", "constant") == "constant"
    # Amounts come in pairs, from the last dimension to the first.
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = len(node.shape) - 1 - i
        if dim in labels and (before or after):
            if not constant or min(before, after) < 0:
                walk.refuse(labels.pop(dim), node, "pads or crops channels by position")
            else:
                labels[dim] = np.pad(walk.fix_axis_labels(labels[dim]), (before, after), constant_values=FIXED)
    return labels


def flip_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of `flip`: reverse the labels."""
    labels = keep_labels(walk, node)
    dims = {d % len(node.shape) for d in node.args["dims"]}
    return {dim: line[::-1].copy() if dim in dims else line for dim, line in labels.items()}


def roll_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of `roll`: not allowed along channels, since the shift is a constant."""
    labels = keep_labels(walk, node)
    dims = node.args.get("dims") or range(len(node.shape))
    for dim in {d % len(node.shape) for d in dims} & set(labels):
        walk.refuse(labels.pop(dim), node, "rolls channels by a fixed number")
    return labels


def tensor_unfold_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of `Tensor.unfold`, which takes windows along a dimension: not allowed along channels."""
    labels = walk.labels_of(node.args["self"])
    dim = int(node.args["dimension"]) % len(walk.shape(node.args["self"]))
    if dim in labels:
        walk.refuse(labels.pop(dim), node, WINDOWS_REASON)
    return labels


def im2col_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of im2col: each channel becomes a block of as many rows as the kernel has positions."""
    labels, last = walk.labels_of(node.args["self"]), len(walk.shape(node.args["self"])) - 1
    for dim in {last - 1, last} & set(labels):
        walk.refuse(labels.pop(dim), node, WINDOWS_REASON)
    times = math.prod(node.args["kernel_size"])
    return {dim: np.repeat(line, times) if dim == last - 2 else line for dim, line in labels.items()}


def col2im_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of col2im, the inverse: the rows of one block are coupled and become one channel."""
    labels, last = walk.labels_of(node.args["self"]), len(walk.shape(node.args["self"])) - 1
    if last in labels:
        walk.refuse(labels.pop(last), node, WINDOWS_REASON)
    if last - 1 in labels:
        channels = labels[last - 1].reshape(-1, math.prod(node.args["kernel_size"]))
        # Transposed, so that each block holds one kernel position of all channels.
        unite_blocks(walk, channels.T.ravel(), channels.shape[1])
        labels[last - 1] = channels[:, 0].copy()
    return labels


def channel_shuffle_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of channel shuffle: couple equal positions of all groups, so that groups stay equally long."""
    labels = walk.labels_of(node.args["self"])
    if 1 in labels:
        unite_blocks(walk, labels[1], int(node.args["groups"]))
    return _execute_single_input(walk, node, [1])


def select_channels_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of a selection of channels by a matrix with a row for each picked channel.

    Its rows are removed together with the picked channels, its columns together with the channels that it picks from.
    """
    labels, matrix = walk.labels_of(node.args["x"]), node.args["selection"]
    name = walk.graph.parameters.get(matrix.name)
    if name is None:  # computed at every call
        return refuse_all_labels(walk, node)
    if 1 in labels:
        rows, columns = (walk.labels_of(matrix).get(dim) for dim in (0, 1))
        picked = labels[1][walk.graph.tensors[name].argmax(1).cpu().numpy()]
        for line, other in ((rows, picked), (columns, labels[1])):
            if line is not None:  # a dimension of size one has no labels
                walk.unite(line, other)
        walk.refuse(picked[:1], node, "picks this channel, and has to pick one at least")
        labels[1] = picked
    return labels


def getitem_rule(walk: LabelWalk, node: Node) -> Labels:
    """Return the labels of one of several results."""
    return dict(walk.labels_of_item(node.args["self"], int(node.args["index"])))
