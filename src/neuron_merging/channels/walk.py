"""The walk: labels on their way through a graph, and what operators say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from neuron_merging.channels.groups import Axis
from neuron_merging.channels.labels import ANY, FIXED, Labels, Line, channels_in, fixed, is_channel, is_open, settled
from neuron_merging.graph.values import Graph, Node, Ref, Shape


@dataclass(frozen=True, eq=False)
class Production:
    """A layer makes these channels."""

    node: Node
    line: Line
    weight: Ref
    bias: Any


@dataclass(frozen=True, eq=False)
class Reading:
    """A layer sums over these channels; `own` are the labels of its weight's axis."""

    node: Node
    input: str
    line: Line
    own: Line
    blocks: int
    weight: str


@dataclass(frozen=True, eq=False)
class Veto:
    """An operator says that these channels cannot be removed."""

    line: Line
    node: Node
    why: str


@dataclass(frozen=True, eq=False)
class Balance:
    """Equally many channels must stay in each of these blocks of a line."""

    line: Line
    blocks: int


@dataclass(frozen=True, eq=False)
class Mixing:
    """An operator takes statistics over these channels."""

    line: Line
    node: Node


@dataclass(frozen=True, eq=False)
class Sum:
    """Values with these channels are added to each other."""

    line: Line
    node: Node
    operands: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Average:
    """A mean over these channels, which lie along `dim`: it may be part of a norm."""

    node: Node
    dim: int
    line: Line


@dataclass(frozen=True, eq=False)
class Parting:
    """A view parts a line into several dimensions; of those, the one at `place` is taken for its channels."""

    node: Node
    place: int
    line: Line


