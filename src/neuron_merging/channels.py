"""channels: which slices of which tensors stand and fall together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from neuron_merging.capture import Graph, Node, Ref, Shape
from neuron_merging.operators import ANY, FIXED, OPERATORS, Labels, Vector, unknown

HIDDEN = "hides the layers inside a no_grad or autocast block: take the block out of forward()"


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter or buffer.

    With `blocks` > 1 the axis is that of a grouped convolution's weight, seen as if the input
    channels of all groups lay one after the other.
    """

    tensor: str
    dim: int
    blocks: int = 1

    def expose(self, weight: Tensor) -> Tensor:
        """The weight with the channels of all blocks side by side along `dim`."""
        if self.blocks == 1:
            return weight
        rows, inside, *kernel = weight.shape
        split = weight.reshape(self.blocks, rows // self.blocks, inside, *kernel)
        return split.transpose(0, 1).reshape(rows // self.blocks, self.blocks * inside, *kernel)

    def restore(self, wide: Tensor) -> Tensor:
        """The inverse of `expose`, for any number of channels that the blocks share equally."""
        if self.blocks == 1:
            return wide
        rows, channels, *kernel = wide.shape
        split = wide.reshape(rows, self.blocks, channels // self.blocks, *kernel)
        return split.transpose(0, 1).reshape(rows * self.blocks, channels // self.blocks, *kernel)


@dataclass(frozen=True)
class Producer:
    """A layer whose output channels belong to a group; `rows[u]` are unit u's (-1: no more)."""

    node: Node
    axis: Axis
    bias: str | None
    rows: Vector = field(repr=False)


@dataclass(frozen=True)
class Consumer:
    """A layer that sums over the channels of a group; `columns[u]` are unit u's (-1: no more).

    `axis` is None where the weight cannot be rewritten: it is computed from others, or it is also
    the weight that makes these channels. A grouped layer reads its channels in separate `blocks`.
    """

    node: Node
    input: str
    axis: Axis | None
    columns: Vector = field(repr=False)
    blocks: int = 1


@dataclass(frozen=True)
class Refusal:
    """Channels that cannot be removed, and the operator that says so."""

    layer: str
    channels: int
    why: str
    operator: str
    place: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.operator} {self.why}" + (f" ({self.place})" if self.place else "")


@dataclass(frozen=True)
class Group:
    """Channels that one decision covers: units to keep or to remove.

    Units are numbered through the whole network; this group's are `start … start + size - 1`.
    `cuts[axis][i]` is the unit at index i of that axis (-1: not of this group). `cells` gives each
    unit's cell: every cell must keep equally many. `locked` units always stay.
    """

    name: str
    start: int
    size: int
    producers: tuple[Producer, ...]
    consumers: tuple[Consumer, ...]
    cuts: Mapping[Axis, Vector] = field(repr=False)
    cells: Vector = field(repr=False)
    locked: Vector = field(repr=False)
    residual: bool = False
    mixing: tuple[Node, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer_name(p.node, p.axis) for p in self.producers))


@dataclass(frozen=True)
class Channels:
    """The analysis of one graph: groups, refusals, and the units that every value carries.

    `units[value][dim]` gives the unit at each index (-1: none). `doubts` are operators whose sizes
    may be constants of the model's own code. `layers` are all layers that make channels.
    """

    groups: tuple[Group, ...]
    refusals: tuple[Refusal, ...]
    doubts: tuple[Node, ...]
    units: Mapping[str, Mapping[int, Vector]] = field(repr=False)
    layers: tuple[str, ...] = ()

    def carries(self, value: str, group: Group) -> bool:
        inside = (
            ((v >= group.start) & (v < group.start + group.size)).any() for v in self.units.get(value, {}).values()
        )
        return any(inside)

    def new_shape(self, value: str, shape: Shape, kept: Vector) -> Shape:
        """The shape of a value once only the units with `kept[unit]` remain."""
        size = list(shape)
        for dim, units in self.units.get(value, {}).items():
            size[dim] = int((kept[units] | (units < 0)).sum())
        return tuple(size)


def layer_name(node: Node, axis: Axis) -> str:
    """The dotted path of the layer: its module, or its weight where it is called as a function."""
    owner = axis.tensor.rpartition(".")[0]
    standard = axis.tensor.endswith(".weight")
    return owner if standard and owner else (axis.tensor if not standard else node.module or axis.tensor)


@dataclass
class _Made:
    node: Node
    vector: Vector
    weight: Ref
    bias: Any


@dataclass
class _Taken:
    node: Node
    input: str
    vector: Vector
    own: Vector
    blocks: int


@dataclass
class Walk:
    """Carries labels through a graph and records which of them belong together."""

    graph: Graph
    labels: dict[str, Labels | list[Labels]] = field(default_factory=dict)
    axes: dict[int, Axis] = field(default_factory=dict)
    count: int = 1
    edges: list[tuple[Vector, Vector]] = field(default_factory=list)
    refusals: list[tuple[Vector, Node, str]] = field(default_factory=list)
    balances: list[tuple[Vector, int]] = field(default_factory=list)
    sums: list[Vector] = field(default_factory=list)
    mixing: list[tuple[Vector, Node]] = field(default_factory=list)
    made: list[_Made] = field(default_factory=list)
    taken: list[_Taken] = field(default_factory=list)
    doubts: dict[str, Node] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    _blocked: dict[Axis, Vector] = field(default_factory=dict)
    _stored: dict[str, Labels] = field(default_factory=dict)

    def run(self) -> Walk:
        self.weights |= set(self.graph.parameters)
        for node in self.graph.nodes:
            if node.inplace and self._writes_into_part(node):
                for ref in node.refs():
                    for vector in self.of(ref).values():
                        self.refuse(vector, node, "writes in place into a part of a tensor")
            row = OPERATORS.get(node.op)
            self.labels[node.name] = (row.rule if row else unknown)(self, node)
            refs = list(node.refs())
            if refs and all(ref.name in self.weights or ref.name in self.graph.constants for ref in refs):
                self.weights.add(node.name)
        self._refuse_outputs()
        return self

    def _writes_into_part(self, node: Node) -> bool:
        """An in-place operator on a view of something that is read again later."""
        name = next(node.refs()).name
        while (view := self.graph.node(name)) is not None and self._is_view(view):
            name = next(view.refs()).name
            later = self.graph.users(name)
            if any(self._order[user.name] > self._order[node.name] for user in later):
                return True
        return False

    def _is_view(self, node: Node) -> bool:
        row = OPERATORS.get(node.op)
        return bool(row and row.kind == "move") and node.op not in ("clone", "contiguous", "cat", "stack")

    @cached_property
    def _order(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.graph.nodes)}

    def _refuse_outputs(self) -> None:
        end = Node("output", "output", lambda: None, {}, (), False, "", "", "")
        for ref in self.graph.outputs:
            for vector in self.of(ref).values():
                self.refuse(vector, end, "is what the network returns")

    # what rules ask

    def of(self, ref: Any) -> Labels:
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
        return self.graph.shapes.get(ref.name, ()) if isinstance(ref, Ref) else ()

    def is_weight(self, ref: Any) -> bool:
        return isinstance(ref, Ref) and ref.name in self.weights

    def dtype_is_bool(self, ref: Any) -> bool:
        if not isinstance(ref, Ref):
            return False
        node = self.graph.node(ref.name)
        logical = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan")
        known = self.graph.constants.get(ref.name)
        if known is None and ref.name in self.graph.parameters:
            known = self.graph.tensors.get(self.graph.parameters[ref.name])
        return (known is not None and known.dtype.itemsize == 1) or (node is not None and node.op in logical)

    # what rules tell

    def unite(self, a: Vector, b: Vector, node: Node | None = None) -> None:
        meant = (a != ANY) & (b != ANY) & (a != b)
        fixed = meant & ((a == FIXED) | (b == FIXED))
        if fixed.any() and node is not None:
            self.refuse(np.maximum(a, b)[fixed], node, "combines channels with the input or a constant of fixed size")
            meant &= ~fixed
        if meant.any():
            self.edges.append((a[meant], b[meant]))

    def refuse(self, vector: Vector, node: Node, why: str) -> None:
        real = vector[vector > FIXED]
        if len(real):
            self.refusals.append((real, node, why))

    def balance(self, vector: Vector, blocks: int) -> None:
        if (vector > FIXED).any() and blocks > 1:
            self.balances.append((vector, blocks))

    def doubt(self, node: Node) -> None:
        self.doubts[node.name] = node

    def note_sum(self, refs: Sequence[Ref]) -> None:
        """Values that are added to each other: residual streams."""
        carrying = [self.of(ref) for ref in refs if any((v > FIXED).any() for v in self.of(ref).values())]
        if len(refs) > 1 and carrying:
            self.sums += [vector for labels in carrying for vector in labels.values()]

    def note_mixing(self, vector: Vector, node: Node) -> None:
        self.mixing.append((vector, node))

    def produce(self, node: Node, vector: Vector, weight: Ref, bias: Any) -> None:
        """These labels are the output channels of a layer with stored weights."""
        if self.is_weight(weight):
            self.made.append(_Made(node, vector, weight, bias))

    def consume(self, node: Node, x: Ref, taken: Vector, weight: Ref, axis: int, blocks: int = 1) -> None:
        """Input channels meet the weight's own labels: they will be cut together."""
        own = self.blocked(weight, axis, blocks) if blocks > 1 and axis == 1 else self.of(weight).get(axis)
        if own is None:
            if len(taken) > 1:
                self.refuse(taken, node, "has weights that are not parameters")
            return
        if (taken == ANY).any():
            taken = np.where(taken == ANY, FIXED, taken)
        self.unite(own, taken, node)
        self.taken.append(_Taken(node, x.name, taken, own, blocks))

    def blocked(self, weight: Ref, dim: int, blocks: int) -> Vector | None:
        """Labels of a grouped weight's axis, all groups' channels one after the other."""
        name = self.graph.parameters.get(weight.name)
        if name is None:
            return None
        axis = Axis(name, dim, blocks)
        if axis not in self._blocked:
            self._blocked[axis] = self._label_axis(axis, self.shape(weight)[dim] * blocks)
        return self._blocked[axis]

    def _label_parameter(self, name: str) -> Labels:
        shape = tuple(self.graph.tensors[name].shape)
        return {dim: self._label_axis(Axis(name, dim), size) for dim, size in enumerate(shape) if size > 1}

    def _label_axis(self, axis: Axis, size: int) -> Vector:
        start, self.count = self.count, self.count + size
        self.axes[start] = axis
        return np.arange(start, start + size)


def find_channels(
    graph: Graph, refused: Mapping[str, str] | None = None, held: Mapping[str, str] | None = None
) -> Channels:
    """Groups of channels that can be removed, and refusals with reasons.

    `refused` names nodes (and why) whose labels must not be removed, beyond what rules find; of those that `held`
    names, only the labels of the result.
    """
    walk = Walk(graph).run()
    refused, held = refused or {}, held or {}
    for node in graph.nodes:
        if node.name in refused:
            _refuse(walk, node, [Ref(node.name), *node.refs()], refused[node.name])
        if node.name in held:
            _refuse(walk, node, [Ref(node.name)], held[node.name])
    return _Assembly(walk).channels()


def _refuse(walk: Walk, node: Node, values: Iterable[Ref], why: str) -> None:
    for ref in values:
        if ref.name not in walk.graph.parameters:
            for vector in _all_vectors(walk.labels.get(ref.name, {})):
                walk.refuse(vector, node, why)


def _all_vectors(labels: Labels | list[Labels]) -> Iterable[Vector]:
    for part in labels if isinstance(labels, list) else [labels]:
        yield from part.values()


def _components(count: int, edges: Sequence[tuple[Vector, Vector]]) -> Vector:
    """The smallest label of each label's class (hooking and pointer jumping, vectorised)."""
    root = np.arange(count)
    if not edges:
        return root
    a = np.concatenate([edge[0] for edge in edges])
    b = np.concatenate([edge[1] for edge in edges])
    while True:
        low, high = np.minimum(root[a], root[b]), np.maximum(root[a], root[b])
        if (low == high).all():
            return root
        np.minimum.at(root, high, low)
        while (root[root] != root).any():
            root = root[root]


class _Assembly:
    """Turns the records of a walk into groups."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.root = _components(walk.count, walk.edges)
        self.refused = np.zeros(walk.count, bool)
        self.refused[FIXED] = True
        for vector, _, _ in walk.refusals:
            self.refused[self.root[vector]] = True
        self.family = self._families()

    def _families(self) -> Vector:
        """Units that share a producer, or a balance, belong to one group."""
        links = [(self.root[m.vector][:-1], self.root[m.vector][1:]) for m in self.walk.made if len(m.vector) > 1]
        for vector, _ in self.walk.balances:
            real = self.root[vector[vector > FIXED]]
            links.append((real[:-1], real[1:]))
        return _components(self.walk.count, links)

    def channels(self) -> Channels:
        groups: list[Group] = []
        refusals: list[Refusal] = []
        made: dict[int, list[_Made]] = defaultdict(list)
        for record in self.walk.made:
            made[int(self.family[self.root[record.vector[0]]])].append(record)
        for family, records in made.items():
            units = self._units(records)
            if len(units) < 2 or self.refused[units].all():
                refusals += self._refusals(records, units)
                continue
            group = self._group(family, units, records, sum(g.size for g in groups))
            if isinstance(group, Refusal):
                refusals.append(group)
            else:
                taken = sum(other.layers == group.layers for other in groups)
                groups.append(replace(group, name=f"{group.name}#{taken + 1}") if taken else group)
                if group.locked.any():
                    refusals += self._refusals(records, units[self.refused[units]])
        refusals += [Refusal(node.module or "forward", 0, HIDDEN, node.op, node.place) for node in self._hidden()]
        layers = [self._layer(record) for record in self.walk.made]
        return Channels(
            tuple(groups),
            tuple(refusals),
            tuple(self.walk.doubts.values()),
            self._unit_maps(groups),
            tuple(dict.fromkeys(layers)),
        )

    def _hidden(self) -> list[Node]:
        return [node for node in self.walk.graph.nodes if node.op.startswith("wrap_with_")]

    def _units(self, records: Sequence[_Made]) -> Vector:
        roots = np.concatenate([self.root[record.vector] for record in records])
        _, first = np.unique(roots, return_index=True)
        return roots[np.sort(first)]

    def _layer(self, record: _Made) -> str:
        return layer_name(record.node, self._axis_of(record) or Axis(record.node.module, 0))

    def _axis_of(self, record: _Made) -> Axis | None:
        """The stored tensor whose slices are this producer's channels."""
        wanted = self.root[record.vector]
        for ref in self._stored(record.weight):
            for axis, start, size in self._axes_of(self.walk.graph.parameters[ref]):
                if size == len(wanted) and (self.root[start : start + size] == wanted).all():
                    if len(self.walk.graph.tensors[axis.tensor].shape) > 1:
                        return axis
        return None

    def _stored(self, weight: Ref) -> list[str]:
        """Parameters from which a weight is computed (usually just itself)."""
        if weight.name in self.walk.graph.parameters:
            return [weight.name]
        node = self.walk.graph.node(weight.name)
        return [name for ref in node.refs() for name in self._stored(ref)] if node else []

    def _axes_of(self, tensor: str) -> Iterable[tuple[Axis, int, int]]:
        shape = self.walk.graph.tensors[tensor].shape
        for start, axis in self._by_tensor.get(tensor, ()):
            yield axis, start, int(shape[axis.dim]) * axis.blocks

    @cached_property
    def _family_axes(self) -> dict[int, list[tuple[Axis, int, int]]]:
        found: dict[int, list[tuple[Axis, int, int]]] = defaultdict(list)
        for start, axis in self.walk.axes.items():
            size = int(self.walk.graph.tensors[axis.tensor].shape[axis.dim]) * axis.blocks
            for family in np.unique(self.family[self.root[start : start + size]]).tolist():
                found[family].append((axis, start, size))
        return found

    @cached_property
    def _by_tensor(self) -> dict[str, list[tuple[int, Axis]]]:
        found: dict[str, list[tuple[int, Axis]]] = defaultdict(list)
        for start, axis in self.walk.axes.items():
            found[axis.tensor].append((start, axis))
        return found

    def _refusals(self, records: Sequence[_Made], units: Vector) -> list[Refusal]:
        chosen = np.zeros(self.walk.count, bool)
        chosen[units] = True
        layer = self._layer(records[0])
        found = [
            Refusal(layer, int(chosen[np.unique(self.root[vector])].sum()), why, node.op, node.place)
            for vector, node, why in self.walk.refusals
            if chosen[self.root[vector]].any()
        ]
        if not found:
            several = any(len(record.vector) > 1 for record in records)
            why = "makes channels that all stand and fall together" if several else "has a single channel"
            found = [Refusal(layer, len(units), why, records[0].node.op, records[0].node.place)]
        return list(dict.fromkeys(found))[:1]

    def _group(self, family: int, units: Vector, records: Sequence[_Made], start: int) -> Group | Refusal:
        number = np.full(self.walk.count, -1)
        number[units] = np.arange(len(units))
        cells = self._cells(units, number)
        if cells is None:
            node = records[0].node
            why = "feeds grouped layers whose groups cannot shrink together"
            return Refusal(self._layer(records[0]), len(units), why, node.op, node.place)
        cuts = {}
        for axis, first, length in self._family_axes[family]:
            index = number[self.root[first : first + length]]
            if (index >= 0).any():
                cuts[axis] = index
        producers = [p for record in records if (p := self._producer(record, number, len(units)))]
        return Group(
            name=self._layer(records[0]),
            start=start,
            size=len(units),
            producers=tuple(_distinct(producers)),
            consumers=tuple(self._consumers(number, len(units))),
            cuts=cuts,
            cells=cells,
            locked=self.refused[units],
            residual=any((number[self.root[v]] >= 0).any() for v in self.walk.sums),
            mixing=tuple(node for v, node in self.walk.mixing if (number[self.root[v]] >= 0).any()),
        )

    def _cells(self, units: Vector, number: Vector) -> Vector | None:
        """Each unit's cell under all balances, or None where no equal cells exist."""
        cells = np.zeros(len(units), int)
        for vector, blocks in self.walk.balances:
            member = number[self.root[vector]].reshape(blocks, -1)
            if not (member >= 0).any():
                continue
            count = np.zeros((len(units), blocks), int)
            for block, row in enumerate(member):
                np.add.at(count[:, block], row[row >= 0], 1)
            if (count == count[:, :1]).all():
                continue
            if (member < 0).any() or not ((count > 0).sum(1) == 1).all() or len(set(count.max(1))) != 1:
                return None
            cells = cells * blocks + count.argmax(1)
        _, cells, sizes = np.unique(cells, return_inverse=True, return_counts=True)
        return cells if len(set(sizes)) == 1 else None

    def _producer(self, record: _Made, number: Vector, size: int) -> Producer | None:
        axis = self._axis_of(record)
        if axis is None:
            return None
        bias = self.walk.graph.parameters.get(record.bias.name) if isinstance(record.bias, Ref) else None
        return Producer(record.node, axis, bias, _positions(number[self.root[record.vector]], size))

    def _consumers(self, number: Vector, size: int) -> Iterable[Consumer]:
        for record in self.walk.taken:
            index = number[self.root[record.vector]]
            if (index >= 0).any():
                axis = self._axis_at(record.own)
                axis = None if axis in self._made_axes else axis
                yield Consumer(record.node, record.input, axis, _positions(index, size), record.blocks)

    @cached_property
    def _made_axes(self) -> set[Axis | None]:
        return {self._axis_of(record) for record in self.walk.made} - {None}

    def _axis_at(self, own: Vector) -> Axis | None:
        """The stored axis that these labels are, if they are one in its own order."""
        axis = self.walk.axes.get(int(own[0]))
        return axis if axis and (np.diff(own) == 1).all() else None

    def _unit_maps(self, groups: Sequence[Group]) -> dict[str, dict[int, Vector]]:
        """For each value, dimension → global unit number (-1: none), numbered group after group."""
        overall = np.full(self.walk.count, -1)
        for group in groups:
            for axis, index in group.cuts.items():
                first = next(s for s, a in self._by_tensor[axis.tensor] if a == axis)
                real = index >= 0
                overall[self.root[first : first + len(index)][real]] = group.start + index[real]
        maps: dict[str, dict[int, Vector]] = {}
        for node in self.walk.graph.nodes:
            labels = self.walk.labels[node.name]
            if isinstance(labels, dict):
                maps[node.name] = {
                    dim: np.where(v > FIXED, overall[self.root[np.maximum(v, 0)]], -1) for dim, v in labels.items()
                }
        return maps


def _positions(index: Vector, size: int) -> Vector:
    """One row per unit with the positions at which it stands, filled up with -1."""
    order = np.argsort(index, kind="stable")
    order = order[index[order] >= 0]
    units = index[order]
    counts = np.bincount(units, minlength=size)
    table = np.full((size, int(counts.max(initial=0))), -1)
    table[units, np.arange(len(units)) - (np.cumsum(counts) - counts)[units]] = order
    return table


def _distinct(producers: Sequence[Producer]) -> list[Producer]:
    """A layer that is called twice is one producer."""
    return list({producer.axis: producer for producer in reversed(producers)}.values())[::-1]
