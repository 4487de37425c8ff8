"""Other inputs than the example: fresh values, another number of them, another size where the network takes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.trees import flat
from neuron_merging.statistics.synthetic import batch_size, is_signal, tokens_of

Inputs = tuple[Any, ...]


def fresh_inputs(analysis: Analysis, seed: int = 0) -> Iterator[Inputs]:
    """Inputs like the example's, the most different first; whether the network takes them is not known yet."""
    batch = batch_size(analysis.inputs)
    other = batch if analysis.fixes_batch else (2 if batch in (1, 3) else 3)
    shapes = [(other, True), (other, False)] + ([(batch, False)] if other != batch else [])
    for count, resized in shapes:
        pick = torch.Generator("cpu").manual_seed(seed)
        yield _made(analysis, batch, count, resized, pick)


def _made(analysis: Analysis, batch: int, count: int, resized: bool, pick: torch.Generator) -> Inputs:
    values, kinds = flat(analysis.inputs), tokens_of(analysis.graph)
    make = partial(_like, batch=batch, count=count, pick=pick)
    signals = any(is_signal(value) for value in values)
    made = [make(value, kinds=kinds.get(i), size=_size(value, signals, resized)) for i, value in enumerate(values)]
    return tuple(tree_unflatten(made, tree_structure(list(analysis.inputs))))


def _size(value: Any, signals: bool, resized: bool) -> tuple[int, ...]:
    """What one entry of the batch measures: images and series another size, otherwise sequences another length."""
    if not isinstance(value, Tensor) or not resized or value.ndim < 2:
        return tuple(value.shape[1:]) if isinstance(value, Tensor) else ()
    if signals:
        return (value.shape[1], *map(_another, value.shape[2:])) if is_signal(value) else tuple(value.shape[1:])
    return (_another(value.shape[1]), *value.shape[2:])


def _another(size: int) -> int:
    """A smaller size where that is safe to pool, and cheaper: 224 → 96, 32 → 24, 8 → 12."""
    if size >= 64:
        return max(32, round(0.45 * size / 32) * 32)
    return size * 3 // 4 if size >= 16 else size * 3 // 2


def _like(value: Any, batch: int, count: int, pick: torch.Generator, kinds: int | None, size: Sequence[int]) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != batch:
        return value
    shape = (count, *size)
    if kinds is not None:
        return torch.randint(kinds, shape, generator=pick, device="cpu").to(value)
    if not value.is_floating_point() or not bool(value.isfinite().all()):
        return _repeated(value, shape)
    if _is_choice(value):
        at = torch.randint(value.numel(), shape, generator=pick, device="cpu").to(value.device)
        return value.flatten()[at]
    return _noise(value, shape, pick)


def _repeated(value: Tensor, shape: Sequence[int]) -> Tensor:
    """The example's own entries: numbers and masks may have rules of their own."""
    for dim, size in enumerate(shape):
        at = torch.arange(size, device=value.device) % value.shape[dim]
        value = value.index_select(dim, at)
    return value


def _is_choice(value: Tensor) -> bool:
    """Whole numbers in floats, not all the same: flags and counts."""
    return bool((value == value.round()).all()) and bool((value != value.flatten()[0]).any())


def _noise(value: Tensor, shape: Sequence[int], pick: torch.Generator) -> Tensor:
    """Gaussian noise of the example's mean and spread, inside of its range; of a constant example, plain noise."""
    noise = torch.randn(tuple(shape), generator=pick, dtype=torch.float64, device="cpu").to(value.device)
    known = value.double()
    if not bool((known != known.flatten()[0]).any()):
        return noise.to(value.dtype)
    return (known.mean() + known.std() * noise).clamp(known.min(), known.max()).to(value.dtype)
