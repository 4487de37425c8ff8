"""What if groups kept fewer channels? The whole network's answer, without a smaller network being made.

The original runs at full size with the columns of removed channels zero and those of kept ones fitted anew. For
one group that differs from a base, only what comes behind it is computed again. Statistics are gathered once for
all choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.classes import class_scores
from neuron_merging.channels.groups import Axis, Group
from neuron_merging.channels.labels import Mask, Scores, Units
from neuron_merging.channels.masks import masks_of, over_kept, staying
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Selection
from neuron_merging.choosing.ratios import keep_count
from neuron_merging.graph.execution import Execution
from neuron_merging.graph.macs import node_macs
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Graph, Node
from neuron_merging.mergers._fit import merges_of, solved
from neuron_merging.mergers.interface import Merged
from neuron_merging.statistics.covariance import Gathered, gather
from neuron_merging.statistics.divergence import Divergence, unsquashed
from neuron_merging.statistics.uses import WIDEST, Use, find_uses

Counts = Mapping[str, int]
"""How many units each group keeps, by the group's name."""


@dataclass(frozen=True)
class Change:
    """New values of tensors at full size, and biases that layers do not have, by the node that gets one."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    errors: tuple[float, ...] = ()
    """Shares of their outputs' variance that the readers are expected to lose."""

    def __or__(self, other: Change) -> Change:
        tensors, biases = {**self.tensors, **other.tensors}, {**self.biases, **other.biases}
        return Change(tensors, biases, (*self.errors, *other.errors))


