"""Find the groups of coupled channels in a graph.

The rule of every operator is run on the labels of its inputs, in order of execution. Then groups are built from the
records.

United labels form a unit. Units that one layer produces, or that a balance constraint ties, form a family. A family
with removable units becomes a group. Records are sorted by family once, so that the cost per layer does not grow with
the depth of the network.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from torch import nn

from neuron_merging.channels.groups import (
    FIXED,
    HEADS_SUFFIX,
    NO_UNIT,
    Axis,
    AxisLabels,
    Channels,
    Consumer,
    Group,
    Labels,
    Mask,
    Producer,
    Refusal,
    Units,
    build_position_table,
    find_connected_components,
    get_layer_name,
    is_channel,
    is_unit,
    make_empty_units,
    select_channels,
)
from neuron_merging.channels.propagation import (
    BalanceConstraint,
    ConsumerRecord,
    HeadSplit,
    LabelWalk,
    ProducerRecord,
    StatisticsRecord,
    SumRecord,
    Veto,
    resolve_constant_axes,
)
from neuron_merging.channels.rules.norms_and_reductions import classify_averages
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.channels.weight_views import find_nodes_using_weight, is_stored_weight
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
        # After the check: the result of the write itself is not an earlier name.
        memory.record_node(node)
        walk.labels[node.name] = lookup_operator(node).rule(walk, node)
        refs = list(node.refs())
        if any(ref.name in walk.input_dependent for ref in refs):
            walk.input_dependent.add(node.name)
        if refs and all(ref.name in walk.weights or ref.name in graph.constants for ref in refs):
            walk.weights.add(node.name)
    classify_averages(walk)
    resolve_constant_axes(walk)
    # The graph has no node for what it returns, and a refusal names one.
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
        # The caller reads the outputs after the last node has run.
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


HIDDEN_BLOCK_REASON = "hides the layers inside an enable_grad or autocast block: take the block out of forward()"
ALL_COUPLED_REASON = "couples all of its channels"
SINGLE_CHANNEL_REASON = "has a single channel"
NO_CHANNEL_AXIS_REASON = "reads it, but not along a channel axis"
EQUAL_PARTS_REASON = "other parts of the layer must keep as many channels and are not prunable"
NO_CONSUMER_REASON = "produces channels that no layer reads"
UNEVEN_GROUPS_REASON = "feeds grouped layers whose groups cannot shrink together"

Record = TypeVar("Record")


@dataclass(frozen=True)
class LabelClasses:
    """For each label, the representative label of its unit and that of its family: the smallest label of each."""

    unit: AxisLabels
    family: AxisLabels

    def split_by_family(self, line: AxisLabels) -> Iterator[tuple[int, AxisLabels]]:
        """Yield the families that have channels along an axis, each with their indices."""
        places = np.flatnonzero(is_channel(line))
        families = self.family[line[places]]
        # Stable, so that the indices of each family stay in their order.
        order = np.argsort(families, kind="stable")
        borders = np.flatnonzero(np.diff(families[order])) + 1
        for part in np.split(order, borders):
            if len(part):
                yield int(families[part[0]]), places[part]

    def group_by_family(
        self, records: Iterable[tuple[AxisLabels, Record]]
    ) -> dict[int, list[tuple[Record, AxisLabels]]]:
        """Return, by family, the records that concern it, each with the indices of the family's channels."""
        by_family: dict[int, list[tuple[Record, AxisLabels]]] = defaultdict(list)
        for line, record in records:
            for family, places in self.split_by_family(line):
                by_family[family].append((record, places))
        return by_family


def compute_label_classes(walk: LabelWalk) -> LabelClasses:
    """Compute which labels are coupled to a unit, and which units one decision covers."""
    unit = find_connected_components(walk.label_count, walk.edges)
    together = [record.line for record in walk.productions] + [select_channels(b.line) for b in walk.balances]
    # Chain neighbours: n - 1 edges connect n units.
    links = [(unit[line[:-1]], unit[line[1:]]) for line in together if len(line) > 1]
    # The links connect representatives only: a label gets the family of its unit's representative.
    return LabelClasses(unit, find_connected_components(walk.label_count, links)[unit])


