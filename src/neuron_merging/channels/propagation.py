"""Label propagation: the labels of every value, and the records that operator rules make of them (producers,
consumers, refusals, balance constraints). A tensor with one value everywhere gets the labels of what it meets,
once all labels are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from neuron_merging.channels.groups import Axis
from neuron_merging.channels.labels import (
    ANY,
    FIXED,
    AxisLabels,
    Labels,
    fix_broadcasts,
    is_broadcast,
    is_channel,
    make_fixed_labels,
    select_channels,
)
from neuron_merging.errors import deprecated_members
from neuron_merging.graph.graph import Graph, Node, Ref, Shape


@dataclass(frozen=True, eq=False)
class ProducerRecord:
    """A layer makes these channels."""

    node: Node
    line: AxisLabels
    weight: Ref
    bias: Any


@dataclass(frozen=True, eq=False)
class ConsumerRecord:
    """A layer sums over these channels; `weight_labels` are those of its weight's axis."""

    node: Node
    input: str
    line: AxisLabels
    weight_labels: AxisLabels
    blocks: int
    weight: str


@dataclass(frozen=True, eq=False)
class Veto:
    """An operator says that these channels cannot be removed."""

    line: AxisLabels
    node: Node
    why: str


@dataclass(frozen=True, eq=False)
class BalanceConstraint:
    """Equally many channels must stay in each of these blocks of a line."""

    line: AxisLabels
    blocks: int


@dataclass(frozen=True, eq=False)
class StatisticsRecord:
    """An operator takes statistics over these channels."""

    line: AxisLabels
    node: Node


@dataclass(frozen=True, eq=False)
class SumRecord:
    """Values with these channels are added to each other."""

    line: AxisLabels
    node: Node
    operands: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class AverageRecord:
    """A mean over these channels, which lie along `dim`: it may be part of a norm."""

    node: Node
    dim: int
    line: AxisLabels


@dataclass(frozen=True, eq=False)
class HeadSplit:
    """A view parts a line into several dimensions; of those, the one at `place` is taken for its channels."""

    node: Node
    place: int
    line: AxisLabels


