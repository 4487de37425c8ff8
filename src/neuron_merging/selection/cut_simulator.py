"""Simulate cuts: how far the outputs move if groups keep fewer channels, without building the smaller network. The
original runs at full size; columns of removed channels are zero, columns of kept ones are fitted anew. Where
one group differs from a base, only the operators downstream of it run again. Statistics are collected once for
all cuts.
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
from neuron_merging.calibration.consumer_weights import MAX_COVARIANCE_FEATURES, ConsumerWeight, find_consumer_weights
from neuron_merging.calibration.layer_stats import LayerStats, collect_layer_stats
from neuron_merging.calibration.output_divergence import Divergence, strip_output_activations
from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.groups import Axis, Group
from neuron_merging.channels.labels import Mask, Scores, Units
from neuron_merging.channels.logits_outputs import find_logits_outputs
from neuron_merging.channels.masks import build_keep_mask, compute_over_kept, get_value_masks
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.interpreter import Interpreter
from neuron_merging.graph.macs import count_node_macs
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.merging.fit import build_merges, solve_blocks
from neuron_merging.merging.protocol import MergeResult
from neuron_merging.selection.ratios import keep_units_by_count

KeptCounts = Mapping[str, int]
"""How many units each group keeps, by the group's name."""


@dataclass(frozen=True)
class TensorChanges:
    """New values of tensors at full size, and biases that layers do not have, by the node that gets one."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    errors: tuple[float, ...] = ()
    """Shares of their outputs' variance that the readers are expected to lose."""

    def __or__(self, other: TensorChanges) -> TensorChanges:
        tensors, biases = {**self.tensors, **other.tensors}, {**self.biases, **other.biases}
        return TensorChanges(tensors, biases, (*self.errors, *other.errors))


