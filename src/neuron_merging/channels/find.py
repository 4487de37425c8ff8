"""find_channels: which slices of which tensors stand and fall together.

Every operator's rule is run on the labels of its inputs, in the order of execution; then the records are
put together to groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neuron_merging.channels.assembly import Assembly
from neuron_merging.channels.fillings import resolve
from neuron_merging.channels.groups import Channels
from neuron_merging.channels.labels import Labels, Line
from neuron_merging.channels.operators.reducing import settle
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Graph, Node, Ref

NEVER = -1
MOST_PARTS = 4
"""Of a line that holds heads: heads, queries and keys and values, their channels, and perhaps groups of heads."""
STALE = "writes in place into memory that is read again under another name"


def find_channels(
    graph: Graph, refused: Mapping[str, str] | None = None, held: Mapping[str, str] | None = None
) -> Channels:
    """Groups of channels that can be removed, and refusals with reasons.

    `refused` names nodes (and why) whose labels must not be removed, beyond what rules find; of those that `held`
    names, only the labels of the result.
    """
    return Assembly(_less(walked(graph), refused or {}, held or {})).channels()


def find_heads(
    graph: Graph, refused: Mapping[str, str] | None = None, held: Mapping[str, str] | None = None
) -> Channels:
    """Groups of whole heads, and refusals; the same walk, but where a view parts a line, its blocks are the units.

    A view into more than two parts, `(heads, 3, width)` or `(3, heads, width)`, does not say which of them are heads:
    those over which a product is taken batch by batch.
    """
    walk = walked(graph, {})
    if not walk.parted:
        return Channels((), (), (), {})
    for _ in range(MOST_PARTS - 2):
        parts = {parting.node.name: parting.place - 1 for parting in Assembly(walk).misplaced()}
        if not parts:
            break
        walk = walked(graph, {**(walk.parts or {}), **parts})
    return Assembly(_less(walk, refused or {}, held or {})).channels()


def _less(walk: Walk, refused: Mapping[str, str], held: Mapping[str, str]) -> Walk:
    """The walk, with what trial cuts have shown."""
    for node in walk.graph.nodes:
        if node.name in refused:
            _refuse(walk, node, [Ref(node.name), *node.refs()], refused[node.name])
        if node.name in held:
            _refuse(walk, node, [Ref(node.name)], held[node.name])
    return walk


def walked(graph: Graph, parts: Mapping[str, int] | None = None) -> Walk:
    """The records of all operators' rules; with `parts`, whole blocks of parted lines are the channels."""
    walk = Walk(graph, parts)
    walk.weights |= set(graph.parameters)
    walk.fed |= {name for name in graph.inputs if name is not None}
    memory = _Memory(graph)
    for node in graph.nodes:
        walk.at = node
        if memory.write_is_seen(node):
            for ref in (*node.refs(), Ref(memory.owner[next(node.refs()).name])):
                for line in walk.of(ref).values():
                    walk.refuse(line, node, STALE)
        memory.note(node)
        walk.labels[node.name] = row_of(node).rule(walk, node)
        refs = list(node.refs())
        if any(ref.name in walk.fed for ref in refs):
            walk.fed.add(node.name)
        if refs and all(ref.name in walk.weights or ref.name in graph.constants for ref in refs):
            walk.weights.add(node.name)
    settle(walk)
    resolve(walk)
    end = Node("output", "output", lambda: None, {}, (), False, "", "", "")
    for ref in graph.outputs:
        for line in walk.of(ref).values():
            walk.refuse(line, end, "is what the network returns")
    return walk


class _Memory:
    """Which values share their memory, and until when it is read under the names that it had so far."""

    def __init__(self, graph: Graph) -> None:
        self.owner: dict[str, str] = {}
        self._order = {node.name: i for i, node in enumerate(graph.nodes)}
        self._last = {ref.name: i for i, node in enumerate(graph.nodes) for ref in node.refs()}
        self._last |= {ref.name: len(graph.nodes) for ref in graph.outputs}
        self._read: dict[str, int] = {}

    def note(self, node: Node) -> None:
        """A new name: of memory of its own, or of its first operand's."""
        first = next((ref.name for ref in node.refs()), None)
        shares = first is not None and (node.inplace or row_of(node).view)
        owner = self._owner_of(first) if shares and first is not None else node.name
        self.owner[node.name] = owner
        self._read[owner] = max(self._read.get(owner, NEVER), self._last.get(node.name, NEVER))

    def _owner_of(self, name: str) -> str:
        """Inputs and stored tensors are noted when they are first met."""
        if name not in self.owner:
            self.owner[name], self._read[name] = name, self._last[name]
        return self.owner[name]

    def write_is_seen(self, node: Node) -> bool:
        """Whether an operator writes into memory that is read later under a name from before."""
        if not node.inplace:
            return False
        owner = self._owner_of(next(node.refs()).name)
        return self._read[owner] > self._order[node.name]


def _refuse(walk: Walk, node: Node, values: Iterable[Ref], why: str) -> None:
    for ref in values:
        if ref.name not in walk.graph.parameters:
            for line in _lines(walk.labels.get(ref.name, {})):
                walk.refuse(line, node, why)


def _lines(labels: Labels | list[Labels]) -> Iterable[Line]:
    for part in labels if isinstance(labels, list) else [labels]:
        yield from part.values()
