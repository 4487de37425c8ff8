"""Inputs like the example: its batch size, slices of its samples, and fresh values of its kind in other sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_structure, tree_unflatten

from neuron_merging.graph.pytree import flatten_inputs

InputTuple = tuple[Any, ...]


def infer_batch_size(inputs: Sequence[Any]) -> int:
    """The length of the first input that has one.

    >>> infer_batch_size((torch.zeros(()), {"image": torch.zeros(4, 3)}))
    4
    """
    return next((len(value) for value in flatten_inputs(inputs) if isinstance(value, Tensor) and value.ndim), 1)


def has_batch_axis(value: Any, batch: int) -> TypeGuard[Tensor]:
    """Whether an input holds a sample for each of the batch; what has another length is no batch."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == batch


def map_batched(inputs: Sequence[Any], change: Callable[[int, Tensor], Tensor], batch: int | None = None) -> InputTuple:
    """The inputs with another value for each that holds samples; `change` gets its number among the flat inputs."""
    size = infer_batch_size(inputs) if batch is None else batch
    values = [change(i, v) if has_batch_axis(v, size) else v for i, v in enumerate(flatten_inputs(inputs))]
    return tuple(tree_unflatten(values, tree_structure(list(inputs))))


def add_batch_axis(inputs: Sequence[Any]) -> InputTuple:
    """A single sample as a batch of one."""
    return tuple(tree_map(lambda value: value[None] if isinstance(value, Tensor) else value, list(inputs)))


def take_sample(inputs: Sequence[Any], i: int) -> InputTuple:
    """One sample of a batch, without the batch dimension."""
    return map_batched(inputs, lambda _, value: value[i])


def slice_samples(inputs: Sequence[Any], part: slice) -> InputTuple:
    """Some samples of a batch."""
    return map_batched(inputs, lambda _, value: value[part])


def take_samples(inputs: Sequence[Any], count: int) -> InputTuple:
    """The first samples of a batch."""
    return slice_samples(inputs, slice(count))


def resample_inputs(inputs: Sequence[Any], count: int, batch: int | None = None) -> InputTuple:
    """So many samples like these, no two of them the same; `batch` is how many there are, if that is known."""
    pick = torch.Generator("cpu").manual_seed(0)
    return map_batched(inputs, lambda _, value: _repeat_with_noise(value, count, pick), batch)


def _repeat_with_noise(value: Tensor, count: int, pick: torch.Generator) -> Tensor:
    repeated = repeat_entries(value, (count, *value.shape[1:]))
    if not value.is_floating_point() or not bool(value.isfinite().all()):
        return repeated
    noise = torch.randn(repeated.shape, generator=pick, dtype=torch.float64, device="cpu")
    return repeated + noise.to(repeated)


def repeat_entries(value: Tensor, shape: Sequence[int]) -> Tensor:
    """The example's own entries in another size: whole numbers and masks may have rules of their own."""
    for dim, size in enumerate(shape):
        if size != value.shape[dim]:
            value = value.index_select(dim, torch.arange(size, device=value.device) % value.shape[dim])
    return value


def draw_example(
    shape: Sequence[int], dtype: torch.dtype, pick: torch.Generator, *, kinds: int = 2, positive: bool = False
) -> Tensor:
    """An example of which nothing but shape and dtype is known: noise, between 0 and 1 where it is to be `positive`.

    Whole numbers are below `kinds`.
    """
    if not dtype.is_floating_point:
        return torch.randint(kinds, tuple(shape), generator=pick, device="cpu").to(dtype)
    draw = torch.rand if positive else torch.randn
    return draw(tuple(shape), generator=pick, device="cpu").to(dtype)


def draw_like(value: Tensor, shape: Sequence[int], pick: torch.Generator, tokens: int | None = None) -> Tensor:
    """Fresh entries of an input's kind in another size; `tokens` is of how many kinds, where they choose table rows."""
    if tokens is not None:
        return draw_tokens(value, shape, pick, tokens)
    if not value.is_floating_point() or not bool(value.isfinite().all()):
        return repeat_entries(value, shape)
    if _is_categorical(value):
        at = torch.randint(value.numel(), tuple(shape), generator=pick, device="cpu").to(value.device)
        return value.flatten()[at]
    return _draw_noise(value, shape, pick)


def draw_tokens(value: Tensor, shape: Sequence[int], pick: torch.Generator, tokens: int) -> Tensor:
    """Numbers of table rows at random."""
    return torch.randint(tokens, tuple(shape), generator=pick, device="cpu").to(value)


def _is_categorical(value: Tensor) -> bool:
    """Whole numbers in floats, not all the same: flags and counts."""
    return bool((value == value.round()).all()) and bool((value != value.flatten()[0]).any())


def _draw_noise(value: Tensor, shape: Sequence[int], pick: torch.Generator) -> Tensor:
    """Gaussian noise of the example's mean and spread, inside of its range; of a constant example, plain noise."""
    noise = torch.randn(tuple(shape), generator=pick, dtype=torch.float64, device="cpu").to(value.device)
    known = value.double()
    if not bool((known != known.flatten()[0]).any()):
        return noise.to(value.dtype)
    return (known.mean() + known.std() * noise).clamp(known.min(), known.max()).to(value.dtype)


def find_batch_size_change(example: Sequence[Any], inputs: Sequence[Any]) -> tuple[int, int] | None:
    """The batch sizes of two lists of flat inputs that differ in nothing else; None where they do."""
    pairs = [(a.shape, b.shape) for a, b in zip(example, inputs, strict=True) if isinstance(a, Tensor)]
    sizes = {(a[0] if a else 0, b[0] if b else 0) for a, b in pairs if a != b}
    return next(iter(sizes)) if len(sizes) == 1 and all(a[1:] == b[1:] for a, b in pairs) else None