@dataclass
class WhatIf:
    """A network, probes, and an order in which each group's channels go."""

    analysis: Analysis
    probes: Sequence[tuple[Any, ...]]
    scores: Mapping[str, Scores]
    fit: Sequence[tuple[Any, ...]] = ()
    """Inputs that merges are fitted on, if there are others than the probes: few of those explain themselves."""
    ridge: float = 0.01
    restore: bool = True
    merge: bool = True
    """Whether kept columns are fitted anew; otherwise the removed ones are zero, and that is all."""
    biases: bool = True
    """Whether layers that have no bias may be given one."""
    temperature: float = 1.0
    """Of the divergences of scores of classes."""
    passes: float = 0.0
    """How much was computed so far, in forward passes of all probes."""
    _changes: dict[tuple[Axis, tuple[int, ...]], Change] = field(default_factory=dict, repr=False)

    @cached_property
    def groups(self) -> dict[str, Group]:
        return {group.name: group for group in self.analysis.channels.groups if group.name in self.scores}

    def kept(self, counts: Counts) -> dict[str, Units]:
        """The units that stay, for groups that lose any."""
        found = {name: keep_count(self.groups[name], self.scores[name], count) for name, count in counts.items()}
        return {name: units for name, units in found.items() if len(units) < self.groups[name].size}

    @torch.no_grad()
    def divergence(self, counts: Counts) -> float:
        """Of the whole network with these counts from the original."""
        return self._swept(counts, {})[0]

    @torch.no_grad()
    def around(self, counts: Counts, others: Mapping[str, Iterable[int]]) -> dict[tuple[str, int], float]:
        """The divergence where one group at a time keeps another number than in `counts`."""
        return self._swept(counts, others)[1]

    @torch.no_grad()
    def local_error(self, name: str, count: int) -> float:
        """The mean share of variance that the group's readers lose if it alone keeps so many units."""
        errors = self._change({name: count}).errors
        return sum(errors) / len(errors) if errors else 0.0

    @torch.no_grad()
    def harmless(self, name: str, count: int, least: float) -> bool:
        """Whether the group's readers lose nothing to speak of, as far as all of them are known."""
        changed = self._change({name: count})
        return self.merge and name not in self._masked and bool(changed.errors) and max(changed.errors) <= least

    def behind(self, name: str) -> float:
        """The share of the network's work that a cut of this group makes to be done again."""
        nodes = self.analysis.graph.nodes
        (start,) = self._starts(self.analysis.graph, [(name, 0)])
        return sum(self._costs[node.name] for node in nodes[start:]) / max(1, sum(self._costs.values()))

    @property
    def classifies(self) -> bool:
        """Whether all answers are scores of classes, so that divergences are Kullback-Leibler's."""
        return len(self._divergence().classes) == len(self._originals[0])

    @cached_property
    def new_biases(self) -> int:
        """Entries of biases that merging makes at most, for layers that have none and no norm behind them."""
        one = {name: 1 for name in self.groups}
        made = self._change(one).biases
        tensors = {consumer.node.name: axis.tensor for axis, use in self._uses.items() for _, consumer in use.consumers}
        return sum({tensors[node]: len(bias) for node, bias in made.items()}.values())

    # Statistics

    @cached_property
    def _whole(self) -> Selection:
        return Selection(self.analysis, {name: np.arange(group.size) for name, group in self.groups.items()})

    @cached_property
    def _uses(self) -> dict[Axis, Use]:
        return {use.axis: use for use in find_uses(self._whole) if use.width <= WIDEST}

    @cached_property
    def _known(self) -> dict[Axis, list[Gathered]]:
        self.passes += 1
        return gather(self._whole, list(self._uses.values()), self.fit or self.probes)

    @cached_property
    def _masked(self) -> frozenset[str]:
        """Groups whose removed channels must be set to zero: not every reader's columns can be."""
        return frozenset(
            name
            for name, group in self.groups.items()
            if group.mixing or not group.consumers or any(c.axis not in self._uses for c in group.consumers)
        )

    def _zeroed(self, counts: Counts) -> Mask:
        kept = self.kept({name: count for name, count in counts.items() if name in self._masked})
        return staying(self.analysis.channels, kept)

    # What changes

    def _change(self, counts: Counts) -> Change:
        kept = self.kept(counts)
        found = Change()
        for use in self._uses.values():
            if any(name in kept for name, _ in use.consumers):
                found |= self._of_use(use, kept)
        return found

    def _of_use(self, use: Use, kept: Mapping[str, Units]) -> Change:
        """The new columns of one weight, fitted to what it reads."""
        names = list(dict.fromkeys(name for name, _ in use.consumers))
        key = use.axis, tuple(len(kept[name]) if name in kept else -1 for name in names)
        if key not in self._changes:
            self._changes[key] = self._fitted(use, {name: kept[name] for name in names if name in kept})
        return self._changes[key]

    def _fitted(self, use: Use, kept: Mapping[str, Units]) -> Change:
        own = replace(use, stays=self._stays(use, kept))
        selection = Selection(self.analysis, kept, new_biases=self.biases)
        weight = selection.tensor(use.axis.tensor)
        if not self.merge:
            return Change({use.axis.tensor: _without(own, weight, self.analysis.graph.tensors[use.axis.tensor].dtype)})
        pairs = zip(own.matrices(weight), self._known[use.axis], strict=True)
        joints = [known.joint(matrix, own.kept(block)) for block, (matrix, known) in enumerate(pairs)]
        merged = merges_of(selection, own, solved(selection, own, joints, self.ridge, self.restore, set()), set())
        return _scattered(own, merged, weight, self.analysis.graph)

    def _stays(self, use: Use, kept: Mapping[str, Units]) -> np.ndarray:
        stays = np.ones(len(use.stays), bool)
        for name, units in kept.items():
            removed = np.setdiff1d(np.arange(self.groups[name].size), units)
            stays &= ~np.isin(self.groups[name].cuts[use.axis], removed)
        return stays

    # Running

    def _swept(self, counts: Counts, others: Mapping[str, Iterable[int]]) -> tuple[float, dict[tuple[str, int], float]]:
        base = self._change(counts)
        wanted = [(name, count) for name, choices in others.items() for count in choices]
        varied = {(name, count): self._change({**counts, name: count}) for name, count in wanted}
        total, each = self._divergence(), {key: self._divergence() for key in wanted}
        for number, batch in enumerate(self.probes):
            graph = unsquashed(self.analysis.graph_for(batch))
            sweep = _Sweep(self.analysis, graph, batch, base, self._zeroed(counts), self._costs)
            starts = self._starts(graph, wanted)
            work = len(self.probes) * self._work(graph, starts)
            for i, node in enumerate(graph.nodes):
                for key in starts.get(i, ()):
                    progress.tell("trying cuts", number * work // len(self.probes) + sweep.computed, work)
                    outputs = sweep.forked(i, varied[key], self._zeroed({**counts, key[0]: key[1]}))
                    each[key].add(self._originals[number], outputs)
                sweep.step(node)
            total.add(self._originals[number], sweep.outputs())
            self.passes += sweep.computed / max(1, sum(self._costs.values()) * len(self.probes))
        return total.value, {key: own.value for key, own in each.items()}

    def _starts(self, graph: Graph, wanted: Sequence[tuple[str, int]]) -> dict[int, list[tuple[str, int]]]:
        """By the number of the node from which on a variation differs."""
        place = {node.name: i for i, node in enumerate(graph.nodes)}
        found: dict[int, list[tuple[str, int]]] = {}
        for name, count in wanted:
            group = self.groups[name]
            plain = all(c.axis in self._uses for c in group.consumers) and not group.mixing
            nodes = (
                [c.node for c in group.consumers] if plain and group.consumers else [p.node for p in group.producers]
            )
            found.setdefault(min((place[n.name] for n in nodes), default=0), []).append((name, count))
        return found

    def _work(self, graph: Graph, starts: Mapping[int, Sequence[tuple[str, int]]]) -> int:
        """Multiply-accumulates of a base and all that branches off, by the graph of the example."""
        costs = [self._costs[node.name] for node in graph.nodes]
        return sum(costs) + sum(len(keys) * sum(costs[i:]) for i, keys in starts.items())

    def _divergence(self) -> Divergence:
        shapes = [tuple(value.shape) for value in self._originals[0]]
        return Divergence(class_scores(unsquashed(self.analysis.graph), shapes), self.temperature)

    @cached_property
    def _costs(self) -> Counter[str]:
        return Counter(node_macs(self.analysis.graph))  # a batch of another size may need a node more

    @cached_property
    def _originals(self) -> list[list[Tensor]]:
        """What the original answers, batch by batch."""
        found = []
        for batch in self.probes:
            graph = unsquashed(self.analysis.graph_for(batch))
            run = Execution(graph, flat(batch), graph.tensors)
            for node in graph.nodes:
                run.step(node, node.compute(run.arguments(node)))
            found.append([value for value in run.outputs() if isinstance(value, Tensor)])
        self.passes += 1
        return found


def _without(use: Use, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight at full size with zeros for the columns that go."""
    gone = torch.from_numpy(~use.stays).nonzero()[:, 0].to(weight.device)
    return use.axis.restore(use.axis.expose(weight).index_fill(use.axis.dim, gone, 0)).to(dtype)


def _scattered(use: Use, merged: Merged, weight: Tensor, graph: Graph) -> Change:
    """A fit's columns back at their places of the whole weight, zero elsewhere."""
    first = merged.merges[0]
    wide = use.axis.expose(weight)
    stay = torch.from_numpy(use.stays).nonzero()[:, 0].to(weight.device)
    columns = wide.index_select(use.axis.dim, stay) if first.columns is None else first.columns
    full = torch.zeros_like(wide).index_copy_(use.axis.dim, stay, columns.to(wide))
    stored = graph.tensors[use.axis.tensor]
    tensors = {use.axis.tensor: use.axis.restore(full).to(stored.dtype)}
    tensors |= {name: value.to(graph.tensors[name].dtype) for name, value in merged.tensors.items()}
    nodes = [consumer.node.name for _, consumer in use.consumers]
    biases = {} if first.bias is None else dict.fromkeys(nodes, first.bias.to(stored))
    return Change(tensors, biases, () if first.error is None else (first.error,))


class _Sweep:
    """The base network on one batch, node by node, from which others branch off."""

    def __init__(
        self,
        analysis: Analysis,
        graph: Graph,
        batch: tuple[Any, ...],
        base: Change,
        stays: Mask,
        costs: Mapping[str, int],
    ) -> None:
        self._analysis, self._graph, self._base = analysis, graph, base
        self._costs = costs
        self._run = Execution(graph, flat(batch), {**graph.tensors, **base.tensors})
        self._stays = stays
        self.computed = 0
        self._values: dict[str, list[str]] = {}
        for value, name in graph.parameters.items():
            self._values.setdefault(name, []).append(value)

    def step(self, node: Node) -> None:
        self._run.step(node, self._computed(node, self._run.arguments(node), self._base, self._stays))

    def outputs(self) -> list[Tensor]:
        return [value for value in self._run.outputs() if isinstance(value, Tensor)]

    def forked(self, start: int, change: Change, stays: Mask) -> list[Tensor]:
        """The outputs with other tensors from this node on; the base is left as it is."""
        branch = self._run.fork()
        names = {*change.tensors, *self._base.tensors}
        for name in names:
            for value in self._values.get(name, ()):
                if value in branch.values:
                    branch.values[value] = change.tensors.get(name, self._graph.tensors[name])
        for node in self._graph.nodes[start:]:
            args = branch.arguments(node)
            if node.inplace:
                args = {key: value.clone() if isinstance(value, Tensor) else value for key, value in args.items()}
            branch.step(node, self._computed(node, args, change, stays))
        return [value for value in branch.outputs() if isinstance(value, Tensor)]

    def _computed(self, node: Node, args: dict[str, Any], change: Change, stays: Mask) -> Any:
        self.computed += self._costs[node.name]
        masks = masks_of(self._analysis.channels, stays, node.name)
        value = over_kept(self._analysis.channels, stays, node, args, masks)
        for dim, stay in masks.items():
            value = value * torch.from_numpy(stay).to(value.device).view(-1, *(1 for _ in value.shape[dim + 1 :]))
        bias = change.biases.get(node.name)
        return value if bias is None else value + _along(bias, value, node)


def _along(bias: Tensor, value: Tensor, node: Node) -> Tensor:
    """A bias as it is added to the output of a layer."""
    trailing = value.ndim - 1 - (1 if row_of(node).convolves and value.ndim > 2 else value.ndim - 1)
    return bias.view(-1, *(1 for _ in range(trailing)))
