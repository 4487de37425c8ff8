"""Reject merges that make the outputs worse than plain pruning. The merged and the pruned network are compared
with the original on inputs that the merger provides. If all merges together are better than none, all are kept;
otherwise consumer layers are reverted to pruning, run by run, where that lowers the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from neuron_merging.calibration.output_divergence import Divergence
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.masked_run import MaskedGraph, build_keep_mask
from neuron_merging.graph.example_inputs import infer_batch_size
from neuron_merging.graph.interpreter import run_graph
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.graph.pytree import flatten_inputs, flatten_outputs
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

MAX_MACS_PER_NETWORK = 2**35
"""Multiply-accumulates of one network on all inputs together."""
MIN_SAMPLES, MAX_SAMPLES = 4, 32
"""Inputs."""
TRIAL_LIMITS = 8, 32
"""Layers, or runs of neighbouring layers, that are tried without their merges, at least and at most."""
MAX_EXTRA_TRIAL_MACS = 2 * MAX_MACS_PER_NETWORK
"""Multiply-accumulates of more trials than the least number."""
MAX_ERROR_RATIO = 0.99
"""What the error must fall to for a layer to be left pruned: less may be chance."""


@torch.no_grad()
def reject_harmful_merges(selection: Selection, merged: MergeResult, merger: Merger) -> MergeResult:
    """The merges, less those that make the outputs worse than pruning does."""
    if not isinstance(merger, TrialInputSource) or not any(m.columns is not None for m in merged.merges):
        return merged
    samples = max(MIN_SAMPLES, min(MAX_SAMPLES, MAX_MACS_PER_NETWORK // max(1, count_graph_macs(selection.graph))))
    if selection.analysis.has_channels_along_batch:
        samples = infer_batch_size(selection.inputs)
    trial = _MergeEvaluator.of(selection, merger.trial_inputs(selection, samples))
    if not trial.batches:
        return merged
    error, pruned = trial.error(merged), trial.error(_revert_merges(merged, _list_merged_axes(merged)))
    if not error > pruned:
        return merged
    for axes in _split_into_runs(
        _list_merged_axes(merged), MAX_EXTRA_TRIAL_MACS // max(1, samples * count_graph_macs(selection.graph))
    ):
        fewer = _revert_merges(merged, axes)
        if not trial.error(fewer) >= MAX_ERROR_RATIO * error:
            merged, error = fewer, trial.error(fewer)
    return merged if error < pruned else _revert_merges(merged, _list_merged_axes(merged))


def _list_merged_axes(merged: MergeResult) -> list[Axis]:
    found = (m.consumer.axis for m in merged.merges if m.columns is not None)
    return list(dict.fromkeys(axis for axis in found if axis is not None))


def _split_into_runs(axes: Sequence[Axis], cheap: int) -> list[Sequence[Axis]]:
    least, most = TRIAL_LIMITS
    size = -(-len(axes) // max(least, min(most, cheap)))
    return [axes[start : start + size] for start in range(0, len(axes), size)]


def _revert_merges(merged: MergeResult, axes: Sequence[Axis]) -> MergeResult:
    """These readers pruned: their columns as they were, and the mean where it was."""
    gone = {name for m in merged.merges if m.consumer.axis in axes for name in m.offset_tensors}
    return MergeResult(
        tuple(
            _revert_merge(m) if m.consumer.axis in axes and m.kind is not MergeKind.PRUNED else m for m in merged.merges
        ),
        {name: tensor for name, tensor in merged.tensors.items() if name not in gone},
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
class _MergeEvaluator:
    """Batches, each with its graph and what the original makes of it."""

    selection: Selection
    batches: tuple[tuple[MaskedGraph, list[Any], list[Tensor]], ...]

    @classmethod
    def of(cls, selection: Selection, inputs: Iterable[Sequence[Any]]) -> _MergeEvaluator:
        batches = []
        for batch in islice(inputs, MAX_SAMPLES):
            graph, given = selection.analysis.graph_for(batch), flatten_inputs(batch)
            wanted = flatten_outputs(run_graph(graph, given, selection.graph.tensors))
            batches.append((MaskedGraph(graph, selection.channels), given, wanted))
        return cls(selection, tuple(batches))

    def error(self, merged: MergeResult) -> float:
        """The squared error of the outputs, relative to the variance of the original's; summed over outputs."""
        stays = build_keep_mask(self.selection.channels, self.selection.kept)
        edits = build_graph_edits(self.selection.graph, merged)
        found = Divergence()
        for masked, given, wanted in self.batches:
            found.add(wanted, flatten_outputs(masked.start(given, stays, edits).run()))
        return found.value
