"""From the records of a walk to groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from neuron_merging.channels.components import components
from neuron_merging.channels.groups import Axis, Channels, Consumer, Group, Producer, Refusal, layer_name
from neuron_merging.channels.labels import FIXED, Line
from neuron_merging.channels.stored import is_stored, uses_of
from neuron_merging.channels.walk import Made, Walk
from neuron_merging.graph.values import Node, Ref

HIDDEN = "hides the layers inside a no_grad or autocast block: take the block out of forward()"


class Assembly:
    """Turns the records of a walk into groups."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.root = components(walk.count, walk.edges)
        self.refused = np.zeros(walk.count, bool)
        self.refused[FIXED] = True
        for vector, _, _ in walk.refusals:
            self.refused[self.root[vector]] = True
        self.family = self._families()

    def _families(self) -> Line:
        """Units that share a producer, or a balance, belong to one group."""
        links = [(self.root[m.vector][:-1], self.root[m.vector][1:]) for m in self.walk.made if len(m.vector) > 1]
        for vector, _ in self.walk.balances:
            real = self.root[vector[vector > FIXED]]
            links.append((real[:-1], real[1:]))
        return components(self.walk.count, links)

    def channels(self) -> Channels:
        groups: list[Group] = []
        refusals: list[Refusal] = []
        made: dict[int, list[Made]] = defaultdict(list)
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

    def _units(self, records: Sequence[Made]) -> Line:
        roots = np.concatenate([self.root[record.vector] for record in records])
        _, first = np.unique(roots, return_index=True)
        return roots[np.sort(first)]

    def _layer(self, record: Made) -> str:
        return layer_name(record.node, self._axis_of(record) or Axis(record.node.module, 0))

    def _axis_of(self, record: Made) -> Axis | None:
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

    def _refusals(self, records: Sequence[Made], units: Line) -> list[Refusal]:
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

    def _group(self, family: int, units: Line, records: Sequence[Made], start: int) -> Group | Refusal:
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

    def _cells(self, units: Line, number: Line) -> Line | None:
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

    def _producer(self, record: Made, number: Line, size: int) -> Producer | None:
        axis = self._axis_of(record)
        if axis is None:
            return None
        bias = self.walk.graph.parameters.get(record.bias.name) if isinstance(record.bias, Ref) else None
        stored = is_stored(self.walk.graph, record.node, record.weight.name, axis)
        stored &= bias is not None or not isinstance(record.bias, Ref)
        return Producer(record.node, axis, bias, _positions(number[self.root[record.vector]], size), stored)

    def _consumers(self, number: Line, size: int) -> Iterable[Consumer]:
        for record in self.walk.taken:
            index = number[self.root[record.vector]]
            if (index >= 0).any():
                axis = self._axis_at(record.own)
                axis = axis if axis not in self._made_axes and axis in self._rewritable else None
                yield Consumer(record.node, record.input, axis, _positions(index, size), record.blocks)

    @cached_property
    def _rewritable(self) -> set[Axis]:
        """Axes of stored tensors that are read as they are, and only by layers to which they mean the same."""
        readers: dict[Axis, set[str]] = defaultdict(set)
        for record in self.walk.taken:
            axis = self._axis_at(record.own)
            if axis is not None and is_stored(self.walk.graph, record.node, record.weight, axis):
                readers[axis].add(record.node.name)
        return {axis for axis, nodes in readers.items() if uses_of(self.walk.graph, axis.tensor) <= nodes}

    @cached_property
    def _made_axes(self) -> set[Axis | None]:
        return {self._axis_of(record) for record in self.walk.made} - {None}

    def _axis_at(self, own: Line) -> Axis | None:
        """The stored axis that these labels are, if they are one in its own order."""
        axis = self.walk.axes.get(int(own[0]))
        return axis if axis and (np.diff(own) == 1).all() else None

    def _unit_maps(self, groups: Sequence[Group]) -> dict[str, dict[int, Line]]:
        """For each value, dimension → global unit number (-1: none), numbered group after group."""
        overall = np.full(self.walk.count, -1)
        for group in groups:
            for axis, index in group.cuts.items():
                first = next(s for s, a in self._by_tensor[axis.tensor] if a == axis)
                real = index >= 0
                overall[self.root[first : first + len(index)][real]] = group.start + index[real]
        maps: dict[str, dict[int, Line]] = {}
        for node in self.walk.graph.nodes:
            labels = self.walk.labels[node.name]
            if isinstance(labels, dict):
                maps[node.name] = {
                    dim: np.where(v > FIXED, overall[self.root[np.maximum(v, 0)]], -1) for dim, v in labels.items()
                }
        return maps


def _positions(index: Line, size: int) -> Line:
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
