"""Simulate cuts: measure how the outputs change if groups keep fewer channels, without building the smaller network.

The original runs at full size; columns of removed channels are zero, columns of kept ones are refitted. Where one group
differs from a base cut, only the operators downstream of it run again. Statistics are collected once for all cuts.
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
from neuron_merging.calibration.layer_stats import (
    MAX_COVARIANCE_FEATURES,
    ConsumerWeight,
    LayerStats,
    collect_layer_stats,
    find_consumer_weights,
    get_weight_input,
    split_by_memory,
)
from neuron_merging.calibration.output_divergence import Divergence, find_logits_outputs, strip_output_activations
from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.groups import Axis, Group, Mask, Scores, Units
from neuron_merging.channels.masked_run import GraphEdits, MaskedGraph, build_keep_mask
from neuron_merging.graph.example_inputs import flatten_inputs, flatten_outputs, infer_batch_size
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.interpreter import Interpreter
from neuron_merging.graph.macs import count_node_macs
from neuron_merging.graph.process_state import reuse_freed_memory
from neuron_merging.merging.fit import build_graph_edits, build_merges, count_new_bias_entries, solve_blocks
from neuron_merging.merging.protocol import MergeResult
from neuron_merging.selection.budget import LossCurve
from neuron_merging.selection.criteria import keep_units_by_count
from neuron_merging.selection.elimination import MAX_WINDOW_FEATURES, EliminationOrder

MIN_NEARBY_PROBES = 32
"""Probes on which small changes of a cut are compared, at least, if there are so many."""
KeptCounts = Mapping[str, int]
"""How many units each group keeps, by the group's name."""


@dataclass(frozen=True)
class CutEffect:
    """The changes that a cut makes to the consumers' tensors, and the expected relative errors of their outputs."""

    edits: GraphEdits = field(default_factory=GraphEdits)
    errors: tuple[float, ...] = ()

    def __or__(self, other: CutEffect) -> CutEffect:
        return CutEffect(self.edits | other.edits, (*self.errors, *other.errors))


