"""Collect the data of the page from an analysis and the compressed network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Group
from neuron_merging.channels.weight_views import filters_of
from neuron_merging.checkpoint.model_folder import Compressed
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.latency import MIN_RUNS, measure_latencies
from neuron_merging.evaluation.summary import GroupSummary
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.graph import Graph
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs.synthetic import is_signal
from neuron_merging.merging.protocol import Merge, MergeKind
from neuron_merging.pruning.plan import GroupDecision
from neuron_merging.report.inline_images import build_scaling_image, encode_images
from neuron_merging.report.report_data import LatencyComparison, LayerReport, ReportData, describe_settings
from neuron_merging.sweeps.group_sensitivity import Sensitivity, build_sensitivity_from_curves
from neuron_merging.sweeps.results import Sweep

LATENCY_BATCH_SIZES = (1, 16)
REPORT_RUNS, REPORT_SECONDS = 30, 2.0
MAX_BATCH_SECONDS = 20.0
"""Seconds that a batch size may take at least; larger ones are left out."""


def collect_report_data(
    analysis: Analysis,
    small: Compressed,
    fidelity: Fidelity | None,
    *,
    title: str,
    method: str,
    load: str,
    recipe: Recipe | None = None,
    notes: tuple[str, ...] = (),
    sensitivity: Sensitivity | None = None,
    sweep: Sweep | None = None,
    inputs: Tensor | None = None,
) -> ReportData:
    """Look at every group, and measure size and latency.

    Where it is not known how `small` was merged (it has no merges), what the original's weights would tell is left out.

    Parameters
    ----------
    analysis
        The original.
    small
        What became of it.
    fidelity
        How alike their answers are, if that was measured.
    title
        The page's title.
    method
        One sentence on what was done.
    load
        How to load the result.
    recipe
        The settings; left out, those that `compress` was given.
    notes
        What else the page should say.
    sensitivity
        What each group is worth; left out, what the search for a budget has found out, if there was one.
    sweep
        The sweep that it is the best of.
    inputs
        Images (n, c, h, w) that were made up, to be shown; left out, those that the network was asked to remember.

    Returns
    -------
    Findings
        Everything that the page shows.

    Examples
    --------
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> found = collect_report_data(analysis, nm.compress(analysis), None, title="net", method="", load="")
    >>> [(layer.name, layer.before, layer.kept) for layer in found.layers]
    [('0', 8, 4)]
    """
    model, graph = analysis.model, analysis.graph
    groups = {group.name: group for group in analysis.channels.groups}
    chosen = zip(small.plan.groups, small.summary.groups, strict=True)
    costs, used = Costs(analysis), recipe or small.recipe
    return ReportData(
        title=title,
        method=method,
        summary=small.summary,
        bytes=(_count_bytes(model), _count_bytes(small.model)),
        layers=tuple(
            replace(
                _describe_layer(choice, told, groups[choice.name], graph, small.merged.merges),
                units=tuple(choice.kept),
                saved=_compute_savings(costs, choice),
            )
            for choice, told in chosen
        ),
        fidelity=fidelity,
        latency=measure_latency(model, small.model, analysis.inputs),
        load=load,
        recipe=used.to_yaml() if used else "",
        notes=(*small.summary.notes, *(() if recipe else small.remarks), *notes),
        asked=describe_settings(used),
        sensitivity=sensitivity or (build_sensitivity_from_curves(small.curves, analysis) if small.curves else None),
        sweep=sweep,
        inputs=encode_images(shown)
        if (shown := _find_synthetic_images(small) if inputs is None else inputs) is not None
        else (),
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
    return tuple(best.tolist())


def _count_bytes(model: nn.Module) -> int:
    """Of the weights, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _find_synthetic_images(small: Compressed) -> Tensor | None:
    """Images that merges were fitted on."""
    images = (
        value for batch in small.remembered for value in flatten_inputs(batch) if is_signal(value) and value.ndim == 4
    )
    return next(images, None)


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
