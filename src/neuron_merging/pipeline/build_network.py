"""Merge and prune: build the smaller network from the kept channels, verify it, and summarise the cut.

Merges that make the whole network worse than plain pruning are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec
import torch
from torch import nn

from neuron_merging.calibration.output_divergence import Divergence, find_token_logits
from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.groups import Axis, Units
from neuron_merging.channels.masked_run import MaskedGraph, build_keep_mask
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.config import CompressConfig
from neuron_merging.evaluation.summary import SkippedGroup, summarise
from neuron_merging.graph.example_inputs import flatten_inputs, flatten_outputs
from neuron_merging.graph.graph_module import GraphNetwork
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.graph.process_state import release_free_memory
from neuron_merging.inputs.input_scale import describe_input_scales
from neuron_merging.inputs.scale_from_norms import count_real_samples, find_input_scales
from neuron_merging.inputs.text import split_texts
from neuron_merging.merging.fit import build_graph_edits
from neuron_merging.merging.protocol import (
    MeanHandling,
    Merge,
    MergeKind,
    Merger,
    MergeResult,
    Reason,
    ReasonCode,
    TrialInputSource,
)
from neuron_merging.pipeline.prepared_inputs import PreparedInputs
from neuron_merging.pruning.plan import Plan, make_plan
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.pruning.trial_prune import resolve_kept_units
from neuron_merging.pruning.verify import VerificationResult, verify_small_network
from neuron_merging.selection.criteria import (
    explain_unpruned,
    resolve_ratios,
)


@dataclass(frozen=True)
class PrunedNetwork:
    """A pruned and merged network, with the units that it keeps, the merge result and the plan."""

    kept: Mapping[str, Units]
    merged: MergeResult
    plan: Plan
    small: nn.Module


@torch.no_grad()
def merge_and_prune(
    analysis: Analysis, kept: Mapping[str, Units], settings: CompressConfig, inputs: PreparedInputs
) -> PrunedNetwork:
    """Merge the removed channels, make the plan, and build the smaller network."""
    # A configuration of transformers cannot describe a bias that the class does not have.
    selection = Selection(analysis, kept, inputs.calibration, not settings.uniform, inputs.sets)
    method = settings.method()
    merged = reject_harmful_merges(selection, method.merge(selection), method)
    release_free_memory()  # statistics of large networks are freed, but malloc keeps their pages
    plan = make_plan(analysis.model, analysis.graph, analysis.channels, kept, merged.merges, analysis.size_attributes)
    plan = msgspec.structs.replace(plan, baked=tuple(analysis.folded_weights))
    return PrunedNetwork(kept, merged, plan, apply_plan(analysis.model, plan, merged))


def verify_and_summarise(
    analysis: Analysis,
    cut: PrunedNetwork,
    verify: bool,
    skipped: Iterable[SkippedGroup] = (),
    notes: Iterable[str] = (),
) -> Compressed:
    """Compare the smaller network with the original, and summarise the cut."""
    stays = build_keep_mask(analysis.channels, cut.kept)
    found = verify_small_network(analysis, cut.plan, stays, cut.small, cut.merged) if verify else None
    notes = (*notes, *_note_fixed_batch(cut.small))
    summary = summarise(analysis, cut.small, cut.plan, found, skipped, notes, statistics=cut.merged.fitted_to)
    return Compressed(cut.small, cut.plan, summary, cut.merged, analysis.inputs)


def _note_fixed_batch(small: nn.Module) -> list[str]:
    """Return a note on a graph that takes only the batch size of its example."""
    if not isinstance(small, GraphNetwork) or small.any_batch_size:
        return []
    size = small.example_batch_size
    return [f"the graph takes batches of {size} only: no rule was found by which its sizes follow the batch"]


def list_untouched_groups(
    analysis: Analysis, kept: Mapping[str, Units], settings: CompressConfig
) -> list[SkippedGroup]:
    """Return the groups that a ratio should cut but does not; with a budget or `max_loss`, uncut groups are normal."""
    if settings.budget is not None or settings.max_loss is not None:
        return []
    ratios = resolve_ratios(analysis.channels, settings.share, settings.ignore, settings.scope)
    uncut = [group for group in analysis.channels.groups if group.name in ratios and group.name not in kept]
    if settings.uniform:
        return [SkippedGroup(g.name, g.size, "uniform=True lets it keep all of them") for g in uncut]
    return [SkippedGroup(g.name, g.size, explain_unpruned(g, ratios[g.name], settings.round_to)) for g in uncut]


def build_compressed(plan: Plan, analysis: Analysis, small: nn.Module) -> Compressed:
    """Wrap a network that was read from disk, with its summary; the details of its merge are not stored."""
    scales = describe_input_scales(find_input_scales(analysis))
    summary = summarise(analysis, small, plan, None, remarks=[scales] if scales else [])
    return Compressed(small, plan, summary, inputs=analysis.inputs)


def verify_plan(plan: Plan, analysis: Analysis, small: nn.Module) -> VerificationResult:
    """Check that `small` equals the original with the plan's removed units zeroed; the merge itself is not checked."""
    stays = build_keep_mask(analysis.channels, resolve_kept_units(plan, analysis.channels))
    return verify_small_network(analysis, plan, stays, small)


MAX_MACS_PER_NETWORK = 2**35
"""MACs that one evaluation may spend on all inputs together: a few seconds on a CPU."""
MIN_SAMPLES, MAX_SAMPLES = 4, 32
"""Inputs of one evaluation, at least and at most: fewer are too noisy, more cost too much."""
TRIAL_LIMITS = 8, 32
"""Consumer layers, or runs of neighbouring ones, that are reverted one after the other, at least and at most."""
MAX_EXTRA_TRIAL_MACS = 2 * MAX_MACS_PER_NETWORK
"""MACs that trials beyond the smallest number may spend."""
MAX_ERROR_RATIO = 0.99
"""A run is reverted only if that lowers the error by at least 1 %: a smaller gain may be chance."""


