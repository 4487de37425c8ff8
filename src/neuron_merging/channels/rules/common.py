"""What rules share: move labels, unite them, refuse them; and the rules of operators that act entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from neuron_merging.channels.labels import FIXED, AxisLabels, Labels, is_broadcast, is_channel, make_fixed_labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.graph.graph import Node, Ref


def dim_of(node: Node, walk: LabelWalk, name: str = "dim") -> int:
    """A dimension that a node names, counted from the front.

    Parameters
    ----------
    node
        The operator.
    walk
        The walk.
    name
        The argument's name.

    Returns
    -------
    int
        Of the argument `self`.

    Examples
    --------
    >>> dim_of(node, walk)                                            # doctest: +SKIP
    1
    """
    return int(node.args.get(name, 0)) % max(len(walk.shape(node.args["self"])), 1)


def is_torch_layer(node: Node) -> bool:
    """Whether one of torch's own modules calls the operator: surgery knows which of its attributes are sizes."""
    return node.module_type.startswith("torch.nn.modules.")


def unite_blocks(walk: LabelWalk, line: AxisLabels, blocks: int) -> None:
    """Unite what stands at the same place of every block.

    Parameters
    ----------
    walk
        The walk.
    line
        Labels along a dimension.
    blocks
        How many blocks of equal length it is made of.

    Examples
    --------
    >>> unite_blocks(walk, labels[1], 2)                                # doctest: +SKIP
    """
    rows = line.reshape(blocks, -1)
    for row in rows[1:]:
        walk.unite(rows[0], row)


def unite_broadcast(
    walk: LabelWalk,
    node: Node,
    operands: Sequence[tuple[Labels, Sequence[int]]],
    *,
    skip: Iterable[int] = (),
    shape: Sequence[int] | None = None,
) -> Labels:
    """Unite what stands at the same index; a dimension without labels fixes what it meets.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator at which they meet.
    operands
        Labels and shape of each; shapes are aligned at their ends, as in broadcasting.
    skip
        Dimensions of the result to leave out.
    shape
        Of the result; left out, the node's.

    Returns
    -------
    Labels
        Of the result.

    Examples
    --------
    >>> unite_broadcast(walk, node, [(walk.labels_of(ref), walk.shape(ref)) for ref in node.refs()])  # doctest: +SKIP
    """
    shape = node.shape if shape is None else shape
    result: Labels = {}
    for dim in set(range(len(shape))) - set(skip):
        lines: list[AxisLabels] = []
        for labels, size in operands:
            own = dim - (len(shape) - len(size))
            if own >= 0 and size[own] > 1:
                lines.append(labels.get(own, make_fixed_labels(size[own])))
        joined = _unite_axis_labels(walk, node, lines) if any((line != FIXED).any() for line in lines) else None
        if joined is not None and (joined != FIXED).any():
            result[dim] = joined
    return result


def _unite_axis_labels(walk: LabelWalk, node: Node, lines: Sequence[AxisLabels]) -> AxisLabels:
    joined = lines[0].copy()
    for line in lines[1:]:
        walk.unite(joined, line)
        joined = merge_labels(joined, line)
    return joined


def merge_labels(a: AxisLabels, b: AxisLabels) -> AxisLabels:
    """What stands where two lines meet: the channel, or what is fixed, or else what is most particular."""
    channel = is_channel(a) | is_channel(b)
    open_ends: AxisLabels = np.where(is_broadcast(a) & is_broadcast(b), np.minimum(a, b), np.maximum(a, b))
    return np.where(channel, np.where(is_channel(a), a, b), open_ends)


def keep_labels(walk: LabelWalk, node: Node) -> Labels:
    """The rule of an operator with one input and one output of the same layout.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator.

    Returns
    -------
    Labels
        Those of its first input.

    Examples
    --------
    >>> @operator("my_activation", moments="pointwise")               # doctest: +SKIP
    ... def my_activation(walk, node):
    ...     return keep_labels(walk, node)
    """
    return dict(walk.labels_of(next(node.refs())))


def attach(walk: LabelWalk, node: Node, labels: Labels, dim: int, ref: Any) -> None:
    """A per-channel tensor stands and falls with the channels that it belongs to.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator that uses it.
    labels
        Of the value with the channels.
    dim
        The dimension along which they lie.
    ref
        The tensor; what is no reference is left alone.

    Examples
    --------
    >>> attach(walk, node, labels, 1, node.args["bias"])              # doctest: +SKIP
    """
    if isinstance(ref, Ref) and (own := walk.labels_of(ref).get(0)) is not None:
        walk.unite(own, labels.get(dim, make_fixed_labels(len(own))))


def new_tensor_rule(walk: LabelWalk, node: Node) -> Labels:
    """A new tensor of fixed size, unrelated to its arguments' channels."""
    return {}


def constant_tensor_rule(walk: LabelWalk, node: Node) -> Labels:
    """A new tensor with one value everywhere: it can lose the channels that it meets, if the code makes it smaller."""
    walk.mark_size_uncertain(node)
    return {dim: walk.add_constant_axis(node, dim) for dim, size in enumerate(node.shape) if size > 1}


def refuse_all_labels(walk: LabelWalk, node: Node) -> Labels:
    """The rule of an operator of which nothing is known: it refuses all channels that reach it.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator.

    Returns
    -------
    Labels
        None.

    Examples
    --------
    >>> refuse_all_labels(walk, node)                                           # doctest: +SKIP
    {}
    """
    for ref in node.refs():
        for line in walk.labels_of(ref).values():
            walk.refuse(line, node, "is not known to act channel by channel")
    return {}


def pointwise_rule(walk: LabelWalk, node: Node) -> Labels:
    """The rule of an operator whose operands meet entry by entry after broadcasting.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator.

    Returns
    -------
    Labels
        Of the result.

    Examples
    --------
    >>> operator("my_sum", moments="pointwise", joins=True)(pointwise_rule)      # doctest: +SKIP
    """
    operands = [(walk.labels_of(ref), walk.shape(ref)) for ref in node.refs()]
    return unite_broadcast(walk, node, operands)


def sum_rule(walk: LabelWalk, node: Node) -> Labels:
    """Operands that are added to or subtracted from each other: a residual connection may end here."""
    walk.note_sum([ref for ref in node.refs() if ref.name in walk.input_dependent])
    return pointwise_rule(walk, node)


def dropout_rule(walk: LabelWalk, node: Node) -> Labels:
    """Nothing happens in evaluation, unless the model's code says otherwise."""
    return random_rule(walk, node) if node.args.get("train") else keep_labels(walk, node)


def random_rule(walk: LabelWalk, node: Node) -> Labels:
    """With fewer channels other numbers would be drawn for those that stay."""
    labels = keep_labels(walk, node)
    for line in labels.values():
        walk.refuse(line, node, "draws at random, entry by entry")
    return labels


def glu_rule(walk: LabelWalk, node: Node) -> Labels:
    dim, labels = dim_of(node, walk) if "dim" in node.args else len(node.shape) - 1, keep_labels(walk, node)
    if dim in labels:
        first, second = np.split(labels[dim], 2)
        walk.unite(first, second)
        labels[dim] = first
    return labels


def prelu_rule(walk: LabelWalk, node: Node) -> Labels:
    labels = walk.labels_of(node.args["self"])
    weight = walk.labels_of(node.args["weight"])
    if 0 in weight:
        walk.unite(weight[0], labels.get(1, make_fixed_labels(len(weight[0]))))
    return dict(labels)
