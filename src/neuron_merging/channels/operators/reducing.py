"""Pooling, reductions, and what mixes the entries of one dimension."""

from __future__ import annotations

from neuron_merging.channels.labels import Labels
from neuron_merging.channels.operators.common import dim_of, same
from neuron_merging.channels.operators.elementwise import pointwise
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Node


def pool(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Windows over the trailing dimensions; channels must not be among them."""
    digits = [c for c in node.op if c.isdigit()]
    ref = next(node.refs())
    labels, ndim = dict(walk.of(ref)), len(walk.shape(ref))
    for dim in [d for d in labels if d >= ndim - int(digits[0])]:
        walk.refuse(labels.pop(dim), node, "pools over channels")
    return labels if not node.several else [labels, *({} for _ in node.shapes[1:])]


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
    dims = node.args.get("dim")
    dims = range(ndim) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    gone = {d % ndim for d in dims} if ndim else set()
    for dim in gone & set(labels):
        walk.refuse(labels.pop(dim), node, "reduces over channels")
    if not node.args.get("keepdim", False):
        labels = {d - sum(g < d for g in gone): v for d, v in labels.items()}
    return labels if not node.several else [labels, *({} for _ in node.shapes[1:])]


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
