"""Is the merged network nearer to the original than the pruned one? Where a layer makes it worse, it stays pruned.

Whole networks are compared, on inputs that the merger itself used: what its statistics left out shows there. If all
merges together are better than none, that is all; else layer after layer goes back to pruning if the outputs gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from neuron_merging.channels.groups import Axis
from neuron_merging.channels.masks import staying
from neuron_merging.channels.selection import Selection
from neuron_merging.cutting.reference import Reference, Zeroing, of_merges
from neuron_merging.graph.execution import run
from neuron_merging.graph.macs import total_macs
from neuron_merging.graph.trees import flat, flatten_outputs
from neuron_merging.mergers.interface import Kind, Mean, Merge, Merged, Merger, Reason, Why
from neuron_merging.statistics.synthetic import batch_size

WORK = 2**35
"""Multiply-accumulates of one network on all inputs together."""
LEAST, MOST = 4, 32
"""Inputs."""
TRIALS = 8, 32
"""Layers, or runs of neighbouring layers, that are tried without their merges, at least and at most."""
EFFORT = 2 * WORK
"""Multiply-accumulates of more trials than the least number."""
GAIN = 0.99
"""What the error must fall to for a layer to be left pruned: less may be chance."""


@runtime_checkable
class Witness(Protocol):
    """A merger that knows inputs to judge its merges on."""

    def inputs(self, selection: Selection, samples: int) -> Iterable[Sequence[Any]]: ...


@torch.no_grad()
def judged(selection: Selection, merged: Merged, merger: Merger) -> Merged:
    """The merges, less those that make the outputs worse than pruning does."""
    if not isinstance(merger, Witness) or not any(m.columns is not None for m in merged.merges):
        return merged
    samples = max(LEAST, min(MOST, WORK // max(1, total_macs(selection.graph))))
    if selection.analysis.channels_along_batch:
        samples = batch_size(selection.inputs)
    trial = _Trial.of(selection, merger.inputs(selection, samples))
    if not trial.batches:
        return merged
    error, pruned = trial.error(merged), trial.error(_without(merged, _axes(merged)))
    if not error > pruned:
        return merged
    for axes in _runs(_axes(merged), EFFORT // max(1, samples * total_macs(selection.graph))):
        fewer = _without(merged, axes)
        if not trial.error(fewer) >= GAIN * error:
            merged, error = fewer, trial.error(fewer)
    return merged if error < pruned else _without(merged, _axes(merged))


def _axes(merged: Merged) -> list[Axis]:
    found = (m.consumer.axis for m in merged.merges if m.columns is not None)
    return list(dict.fromkeys(axis for axis in found if axis is not None))


def _runs(axes: Sequence[Axis], cheap: int) -> list[Sequence[Axis]]:
    least, most = TRIALS
    size = -(-len(axes) // max(least, min(most, cheap)))
    return [axes[start : start + size] for start in range(0, len(axes), size)]


def _without(merged: Merged, axes: Sequence[Axis]) -> Merged:
    """These readers pruned: their columns as they were, and the mean where it was."""
    gone = {name for m in merged.merges if m.consumer.axis in axes for name in m.moved}
    return Merged(
        tuple(_pruned(m) if m.consumer.axis in axes and m.kind is not Kind.PRUNED else m for m in merged.merges),
        {name: tensor for name, tensor in merged.tensors.items() if name not in gone},
        merged.sources,
    )


def _pruned(merge: Merge) -> Merge:
    return replace(
        merge, kind=Kind.PRUNED, reason=Reason(Why.WORSE), columns=None, bias=None, folded=0, mean=Mean.KEPT,
        error=None, scaling=None, moved=(),
    )  # fmt: skip


@dataclass(frozen=True)
class _Trial:
    """Inputs, what the original makes of them, and the network with the removed units zero."""

    zeroing: Mapping[int, Zeroing]
    batches: tuple[tuple[Sequence[Any], list[Tensor]], ...]

    @classmethod
    def of(cls, selection: Selection, inputs: Iterable[Sequence[Any]]) -> _Trial:
        zeroing, batches = {}, []
        for i, batch in enumerate(islice(inputs, MOST)):
            graph = selection.analysis.graph_for(batch)
            zeroing[i] = Zeroing(graph, selection.channels, staying(selection.channels, selection.kept))
            batches.append((batch, flatten_outputs(run(graph, flat(batch), selection.graph.tensors))))
        return cls(zeroing, tuple(batches))

    def error(self, merged: Merged) -> float:
        """The square of what the outputs are off, relative to their variance; the mean over outputs and batches."""
        reference: Reference | None = None
        errors = []
        for i, (batch, wanted) in enumerate(self.batches):
            reference = reference or of_merges(self.zeroing[i].graph, merged)
            got = flatten_outputs(self.zeroing[i].run(reference, batch))
            errors += [_relative(a, b) for a, b in zip(got, wanted, strict=True) if b.is_floating_point() and b.numel()]
        return sum(errors) / len(errors) if errors else 0.0


def _relative(got: Tensor, want: Tensor) -> float:
    usable = got.isfinite() & want.isfinite()
    a, b = got[usable].double(), want[usable].double()
    if not b.numel():
        return 0.0
    spread = float((b - b.mean()).square().sum()) or float(b.square().sum())
    return float((a - b).square().sum()) / max(spread, 1e-30)
