"""Rules of element-wise operators."""

from __future__ import annotations

import numpy as np

from neuron_merging.channels.labels import Labels, make_fixed_labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules.common import dim_of, keep_labels, unite_broadcast
from neuron_merging.graph.graph import Node


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
