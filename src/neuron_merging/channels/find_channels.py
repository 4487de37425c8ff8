"""Find the groups of coupled channels in a graph.

The rule of every operator is run on the labels of its inputs, in order of execution. Then groups are built from the
records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neuron_merging.channels.group_builder import GroupBuilder
from neuron_merging.channels.groups import Channels
from neuron_merging.channels.labels import AxisLabels, Labels
from neuron_merging.channels.propagation import LabelWalk, resolve_constant_axes
from neuron_merging.channels.rules.norms_and_reductions import classify_averages
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Graph, Node, Ref

NEVER_READ = -1
"""Position of the last read of a value that nothing reads: before the first node."""
MAX_SPLIT_DIMS = 4
"""Most dimensions that a view splits attention channels into: groups of heads, heads, (query, key, value), width."""
STALE_MEMORY_REASON = "writes in place into memory that is read again under another name"


def find_channels(
    graph: Graph, refused: Mapping[str, str] | None = None, held: Mapping[str, str] | None = None
) -> Channels:
    """Return groups of channels that can be removed, and refusals with reasons.

    `refused` maps names of nodes to the reason why the labels of their operands and results must not be removed, beyond
    what the rules find. `held` does so for the results alone.
    """
    return GroupBuilder(_apply_trial_refusals(propagate_labels(graph), refused or {}, held or {})).build_channels()


def find_heads(
    graph: Graph, refused: Mapping[str, str] | None = None, held: Mapping[str, str] | None = None
) -> Channels:
    """Return groups of whole attention heads, and refusals.

    The walk is that of `find_channels`, except that the blocks into which a view splits an axis are the units. A view
    into more than two dimensions, `(heads, 3, width)` or `(3, heads, width)`, does not tell which one counts heads. It
    is the one that becomes a batch dimension of a matrix product.
    """
    walk = propagate_labels(graph, {})
    if not walk.head_splits:
        return Channels((), (), (), {})
    for _ in range(MAX_SPLIT_DIMS - 2):
        # Each round moves a wrong choice one dimension to the left, until heads are batch dimensions of a product.
        dims = {split.node.name: split.position - 1 for split in GroupBuilder(walk).find_misplaced_splits()}
        if not dims:
            break
        walk = propagate_labels(graph, {**(walk.head_dims or {}), **dims})
    return GroupBuilder(_apply_trial_refusals(walk, refused or {}, held or {})).build_channels()


def _apply_trial_refusals(walk: LabelWalk, refused: Mapping[str, str], held: Mapping[str, str]) -> LabelWalk:
    """Refuse the labels that trial cuts excluded. Return the walk."""
    for node in walk.graph.nodes:
        if node.name in refused:
            _refuse_values(walk, node, [Ref(node.name), *node.refs()], refused[node.name])
        if node.name in held:
            _refuse_values(walk, node, [Ref(node.name)], held[node.name])
    return walk


def propagate_labels(graph: Graph, head_dims: Mapping[str, int] | None = None) -> LabelWalk:
    """Run the rules of all operators and return their records. With `head_dims`, whole heads are the channels."""
    walk = LabelWalk(graph, head_dims)
    walk.weights |= set(graph.parameters)
    walk.input_dependent |= {name for name in graph.inputs if name is not None}
    memory = _MemoryAliases(graph)
    for node in graph.nodes:
        walk.current_node = node
        # Labels belong to values, not to memory: a later read under an old name would see labels from before the write.
        if memory.is_write_visible(node):
            for ref in (*node.refs(), Ref(memory.owner[next(node.refs()).name])):
                for line in walk.labels_of(ref).values():
                    walk.refuse(line, node, STALE_MEMORY_REASON)
        memory.record_node(node)
        walk.labels[node.name] = lookup_operator(node).rule(walk, node)
        refs = list(node.refs())
        if any(ref.name in walk.input_dependent for ref in refs):
            walk.input_dependent.add(node.name)
        if refs and all(ref.name in walk.weights or ref.name in graph.constants for ref in refs):
            walk.weights.add(node.name)
    classify_averages(walk)
    resolve_constant_axes(walk)
    end = Node("output", "output", lambda: None, {}, (), False, "", "", "")
    for ref in graph.outputs:
        for line in walk.labels_of(ref).values():
            walk.refuse(line, end, "is what the network returns")
    return walk


class _MemoryAliases:
    """Track which values share memory, and when each memory is last read under the names that it has so far."""

    def __init__(self, graph: Graph) -> None:
        self.owner: dict[str, str] = {}
        self._order = {node.name: i for i, node in enumerate(graph.nodes)}
        self._last_reads = {ref.name: i for i, node in enumerate(graph.nodes) for ref in node.refs()}
        self._last_reads |= {ref.name: len(graph.nodes) for ref in graph.outputs}
        self._last_read_by_owner: dict[str, int] = {}

    def record_node(self, node: Node) -> None:
        """Record a node's result: a view or in-place result names its first operand's memory, any other new memory."""
        first = next((ref.name for ref in node.refs()), None)
        shares = first is not None and (node.inplace or lookup_operator(node).view)
        owner = self._find_owner(first) if shares and first is not None else node.name
        self.owner[node.name] = owner
        self._last_read_by_owner[owner] = max(
            self._last_read_by_owner.get(owner, NEVER_READ), self._last_reads.get(node.name, NEVER_READ)
        )

    def _find_owner(self, name: str) -> str:
        """Return the first name of a value's memory. Inputs and stored tensors are recorded at their first use."""
        if name not in self.owner:
            self.owner[name], self._last_read_by_owner[name] = name, self._last_reads[name]
        return self.owner[name]

    def is_write_visible(self, node: Node) -> bool:
        """Return whether a node writes into memory that is read later under an earlier name."""
        if not node.inplace:
            return False
        owner = self._find_owner(next(node.refs()).name)
        return self._last_read_by_owner[owner] > self._order[node.name]


def _refuse_values(walk: LabelWalk, node: Node, values: Iterable[Ref], why: str) -> None:
    for ref in values:
        if ref.name not in walk.graph.parameters:
            for line in _iter_axis_labels(walk.labels.get(ref.name, {})):
                walk.refuse(line, node, why)


def _iter_axis_labels(labels: Labels | list[Labels]) -> Iterable[AxisLabels]:
    for part in labels if isinstance(labels, list) else [labels]:
        yield from part.values()