@dataclass(frozen=True, eq=False)
class Filling:
    """A dimension of a tensor with one value everywhere, and what it meets: lines, and reasons why it must stay."""

    node: Node
    dim: int
    met: list[tuple[Node, Line]] = field(default_factory=list)
    refused: list[tuple[Node, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.node.shape[self.dim]


MEETS_FIXED = "meets them with a tensor whose size is fixed: an input, a constant, a mask, rotary angles"
START = Node("", "", lambda: None, {}, (), False, "", "", "")
"""Stands for the operator at hand before there is one."""


@dataclass
class Walk:
    """The labels of every value so far, and all that operators have said of them.

    Rules ask it what their inputs carry and tell it what stands and falls together; it decides nothing.

    Examples
    --------
    >>> def pairs(walk, node):  # a rule: each channel goes with its neighbour
    ...     labels = walk.of(node.args["x"])
    ...     walk.unite(labels[1][0::2], labels[1][1::2])
    ...     return labels
    """

    graph: Graph
    parts: Mapping[str, int] | None = None
    """Whole heads are looked for; of the dimensions into which these views part a line, the one that counts them."""
    labels: dict[str, Labels | list[Labels]] = field(default_factory=dict)
    axes: dict[int, Axis] = field(default_factory=dict)
    count: int = 1
    edges: list[tuple[Line, Line]] = field(default_factory=list)
    vetoes: list[Veto] = field(default_factory=list)
    balances: list[Balance] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    mixing: list[Mixing] = field(default_factory=list)
    averages: list[Average] = field(default_factory=list)
    parted: list[Parting] = field(default_factory=list)
    batched: list[Line] = field(default_factory=list)
    productions: list[Production] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    fillings: list[Filling] = field(default_factory=list)
    at: Node = START
    doubts: dict[str, Node] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    fed: set[str] = field(default_factory=set)
    """Values that depend on an input of the network."""
    _blocked: dict[Axis, Line] = field(default_factory=dict)
    _stored: dict[str, Labels] = field(default_factory=dict)

    # what rules ask

    def of(self, ref: Any) -> Labels:
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

    def item(self, ref: Ref, index: int) -> Labels:
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

    def are_blocks(self, line: Line) -> bool:
        """Whether these are blocks that a view has parted a line into."""
        return any(np.isin(channels_in(line), parting.line).all() for parting in self.parted)

    def fillings_in(self, line: Line) -> list[Filling]:
        """The tensors with one value everywhere that stand in a line."""
        return [self.fillings[ANY - 1 - label] for label in np.unique(line[line < ANY]).tolist()]

    # what rules tell

    def fill(self, node: Node, dim: int) -> Line:
        """The line of a dimension of a tensor with one value everywhere."""
        self.fillings.append(Filling(node, dim))
        return np.full(node.shape[dim], ANY - len(self.fillings))

    def unite(self, a: Line, b: Line) -> None:
        """Channels at the same index stand and fall together."""
        for own, other in ((a, b), (b, a)):
            for filling in self.fillings_in(own):
                whole = len(own) == filling.size and (own == own[0]).all()
                filling.met.append((self.at, other if whole else fixed(filling.size)))
        differ = ~is_open(a) & ~is_open(b) & (a != b)
        meets_fixed = differ & ((a == FIXED) | (b == FIXED))
        if meets_fixed.any():
            self.refuse(np.maximum(a, b)[meets_fixed], self.at, MEETS_FIXED)
        united = differ & ~meets_fixed
        if united.any():
            self.edges.append((a[united], b[united]))

    def refuse(self, line: Line, node: Node, why: str) -> None:
        """These channels cannot be removed."""
        if len(channels := channels_in(line)):
            self.vetoes.append(Veto(channels, node, why))
        for filling in self.fillings_in(line):
            filling.refused.append((node, why))

    def balance(self, line: Line, blocks: int) -> None:
        """Each block of the line must keep equally many."""
        if is_channel(line).any() and blocks > 1:
            self.balances.append(Balance(line, blocks))

    def doubt(self, node: Node) -> None:
        """A size of this operator may be a constant of the model's code."""
        self.doubts[node.name] = node

    def note_sum(self, refs: Sequence[Ref]) -> None:
        """Values that are added to each other."""
        found = [channels_in(line) for ref in refs for line in self.of(ref).values()]
        names = tuple(ref.name for ref in refs)
        if len(set(names)) > 1:
            self.sums += [Sum(line, self.at, names) for line in found if len(line)]

    def note_parting(self, node: Node, place: int, line: Line) -> None:
        """A view has parted a line into blocks, and these are the blocks."""
        self.parted.append(Parting(node, place, channels_in(line)))

    def note_batched(self, line: Line) -> None:
        """A product is taken for each of these channels."""
        self.batched.append(channels_in(line))

    def note_mixing(self, line: Line, node: Node) -> None:
        """An operator takes statistics over these channels."""
        self.mixing.append(Mixing(line, node))

    def note_average(self, node: Node, dim: int, line: Line) -> None:
        """A mean is taken over these channels; what it is for shows later."""
        self.averages.append(Average(node, dim, self.settled(line)))

    def produce(self, node: Node, line: Line, weight: Ref, bias: Any) -> None:
        """These labels are the output channels of a layer with stored weights."""
        if self.is_weight(weight):
            self.productions.append(Production(node, line, weight, bias))

    def consume(self, node: Node, x: Ref, line: Line, weight: Ref, axis: int, blocks: int = 1) -> None:
        """Input channels meet the weight's own labels: they will be cut together."""
        line = self.settled(line)
        own = self.blocked(weight, axis, blocks) if blocks > 1 and axis == 1 else self.of(weight).get(axis)
        if own is None:
            if len(line) > 1:
                self.refuse(line, node, "reads them with a weight that the code computes at every call")
            return
        self.unite(own, line)
        self.readings.append(Reading(node, x.name, line, own, blocks, weight.name))

    def blocked(self, weight: Ref, dim: int, blocks: int) -> Line | None:
        """Labels of a grouped weight's axis, all groups' channels one after the other."""
        name = self.graph.parameters.get(weight.name)
        if name is None:
            return None
        axis = Axis(name, dim, blocks)
        if axis not in self._blocked:
            self._blocked[axis] = self._label_axis(axis, self.shape(weight)[dim] * blocks)
        return self._blocked[axis]

    def settled(self, line: Line) -> Line:
        """A line of which what adapts to others has to stay as it is."""
        for filling in self.fillings_in(line):
            filling.refused.append((self.at, MEETS_FIXED))
        return settled(line)

    def number(self, size: int) -> Line:
        """New labels."""
        start, self.count = self.count, self.count + size
        return np.arange(start, start + size)

    def _label_parameter(self, name: str) -> Labels:
        shape = tuple(self.graph.tensors[name].shape)
        return {dim: self._label_axis(Axis(name, dim), size) for dim, size in enumerate(shape) if size > 1}

    def _label_axis(self, axis: Axis, size: int) -> Line:
        line = self.number(size)
        self.axes[int(line[0])] = axis
        return line
