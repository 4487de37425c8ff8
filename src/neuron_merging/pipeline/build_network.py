"""Merge and prune: build the smaller network from the kept channels, verify it, and summarise the cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.groups import Units
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.config import CompressConfig
from neuron_merging.evaluation.summary import SkippedGroup, summarise
from neuron_merging.graph.graph_module import GraphNetwork
from neuron_merging.graph.process_state import release_free_memory
from neuron_merging.inputs.input_scale import describe_input_scales
from neuron_merging.inputs.scale_from_norms import find_input_scales
from neuron_merging.merging import MergeResult
from neuron_merging.pipeline.prepared_inputs import PreparedInputs
from neuron_merging.pruning.plan import Plan, make_plan
from neuron_merging.pruning.reject_harmful import reject_harmful_merges
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
