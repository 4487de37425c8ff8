"""Find the outputs of a network that are class scores: logits, or a softmax of them."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Graph, Node


def find_logits_outputs(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """The outputs that are scores of classes: a row per sample, straight from a linear layer or a softmax."""
    found = set()
    for i, (ref, shape) in enumerate(zip(graph.outputs, shapes, strict=True)):
        node = graph.node(ref.name)
        if node is not None and len(shape) == 2 and shape[1] > 1 and _is_logits_node(graph, node):
            found.add(i)
    return frozenset(found)


def _is_logits_node(graph: Graph, node: Node) -> bool:
    """Through views, the result of a layer that sums over features, or of a softmax."""
    while lookup_operator(node).moves and (before := graph.node(next(node.refs()).name)) is not None:
        node = before
    row = lookup_operator(node)
    return row.probabilities in ("softmax", "log softmax") or row.layer in ("linear", "product", "convolution")
