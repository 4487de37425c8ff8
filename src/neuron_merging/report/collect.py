"""collect: from a network and its smaller version to everything that the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.filters import filters_of
from neuron_merging.channels.groups import Group
from neuron_merging.cutting.plan import Choice
from neuron_merging.errors import MergingError
from neuron_merging.folder.recipe import Recipe
from neuron_merging.folder.store import Compressed
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Graph
from neuron_merging.measuring.fidelity import Fidelity
from neuron_merging.measuring.latency import LEAST, latencies
from neuron_merging.measuring.size import Costs
from neuron_merging.measuring.summary import GroupSummary
from neuron_merging.mergers.interface import Kind, Merge
from neuron_merging.report.asked import asked
from neuron_merging.report.findings import Findings, Latency, Layer
from neuron_merging.report.gallery import gallery
from neuron_merging.report.scaling import heat
from neuron_merging.statistics.made import so_far
from neuron_merging.statistics.synthetic import is_signal
from neuron_merging.sweeping.losses import Sensitivity, of_curves
from neuron_merging.sweeping.outcome import Sweep

BATCHES = (1, 16)
RUNS, SECONDS = 30, 2.0
PATIENCE = 20.0
"""Seconds that a batch size may take at least; larger ones are left out."""


def collect(
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
) -> Findings:
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
    >>> import torch, neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> found = collect(analysis, nm.compress(analysis), None, title="net", method="", load="")
    >>> [(layer.name, layer.before, layer.kept) for layer in found.layers]
    [('0', 8, 4)]
    """
    model, graph = analysis.model, analysis.graph
    groups = {group.name: group for group in analysis.channels.groups}
    chosen = zip(small.plan.groups, small.summary.groups, strict=True)
    costs, used = Costs(analysis), recipe or small.recipe
    return Findings(
        title=title,
        method=method,
        summary=small.summary,
        bytes=(_bytes(model), _bytes(small.model)),
        layers=tuple(
            replace(
                _layer(choice, told, groups[choice.name], graph, small.merged.merges),
                units=tuple(choice.kept),
                saved=_saved(costs, choice),
            )
            for choice, told in chosen
        ),
        fidelity=fidelity,
        latency=latency(model, small.model, analysis.inputs),
        load=load,
        recipe=used.to_yaml() if used else "",
        notes=(*small.summary.notes, *(() if recipe else small.remarks), *notes),
        asked=asked(used),
        sensitivity=sensitivity or (of_curves(small.curves, analysis) if small.curves else None),
        sweep=sweep,
        inputs=gallery(shown) if (shown := _remembered(analysis) if inputs is None else inputs) is not None else (),
    )


def _saved(costs: Costs, choice: Choice) -> tuple[float, float]:
    """Shares of parameters and multiply-accumulates that go with this group's channels alone."""
    cut = {choice.name: choice.kept}
    return (
        1 - costs.parameters(cut) / max(1, costs.parameters({})),
        1 - costs.macs(cut) / max(1, costs.macs({})),
    )


def _layer(choice: Choice, told: GroupSummary, group: Group, graph: Graph, merges: Sequence[Merge]) -> Layer:
    own = [merge for merge in merges if merge.group == choice.name]
    kept = np.array(choice.kept)
    if not merges:
        return Layer(choice.name, choice.size, len(kept), None, told.error, told.said)
    removed = np.setdiff1d(np.arange(choice.size), kept)
    pictures = (heat(merge, kept, removed, graph.tensors) for merge in own)
    return Layer(
        name=choice.name,
        before=choice.size,
        kept=len(kept),
        merged=min((_taken(merge, len(removed)) for merge in own), default=0),
        error=told.error,
        how=told.said,
        heat=next(filter(None, pictures), None),
        similarity=_similarity(graph, group, kept, removed),
    )


def _taken(merge: Merge, removed: int) -> int:
    """How many of the removed channels a reader took in."""
    return 0 if merge.kind is Kind.PRUNED else merge.folded if merge.scaling is not None else removed


def _similarity(graph: Graph, group: Group, kept: np.ndarray, removed: np.ndarray) -> tuple[float, ...]:
    """For each removed channel, the largest cosine of its filter with that of a kept one."""
    if not group.producers:
        return ()
    rows = filters_of(graph, group).double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    best = (rows[removed] @ rows[kept].T).amax(1)
    return tuple(best.tolist())


def _bytes(model: nn.Module) -> int:
    """Of the weights, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _remembered(analysis: Analysis) -> Tensor | None:
    """Images that were remembered in the course of the work."""
    images = (value for batch in so_far(analysis) for value in flat(batch) if is_signal(value) and value.ndim == 4)
    return next(images, None)


def latency(model: nn.Module, small: nn.Module, inputs: tuple[Any, ...]) -> Latency | None:
    """Measured, for the batch sizes that the network takes."""
    networks = {"original": bare_copy(model).eval(), "small": bare_copy(small).eval()}
    found: dict[int, tuple[float, float]] = {}
    for size in BATCHES:
        if size * sum(found.get(1, ())) * (LEAST + 1) > PATIENCE:
            continue
        try:
            times = latencies(networks, inputs, (size,), RUNS, SECONDS)
        except MergingError:
            continue
        found[size] = (times["original"][size], times["small"][size])
    return Latency(found, torch.get_num_threads()) if found else None
