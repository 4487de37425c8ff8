"""Label propagation: the labels of every value, and the records of operator rules (producers, consumers, refusals,
balance constraints).

A constant tensor has the same value everywhere, so it can take any size. It gets the labels of the tensors that it is
combined with, once all labels are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from neuron_merging.channels.groups import (
    ANY,
    FIXED,
    Axis,
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
    """A layer produces these channels."""

    node: Node
    line: AxisLabels
    weight: Ref
    bias: Any


@dataclass(frozen=True, eq=False)
class ConsumerRecord:
    """A layer sums over these channels. `weight_labels` are the labels of its weight's input axis."""

    node: Node
    input: str
    line: AxisLabels
    weight_labels: AxisLabels
    blocks: int
    weight: str


@dataclass(frozen=True, eq=False)
class Veto:
    """These channels cannot be removed because of an operator."""

    line: AxisLabels
    node: Node
    why: str


@dataclass(frozen=True, eq=False)
class BalanceConstraint:
    """Each of the equally long blocks of an axis must keep equally many channels."""

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
    """A mean over the channels along `dim`. It may be part of a norm that is written out."""

    node: Node
    dim: int
    line: AxisLabels


@dataclass(frozen=True, eq=False)
class HeadSplit:
    """A view splits an axis into several dimensions, of which the one at `position` is assumed to count heads."""

    node: Node
    position: int
    line: AxisLabels


