"""Pooling, reductions, and what mixes the entries of one dimension."""

from __future__ import annotations

import math

import numpy as np

from neuron_merging.channels.labels import Labels, Line
from neuron_merging.channels.operators.common import dim_of, same
from neuron_merging.channels.operators.elementwise import pointwise
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Node, Ref

REDUCES = "reduces over channels"
AVERAGES = ("mean", "var", "std")
"""Statistics that do not grow with the number of what they run over."""
ON_THE_WAY = ("add", "rsqrt", "sqrt", "pow", "reciprocal", "to", "_to_copy", "type_as", "clamp", "clamp_min", "float")
RETURNS = ("sub", "mul", "div")


def pool(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Windows over the trailing dimensions; channels must not be among them."""
    digits = [c for c in node.op if c.isdigit()]
    ref = next(node.refs())
    labels, ndim = dict(walk.of(ref)), len(walk.shape(ref))
    first = ndim - int(digits[0])
    for dim in [d for d in labels if d >= first and not _leaves_alone(node, d - first)]:
        walk.refuse(labels.pop(dim), node, "pools over channels")
    return labels if not node.several else [labels, *({} for _ in node.shapes[1:])]


def _leaves_alone(node: Node, which: int) -> bool:
    """Whether windows are one wide along this of the dimensions that they run over, and lie side by side."""
    if "kernel_size" not in node.args or node.several:
        return False
    kernel = node.args["kernel_size"]
    sizes = (kernel, node.args.get("stride") or kernel, node.args.get("padding") or [0])
    return [size[min(which, len(size) - 1)] for size in sizes] == [1, 1, 0]


def reduce(walk: Walk, node: Node) -> Labels | list[Labels]:
    """The rule of an operator that sums or averages over dimensions: its channels must not be among them.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator, with the arguments `dim` and `keepdim`.

    Returns
    -------
    Labels | list[Labels]
        Of its output, or of each of its outputs.

    Examples
    --------
    >>> operator("my_mean", homogeneous=True)(reduce)                 # doctest: +SKIP
    """
    ref = next(node.refs())
    labels, ndim = dict(walk.of(ref)), len(walk.shape(ref))
    gone = reduced_dims(node, ndim)
    for dim in gone & set(labels):
        if node.op in AVERAGES and node.args.get("keepdim"):
            walk.note_average(node, dim, labels.pop(dim))
        else:
            walk.refuse(labels.pop(dim), node, REDUCES)
    if not node.args.get("keepdim", False):
        labels = {d - sum(g < d for g in gone): v for d, v in labels.items()}
    return labels if not node.several else [labels, *({} for _ in node.shapes[1:])]


def reduced_dims(node: Node, ndim: int) -> set[int]:
    """The dimensions of its input that a reduction runs over."""
    dims = node.args.get("dim")
    dims = range(ndim) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    return {d % ndim for d in dims} if ndim else set()


def settle(walk: Walk) -> None:
    """Means over channels are fine as parts of a norm that is written out, once all labels are known to see that.

    A norm divides by one of them; channels that are only centred are no norm, and would miss those that go.
    """
    ways = [(average, _returns(walk, average.node, average.dim, average.line)) for average in walk.averages]
    scaled = [average.line for average, ops in ways if ops and ops - {"sub"}]
    for average, ops in ways:
        if ops and any(np.array_equal(average.line, line) for line in scaled):
            walk.note_mixing(average.line, average.node)
        else:
            walk.refuse(average.line, average.node, REDUCES)


def _returns(walk: Walk, node: Node, dim: int, line: Line) -> set[str]:
    """The operators by which a mean over channels goes back to these, entry by entry; none if it goes elsewhere too."""
    ahead, met = [node.name], set()
    while ahead:
        name = ahead.pop()
        for user in walk.graph.users(name):
            others = [ref for ref in user.refs() if ref.name != name and math.prod(walk.shape(ref)) > 1]
            if not others and user.op in ON_THE_WAY:
                ahead.append(user.name)
            elif others and user.op in RETURNS and all(_stands(walk, ref, user, dim, line) for ref in others):
                met.add(user.op)
            else:
                return set()
    return met


def _stands(walk: Walk, ref: Ref, user: Node, dim: int, line: Line) -> bool:
    there = walk.of(ref).get(dim)
    return len(walk.shape(ref)) == len(user.shape) and there is not None and np.array_equal(there, line)


def extreme(walk: Walk, node: Node) -> Labels | list[Labels]:
    """torch.max and torch.min: of two tensors entry by entry, or of one over a dimension."""
    return pointwise(walk, node) if "other" in node.args else reduce(walk, node)


def along(walk: Walk, node: Node) -> Labels:
    """Softmax and its kin mix the entries of one dimension and keep the others apart."""
    labels = same(walk, node)
    dim = dim_of(node, walk)
    if dim in labels:
        walk.refuse(labels.pop(dim), node, "mixes all channels")
    return labels