@dataclass
class CutSimulator:
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
    _changes: dict[tuple[Axis, tuple[int, ...]], TensorChanges] = field(default_factory=dict, repr=False)

    @cached_property
    def groups(self) -> dict[str, Group]:
        return {group.name: group for group in self.analysis.channels.groups if group.name in self.scores}

    def kept(self, counts: KeptCounts) -> dict[str, Units]:
        """The units that stay, for groups that lose any."""
        found = {
            name: keep_units_by_count(self.groups[name], self.scores[name], count) for name, count in counts.items()
        }
        return {name: units for name, units in found.items() if len(units) < self.groups[name].size}

    @torch.no_grad()
    def divergence(self, counts: KeptCounts) -> float:
        """Of the whole network with these counts from the original."""
        return self._run_variations(counts, {})[0]

    @torch.no_grad()
    def around(self, counts: KeptCounts, others: Mapping[str, Iterable[int]]) -> dict[tuple[str, int], float]:
        """The divergence where one group at a time keeps another number than in `counts`."""
        return self._run_variations(counts, others)[1]

    @torch.no_grad()
    def consumer_error(self, name: str, count: int) -> float:
        """The mean share of variance that the group's readers lose if it alone keeps so many units."""
        errors = self._compute_changes({name: count}).errors
        return sum(errors) / len(errors) if errors else 0.0

    @torch.no_grad()
    def is_harmless(self, name: str, count: int, least: float) -> bool:
        """Whether the group's readers lose nothing to speak of, as far as all of them are known."""
        changed = self._compute_changes({name: count})
        return self.merge and name not in self._masked_groups and bool(changed.errors) and max(changed.errors) <= least

    def downstream_share(self, name: str) -> float:
        """The share of the network's work that a cut of this group makes to be done again."""
        nodes = self.analysis.graph.nodes
        (start,) = self._starts(self.analysis.graph, [(name, 0)])
        return sum(self._costs[node.name] for node in nodes[start:]) / max(1, sum(self._costs.values()))

    @property
    def is_classifier(self) -> bool:
        """Whether all answers are scores of classes, so that divergences are Kullback-Leibler's."""
        return len(self._divergence().classes) == len(self._original_outputs[0])

    @cached_property
    def new_biases(self) -> int:
        """Entries of biases that merging makes at most, for layers that have none and no norm behind them."""
        one = {name: 1 for name in self.groups}
        made = self._compute_changes(one).biases
        tensors = {consumer.node.name: axis.tensor for axis, use in self._uses.items() for _, consumer in use.consumers}
        return sum({tensors[node]: len(bias) for node, bias in made.items()}.values())

    # Statistics

    @cached_property
    def _whole(self) -> Selection:
        return Selection(self.analysis, {name: np.arange(group.size) for name, group in self.groups.items()})

    @cached_property
    def _uses(self) -> dict[Axis, ConsumerWeight]:
        return {use.axis: use for use in find_consumer_weights(self._whole) if use.width <= MAX_COVARIANCE_FEATURES}

    @cached_property
    def _known(self) -> dict[Axis, list[LayerStats]]:
        self.passes += 1
        return collect_layer_stats(self._whole, list(self._uses.values()), self.fit or self.probes)

    @cached_property
    def _masked_groups(self) -> frozenset[str]:
        """Groups whose removed channels must be set to zero: not every reader's columns can be."""
        return frozenset(
            name
            for name, group in self.groups.items()
            if group.norms_across_channels
            or not group.consumers
            or any(c.axis not in self._uses for c in group.consumers)
        )

    def _zeroed(self, counts: KeptCounts) -> Mask:
        kept = self.kept({name: count for name, count in counts.items() if name in self._masked_groups})
        return build_keep_mask(self.analysis.channels, kept)

    # What changes

    def _compute_changes(self, counts: KeptCounts) -> TensorChanges:
        kept = self.kept(counts)
        found = TensorChanges()
        for use in self._uses.values():
            if any(name in kept for name, _ in use.consumers):
                found |= self._get_weight_changes(use, kept)
        return found

    def _get_weight_changes(self, use: ConsumerWeight, kept: Mapping[str, Units]) -> TensorChanges:
        """The new columns of one weight, fitted to what it reads."""
        names = list(dict.fromkeys(name for name, _ in use.consumers))
        key = use.axis, tuple(len(kept[name]) if name in kept else -1 for name in names)
        if key not in self._changes:
            self._changes[key] = self._fit_weight(use, {name: kept[name] for name in names if name in kept})
        return self._changes[key]

    def _fit_weight(self, use: ConsumerWeight, kept: Mapping[str, Units]) -> TensorChanges:
        own = replace(use, stays=self._stays(use, kept))
        selection = Selection(self.analysis, kept, new_biases=self.biases)
        weight = selection.tensor(use.axis.tensor)
        if not self.merge:
            return TensorChanges(
                {
                    use.axis.tensor: _zero_removed_columns(
                        own, weight, self.analysis.graph.tensors[use.axis.tensor].dtype
                    )
                }
            )
        pairs = zip(own.to_matrices(weight), self._known[use.axis], strict=True)
        joints = [known.to_fit_statistics(matrix, own.kept(block)) for block, (matrix, known) in enumerate(pairs)]
        merged = build_merges(
            selection, own, solve_blocks(selection, own, joints, self.ridge, self.restore, set()), set()
        )
        return _scatter_columns(own, merged, weight, self.analysis.graph)

    def _stays(self, use: ConsumerWeight, kept: Mapping[str, Units]) -> np.ndarray:
        stays = np.ones(len(use.stays), bool)
        for name, units in kept.items():
            removed = np.setdiff1d(np.arange(self.groups[name].size), units)
            stays &= ~np.isin(self.groups[name].cuts[use.axis], removed)
        return stays

    # Running

    def _run_variations(
        self, counts: KeptCounts, others: Mapping[str, Iterable[int]]
    ) -> tuple[float, dict[tuple[str, int], float]]:
        base = self._compute_changes(counts)
        wanted = [(name, count) for name, choices in others.items() for count in choices]
        varied = {(name, count): self._compute_changes({**counts, name: count}) for name, count in wanted}
        total, each = self._divergence(), {key: self._divergence() for key in wanted}
        for number, batch in enumerate(self.probes):
            graph = strip_output_activations(self.analysis.graph_for(batch))
            sweep = _BranchingRun(self.analysis, graph, batch, base, self._zeroed(counts), self._costs)
            starts = self._starts(graph, wanted)
            work = len(self.probes) * self._work(graph, starts)
            for i, node in enumerate(graph.nodes):
                for key in starts.get(i, ()):
                    progress.report_progress("trying cuts", number * work // len(self.probes) + sweep.computed, work)
                    outputs = sweep.run_branch(i, varied[key], self._zeroed({**counts, key[0]: key[1]}))
                    each[key].add(self._original_outputs[number], outputs)
                sweep.step(node)
            total.add(self._original_outputs[number], sweep.outputs())
            self.passes += sweep.computed / max(1, sum(self._costs.values()) * len(self.probes))
        return total.value, {key: own.value for key, own in each.items()}

    def _starts(self, graph: Graph, wanted: Sequence[tuple[str, int]]) -> dict[int, list[tuple[str, int]]]:
        """By the number of the node from which on a variation differs."""
        place = {node.name: i for i, node in enumerate(graph.nodes)}
        found: dict[int, list[tuple[str, int]]] = {}
        for name, count in wanted:
            group = self.groups[name]
            plain = all(c.axis in self._uses for c in group.consumers) and not group.norms_across_channels
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
        shapes = [tuple(value.shape) for value in self._original_outputs[0]]
        return Divergence(find_logits_outputs(strip_output_activations(self.analysis.graph), shapes), self.temperature)

    @cached_property
    def _costs(self) -> Counter[str]:
        return Counter(count_node_macs(self.analysis.graph))  # a batch of another size may need a node more

    @cached_property
    def _original_outputs(self) -> list[list[Tensor]]:
        """What the original answers, batch by batch."""
        found = []
        for batch in self.probes:
            graph = strip_output_activations(self.analysis.graph_for(batch))
            run = Interpreter(graph, flatten_inputs(batch), graph.tensors)
            for node in graph.nodes:
                run.step(node, node.compute(run.arguments(node)))
            found.append([value for value in run.outputs() if isinstance(value, Tensor)])
        self.passes += 1
        return found


def _zero_removed_columns(use: ConsumerWeight, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight at full size with zeros for the columns that go."""
    gone = torch.from_numpy(~use.stays).nonzero()[:, 0].to(weight.device)
    return use.axis.split_blocks(use.axis.join_blocks(weight).index_fill(use.axis.dim, gone, 0)).to(dtype)


def _scatter_columns(use: ConsumerWeight, merged: MergeResult, weight: Tensor, graph: Graph) -> TensorChanges:
    """A fit's columns back at their places of the whole weight, zero elsewhere."""
    first = merged.merges[0]
    wide = use.axis.join_blocks(weight)
    stay = torch.from_numpy(use.stays).nonzero()[:, 0].to(weight.device)
    columns = wide.index_select(use.axis.dim, stay) if first.columns is None else first.columns
    full = torch.zeros_like(wide).index_copy_(use.axis.dim, stay, columns.to(wide))
    stored = graph.tensors[use.axis.tensor]
    tensors = {use.axis.tensor: use.axis.split_blocks(full).to(stored.dtype)}
    tensors |= {name: value.to(graph.tensors[name].dtype) for name, value in merged.tensors.items()}
    nodes = [consumer.node.name for _, consumer in use.consumers]
    biases = {} if first.bias is None else dict.fromkeys(nodes, first.bias.to(stored))
    return TensorChanges(tensors, biases, () if first.error is None else (first.error,))


class _BranchingRun:
    """The base network on one batch, node by node, from which others branch off."""

    def __init__(
        self,
        analysis: Analysis,
        graph: Graph,
        batch: tuple[Any, ...],
        base: TensorChanges,
        stays: Mask,
        costs: Mapping[str, int],
    ) -> None:
        self._analysis, self._graph, self._base = analysis, graph, base
        self._costs = costs
        self._run = Interpreter(graph, flatten_inputs(batch), {**graph.tensors, **base.tensors})
        self._stays = stays
        self.computed = 0
        self._values: dict[str, list[str]] = {}
        for value, name in graph.parameters.items():
            self._values.setdefault(name, []).append(value)

    def step(self, node: Node) -> None:
        self._run.step(node, self._compute_node(node, self._run.arguments(node), self._base, self._stays))

    def outputs(self) -> list[Tensor]:
        return [value for value in self._run.outputs() if isinstance(value, Tensor)]

    def run_branch(self, start: int, change: TensorChanges, stays: Mask) -> list[Tensor]:
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
            branch.step(node, self._compute_node(node, args, change, stays))
        return [value for value in branch.outputs() if isinstance(value, Tensor)]

    def _compute_node(self, node: Node, args: dict[str, Any], change: TensorChanges, stays: Mask) -> Any:
        self.computed += self._costs[node.name]
        masks = get_value_masks(self._analysis.channels, stays, node.name)
        value = compute_over_kept(self._analysis.channels, stays, node, args, masks)
        for dim, stay in masks.items():
            value = value * torch.from_numpy(stay).to(value.device).view(-1, *(1 for _ in value.shape[dim + 1 :]))
        bias = change.biases.get(node.name)
        return value if bias is None else value + _align_bias(bias, value, node)


def _align_bias(bias: Tensor, value: Tensor, node: Node) -> Tensor:
    """A bias as it is added to the output of a layer."""
    trailing = value.ndim - 1 - (1 if lookup_operator(node).convolves and value.ndim > 2 else value.ndim - 1)
    return bias.view(-1, *(1 for _ in range(trailing)))
