"""Build groups of coupled channels from the records of label propagation. Labels that were united are one unit;
units that one layer makes, or that a balance constraint ties, are one family; a family of which something can
be removed is a group. Records are sorted by family once, so that a deep network costs no more per layer than a
shallow one.
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
    HEADS_SUFFIX,
    Axis,
    Channels,
    Consumer,
    Group,
    Producer,
    Refusal,
    get_layer_name,
)
from neuron_merging.channels.labels import (
    FIXED,
    NO_UNIT,
    AxisLabels,
    Labels,
    Mask,
    Units,
    build_position_table,
    find_connected_components,
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
)
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.channels.weight_views import find_nodes_using_weight, is_stored_weight
from neuron_merging.graph.graph import Graph, Ref

HIDDEN_BLOCK_REASON = "hides the layers inside an enable_grad or autocast block: take the block out of forward()"
ALL_COUPLED_REASON = "couples all of its channels"
SINGLE_CHANNEL_REASON = "has a single channel"
NO_CHANNEL_AXIS_REASON = "reads it as no part of any channel"
EQUAL_PARTS_REASON = "other parts of the layer must keep as many channels and are not prunable"
NO_CONSUMER_REASON = "produces channels that no layer reads"
UNEVEN_GROUPS_REASON = "feeds grouped layers whose groups cannot shrink together"

Record = TypeVar("Record")


@dataclass(frozen=True)
class LabelClasses:
    """By label, the label that stands for its unit, and the one that stands for its family."""

    unit: AxisLabels
    family: AxisLabels

    def split_by_family(self, line: AxisLabels) -> Iterator[tuple[int, AxisLabels]]:
        """The families of which a line has channels, each with the places at which they stand."""
        places = np.flatnonzero(is_channel(line))
        families = self.family[line[places]]
        order = np.argsort(families, kind="stable")
        borders = np.flatnonzero(np.diff(families[order])) + 1
        for part in np.split(order, borders):
            if len(part):
                yield int(families[part[0]]), places[part]

    def group_by_family(
        self, records: Iterable[tuple[AxisLabels, Record]]
    ) -> dict[int, list[tuple[Record, AxisLabels]]]:
        """By family, the records with the places of their line at which the family stands."""
        found: dict[int, list[tuple[Record, AxisLabels]]] = defaultdict(list)
        for line, record in records:
            for family, places in self.split_by_family(line):
                found[family].append((record, places))
        return found


def compute_label_classes(walk: LabelWalk) -> LabelClasses:
    """Labels that stand and fall together, and units that one decision covers."""
    unit = find_connected_components(walk.label_count, walk.edges)
    together = [record.line for record in walk.productions] + [select_channels(b.line) for b in walk.balances]
    links = [(unit[line[:-1]], unit[line[1:]]) for line in together if len(line) > 1]
    return LabelClasses(unit, find_connected_components(walk.label_count, links)[unit])


@dataclass(frozen=True)
class StoredAxis:
    """An axis of a stored tensor, and the labels that it was given."""

    axis: Axis
    labels: AxisLabels

    @classmethod
    def list_all_axes(cls, walk: LabelWalk) -> list[StoredAxis]:
        shapes = {name: tensor.shape for name, tensor in walk.graph.tensors.items()}
        sizes = ((axis, start, int(shapes[axis.tensor][axis.dim]) * axis.blocks) for start, axis in walk.axes.items())
        return [cls(axis, np.arange(start, start + size)) for axis, start, size in sizes]


class GroupBuilder:
    """Turns the records of a walk into groups."""

    def __init__(self, walk: LabelWalk) -> None:
        self.walk = walk
        self.classes = compute_label_classes(walk)
        self.refusal_by_family: dict[int, Refusal] = {}
        """By family, why nothing, or not all, of it can go."""
        self.unit_numbers = make_empty_units(walk.label_count)
        """By the label that stands for a unit, the unit's number inside its group."""
        self.refused_units = self._mark_units(veto.line for veto in walk.vetoes)
        self.batched_units = self._mark_units(walk.batched_labels)
        self.head_units = self._mark_units(parting.line for parting in walk.head_splits) & self.batched_units
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
            (mixing.line, mixing) for mixing in walk.norms_across_channels
        )

    def _mark_units(self, lines: Iterable[AxisLabels]) -> Mask:
        """By the label that stands for a unit, whether one of its labels is among these."""
        marks = np.zeros(self.walk.label_count, bool)
        for line in lines:
            marks[self.classes.unit[line]] = True
        return marks

    def find_misplaced_splits(self) -> list[HeadSplit]:
        """Views of whose parts others than those that were taken may be heads."""
        return [p for p in self.walk.head_splits if p.place and not self.batched_units[self.classes.unit[p.line]].any()]

    def build_channels(self) -> Channels:
        groups: list[Group] = []
        refusals: list[Refusal] = []
        seen: Counter[tuple[str, ...]] = Counter()
        units = make_empty_units(self.walk.label_count)
        start = 0
        for family, records in self._group_productions_by_family().items():
            found, refused = self._assemble_family(family, records)
            refusals += refused
            if refused:
                self.refusal_by_family[family] = refused[0]
            if found is None:
                continue
            group, members = found
            seen[group.layers] += 1
            name = group.name + (HEADS_SUFFIX if group.heads else "")
            name = name if seen[group.layers] == 1 else f"{name}#{seen[group.layers]}"
            groups.append(replace(group, name=name, start=start))
            units[members] = np.arange(start, start + group.size)
            start += group.size
        layers = tuple(dict.fromkeys(self._get_layer_name(record) for record in self.walk.productions))
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
        """Why a stored tensor keeps entries: what is said of the channels that it makes, else of those it meets."""
        layer = tensor.rpartition(".")[0] or tensor
        if (told := self._find_known_refusal(tensor)) is not None:
            return replace(told, layer=layer)
        first = (
            self._first_veto_by_unit[self.classes.unit[stored.labels]] for stored in self._list_axes_of_tensor(tensor)
        )
        number = next((int(found.max()) for found in first if is_unit(found).any()), None)
        if number is None:
            reader = self.walk.graph.first_node_reading(tensor)
            return Refusal(layer, 0, NO_CHANNEL_AXIS_REASON, reader.op, reader.location)
        veto = self.walk.vetoes[number]
        return Refusal(layer, len(veto.line), veto.why, veto.node.op, veto.node.location)

    def _list_axes_of_tensor(self, tensor: str) -> list[StoredAxis]:
        """The axes of a tensor, those along which it makes channels first."""
        return sorted(self.axes_of_tensor[tensor], key=lambda stored: stored.axis not in self._producer_axes)

    def _find_known_refusal(self, tensor: str) -> Refusal | None:
        """What was said already of channels that a tensor has."""
        families = (int(self.classes.family[stored.labels[0]]) for stored in self._list_axes_of_tensor(tensor))
        return next((self.refusal_by_family[family] for family in families if family in self.refusal_by_family), None)

    @cached_property
    def _first_veto_by_unit(self) -> AxisLabels:
        """By the label that stands for a unit, the number of the first veto against it."""
        numbers = make_empty_units(self.walk.label_count)
        for number, veto in reversed(list(enumerate(self.walk.vetoes))):
            numbers[self.classes.unit[veto.line]] = number
        return numbers

    def _find_missing_refusals(self, groups: Sequence[Group], reasons: Mapping[str, Refusal]) -> list[Refusal]:
        """Refusals of layers with weights that are in no group and of which nothing was said so far."""
        cut = {axis.tensor for group in groups for axis in group.cuts}
        tensors = self.walk.graph.tensors.items()
        wide = [name for name, tensor in tensors if tensor.ndim > 1 and isinstance(tensor, nn.Parameter)]
        fresh = [
            name for name in wide if name in reasons and name not in cut and self._find_known_refusal(name) is None
        ]
        return list({reasons[name].layer: reasons[name] for name in fresh}.values())

    def _group_productions_by_family(self) -> dict[int, list[ProducerRecord]]:
        found: dict[int, list[ProducerRecord]] = defaultdict(list)
        for record in self.walk.productions:
            if self.walk.head_dims is None or self.head_units[self.classes.unit[record.line]].any():
                found[int(self.classes.family[record.line[0]])].append(record)
        return found

    def _assemble_family(
        self, family: int, records: Sequence[ProducerRecord]
    ) -> tuple[tuple[Group, AxisLabels] | None, list[Refusal]]:
        """A family's group, with the labels that stand for its units, if something of it can go; and what cannot."""
        members = self._collect_units(records)
        refused = self.refused_units[members]
        if len(members) < 2 or refused.all():
            return None, self._explain_units(family, records, members)
        if not self.consumptions_by_family[family]:
            return None, [self._refuse_layer(records[0], len(members), NO_CONSUMER_REASON)]
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
        """The labels that stand for a family's units, in the order in which layers make them."""
        made = np.concatenate([self.classes.unit[record.line] for record in records])
        _, first = np.unique(made, return_index=True)
        return made[np.sort(first)]

    def _build_group(self, family: int, records: Sequence[ProducerRecord], members: AxisLabels, cells: Units) -> Group:
        cuts = ((stored.axis, self._get_unit_numbers(stored.labels, places)) for stored, places in self.axes[family])
        mixing = (
            mixing.node
            for mixing, at in self.norms_by_family[family]
            if is_unit(self._get_unit_numbers(mixing.line, at)).any()
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
            norms_across_channels=tuple(mixing),
            heads=self.walk.head_dims is not None,
        )

    def _is_residual_stream(self, family: int) -> bool:
        """Whether channels pass by a layer that reads them and are then added to what has become of them there."""
        sums = {record.node.name: record for record, _ in self.sums[family]}
        return bool(sums) and any(
            self._is_skipped_by_sum(record, sums) for record, _ in self.consumptions_by_family[family]
        )

    def _is_skipped_by_sum(self, reading: ConsumerRecord, sums: Mapping[str, SumRecord]) -> bool:
        """Whether one operand of a sum comes from this layer and another does not."""
        graph, behind, left = self.walk.graph, {reading.node.name}, set(sums)
        left -= {name for name in sums if graph.is_before(name, reading.node.name)}
        for node in graph.iter_downstream([reading.node], lambda _: bool(left)) if left else ():
            behind.add(node.name)
            if node.name in left:
                left.remove(node.name)
                if not behind.issuperset(sums[node.name].operands):
                    return True
        return False

    def _get_unit_numbers(self, line: AxisLabels, places: AxisLabels) -> Units:
        """The units inside their group that stand at these places of a line, and none at the others."""
        numbers = make_empty_units(len(line))
        numbers[places] = self.unit_numbers[self.classes.unit[line[places]]]
        return numbers

    def _explain_units(self, family: int, records: Sequence[ProducerRecord], units: AxisLabels) -> list[Refusal]:
        """Why these units cannot go: the first reason that was given."""
        layer, node = self._get_layer_name(records[0]), records[0].node
        for veto, places in self.vetoes[family]:
            vetoed = np.intersect1d(self.classes.unit[veto.line[places]], units)
            if len(vetoed):
                return [Refusal(layer, len(vetoed), veto.why, veto.node.op, veto.node.location)]
        why = ALL_COUPLED_REASON if any(len(record.line) > 1 for record in records) else SINGLE_CHANNEL_REASON
        return [Refusal(layer, len(units), why, node.op, node.location)]

    def _refuse_layer(self, record: ProducerRecord, size: int, why: str) -> Refusal:
        """Why a layer keeps all of its channels."""
        return Refusal(self._get_layer_name(record), size, why, record.node.op, record.node.location)

    def _compute_cells(self, family: int, size: int) -> Units | None:
        """Each unit's cell under all balances: those that stand equally often in every block; None if unequal.

        Blocks are equally long, so they stay so where equally long cells keep equally many.
        """
        cells = np.zeros(size, int)
        for balance, places in self.balances[family]:
            blocks = self._get_unit_numbers(balance.line, places).reshape(balance.blocks, -1)
            shares = _count_units_per_block(blocks, size)
            if (shares == shares[:, :1]).all():
                continue
            if not is_unit(blocks).all():
                return None
            _, alike = np.unique(shares, axis=0, return_inverse=True)
            cells = _renumber_by_first_occurrence(cells * size + alike.ravel())
        sizes = set(np.bincount(cells))
        return cells if len(sizes) == 1 and sizes != {1} else None

    def _build_producers(self, records: Sequence[ProducerRecord], size: int) -> list[Producer]:
        """The layers that make a family's channels; one that is called twice is listed once."""
        found: dict[Axis, list[ProducerRecord]] = defaultdict(list)
        for record in records:
            axis = self._axis_by_production[record]
            if axis is not None:
                found[axis].append(record)
        return [self._build_producer(made, axis, size) for axis, made in found.items()]

    def _build_producer(self, records: Sequence[ProducerRecord], axis: Axis, size: int) -> Producer:
        graph, record = self.walk.graph, records[0]
        bias = graph.parameters.get(record.bias.name) if isinstance(record.bias, Ref) else None
        stored = is_stored_weight(graph, record.node, record.weight.name, axis)
        stored &= bias is not None or not isinstance(record.bias, Ref)
        places = np.unique(np.concatenate([self._get_axis_positions(made, axis) for made in records]))
        units = self.unit_numbers[self.classes.unit[self.first_labels[axis] + places]]
        return Producer(record.node, axis, bias, build_position_table(units, places, size), stored)

    def _get_axis_positions(self, record: ProducerRecord, axis: Axis) -> AxisLabels:
        """Where on the axis a layer's channels are: everywhere, or on the piece of it that is the layer's weight."""
        size = self.walk.graph.tensors[axis.tensor].shape[axis.dim] * axis.blocks
        places = record.line - self.first_labels[axis]
        return places if (places >= 0).all() and (places < size).all() else np.arange(len(record.line))

    def _build_consumers(self, family: int, size: int) -> Iterator[Consumer]:
        for record, places in self.consumptions_by_family[family]:
            units = self.unit_numbers[self.classes.unit[record.line[places]]]
            there = is_unit(units)
            if there.any():
                positions = build_position_table(units[there], places[there], size)
                yield Consumer(record.node, record.input, self._find_rewritable_axis(record), positions, record.blocks)

    def _find_rewritable_axis(self, record: ConsumerRecord) -> Axis | None:
        """The stored axis that a reader may be given new columns on: it makes no channels, and is read as it is."""
        axis = self._find_stored_axis(record)
        return axis if axis not in self._producer_axes and axis in self._axes_read_as_stored else None

    def _find_stored_axis(self, record: ConsumerRecord) -> Axis | None:
        """The stored axis that the reader's own labels are, if they are one in its order."""
        axis = self.walk.axes.get(int(record.weight_labels[0]))
        return axis if axis is not None and (np.diff(record.weight_labels) == 1).all() else None

    @cached_property
    def _axes_read_as_stored(self) -> set[Axis]:
        """Axes of stored tensors that are read as they are, and only by layers to which they mean the same."""
        readers: dict[Axis, set[str]] = defaultdict(set)
        for record in self.walk.consumptions:
            axis = self._find_stored_axis(record)
            if axis is not None and is_stored_weight(self.walk.graph, record.node, record.weight, axis):
                readers[axis].add(record.node.name)
        return {
            axis for axis, nodes in readers.items() if find_nodes_using_weight(self.walk.graph, axis.tensor) <= nodes
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
        """The stored tensor, of those that the weight is computed from, whose slices are this producer's channels."""
        wanted = self.classes.unit[record.line]
        names = (self.walk.graph.parameters[ref] for ref in _iter_source_parameters(self.walk.graph, record.weight))
        found = [stored for name in names for stored in self.axes_of_tensor.get(name, ())]
        found = [stored for stored in found if self.walk.graph.tensors[stored.axis.tensor].ndim > 1]
        same = (stored.axis for stored in found if np.array_equal(self.classes.unit[stored.labels], wanted))
        pieces = (stored.axis for stored in found if np.isin(record.line, stored.labels).all())
        return next(same, None) or next(pieces, None)

    def _build_unit_maps(self, units: Units) -> dict[str, dict[int, Units]]:
        """For each value, by dimension, the unit at each index, numbered through the network."""

        def along(line: AxisLabels) -> Units:
            found: Units = np.where(is_channel(line), units[self.classes.unit[np.maximum(line, FIXED)]], NO_UNIT)
            return found

        found: dict[str, dict[int, Units]] = {}
        for node in self.walk.graph.nodes:
            labels: Labels | list[Labels] = self.walk.labels[node.name]
            if isinstance(labels, dict):
                found[node.name] = {dim: at for dim, line in labels.items() if is_unit(at := along(line)).any()}
        return found


def _has_fully_locked_cell(cells: Units, refused: Mask) -> bool:
    """Whether a cell must keep all of its units, and so must those that keep as many."""
    return any(bool(refused[cells == cell].all()) for cell in range(int(cells.max()) + 1))


def _count_units_per_block(blocks: Units, size: int) -> AxisLabels:
    """A row for each unit: how often it stands in each block."""
    shares = np.zeros((size, len(blocks)), int)
    block, place = np.nonzero(is_unit(blocks))
    np.add.at(shares, (blocks[block, place], block), 1)
    return shares


def _renumber_by_first_occurrence(values: Units) -> Units:
    """Values as numbers from 0, in the order in which they first stand.

    >>> _renumber_by_first_occurrence(np.array([7, 7, 3, 7, 5])).tolist()
    [0, 0, 1, 0, 2]
    """
    _, first, at = np.unique(values, return_index=True, return_inverse=True)
    numbers: Units = first.argsort().argsort()[at.ravel()]
    return numbers


def _iter_source_parameters(graph: Graph, weight: Ref) -> Iterator[str]:
    """Parameters from which a weight is computed (usually just itself)."""
    if weight.name in graph.parameters:
        yield weight.name
    elif (node := graph.node(weight.name)) is not None:
        for ref in node.refs():
            yield from _iter_source_parameters(graph, ref)


def _find_hidden_blocks(graph: Graph) -> list[Refusal]:
    """Blocks of operators that the graph does not show."""
    wraps = [node for node in graph.nodes if lookup_operator(node).hides_operators]
    nodes = [node for node in wraps if any(_is_parameter(graph, ref) for ref in node.refs())]
    return [Refusal(node.module or "forward", 0, HIDDEN_BLOCK_REASON, node.op, node.location) for node in nodes]


def _is_parameter(graph: Graph, ref: Ref) -> bool:
    return isinstance(graph.tensors.get(graph.parameters.get(ref.name, "")), nn.Parameter)
