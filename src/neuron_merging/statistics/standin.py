"""standin: inputs in place of the data that a network comes without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.rebatching import objection
from neuron_merging.graph.trees import flat
from neuron_merging.statistics import synthetic
from neuron_merging.statistics.remembered import Batch, Remembered

SMALL = 8
"""Samples of a batch that is not worth splitting."""


@dataclass(frozen=True)
class Inputs:
    """Batches that a network takes, and what they are, for people."""

    batches: tuple[Batch, ...]
    source: str
    guessed: bool = False
    """Whether nothing that the network knows of its data went into them."""

    def __str__(self) -> str:
        return f"{sum(synthetic.batch_size(batch) for batch in self.batches):,} {self.source}"


def remembered_or(made: Remembered, analysis: Analysis, count: int, seed: int) -> Inputs:
    """Inputs that the network remembers, as many as there are up to `count`; where there are none, others."""
    return Inputs(_first(made.batches, count), made.source) if made.batches else stand_in(analysis, count, seed)


def _first(batches: Sequence[Batch], count: int) -> tuple[Batch, ...]:
    """As many samples, in batches as they are but for the last."""
    found: list[Batch] = []
    for batch in batches:
        left = count - sum(synthetic.batch_size(own) for own in found)
        if left > 0:
            found.append(some(batch, left))
    return tuple(found)


def stand_in(analysis: Analysis, count: int, seed: int) -> Inputs:
    """About `count` inputs that the network takes, and their source; the example where it takes nothing else."""
    kinds = _kinds(analysis)
    made = (_together(analysis, count, seed) or _one_by_one(analysis, count, seed)) if kinds else None
    if made is None:
        return Inputs((analysis.inputs,), "example inputs", guessed=True)
    return Inputs(made, " and ".join(kinds), guessed=True)


def _together(analysis: Analysis, count: int, seed: int) -> tuple[Batch, ...] | None:
    """In batches of a size of our own, if the network takes other sizes than the example's."""
    if analysis.channels_along_batch:
        return None
    made, size = _made(analysis, count, seed), synthetic.batch_size(analysis.inputs)
    few = some(made[0], size + 1) if count > size else _made(analysis, size + 1, seed)[0]
    return None if objection(analysis.model, few) else made


def _one_by_one(analysis: Analysis, count: int, seed: int) -> tuple[Batch, ...] | None:
    """In batches of the example's size."""
    size = synthetic.batch_size(analysis.inputs)
    seeds = range(seed, seed + max(1, count // size))
    made = tuple(batch for own in seeds for batch in _made(analysis, size, own))
    return None if objection(analysis.model, made[0]) else made


def some(batch: Batch, count: int) -> Batch:
    """The first samples of a batch."""
    return _sliced(batch, slice(count))


def parted(batch: Batch) -> tuple[Batch, Batch]:
    """The first three quarters of a batch, and the last; of a small one all, twice."""
    length = synthetic.batch_size(batch)
    if length < SMALL:
        return batch, batch
    return _sliced(batch, slice(length - length // 4)), _sliced(batch, slice(length - length // 4, None))


def halved(batches: Sequence[Batch]) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
    """Every other batch, and the rest; the halves of a single one."""
    if len(batches) != 1 or synthetic.batch_size(batches[0]) < 2:
        return tuple(batches[::2]), tuple(batches[1::2] or batches)
    half = -(-synthetic.batch_size(batches[0]) // 2)
    return (_sliced(batches[0], slice(half)),), (_sliced(batches[0], slice(half, None)),)


def _sliced(batch: Batch, part: slice) -> Batch:
    length = synthetic.batch_size(batch)

    def few(value: Any) -> Any:
        return value[part] if isinstance(value, Tensor) and value.ndim and len(value) == length else value

    return tuple(tree_map(few, list(batch)))


def _made(analysis: Analysis, count: int, seed: int) -> tuple[Batch, ...]:
    return tuple(synthetic.probes(analysis.inputs, count, seed, synthetic.tokens_of(analysis.graph)))


def _kinds(analysis: Analysis) -> list[str]:
    """What is made up: other inputs are repeated from the example."""
    tokens = synthetic.tokens_of(analysis.graph)
    named = (_kind(value, i in tokens) for i, value in enumerate(flat(analysis.inputs)))
    return list(dict.fromkeys(name for name in named if name))


def _kind(value: Any, token: bool) -> str:
    if token:
        return "random tokens"
    if synthetic.is_channels_last(value):
        return "synthetic images"
    if synthetic.is_signal(value):
        return {3: "synthetic series", 4: "synthetic images"}.get(value.ndim, "synthetic volumes")
    return "random numbers" if isinstance(value, Tensor) and value.ndim and synthetic.is_numeric(value) else ""