@dataclass(frozen=True)
class StoredAxis:
    """An axis of a stored tensor, with its labels."""

    axis: Axis
    labels: AxisLabels

    @classmethod
    def list_all_axes(cls, walk: LabelWalk) -> list[StoredAxis]:
        shapes = {name: tensor.shape for name, tensor in walk.graph.tensors.items()}
        sizes = ((axis, start, int(shapes[axis.tensor][axis.dim]) * axis.blocks) for start, axis in walk.axes.items())
        return [cls(axis, np.arange(start, start + size)) for axis, start, size in sizes]


class GroupBuilder:
    """Builds groups from the records of a walk."""

    def __init__(self, walk: LabelWalk) -> None:
        self.walk = walk
        self.classes = compute_label_classes(walk)
        self.refusal_by_family: dict[int, Refusal] = {}
        """For each family with units that must stay, the first reason."""
        self.unit_numbers = make_empty_units(walk.label_count)
        """For each representative label of a unit, the unit's number inside its group."""
        self.refused_units = self._mark_units(veto.line for veto in walk.vetoes)
        self.batched_units = self._mark_units(walk.batched_labels)
        self.head_units = self._mark_units(split.line for split in walk.head_splits) & self.batched_units
        axes = StoredAxis.list_all_axes(walk)
        self.first_labels = {axis: start for start, axis in walk.axes.items()}
        self.axes_of_tensor: dict[str, list[StoredAxis]] = defaultdict(list)
        for stored in axes:
            self.axes_of_tensor[stored.axis.tensor].append(stored)
        self.axes = self.classes.group_by_family((stored.labels, stored) for stored in axes)
        self.consumptions_by_family: dict[int, list[tuple[ConsumerRecord, AxisLabels]]]
        self.consumptions_by_family = self.classes.group_by_family(
            (record.line, record) for record in walk.consumptions
        )
        self.vetoes: dict[int, list[tuple[Veto, AxisLabels]]]
        self.vetoes = self.classes.group_by_family((veto.line, veto) for veto in walk.vetoes)
        self.balances: dict[int, list[tuple[BalanceConstraint, AxisLabels]]]
        self.balances = self.classes.group_by_family((balance.line, balance) for balance in walk.balances)
        self.sums: dict[int, list[tuple[SumRecord, AxisLabels]]]
        self.sums = self.classes.group_by_family((record.line, record) for record in walk.sums)
        self.norms_by_family: dict[int, list[tuple[StatisticsRecord, AxisLabels]]]
        self.norms_by_family = self.classes.group_by_family(
            (record.line, record) for record in walk.norms_across_channels
        )

    def _mark_units(self, lines: Iterable[AxisLabels]) -> Mask:
        """Return, for each representative label of a unit, whether these labels include one of the unit."""
        marks = np.zeros(self.walk.label_count, bool)
        for line in lines:
            marks[self.classes.unit[line]] = True
        return marks

    def find_misplaced_splits(self) -> list[HeadSplit]:
        """Return the views whose chosen head dimension is not a batch dimension of any product, and may be wrong."""
        return [
            p for p in self.walk.head_splits if p.position and not self.batched_units[self.classes.unit[p.line]].any()
        ]

    def build_channels(self) -> Channels:
        """Build all groups, refusals and the maps of units."""
        groups: list[Group] = []
        refusals: list[Refusal] = []
        seen: Counter[tuple[str, ...]] = Counter()
        units = make_empty_units(self.walk.label_count)
        start = 0
        for family, records in self._group_productions_by_family().items():
            assembled, refused = self._assemble_family(family, records)
            refusals += refused
            if refused:
                self.refusal_by_family[family] = refused[0]
            if assembled is None:
                continue
            group, members = assembled
            # Several groups may come from the same layers, such as the parts of a fused QKV: number them.
            seen[group.layers] += 1
            name = group.name + (HEADS_SUFFIX if group.heads else "")
            name = name if seen[group.layers] == 1 else f"{name}#{seen[group.layers]}"
            groups.append(replace(group, name=name, start=start))
            units[members] = np.arange(start, start + group.size)
            start += group.size
        layers = tuple(dict.fromkeys(self._get_layer_name(record) for record in self.walk.productions))
        # Only the search for single channels explains tensors; `Channels.add_heads` keeps its reasons.
        tensors = self.walk.graph.tensors if self.walk.head_dims is None else ()
        reasons = {name: self._explain_tensor(name) for name in tensors if self.walk.graph.nodes_reading(name)}
        refusals += self._find_missing_refusals(groups, reasons)
        return Channels(
            groups=tuple(groups),
            refusals=(*refusals, *_find_hidden_blocks(self.walk.graph)),
            uncertain_sizes=tuple(self.walk.uncertain_sizes.values()),
            units=self._build_unit_maps(units),
            layers=layers,
            reasons=reasons,
        )

    def _explain_tensor(self, tensor: str) -> Refusal:
        """Return why a stored tensor keeps entries: the refusal of the channels it produces, else of those it reads."""
        layer = tensor.rpartition(".")[0] or tensor
        if (refusal := self._find_known_refusal(tensor)) is not None:
            return replace(refusal, layer=layer)
        first_vetoes = (
            self._first_veto_by_unit[self.classes.unit[stored.labels]] for stored in self._list_axes_of_tensor(tensor)
        )
        number = next((int(vetoes.max()) for vetoes in first_vetoes if is_unit(vetoes).any()), None)
        if number is None:
            consumer = self.walk.graph.first_node_reading(tensor)
            return Refusal(layer, 0, NO_CHANNEL_AXIS_REASON, consumer.op, consumer.location)
        veto = self.walk.vetoes[number]
        return Refusal(layer, len(veto.line), veto.why, veto.node.op, veto.node.location)

    def _list_axes_of_tensor(self, tensor: str) -> list[StoredAxis]:
        """Return the axes of a tensor, those along which it produces channels first."""
        return sorted(self.axes_of_tensor[tensor], key=lambda stored: stored.axis not in self._producer_axes)

    def _find_known_refusal(self, tensor: str) -> Refusal | None:
        """Return the refusal of the first of a tensor's families that has one; None if none has."""
        families = (int(self.classes.family[stored.labels[0]]) for stored in self._list_axes_of_tensor(tensor))
        return next((self.refusal_by_family[family] for family in families if family in self.refusal_by_family), None)

    @cached_property
    def _first_veto_by_unit(self) -> AxisLabels:
        """For each representative label of a unit, the number of the first veto against it."""
        numbers = make_empty_units(self.walk.label_count)
        # In reverse, so that the first veto is written last and stays.
        for number, veto in reversed(list(enumerate(self.walk.vetoes))):
            numbers[self.classes.unit[veto.line]] = number
        return numbers

    def _find_missing_refusals(self, groups: Sequence[Group], reasons: Mapping[str, Refusal]) -> list[Refusal]:
        """Return refusals for layers with weights that are in no group and have no refusal yet."""
        cut = {axis.tensor for group in groups for axis in group.cuts}
        tensors = self.walk.graph.tensors.items()
        wide = [name for name, tensor in tensors if tensor.ndim > 1 and isinstance(tensor, nn.Parameter)]
        unexplained = [
            name for name in wide if name in reasons and name not in cut and self._find_known_refusal(name) is None
        ]
        return list({reasons[name].layer: reasons[name] for name in unexplained}.values())

    def _group_productions_by_family(self) -> dict[int, list[ProducerRecord]]:
        by_family: dict[int, list[ProducerRecord]] = defaultdict(list)
        for record in self.walk.productions:
            # In a search for heads, families without heads belong to the search for single channels.
            if self.walk.head_dims is None or self.head_units[self.classes.unit[record.line]].any():
                by_family[int(self.classes.family[record.line[0]])].append(record)
        return by_family

    def _assemble_family(
        self, family: int, records: Sequence[ProducerRecord]
    ) -> tuple[tuple[Group, AxisLabels] | None, list[Refusal]]:
        """Return a family's group with the representative labels of its units, or None; and its refusals."""
        members = self._collect_units(records)
        refused = self.refused_units[members]
        # A group never loses its last unit, so one unit alone is not prunable.
        if len(members) < 2 or refused.all():
            return None, self._explain_units(family, records, members)
        if not self.consumptions_by_family[family]:
            return None, [self._refuse_layer(records[0], len(members), NO_CONSUMER_REASON)]
        # First, because all steps below look up the numbers of units.
        self.unit_numbers[members] = np.arange(len(members))
        cells = self._compute_cells(family, len(members))
        if cells is None:
            return None, [self._refuse_layer(records[0], len(members), UNEVEN_GROUPS_REASON)]
        if _has_fully_locked_cell(cells, refused):
            (first,) = self._explain_units(family, records, members)
            return None, [replace(first, why=f"{first.why}; {EQUAL_PARTS_REASON}", channels=len(members))]
        group = self._build_group(family, records, members, cells)
        return (group, members), self._explain_units(family, records, members[refused]) if refused.any() else []

    def _collect_units(self, records: Sequence[ProducerRecord]) -> AxisLabels:
        """Return the representative labels of a family's units, in the order in which layers produce them."""
        produced = np.concatenate([self.classes.unit[record.line] for record in records])
        _, first = np.unique(produced, return_index=True)
        return produced[np.sort(first)]

    def _build_group(self, family: int, records: Sequence[ProducerRecord], members: AxisLabels, cells: Units) -> Group:
        cuts = ((stored.axis, self._get_unit_numbers(stored.labels, places)) for stored, places in self.axes[family])
        norms = (
            norm.node
            for norm, places in self.norms_by_family[family]
            if is_unit(self._get_unit_numbers(norm.line, places)).any()
        )
        return Group(
            name=self._get_layer_name(records[0]),
            start=0,
            size=len(members),
            producers=tuple(self._build_producers(records, len(members))),
            consumers=tuple(self._build_consumers(family, len(members))),
            cuts={axis: numbers for axis, numbers in cuts if is_unit(numbers).any()},
            balance_cells=cells,
            locked=self.refused_units[members],
            residual=self._is_residual_stream(family),
            norms_across_channels=tuple(norms),
            heads=self.walk.head_dims is not None,
        )

    def _is_residual_stream(self, family: int) -> bool:
        """Return whether a sum adds the channels to the output of a layer that reads them: a skip connection."""
        sums = {record.node.name: record for record, _ in self.sums[family]}
        return bool(sums) and any(
            self._is_skipped_by_sum(record, sums) for record, _ in self.consumptions_by_family[family]
        )

    def _is_skipped_by_sum(self, reading: ConsumerRecord, sums: Mapping[str, SumRecord]) -> bool:
        """Return whether one operand of a sum depends on this layer and another does not."""
        graph, downstream, left = self.walk.graph, {reading.node.name}, set(sums)
        # A sum that runs before the layer cannot add the layer's output to anything.
        left -= {name for name in sums if graph.is_before(name, reading.node.name)}
        for node in graph.iter_downstream([reading.node], lambda _: bool(left)) if left else ():
            downstream.add(node.name)
            if node.name in left:
                left.remove(node.name)
                if not downstream.issuperset(sums[node.name].operands):
                    return True
        return False

    def _get_unit_numbers(self, line: AxisLabels, places: AxisLabels) -> Units:
        """Return the unit at each index of an axis: its number inside the group at `places`, no unit elsewhere."""
        numbers = make_empty_units(len(line))
        numbers[places] = self.unit_numbers[self.classes.unit[line[places]]]
        return numbers

    def _explain_units(self, family: int, records: Sequence[ProducerRecord], units: AxisLabels) -> list[Refusal]:
        """Return why these units must stay: the first veto against one of them."""
        layer, node = self._get_layer_name(records[0]), records[0].node
        for veto, places in self.vetoes[family]:
            vetoed = np.intersect1d(self.classes.unit[veto.line[places]], units)
            if len(vetoed):
                return [Refusal(layer, len(vetoed), veto.why, veto.node.op, veto.node.location)]
        why = ALL_COUPLED_REASON if any(len(record.line) > 1 for record in records) else SINGLE_CHANNEL_REASON
        return [Refusal(layer, len(units), why, node.op, node.location)]

    def _refuse_layer(self, record: ProducerRecord, size: int, why: str) -> Refusal:
        """Return the refusal of all channels of a layer."""
        return Refusal(self._get_layer_name(record), size, why, record.node.op, record.node.location)

    def _compute_cells(self, family: int, size: int) -> Units | None:
        """Return the cell of each unit under all balance constraints; None if the cells cannot shrink together.

        Units with the same number of indices in every block form a cell. Blocks have equal lengths, and keep them if
        all cells are equally large and keep equally many units.
        """
        cells = np.zeros(size, int)
        for balance, places in self.balances[family]:
            blocks = self._get_unit_numbers(balance.line, places).reshape(balance.blocks, -1)
            shares = _count_units_per_block(blocks, size)
            if (shares == shares[:, :1]).all():  # every unit is in all blocks alike: removing it keeps the balance
                continue
            if not is_unit(blocks).all():
                return None
            _, alike = np.unique(shares, axis=0, return_inverse=True)
            # The common refinement with the cells so far: pairs of numbers, written as one number.
            cells = _renumber_by_first_occurrence(cells * size + alike.ravel())
        # A cell of one unit cannot lose it, and then no cell can lose any.
        sizes = set(np.bincount(cells))
        return cells if len(sizes) == 1 and sizes != {1} else None

    def _build_producers(self, records: Sequence[ProducerRecord], size: int) -> list[Producer]:
        """Return the layers that produce a family's channels. A layer that is called twice is listed once."""
        by_axis: dict[Axis, list[ProducerRecord]] = defaultdict(list)
        for record in records:
            axis = self._axis_by_production[record]
            if axis is not None:
                by_axis[axis].append(record)
        return [self._build_producer(calls, axis, size) for axis, calls in by_axis.items()]

    def _build_producer(self, records: Sequence[ProducerRecord], axis: Axis, size: int) -> Producer:
        graph, record = self.walk.graph, records[0]
        bias = graph.parameters.get(record.bias.name) if isinstance(record.bias, Ref) else None
        stored = is_stored_weight(graph, record.node, record.weight.name, axis)
        # A computed bias is not stored either: new values for the producer would have no tensor to go to.
        stored &= bias is not None or not isinstance(record.bias, Ref)
        places = np.unique(np.concatenate([self._get_axis_positions(call, axis) for call in records]))
        units = self.unit_numbers[self.classes.unit[self.first_labels[axis] + places]]
        return Producer(record.node, axis, bias, build_position_table(units, places, size), stored)

    def _get_axis_positions(self, record: ProducerRecord, axis: Axis) -> AxisLabels:
        """Return the indices of a layer's channels on the axis: all of it, or the slice that is the layer's weight."""
        size = self.walk.graph.tensors[axis.tensor].shape[axis.dim] * axis.blocks
        places = record.line - self.first_labels[axis]
        return places if (places >= 0).all() and (places < size).all() else np.arange(len(record.line))

    def _build_consumers(self, family: int, size: int) -> Iterator[Consumer]:
        for record, places in self.consumptions_by_family[family]:
            units = self.unit_numbers[self.classes.unit[record.line[places]]]
            valid = is_unit(units)
            if valid.any():
                positions = build_position_table(units[valid], places[valid], size)
                yield Consumer(record.node, record.input, self._find_rewritable_axis(record), positions, record.blocks)

    def _find_rewritable_axis(self, record: ConsumerRecord) -> Axis | None:
        """Return the stored axis that merging may write new columns to; None if it also produces channels."""
        axis = self._find_stored_axis(record)
        return axis if axis not in self._producer_axes and axis in self._axes_read_as_stored else None

    def _find_stored_axis(self, record: ConsumerRecord) -> Axis | None:
        """Return the stored axis whose labels the consumer's weight has, in the same order; None if there is none."""
        axis = self.walk.axes.get(int(record.weight_labels[0]))
        return axis if axis is not None and (np.diff(record.weight_labels) == 1).all() else None

    @cached_property
    def _axes_read_as_stored(self) -> set[Axis]:
        """Axes of stored tensors that are read in their stored layout, by consumers of this axis alone."""
        consumers: dict[Axis, set[str]] = defaultdict(set)
        for record in self.walk.consumptions:
            axis = self._find_stored_axis(record)
            if axis is not None and is_stored_weight(self.walk.graph, record.node, record.weight, axis):
                consumers[axis].add(record.node.name)
        return {
            axis for axis, nodes in consumers.items() if find_nodes_using_weight(self.walk.graph, axis.tensor) <= nodes
        }

    def _get_layer_name(self, record: ProducerRecord) -> str:
        return get_layer_name(record.node, self._axis_by_production[record] or Axis(record.node.module, 0))

    @cached_property
    def _producer_axes(self) -> set[Axis]:
        return {axis for axis in self._axis_by_production.values() if axis is not None}

    @cached_property
    def _axis_by_production(self) -> dict[ProducerRecord, Axis | None]:
        return {record: self._find_production_axis(record) for record in self.walk.productions}

    def _find_production_axis(self, record: ProducerRecord) -> Axis | None:
        """Return the axis of the tensors behind the weight whose slices are this producer's channels."""
        wanted = self.classes.unit[record.line]
        names = (self.walk.graph.parameters[ref] for ref in _iter_source_parameters(self.walk.graph, record.weight))
        axes = [stored for name in names for stored in self.axes_of_tensor.get(name, ())]
        # Vectors are biases and scales, not weights.
        axes = [stored for stored in axes if self.walk.graph.tensors[stored.axis.tensor].ndim > 1]
        same = (stored.axis for stored in axes if np.array_equal(self.classes.unit[stored.labels], wanted))
        slices = (stored.axis for stored in axes if np.isin(record.line, stored.labels).all())
        # An axis with exactly these units is the weight's own; a fused weight (QKV) only contains them.
        return next(same, None) or next(slices, None)

    def _build_unit_maps(self, units: Units) -> dict[str, dict[int, Units]]:
        """Return, for each value and dimension, the unit at each index, numbered through the network."""

        def get_units(line: AxisLabels) -> Units:
            # Broadcast labels are negative; the maximum keeps them from indexing from the end.
            line_units: Units = np.where(is_channel(line), units[self.classes.unit[np.maximum(line, FIXED)]], NO_UNIT)
            return line_units

        unit_maps: dict[str, dict[int, Units]] = {}
        for node in self.walk.graph.nodes:
            labels: Labels | list[Labels] = self.walk.labels[node.name]
            if isinstance(labels, dict):
                unit_maps[node.name] = {
                    dim: line_units for dim, line in labels.items() if is_unit(line_units := get_units(line)).any()
                }
        return unit_maps


