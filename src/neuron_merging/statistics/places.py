"""Places: where in a layer's input and output rows are taken for a fit.

A row is what the layer reads for one output position: a vector, or a window of all channels. A fit needs some rows
per weight, not all that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, LEAST = 4, 4096
"""Rows for each fitted weight, and at least."""
Sample = Callable[[int, int], Tensor]
"""Of so many available positions, at most so many."""


@dataclass(frozen=True)
class Vectors:
    """A layer that reads along one dimension, counted from the end: every other position is a row."""

    from_end: int

    def pick(self, value: Tensor, sample: Sample) -> Tensor:
        """Positions, over the batch and all else."""
        width = value.shape[-self.from_end]
        return sample(value.numel() // max(1, width), max(LEAST, ROWS * width))

    def rows(self, value: Tensor, at: Tensor) -> list[Tensor]:
        """What the layer reads at these positions: one matrix."""
        flat = value.movedim(-self.from_end, -1).reshape(-1, value.shape[-self.from_end])
        return [flat[at.to(value.device)]]

    outputs = rows
    """What it puts out there lies along the same dimension."""


@dataclass(frozen=True)
class Windows:
    """A convolution, in separate `blocks` of channels: a window around each position is a row.

    As it is made, every position is a window of the kernel's size; `as_called` heeds strides and padding.
    """

    kernel: tuple[int, ...]
    blocks: int
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()

    def as_called(self, args: Mapping[str, Any]) -> Windows:
        """The windows that a layer sees which is called with these arguments."""
        count = len(self.kernel)
        dilation = _each(args.get("dilation"), count, 1)
        padding = _padding(args.get("padding"), self.kernel, dilation)
        return replace(self, stride=_each(args.get("stride"), count, 1), dilation=dilation, padding=padding)

    def pick(self, value: Tensor, sample: Sample) -> Tensor:
        """Positions over space, the same in every sample."""
        batched = self._batched(value)
        enough = max(LEAST, ROWS * prod(self.kernel) * batched.shape[1])
        return sample(prod(self._grid(self._windows(batched))), max(1, enough // len(batched)))

    def rows(self, value: Tensor, at: Tensor) -> list[Tensor]:
        """What the layer reads at these positions, a matrix for each block."""
        windows = self._windows(self._batched(value))
        taken = _at(windows, self._grid(windows), at).flatten(3)
        return [part.flatten(1) for part in taken.transpose(1, 2).flatten(0, 1).chunk(self.blocks, 1)]

    def outputs(self, value: Tensor, at: Tensor) -> list[Tensor]:
        """What the layer puts out at these positions, a matrix for each block."""
        batched = self._batched(value)
        taken = _at(batched, batched.shape[2:], at)
        return list(taken.transpose(1, 2).flatten(0, 1).chunk(self.blocks, 1))

    def _batched(self, value: Tensor) -> Tensor:
        return value if value.ndim == len(self.kernel) + 2 else value.unsqueeze(0)

    def _windows(self, value: Tensor) -> Tensor:
        """(batch, channels, places …, taps …)."""
        ones = (1,) * len(self.kernel)
        stride, dilation = self.stride or ones, self.dilation or ones
        windows = F.pad(value, list(self.padding)) if self.padding else value
        for i, size in enumerate(self.kernel):
            windows = windows.unfold(2 + i, dilation[i] * (size - 1) + 1, stride[i])
        steps: list[Any] = [slice(None, None, step) for step in dilation]
        return windows[(..., *steps)]

    def _grid(self, windows: Tensor) -> torch.Size:
        return windows.shape[2 : -len(self.kernel)]


def _at(value: Tensor, grid: torch.Size, at: Tensor) -> Tensor:
    """(batch, channels, positions, …): the places of a grid that is flattened into numbers."""
    index: list[Any] = [slice(None), slice(None), *torch.unravel_index(at.to(value.device), grid)]
    return value[tuple(index)]


def _padding(value: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Zeros before and after each dimension, the last one first, as torch wants them."""
    if value == "same":
        total = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return tuple(amount for size in reversed(total) for amount in (size // 2, size - size // 2))
    sizes = _each(None if value == "valid" else value, len(kernel), 0)
    return tuple(amount for size in reversed(sizes) for amount in (size, size))


def _each(value: Any, count: int, default: int) -> tuple[int, ...]:
    listed = [default] if value is None else [value] if isinstance(value, int) else list(value)
    return tuple(int(v) for v in (listed * count if len(listed) == 1 else listed))