@dataclass(frozen=True, eq=False)
class ConstantAxis:
    """A dimension of a constant tensor, the labels that it is combined with, and reasons why it must keep its size."""

    node: Node
    dim: int
    encounters: list[tuple[Node, AxisLabels]] = field(default_factory=list)
    refusal_reasons: list[tuple[Node, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.node.shape[self.dim]


FIXED_SIZE_REASON = "combines them with a tensor whose size is fixed: an input, a constant, a mask, rotary angles"
NO_NODE = Node("", "", lambda: None, {}, (), False, "", "", "")
"""The current node before the first one."""


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
    """The labels of every value so far, and the records that the operators' rules have made.

    Rules read the labels of their inputs from it, and record which labels are coupled, produced, consumed or refused.
    Groups are built from these records later.

    Examples
    --------
    >>> def pairs(walk, node):  # a rule that couples each channel with its neighbour
    ...     labels = walk.labels_of(node.args["x"])
    ...     walk.unite(labels[1][0::2], labels[1][1::2])
    ...     return labels
    """

    graph: Graph
    head_dims: Mapping[str, int] | None = None
    """Set in a search for heads: for views, which of the dimensions that they split an axis into counts heads."""
    labels: dict[str, Labels | list[Labels]] = field(default_factory=dict)
    axes: dict[int, Axis] = field(default_factory=dict)
    label_count: int = 1  # 0 is FIXED
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

    # Queries of rules

    def labels_of(self, ref: Any) -> Labels:
        """Return the labels of an operand, by dimension. A parameter gets its labels at the first request."""
        if not isinstance(ref, Ref):
            return {}
        if ref.name in self.graph.parameters and ref.name not in self.labels:
            name = self.graph.parameters[ref.name]
            # By the stored tensor's name: a tied weight has several refs and one set of labels.
            if name not in self._stored:
                self._stored[name] = self._label_parameter(name)
            self.labels[ref.name] = self._stored[name]
        labels = self.labels.get(ref.name, {})
        # A copy, because rules remove entries from what they get.
        return dict(labels[0] if labels else {}) if isinstance(labels, list) else dict(labels)

    def labels_of_item(self, ref: Ref, index: int) -> Labels:
        """Return the labels of one of several results of an operator."""
        labels = self.labels.get(ref.name, {})
        if isinstance(labels, list):
            return labels[index] if index < len(labels) else {}
        return labels

    def shape(self, ref: Any) -> Shape:
        """Return the shape of an operand."""
        return self.graph.shapes.get(ref.name, ()) if isinstance(ref, Ref) else ()

    def is_weight(self, ref: Any) -> bool:
        """Return whether an operand is a parameter, or computed from parameters alone."""
        return isinstance(ref, Ref) and ref.name in self.weights

    def is_mask(self, ref: Any) -> bool:
        """Return whether an operand is a boolean mask. torch also indexes with uint8 as a mask."""
        return isinstance(ref, Ref) and self.graph.dtypes.get(ref.name) in (torch.bool, torch.uint8)

    def are_split_blocks(self, line: AxisLabels) -> bool:
        """Return whether these are blocks into which a view split an axis: heads."""
        return any(np.isin(select_channels(line), split.line).all() for split in self.head_splits)

    def find_constant_axes(self, line: AxisLabels) -> list[ConstantAxis]:
        """Return the axes of constant tensors among these labels."""
        # The axis number i has the label ANY - 1 - i.
        return [self.constant_axes[ANY - 1 - label] for label in np.unique(line[line < ANY]).tolist()]

    # Records of rules

    def add_constant_axis(self, node: Node, dim: int) -> AxisLabels:
        """Record a dimension of a constant tensor and return its labels."""
        self.constant_axes.append(ConstantAxis(node, dim))
        # A label of its own below ANY, from which `find_constant_axes` computes the number of the axis.
        return np.full(node.shape[dim], ANY - len(self.constant_axes))

    def unite(self, a: AxisLabels, b: AxisLabels) -> None:
        """Couple the channels at equal indices: they can only be removed together."""
        for line, other in ((a, b), (b, a)):
            for constant_axis in self.find_constant_axes(line):
                # A part of a constant axis, say after cat, has no known place on it: then it keeps its size.
                whole = len(line) == constant_axis.size and (line == line[0]).all()
                constant_axis.encounters.append(
                    (self.current_node, other if whole else make_fixed_labels(constant_axis.size))
                )
        # A broadcast takes any size, so it ties nothing.
        differ = ~is_broadcast(a) & ~is_broadcast(b) & (a != b)
        with_fixed = differ & ((a == FIXED) | (b == FIXED))
        if with_fixed.any():
            # FIXED is below every channel, so the maximum is the channel of each pair.
            self.refuse(np.maximum(a, b)[with_fixed], self.current_node, FIXED_SIZE_REASON)
        united = differ & ~with_fixed
        if united.any():
            self.edges.append((a[united], b[united]))

    def refuse(self, line: AxisLabels, node: Node, why: str) -> None:
        """Record that these channels cannot be removed."""
        if len(channels := select_channels(line)):
            self.vetoes.append(Veto(channels, node, why))
        for constant_axis in self.find_constant_axes(line):
            constant_axis.refusal_reasons.append((node, why))

    def balance(self, line: AxisLabels, blocks: int) -> None:
        """Record that each block of the axis must keep equally many channels."""
        if is_channel(line).any() and blocks > 1:
            self.balances.append(BalanceConstraint(line, blocks))

    def mark_size_uncertain(self, node: Node) -> None:
        """Record that a size of this operator may be a constant of the model's code, which a trial cut has to test."""
        self.uncertain_sizes[node.name] = node

    def note_sum(self, refs: Sequence[Ref]) -> None:
        """Record that these values are added to each other."""
        lines = [select_channels(line) for ref in refs for line in self.labels_of(ref).values()]
        names = tuple(ref.name for ref in refs)
        # x + x joins no two branches.
        if len(set(names)) > 1:
            self.sums += [SumRecord(line, self.current_node, names) for line in lines if len(line)]

    def note_head_split(self, node: Node, position: int, line: AxisLabels) -> None:
        """Record that a view split an axis into these blocks."""
        self.head_splits.append(HeadSplit(node, position, select_channels(line)))

    def note_batched(self, line: AxisLabels) -> None:
        """Record that these channels are a batch dimension of a matrix product."""
        self.batched_labels.append(select_channels(line))

    def note_norm_across_channels(self, line: AxisLabels, node: Node) -> None:
        """Record that an operator takes statistics over these channels."""
        self.norms_across_channels.append(StatisticsRecord(line, node))

    def note_average(self, node: Node, dim: int, line: AxisLabels) -> None:
        """Record a mean over these channels. Whether it is part of a norm is decided later (`classify_averages`)."""
        self.averages.append(AverageRecord(node, dim, self.fix_axis_labels(line)))

    def produce(self, node: Node, line: AxisLabels, weight: Ref, bias: Any) -> None:
        """Record that these labels are the output channels of a layer with stored weights."""
        if self.is_weight(weight):
            self.productions.append(ProducerRecord(node, line, weight, bias))

    def consume(self, node: Node, x: Ref, line: AxisLabels, weight: Ref, axis: int, blocks: int = 1) -> None:
        """Record that a layer sums over these channels, and couple them with the input axis of its weight."""
        line = self.fix_axis_labels(line)
        weight_labels = (
            self.label_grouped_axis(weight, axis, blocks)
            if blocks > 1 and axis == 1
            else self.labels_of(weight).get(axis)
        )
        if weight_labels is None:
            if len(line) > 1:
                self.refuse(line, node, "reads them with a weight that the code computes at every call")
            return
        self.unite(weight_labels, line)
        self.consumptions.append(ConsumerRecord(node, x.name, line, weight_labels, blocks, weight.name))

    def label_grouped_axis(self, weight: Ref, dim: int, blocks: int) -> AxisLabels | None:
        """Return the labels of a grouped weight's axis, one group after the other; None for a computed weight."""
        name = self.graph.parameters.get(weight.name)
        if name is None:
            return None
        axis = Axis(name, dim, blocks)
        if axis not in self._grouped_axis_labels:
            self._grouped_axis_labels[axis] = self._label_axis(axis, self.shape(weight)[dim] * blocks)
        return self._grouped_axis_labels[axis]

    def fix_axis_labels(self, line: AxisLabels) -> AxisLabels:
        """Return the labels with broadcasts fixed: constant tensors along this axis must keep their size."""
        for constant_axis in self.find_constant_axes(line):
            constant_axis.refusal_reasons.append((self.current_node, FIXED_SIZE_REASON))
        return fix_broadcasts(line)

    def create_labels(self, size: int) -> AxisLabels:
        """Return new labels."""
        start, self.label_count = self.label_count, self.label_count + size
        return np.arange(start, start + size)

    def _label_parameter(self, name: str) -> Labels:
        shape = tuple(self.graph.tensors[name].shape)
        # Nothing can be removed along a dimension of size one, and broadcasting may expand it.
        return {dim: self._label_axis(Axis(name, dim), size) for dim, size in enumerate(shape) if size > 1}

    def _label_axis(self, axis: Axis, size: int) -> AxisLabels:
        line = self.create_labels(size)
        # The labels of an axis are consecutive, so its first label identifies it.
        self.axes[int(line[0])] = axis
        return line


def resolve_constant_axes(walk: LabelWalk) -> None:
    """Give every constant axis labels of its own, united with the labels that it was combined with."""
    lines = {id(constant_axis): walk.create_labels(constant_axis.size) for constant_axis in walk.constant_axes}
    for constant_axis in walk.constant_axes:
        new_labels = lines[id(constant_axis)]
        for node, other in constant_axis.encounters:
            # `unite` blames the current node if it has to refuse labels.
            walk.current_node = node
            walk.unite(new_labels, _resolve_axis_labels(walk, other, lines))
        for node, why in constant_axis.refusal_reasons:
            walk.refuse(new_labels, node, why)
    for name, labels in walk.labels.items():
        parts = [
            _resolve_value_labels(walk, part, lines) for part in (labels if isinstance(labels, list) else [labels])
        ]
        walk.labels[name] = parts if isinstance(labels, list) else parts[0]


def _resolve_value_labels(walk: LabelWalk, labels: Labels, lines: dict[int, AxisLabels]) -> Labels:
    return {dim: _resolve_axis_labels(walk, line, lines) for dim, line in labels.items()}


def _resolve_axis_labels(walk: LabelWalk, line: AxisLabels, lines: dict[int, AxisLabels]) -> AxisLabels:
    """Return the labels of the constant axis that these labels stand for; other labels unchanged."""
    for constant_axis in walk.find_constant_axes(line):
        if len(line) == constant_axis.size and (line == line[0]).all():
            return lines[id(constant_axis)]
    return line