def _has_fully_locked_cell(cells: Units, refused: Mask) -> bool:
    """Return whether some cell must keep all of its units: then every other cell must, too."""
    return any(bool(refused[cells == cell].all()) for cell in range(int(cells.max()) + 1))


def _count_units_per_block(blocks: Units, size: int) -> AxisLabels:
    """Return a row for each unit: the number of its indices in each block."""
    shares = np.zeros((size, len(blocks)), int)
    block, place = np.nonzero(is_unit(blocks))
    np.add.at(shares, (blocks[block, place], block), 1)
    return shares


def _renumber_by_first_occurrence(values: Units) -> Units:
    """Renumber values from 0 in the order of their first occurrence.

    >>> _renumber_by_first_occurrence(np.array([7, 7, 3, 7, 5])).tolist()
    [0, 0, 1, 0, 2]
    """
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    # Sorting twice gives ranks: the value that occurs first becomes 0, and so on.
    numbers: Units = first.argsort().argsort()[inverse.ravel()]
    return numbers


def _iter_source_parameters(graph: Graph, weight: Ref) -> Iterator[str]:
    """Yield the parameters that a weight is computed from; usually just itself."""
    if weight.name in graph.parameters:
        yield weight.name
    elif (node := graph.node(weight.name)) is not None:
        for ref in node.refs():
            yield from _iter_source_parameters(graph, ref)


def _find_hidden_blocks(graph: Graph) -> list[Refusal]:
    """Return refusals for blocks of operators that the graph does not show."""
    blocks = [node for node in graph.nodes if lookup_operator(node).hides_operators]
    nodes = [node for node in blocks if any(_is_parameter(graph, ref) for ref in node.refs())]
    return [Refusal(node.module or "forward", 0, HIDDEN_BLOCK_REASON, node.op, node.location) for node in nodes]


def _is_parameter(graph: Graph, ref: Ref) -> bool:
    return isinstance(graph.tensors.get(graph.parameters.get(ref.name, "")), nn.Parameter)
