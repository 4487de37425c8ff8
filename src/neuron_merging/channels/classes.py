"""classes: which of a network's outputs are scores of classes."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_merging.channels.operators.table import row_of
from neuron_merging.graph.values import Graph, Node

CLASSES = ("softmax", "_softmax", "log_softmax", "_log_softmax")


def class_scores(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """The outputs that are scores of classes: a row per sample, straight from a linear layer or a softmax."""
    found = set()
    for i, (ref, shape) in enumerate(zip(graph.outputs, shapes, strict=True)):
        node = graph.node(ref.name)
        if node is not None and len(shape) == 2 and shape[1] > 1 and _scores(graph, node):
            found.add(i)
    return frozenset(found)


def _scores(graph: Graph, node: Node) -> bool:
    """Through views, the result of a layer that sums over features, or of a softmax."""
    while row_of(node).moves and (before := graph.node(next(node.refs()).name)) is not None:
        node = before
    return node.op in CLASSES or row_of(node).layer in ("linear", "product", "convolution")