@dataclass
class CutSimulator:
    """Measures cuts of one network on probes; `scores` decide which channels of a group are removed first."""

    analysis: Analysis
    probes: Sequence[tuple[Any, ...]]
    scores: Mapping[str, Scores]
    fit: Sequence[tuple[Any, ...]] = ()
    """Inputs that merges are fitted on, by default the probes. A fit looks too good on its own inputs if they are few.
    """
    ridge: float = 0.01
    restore: bool = True
    merge: bool = True
    """Whether kept columns are refitted; otherwise the cut is plain pruning."""
    biases: bool = True
    """Whether layers without a bias may get one."""
    orders: Mapping[str, EliminationOrder] = field(default_factory=dict, repr=False)
    """The elimination orders that the scores are the ranks of, if there are any: they hold the consumers' errors."""
    temperature: float = 1.0
    """Temperature of the divergence of class scores."""
    int8: bool = False
    """Whether the result will be an int8 file: budgets then count one byte per weight, and time such a file."""
    unfitted: frozenset[str] = frozenset()
    """Groups whose consumers will not be refitted, because nothing tells what they read."""
    passes: float = 0.0
    """Work done so far, in forward passes of all probes."""
    _effects: dict[tuple[Axis, tuple[int, ...]], CutEffect] = field(default_factory=dict, repr=False)
    loss_curves: dict[object, Mapping[str, LossCurve]] = field(default_factory=dict, repr=False)
    """Curves that were measured already, by how far groups may be cut."""

    @property
    def is_small(self) -> bool:
        """Whether the statistics are small enough to be kept for later searches."""
        return len(split_by_memory(self._whole, list(self._consumer_weights.values()))) == 1

    @cached_property
    def groups(self) -> dict[str, Group]:
        return {group.name: group for group in self.analysis.channels.groups if group.name in self.scores}

    def select_kept_units(self, counts: KeptCounts) -> dict[str, Units]:
        """Return the kept units of the groups that lose any."""
        found = {
            name: keep_units_by_count(self.groups[name], self.scores[name], count) for name, count in counts.items()
        }
        return {name: units for name, units in found.items() if len(units) < self.groups[name].size}

    @torch.no_grad()
    def measure_divergence(self, counts: KeptCounts) -> float:
        """Return the divergence from the original of the network whose groups keep so many units."""
        return self._run_variations(counts, {})[0]

    @torch.no_grad()
    @reuse_freed_memory()
    def measure_variations(
        self, counts: KeptCounts, others: Mapping[str, Iterable[int]]
    ) -> dict[tuple[str, int], float]:
        """Return the divergences where one group at a time keeps another number of units than in `counts`."""
        return self._run_variations(counts, others)[1]

    @torch.no_grad()
    @reuse_freed_memory()
    def measure_nearby(
        self, counts: KeptCounts, others: Mapping[str, Iterable[int]]
    ) -> tuple[float, dict[tuple[str, int], float]]:
        """Return the divergence of a cut and of its variations, on half of the probes if these are many.

        That is enough for their differences.
        """
        half = len(self.probes) // 2
        enough = sum(map(infer_batch_size, self.probes[:half])) >= MIN_NEARBY_PROBES
        return self._run_variations(counts, others, half if enough else None)

    @torch.no_grad()
    def consumer_error(self, name: str, count: int) -> float:
        """Return the relative error of the group's consumer layers if it alone keeps so many units.

        It is the mean of fits. For wide layers, whose fits are expensive, it is the sum that the elimination order has.
        """
        if name in self.orders and name in self._wide_groups:
            removed = self.groups[name].size - count
            return float(self.orders[name].errors[removed - 1]) if removed else 0.0
        errors = self._compute_effect({name: count}).errors
        return sum(errors) / len(errors) if errors else 0.0

    @torch.no_grad()
    def is_harmless(self, name: str, count: int, least: float) -> bool:
        """Return whether the relative errors of all consumer layers of the group are known and at most `least`."""
        changed = self._compute_effect({name: count})
        return self.merge and name not in self._masked_groups and bool(changed.errors) and max(changed.errors) <= least

    def downstream_share(self, name: str) -> float:
        """Return the share of the network's MACs that have to run again for a cut of this group."""
        nodes = self.analysis.graph.nodes
        (start,) = self._group_by_first_node(self.analysis.graph, [(name, 0)])
        return sum(self._costs[node.name] for node in nodes[start:]) / max(1, sum(self._costs.values()))

    @property
    def is_classifier(self) -> bool:
        """Whether all outputs are class scores, so that divergences are Kullback-Leibler divergences."""
        return len(self._divergence().classes) == len(self._original_outputs[0])

    @cached_property
    def new_biases(self) -> int:
        """The largest number of bias entries that merging adds, in layers without a bias and without a norm behind
        them.
        """
        selection = replace(self._whole, new_biases=self.biases)
        weights = self._consumer_weights.values() if self.merge else ()
        return sum(count_new_bias_entries(selection, weight) for weight in weights)

    # Statistics

    @cached_property
    def _layer_stats(self) -> dict[Axis, list[LayerStats]]:
        """The statistics that all cuts are fitted on, from one pass."""
        self.passes += 1
        return collect_layer_stats(self._whole, list(self._consumer_weights.values()), self.fit or self.probes)

    @cached_property
    def _whole(self) -> Selection:
        return Selection(self.analysis, {name: np.arange(group.size) for name, group in self.groups.items()})

    @cached_property
    def _consumer_weights(self) -> dict[Axis, ConsumerWeight]:
        return {
            consumer_weight.axis: consumer_weight
            for consumer_weight in find_consumer_weights(self._whole)
            if consumer_weight.width <= MAX_COVARIANCE_FEATURES
        }

    @cached_property
    def _wide_groups(self) -> frozenset[str]:
        weights = self._consumer_weights.values()
        wide = (weight.consumers for weight in weights if weight.width > MAX_WINDOW_FEATURES)
        return frozenset(name for consumers in wide for name, _ in consumers)

    @cached_property
    def _masked_groups(self) -> frozenset[str]:
        """Groups whose removed channels must be set to zero: columns of zeros do not hide them from every consumer.

        Some weights cannot be rewritten. Others read an infinity, and 0 · ∞ is NaN.
        """
        hidden = self._consumer_weights.keys() - self._original_run[1]
        return frozenset(
            name
            for name, group in self.groups.items()
            if group.norms_across_channels or not group.consumers or any(c.axis not in hidden for c in group.consumers)
        )

    def _build_zero_mask(self, counts: KeptCounts) -> Mask:
        kept = self.select_kept_units({name: count for name, count in counts.items() if name in self._masked_groups})
        return build_keep_mask(self.analysis.channels, kept)

    # What changes

    def _compute_effect(self, counts: KeptCounts) -> CutEffect:
        kept = self.select_kept_units(counts)
        found = CutEffect()
        for consumer_weight in self._consumer_weights.values():
            names = list(dict.fromkeys(name for name, _ in consumer_weight.consumers))
            # A weight's fit depends only on the groups that it reads: cache it by their counts.
            key = consumer_weight.axis, tuple(len(kept[name]) if name in kept else -1 for name in names)
            if any(name in kept for name in names) and key not in self._effects:
                self._effects[key] = self._fit_weight(
                    consumer_weight, {name: kept[name] for name in names if name in kept}
                )
            found |= self._effects.get(key, CutEffect())
        return found

    def _fit_weight(self, consumer_weight: ConsumerWeight, kept: Mapping[str, Units]) -> CutEffect:
        """Fit the kept columns of one weight and return the changes."""
        own = replace(consumer_weight, stays=self._find_kept_positions(consumer_weight, kept))
        selection = Selection(self.analysis, kept, new_biases=self.biases)
        merged = MergeResult(())
        if self.merge and not self.unfitted.issuperset(kept):
            pairs = zip(
                own.to_matrices(selection.tensor(consumer_weight.axis.tensor)),
                self._layer_stats[consumer_weight.axis],
                strict=True,
            )
            stats = [
                known.to_fit_statistics(matrix, own.kept_columns(block)) for block, (matrix, known) in enumerate(pairs)
            ]
            # Every weight is fitted for itself, so no bias or running mean is taken yet.
            parts = solve_blocks(selection, own, stats, self.ridge, self.restore, set())
            merged = build_merges(selection, own, parts, set())
        edits = build_graph_edits(self.analysis.graph, merged, {consumer_weight.axis: own.removed_positions})
        errors = [merge.error for merge in merged.merges[:1] if merge.error is not None]
        return CutEffect(edits.write_columns(self.analysis.graph), tuple(errors))

    def _find_kept_positions(self, consumer_weight: ConsumerWeight, kept: Mapping[str, Units]) -> np.ndarray:
        stays = np.ones(len(consumer_weight.stays), bool)
        for name, units in kept.items():
            removed = np.setdiff1d(np.arange(self.groups[name].size), units)
            stays &= ~np.isin(self.groups[name].cuts[consumer_weight.axis], removed)
        return stays

    # Running

    def _run_variations(
        self, counts: KeptCounts, others: Mapping[str, Iterable[int]], batches: int | None = None
    ) -> tuple[float, dict[tuple[str, int], float]]:
        """Return the divergence of a cut and of its variations, on the first so many batches of the probes."""
        base = self._compute_effect(counts)
        wanted = [(name, count) for name, choices in others.items() for count in choices]
        varied = {(name, count): self._compute_effect({**counts, name: count}) for name, count in wanted}
        total, each = self._divergence(), {key: self._divergence() for key in wanted}
        probes = self.probes[:batches]
        for number, batch in enumerate(probes):
            graph = strip_output_activations(self.analysis.graph_for(batch))
            masked, starts = MaskedGraph(graph, self.analysis.channels), self._group_by_first_node(graph, wanted)
            run = masked.start(flatten_inputs(batch), self._build_zero_mask(counts), base.edits)
            work, done = self._count_work(graph, starts), 0
            for i, node in enumerate(graph.nodes):
                for key in starts.get(i, ()):
                    progress.report_progress("trying cuts", number * work + done, len(probes) * work)
                    stays = self._build_zero_mask({**counts, key[0]: key[1]})
                    # The fork shares all values computed so far and computes only the rest.
                    outputs = masked.continue_with(run.fork(), stays, varied[key].edits).run()
                    each[key].add(self._original_outputs[number], flatten_outputs(outputs))
                    done += sum(self._costs[own.name] for own in graph.nodes[i:])
                run.run_node(node)
                done += self._costs[node.name]
            total.add(self._original_outputs[number], flatten_outputs(run.outputs()))
            self.passes += work / max(1, sum(self._costs.values()) * len(self.probes))
        return total.value, {key: own.value for key, own in each.items()}

    def _group_by_first_node(self, graph: Graph, wanted: Sequence[tuple[str, int]]) -> dict[int, list[tuple[str, int]]]:
        """Group the variations by the index of the first node whose value differs from the base.

        Zero columns change nothing before the first consumer; masked channels change from their producer on.
        """
        place = {node.name: i for i, node in enumerate(graph.nodes)}
        found: dict[int, list[tuple[str, int]]] = {}
        for name, count in wanted:
            group = self.groups[name]
            ends = group.producers if name in self._masked_groups else group.consumers
            found.setdefault(min((place[end.node.name] for end in ends), default=0), []).append((name, count))
        return found

    def _count_work(self, graph: Graph, starts: Mapping[int, Sequence[tuple[str, int]]]) -> int:
        """Count the multiply-accumulates of a base run and of all variations that branch off."""
        costs = [self._costs[node.name] for node in graph.nodes]
        return sum(costs) + sum(len(keys) * sum(costs[i:]) for i, keys in starts.items())

    def _divergence(self) -> Divergence:
        shapes = [tuple(value.shape) for value in self._original_outputs[0]]
        return Divergence(find_logits_outputs(strip_output_activations(self.analysis.graph), shapes), self.temperature)

    @cached_property
    def _costs(self) -> Counter[str]:
        return Counter(count_node_macs(self.analysis.graph))  # a Counter: batches of another size may have extra nodes

    @property
    def _original_outputs(self) -> list[list[Tensor]]:
        """The original's outputs, batch by batch."""
        return self._original_run[0]

    @cached_property
    def _original_run(self) -> tuple[list[list[Tensor]], set[Axis]]:
        """The original's outputs, and the weights that read an infinite value somewhere."""
        found, infinite = [], set[Axis]()
        by_node = {
            name: consumer_weight
            for consumer_weight in self._consumer_weights.values()
            for name in consumer_weight.inputs
        }

        def compute_node(node: Node, args: dict[str, Any]) -> Any:
            consumer_weight = by_node.get(node.name)
            if consumer_weight is not None and not bool(get_weight_input(consumer_weight, node, args).isfinite().all()):
                infinite.add(consumer_weight.axis)
            return node.compute(args)

        for batch in self.probes:
            graph = strip_output_activations(self.analysis.graph_for(batch))
            found.append(flatten_outputs(Interpreter(graph, flatten_inputs(batch), graph.tensors, compute_node).run()))
        self.passes += 1
        return found, infinite
