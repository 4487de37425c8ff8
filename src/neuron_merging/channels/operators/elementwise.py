"""Operators that act entry by entry."""

from __future__ import annotations

import numpy as np

from neuron_merging.channels.labels import Labels, fixed
from neuron_merging.channels.operators.common import dim_of, meet, same
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Node


def pointwise(walk: Walk, node: Node) -> Labels:
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
    >>> operator("my_sum", moments="pointwise", joins=True)(pointwise)      # doctest: +SKIP
    """
    operands = [(walk.of(ref), walk.shape(ref)) for ref in node.refs()]
    if node.op in ("add", "sub", "rsub"):
        walk.note_sum([ref for ref in node.refs() if ref.name in walk.fed])
    return meet(walk, node, operands)


def dropout(walk: Walk, node: Node) -> Labels:
    """Nothing happens in evaluation, unless the model's code says otherwise."""
    return drawn(walk, node) if node.args.get("train") else same(walk, node)


def drawn(walk: Walk, node: Node) -> Labels:
    """With fewer channels other numbers would be drawn for those that stay."""
    labels = same(walk, node)
    for line in labels.values():
        walk.refuse(line, node, "draws at random, entry by entry")
    return labels


def glu(walk: Walk, node: Node) -> Labels:
    dim, labels = dim_of(node, walk) if "dim" in node.args else len(node.shape) - 1, same(walk, node)
    if dim in labels:
        first, second = np.split(labels[dim], 2)
        walk.unite(first, second)
        labels[dim] = first
    return labels


def prelu(walk: Walk, node: Node) -> Labels:
    labels = walk.of(node.args["self"])
    weight = walk.of(node.args["weight"])
    if 0 in weight:
        walk.unite(weight[0], labels.get(1, fixed(len(weight[0]))))
    return dict(labels)
