"""collect: from a network and its smaller version to everything that the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from neuron_merging.bench import LEAST, latencies
from neuron_merging.capture import Graph, as_inputs, bare_copy
from neuron_merging.channels import Group
from neuron_merging.errors import MergingError
from neuron_merging.pipeline import Compressed, GroupSummary
from neuron_merging.plan import Choice
from neuron_merging.probe import analyse
from neuron_merging.report.fidelity import Fidelity
from neuron_merging.report.findings import Findings, Latency, Layer
from neuron_merging.report.scaling import heat
from neuron_merging.task import Merge, unit_rows

BATCHES = (1, 16)
RUNS, SECONDS = 30, 2.0
PATIENCE = 20.0
"""Seconds that a batch size may take at least; larger ones are left out."""


def collect(
    model: nn.Module,
    small: Compressed,
    graph: Graph,
    example_inputs: Any,
    fidelity: Fidelity | None,
    *,
    title: str,
    method: str,
    load: str,
    recipe: str = "",
    notes: tuple[str, ...] = (),
) -> Findings:
    """Look at every group, and measure size and latency.

    Where it is not known how `small` was merged (it has no merges), what the weights of `model` would tell
    is left out.
    """
    groups = {group.name: group for group in analyse(model, graph, example_inputs).groups}
    chosen = zip(small.plan.groups, small.summary.groups, strict=True)
    return Findings(
        title=title,
        method=method,
        summary=small.summary,
        bytes=(_bytes(model), _bytes(small.model)),
        layers=tuple(_layer(choice, told, groups[choice.name], graph, small.merges) for choice, told in chosen),
        fidelity=fidelity,
        latency=latency(model, small.model, as_inputs(example_inputs)),
        load=load,
        recipe=recipe,
        notes=(*small.summary.notes, *notes),
    )


def _layer(choice: Choice, told: GroupSummary, group: Group, graph: Graph, merges: Sequence[Merge]) -> Layer:
    own = [merge for merge in merges if merge.group == choice.name]
    kept = np.array(choice.kept)
    if not merges:
        return Layer(choice.name, choice.size, len(kept), None, told.error, told.how)
    removed = np.setdiff1d(np.arange(choice.size), kept)
    pictures = (heat(merge, kept, removed, graph.tensors) for merge in own)
    return Layer(
        name=choice.name,
        before=choice.size,
        kept=len(kept),
        merged=min((_taken(merge, len(removed)) for merge in own), default=0),
        error=told.error,
        how=told.how,
        heat=next(filter(None, pictures), None),
        similarity=_similarity(graph, group, kept, removed),
    )


def _taken(merge: Merge, removed: int) -> int:
    """How many of the removed channels a reader took in."""
    if merge.how.startswith("pruned"):
        return 0
    return merge.folded if merge.scaling is not None else removed


def _similarity(graph: Graph, group: Group, kept: np.ndarray, removed: np.ndarray) -> tuple[float, ...]:
    """For each removed channel, the largest cosine of its filter with that of a kept one."""
    if not group.producers:
        return ()
    rows = unit_rows(graph, group).double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    best = (rows[removed] @ rows[kept].T).amax(1)
    return tuple(best.tolist())


def _bytes(model: nn.Module) -> int:
    """Of the weights, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


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