@torch.no_grad()
def reject_harmful_merges(selection: Selection, merged: MergeResult, merger: Merger) -> MergeResult:
    """Return the merges without those that make the outputs worse than plain pruning."""
    if not isinstance(merger, TrialInputSource) or not any(m.columns is not None for m in merged.merges):
        return merged
    samples = max(MIN_SAMPLES, min(MAX_SAMPLES, MAX_MACS_PER_NETWORK // max(1, count_graph_macs(selection.graph))))
    given = [merger.trial_inputs(selection, samples)]
    if 1 < count_real_samples(selection.analysis) <= samples:
        given.append([selection.inputs])  # real example inputs: a merge must not be worse than pruning on them either
    trials = _MergeTrials.of(selection, merged, given)
    error = trials.error(merged)
    if not error > 1:  # also when an error is NaN: nothing can be decided then
        return merged
    # Greedy: revert one run of consumer layers at a time and keep the reverts that help.
    for axes in _split_into_runs(
        _list_merged_axes(merged), MAX_EXTRA_TRIAL_MACS // max(1, samples * count_graph_macs(selection.graph))
    ):
        fewer = _revert_merges(merged, axes)
        fewer_error = trials.error(fewer)
        if fewer_error < MAX_ERROR_RATIO * error:
            merged, error = fewer, fewer_error
    return merged if error < 1 else _revert_merges(merged, _list_merged_axes(merged))


def _list_merged_axes(merged: MergeResult) -> list[Axis]:
    """Return the weight axes that merges rewrite, each once, in order."""
    axes = (m.consumer.axis for m in merged.merges if m.columns is not None)
    return list(dict.fromkeys(axis for axis in axes if axis is not None))


def _split_into_runs(axes: Sequence[Axis], affordable: int) -> list[Sequence[Axis]]:
    """Split the axes into runs of neighbours, as many as are `affordable` within `TRIAL_LIMITS`."""
    least, most = TRIAL_LIMITS
    size = -(-len(axes) // max(least, min(most, affordable)))  # rounded up
    return [axes[start : start + size] for start in range(0, len(axes), size)]


def _revert_merges(merged: MergeResult, axes: Sequence[Axis]) -> MergeResult:
    """Revert the consumer layers of these axes to plain pruning, together with their mean corrections."""
    offsets = {name for m in merged.merges if m.consumer.axis in axes for name in m.offset_tensors}
    return MergeResult(
        tuple(
            _revert_merge(m) if m.consumer.axis in axes and m.kind is not MergeKind.PRUNED else m for m in merged.merges
        ),
        {name: tensor for name, tensor in merged.tensors.items() if name not in offsets},
        merged.sources,
    )


def _revert_merge(merge: Merge) -> Merge:
    return replace(
        merge,
        kind=MergeKind.PRUNED,
        reason=Reason(ReasonCode.WORSE),
        columns=None,
        bias=None,
        folded=0,
        mean=MeanHandling.KEPT,
        error=None,
        scaling=None,
        offset_tensors=(),
    )


@dataclass(frozen=True)
class _MergeTrials:
    """Compares merge results with plain pruning, on several kinds of inputs."""

    evaluators: tuple[tuple[_MergeEvaluator, float], ...]
    """Each with the error of plain pruning."""

    @classmethod
    def of(cls, selection: Selection, merged: MergeResult, inputs: Iterable[Iterable[Sequence[Any]]]) -> _MergeTrials:
        pruned = _revert_merges(merged, _list_merged_axes(merged))
        evaluators = [_MergeEvaluator.of(selection, batches) for batches in inputs]
        return cls(tuple((each, each.error(pruned)) for each in evaluators if each.batches))

    def error(self, merged: MergeResult) -> float:
        """Return the error relative to plain pruning's, on the kind of inputs where that is largest."""
        # Where pruning changes nothing, or overflows, there is no scale to compare with.
        ratios = (each.error(merged) / pruned for each, pruned in self.evaluators if 0 < pruned < math.inf)
        return max(ratios, default=0.0)


@dataclass(frozen=True)
class _MergeEvaluator:
    """Compares merge results on fixed batches."""

    selection: Selection
    batches: tuple[Sequence[Any], ...]

    @classmethod
    def of(cls, selection: Selection, inputs: Iterable[Sequence[Any]]) -> _MergeEvaluator:
        batches = islice(inputs, MAX_SAMPLES)
        return cls(
            selection, tuple(part for batch in batches for part in split_texts(selection.analysis, tuple(batch)))
        )

    def error(self, merged: MergeResult) -> float:
        """Return the divergence of the outputs: squared errors relative to the variance of the original's.

        Scores of a language model are compared by the Kullback-Leibler divergence: their squared error says little
        about the text that it writes.
        """
        stays = build_keep_mask(self.selection.channels, self.selection.kept)
        edits = build_graph_edits(self.selection.graph, merged)
        tokens = find_token_logits(self.selection.graph)
        divergence = Divergence(frozenset() if tokens is None else frozenset([tokens]))
        for batch in self.batches:
            masked = MaskedGraph(self.selection.analysis.graph_for(batch), self.selection.channels)
            original = self.selection.compute_original_outputs(batch)
            divergence.add(original, flatten_outputs(masked.start(flatten_inputs(batch), stays, edits).run()))
        return divergence.value
