"""The figures of a smaller network that its page and its card show: sizes, layers, latency, pictures.

`compress` collects them once, while the original network is at hand; a folder stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Group
from neuron_merging.channels.weight_views import filters_of
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.inline_images import ScalingImage, build_scaling_image, encode_images
from neuron_merging.evaluation.latency import MIN_RUNS, measure_latencies
from neuron_merging.evaluation.summary import GroupSummary, Summary
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.graph import Graph
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs.synthetic import is_signal
from neuron_merging.merging.protocol import Merge, MergeKind
from neuron_merging.pruning.plan import GroupDecision, Plan

LATENCY_BATCH_SIZES = (1, 16)
REPORT_RUNS, REPORT_SECONDS = 30, 2.0
MAX_BATCH_SECONDS = 20.0
"""Seconds that a batch size may take at least; larger ones are left out."""
SIMILARITY_DIGITS = 6
"""Digits of a similarity that are kept: the page shows a histogram."""


@dataclass(frozen=True)
class LayerReport:
    """One group of channels.

    `merged` counts the removed channels that every reader took in; None where it is not known.
    `similarity` is, for each removed channel, its largest cosine similarity to a kept one.
    """

    name: str
    before: int
    kept: int
    merged: int | None
    error: float | None
    how: tuple[str, ...]
    heat: ScalingImage | None = None
    similarity: tuple[float, ...] = ()
    units: tuple[int, ...] = ()
    """The numbers of the kept channels."""
    saved: tuple[float, float] = (0.0, 0.0)
    """Shares of the network's parameters and multiply-accumulates that this cut alone saves."""

    @property
    def dropped(self) -> int:
        return self.before - self.kept - (self.merged or 0)

    @property
    def gone(self) -> tuple[int, ...]:
        """The numbers of the removed channels."""
        kept = set(self.units)
        return tuple(unit for unit in range(self.before) if unit not in kept)

    @property
    def numbers(self) -> str:
        """Which channels stay and which go."""
        return f"kept: {format_ranges(self.units)}; removed: {format_ranges(self.gone)}" if self.units else ""


def format_ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, as people write them.

    >>> format_ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("–".join(map(str, run)) for run in found)


@dataclass(frozen=True)
class LatencyComparison:
    """Median seconds of a forward pass, by batch size: original and small."""

    seconds: Mapping[int, tuple[float, float]]
    threads: int


@dataclass(frozen=True)
class Figures:
    """Everything that was measured of a smaller network. What is None or empty is not known, and the page says so.

    Attributes
    ----------
    summary
        Before and after, group by group, with the verdict.
    bytes
        The size of all tensors before and after.
    layers
        Each group, with similarities and a picture of its scaling matrix where there is one.
    fidelity
        How alike the networks' answers are.
    latency
        Median seconds of a forward pass.
    inputs
        Some synthetic inputs, as addresses of pictures.
    """

    summary: Summary
    bytes: tuple[int, int]
    layers: tuple[LayerReport, ...]
    fidelity: Fidelity | None
    latency: LatencyComparison | None = None
    inputs: tuple[str, ...] = ()


def collect_figures(
    analysis: Analysis,
    small: nn.Module,
    plan: Plan,
    summary: Summary,
    fidelity: Fidelity | None,
    merges: Sequence[Merge] = (),
    inputs: Iterable[Sequence[Any]] = (),
) -> Figures:
    """Look at every group of the original that was cut. The latency is not measured here: that takes seconds.

    Without `merges` it is not known how channels were merged; similarities and pictures are left out.
    Images among `inputs`, which the merges were fitted on, are shown.
    """
    groups = {group.name: group for group in analysis.channels.groups}
    costs, shown = Costs(analysis), _find_images(inputs)
    return Figures(
        summary=summary,
        bytes=(_count_bytes(analysis.model), _count_bytes(small)),
        layers=tuple(
            replace(
                _describe_layer(choice, told, groups[choice.name], analysis.graph, merges),
                units=tuple(choice.kept),
                saved=_compute_savings(costs, choice),
            )
            for choice, told in zip(plan.groups, summary.groups, strict=True)
        ),
        fidelity=fidelity,
        inputs=() if shown is None else encode_images(shown),
    )


def _compute_savings(costs: Costs, choice: GroupDecision) -> tuple[float, float]:
    """Shares of parameters and multiply-accumulates that go with this group's channels alone."""
    cut = {choice.name: choice.kept}
    return (
        1 - costs.parameters(cut) / max(1, costs.parameters({})),
        1 - costs.macs(cut) / max(1, costs.macs({})),
    )


def _describe_layer(
    choice: GroupDecision, told: GroupSummary, group: Group, graph: Graph, merges: Sequence[Merge]
) -> LayerReport:
    own = [merge for merge in merges if merge.group == choice.name]
    kept = np.array(choice.kept)
    if not merges:
        return LayerReport(choice.name, choice.size, len(kept), None, told.error, told.said)
    removed = np.setdiff1d(np.arange(choice.size), kept)
    pictures = (build_scaling_image(merge, kept, removed, graph.tensors) for merge in own)
    return LayerReport(
        name=choice.name,
        before=choice.size,
        kept=len(kept),
        merged=min((_count_merged(merge, len(removed)) for merge in own), default=0),
        error=told.error,
        how=told.said,
        heat=next(filter(None, pictures), None),
        similarity=_compute_filter_similarity(graph, group, kept, removed),
    )


def _count_merged(merge: Merge, removed: int) -> int:
    """How many of the removed channels a reader took in."""
    return 0 if merge.kind is MergeKind.PRUNED else merge.folded if merge.scaling is not None else removed


def _compute_filter_similarity(graph: Graph, group: Group, kept: np.ndarray, removed: np.ndarray) -> tuple[float, ...]:
    """For each removed channel, the largest cosine of its filter with that of a kept one."""
    if not group.producers:
        return ()
    rows = filters_of(graph, group).double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    best = (rows[removed] @ rows[kept].T).amax(1)
    return tuple(round(value, SIMILARITY_DIGITS) for value in best.tolist())


def _count_bytes(model: nn.Module) -> int:
    """Of the weights, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _find_images(batches: Iterable[Sequence[Any]]) -> Tensor | None:
    """The first batch of images (n, c, h, w)."""
    values = (value for batch in batches for value in flatten_inputs(batch))
    return next((value for value in values if is_signal(value) and value.ndim == 4), None)


def measure_latency(model: nn.Module, small: nn.Module, inputs: tuple[Any, ...]) -> LatencyComparison | None:
    """Measured, for the batch sizes that the network takes."""
    networks = {"original": copy_without_hooks(model).eval(), "small": copy_without_hooks(small).eval()}
    found: dict[int, tuple[float, float]] = {}
    for size in LATENCY_BATCH_SIZES:
        if size * sum(found.get(1, ())) * (MIN_RUNS + 1) > MAX_BATCH_SECONDS:
            continue
        try:
            times = measure_latencies(networks, inputs, (size,), REPORT_RUNS, REPORT_SECONDS)
        except MergingError:
            continue
        found[size] = (times["original"][size], times["small"][size])
    return LatencyComparison(found, torch.get_num_threads()) if found else None
