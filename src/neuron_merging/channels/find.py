"""find_channels: which slices of which tensors stand and fall together.

Every operator's rule is run on the labels of its inputs, in the order of execution; then the records are
put together to groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neuron_merging.channels.assembly import Assembly
from neuron_merging.channels.groups import Channels
from neuron_merging.channels.labels import Labels, Line
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Graph, Node, Ref


def find_channels(
    graph: Graph, refused: Mapping[str, str] | None = None, held: Mapping[str, str] | None = None
) -> Channels:
    """Groups of channels that can be removed, and refusals with reasons.

    `refused` names nodes (and why) whose labels must not be removed, beyond what rules find; of those that `held`
    names, only the labels of the result.
    """
    walk = walked(graph)
    refused, held = refused or {}, held or {}
    for node in graph.nodes:
        if node.name in refused:
            _refuse(walk, node, [Ref(node.name), *node.refs()], refused[node.name])
        if node.name in held:
            _refuse(walk, node, [Ref(node.name)], held[node.name])
    return Assembly(walk).channels()


def walked(graph: Graph) -> Walk:
    """The records of all operators' rules."""
    walk = Walk(graph)
    walk.weights |= set(graph.parameters)
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.inplace and _writes_into_part(graph, node, order):
            for ref in node.refs():
                for line in walk.of(ref).values():
                    walk.refuse(line, node, "writes in place into a part of a tensor")
        walk.labels[node.name] = row_of(node).rule(walk, node)
        refs = list(node.refs())
        if refs and all(ref.name in walk.weights or ref.name in graph.constants for ref in refs):
            walk.weights.add(node.name)
    end = Node("output", "output", lambda: None, {}, (), False, "", "", "")
    for ref in graph.outputs:
        for line in walk.of(ref).values():
            walk.refuse(line, end, "is what the network returns")
    return walk


def _writes_into_part(graph: Graph, node: Node, order: Mapping[str, int]) -> bool:
    """An in-place operator on a view of something that is read again later."""
    name = next(node.refs()).name
    while (view := graph.node(name)) is not None and row_of(view).view:
        name = next(view.refs()).name
        if any(order[user.name] > order[node.name] for user in graph.users(name)):
            return True
    return False


def _refuse(walk: Walk, node: Node, values: Iterable[Ref], why: str) -> None:
    for ref in values:
        if ref.name not in walk.graph.parameters:
            for line in _lines(walk.labels.get(ref.name, {})):
                walk.refuse(line, node, why)


def _lines(labels: Labels | list[Labels]) -> Iterable[Line]:
    for part in labels if isinstance(labels, list) else [labels]:
        yield from part.values()