@dataclass(frozen=True, eq=False)
class ConstantAxis:
    """A dimension of a tensor with one value everywhere, and what it meets: lines, and reasons why it must stay."""

    node: Node
    dim: int
    encounters: list[tuple[Node, AxisLabels]] = field(default_factory=list)
    refusal_reasons: list[tuple[Node, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.node.shape[self.dim]


MEETS_FIXED_REASON = "meets them with a tensor whose size is fixed: an input, a constant, a mask, rotary angles"
NO_NODE = Node("", "", lambda: None, {}, (), False, "", "", "")
"""Stands for the operator at hand before there is one."""


@deprecated_members(
    of="labels_of",
    item="labels_of_item",
    at="current_node",
    doubt="mark_size_uncertain",
    doubts="uncertain_sizes",
    number="create_labels",
    note_mixing="note_norm_across_channels",
    parts="head_dims",
    readings="consumptions",
)
@dataclass
class LabelWalk:
    """The labels of every value so far, and all that operators have said of them.

    Rules ask it what their inputs carry and tell it what stands and falls together; it decides nothing.

    Examples
    --------
    >>> def pairs(walk, node):  # a rule: each channel goes with its neighbour
    ...     labels = walk.labels_of(node.args["x"])
    ...     walk.unite(labels[1][0::2], labels[1][1::2])
    ...     return labels
    """

    graph: Graph
    head_dims: Mapping[str, int] | None = None
    """Whole heads are looked for; of the dimensions into which these views part a line, the one that counts them."""
    labels: dict[str, Labels | list[Labels]] = field(default_factory=dict)
    axes: dict[int, Axis] = field(default_factory=dict)
    label_count: int = 1
    edges: list[tuple[AxisLabels, AxisLabels]] = field(default_factory=list)
    vetoes: list[Veto] = field(default_factory=list)
    balances: list[BalanceConstraint] = field(default_factory=list)
    sums: list[SumRecord] = field(default_factory=list)
    norms_across_channels: list[StatisticsRecord] = field(default_factory=list)
    averages: list[AverageRecord] = field(default_factory=list)
    head_splits: list[HeadSplit] = field(default_factory=list)
    batched_labels: list[AxisLabels] = field(default_factory=list)
    productions: list[ProducerRecord] = field(default_factory=list)
    consumptions: list[ConsumerRecord] = field(default_factory=list)
    constant_axes: list[ConstantAxis] = field(default_factory=list)
    current_node: Node = NO_NODE
    uncertain_sizes: dict[str, Node] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    input_dependent: set[str] = field(default_factory=set)
    """Values that depend on an input of the network."""
    _grouped_axis_labels: dict[Axis, AxisLabels] = field(default_factory=dict)
    _stored: dict[str, Labels] = field(default_factory=dict)

    # what rules ask

    def labels_of(self, ref: Any) -> Labels:
        """The labels of an input, by dimension; a parameter gets its labels when it is first asked for."""
        if not isinstance(ref, Ref):
            return {}
        if ref.name in self.graph.parameters and ref.name not in self.labels:
            name = self.graph.parameters[ref.name]
            if name not in self._stored:
                self._stored[name] = self._label_parameter(name)
            self.labels[ref.name] = self._stored[name]
        found = self.labels.get(ref.name, {})
        return dict(found[0] if found else {}) if isinstance(found, list) else dict(found)

    def labels_of_item(self, ref: Ref, index: int) -> Labels:
        found = self.labels.get(ref.name, {})
        if isinstance(found, list):
            return found[index] if index < len(found) else {}
        return found

    def shape(self, ref: Any) -> Shape:
        """The shape of an input."""
        return self.graph.shapes.get(ref.name, ()) if isinstance(ref, Ref) else ()

    def is_weight(self, ref: Any) -> bool:
        """Whether an input is a parameter, or computed from parameters alone."""
        return isinstance(ref, Ref) and ref.name in self.weights

    def is_mask(self, ref: Any) -> bool:
        return isinstance(ref, Ref) and self.graph.dtypes.get(ref.name) in (torch.bool, torch.uint8)

    def are_split_blocks(self, line: AxisLabels) -> bool:
        """Whether these are blocks that a view has parted a line into."""
        return any(np.isin(select_channels(line), parting.line).all() for parting in self.head_splits)

    def find_constant_axes(self, line: AxisLabels) -> list[ConstantAxis]:
        """The tensors with one value everywhere that stand in a line."""
        return [self.constant_axes[ANY - 1 - label] for label in np.unique(line[line < ANY]).tolist()]

    # what rules tell

    def add_constant_axis(self, node: Node, dim: int) -> AxisLabels:
        """The line of a dimension of a tensor with one value everywhere."""
        self.constant_axes.append(ConstantAxis(node, dim))
        return np.full(node.shape[dim], ANY - len(self.constant_axes))

    def unite(self, a: AxisLabels, b: AxisLabels) -> None:
        """Channels at the same index stand and fall together."""
        for own, other in ((a, b), (b, a)):
            for filling in self.find_constant_axes(own):
                whole = len(own) == filling.size and (own == own[0]).all()
                filling.encounters.append((self.current_node, other if whole else make_fixed_labels(filling.size)))
        differ = ~is_broadcast(a) & ~is_broadcast(b) & (a != b)
        meets_fixed = differ & ((a == FIXED) | (b == FIXED))
        if meets_fixed.any():
            self.refuse(np.maximum(a, b)[meets_fixed], self.current_node, MEETS_FIXED_REASON)
        united = differ & ~meets_fixed
        if united.any():
            self.edges.append((a[united], b[united]))

    def refuse(self, line: AxisLabels, node: Node, why: str) -> None:
        """These channels cannot be removed."""
        if len(channels := select_channels(line)):
            self.vetoes.append(Veto(channels, node, why))
        for filling in self.find_constant_axes(line):
            filling.refusal_reasons.append((node, why))

    def balance(self, line: AxisLabels, blocks: int) -> None:
        """Each block of the line must keep equally many."""
        if is_channel(line).any() and blocks > 1:
            self.balances.append(BalanceConstraint(line, blocks))

    def mark_size_uncertain(self, node: Node) -> None:
        """A size of this operator may be a constant of the model's code."""
        self.uncertain_sizes[node.name] = node

    def note_sum(self, refs: Sequence[Ref]) -> None:
        """Values that are added to each other."""
        found = [select_channels(line) for ref in refs for line in self.labels_of(ref).values()]
        names = tuple(ref.name for ref in refs)
        if len(set(names)) > 1:
            self.sums += [SumRecord(line, self.current_node, names) for line in found if len(line)]

    def note_head_split(self, node: Node, place: int, line: AxisLabels) -> None:
        """A view has parted a line into blocks, and these are the blocks."""
        self.head_splits.append(HeadSplit(node, place, select_channels(line)))

    def note_batched(self, line: AxisLabels) -> None:
        """A product is taken for each of these channels."""
        self.batched_labels.append(select_channels(line))

    def note_norm_across_channels(self, line: AxisLabels, node: Node) -> None:
        """An operator takes statistics over these channels."""
        self.norms_across_channels.append(StatisticsRecord(line, node))

    def note_average(self, node: Node, dim: int, line: AxisLabels) -> None:
        """A mean is taken over these channels; what it is for shows later."""
        self.averages.append(AverageRecord(node, dim, self.fix_axis_labels(line)))

    def produce(self, node: Node, line: AxisLabels, weight: Ref, bias: Any) -> None:
        """These labels are the output channels of a layer with stored weights."""
        if self.is_weight(weight):
            self.productions.append(ProducerRecord(node, line, weight, bias))

    def consume(self, node: Node, x: Ref, line: AxisLabels, weight: Ref, axis: int, blocks: int = 1) -> None:
        """Input channels meet the weight's own labels: they will be cut together."""
        line = self.fix_axis_labels(line)
        own = (
            self.label_grouped_axis(weight, axis, blocks)
            if blocks > 1 and axis == 1
            else self.labels_of(weight).get(axis)
        )
        if own is None:
            if len(line) > 1:
                self.refuse(line, node, "reads them with a weight that the code computes at every call")
            return
        self.unite(own, line)
        self.consumptions.append(ConsumerRecord(node, x.name, line, own, blocks, weight.name))

    def label_grouped_axis(self, weight: Ref, dim: int, blocks: int) -> AxisLabels | None:
        """Labels of a grouped weight's axis, all groups' channels one after the other."""
        name = self.graph.parameters.get(weight.name)
        if name is None:
            return None
        axis = Axis(name, dim, blocks)
        if axis not in self._grouped_axis_labels:
            self._grouped_axis_labels[axis] = self._label_axis(axis, self.shape(weight)[dim] * blocks)
        return self._grouped_axis_labels[axis]

    def fix_axis_labels(self, line: AxisLabels) -> AxisLabels:
        """A line of which what adapts to others has to stay as it is."""
        for filling in self.find_constant_axes(line):
            filling.refusal_reasons.append((self.current_node, MEETS_FIXED_REASON))
        return fix_broadcasts(line)

    def create_labels(self, size: int) -> AxisLabels:
        """New labels."""
        start, self.label_count = self.label_count, self.label_count + size
        return np.arange(start, start + size)

    def _label_parameter(self, name: str) -> Labels:
        shape = tuple(self.graph.tensors[name].shape)
        return {dim: self._label_axis(Axis(name, dim), size) for dim, size in enumerate(shape) if size > 1}

    def _label_axis(self, axis: Axis, size: int) -> AxisLabels:
        line = self.create_labels(size)
        self.axes[int(line[0])] = axis
        return line


def resolve_constant_axes(walk: LabelWalk) -> None:
    """Give every such tensor channels of its own, united with all that it has met, once that is known."""
    lines = {id(filling): walk.create_labels(filling.size) for filling in walk.constant_axes}
    for filling in walk.constant_axes:
        own = lines[id(filling)]
        for node, met in filling.encounters:
            walk.current_node = node
            walk.unite(own, _resolve_axis_labels(walk, met, lines))
        for node, why in filling.refusal_reasons:
            walk.refuse(own, node, why)
    for name, labels in walk.labels.items():
        several = [
            _resolve_value_labels(walk, part, lines) for part in (labels if isinstance(labels, list) else [labels])
        ]
        walk.labels[name] = several if isinstance(labels, list) else several[0]


def _resolve_value_labels(walk: LabelWalk, labels: Labels, lines: dict[int, AxisLabels]) -> Labels:
    return {dim: _resolve_axis_labels(walk, line, lines) for dim, line in labels.items()}


def _resolve_axis_labels(walk: LabelWalk, line: AxisLabels, lines: dict[int, AxisLabels]) -> AxisLabels:
    """A line with the channels of the tensors that stand in it; as it is where it is not the whole of one."""
    for filling in walk.find_constant_axes(line):
        if len(line) == filling.size and (line == line[0]).all():
            return lines[id(filling)]
    return line
