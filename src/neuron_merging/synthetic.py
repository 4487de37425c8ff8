"""synthetic: inputs that look like data, for a network that comes without any.

Natural signals are made of objects that hide one another. The dead-leaves model paints random
balls of random colour over each other; with sizes drawn from a power law it has the edges, the
flat regions and the 1/f² spectrum of natural images, and with a shared brightness the strong
correlation between their colours. It works in one, two and three dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

LEAVES = 60


def looks_natural(example: Any) -> bool:
    """Whether an input is a batch of float signals over space or time: (batch, channels, …)."""
    return (
        isinstance(example, Tensor)
        and example.is_floating_point()
        and example.ndim >= 3
        and min(example.shape[2:]) >= 8
    )


def dead_leaves(count: int, shape: Sequence[int], pick: torch.Generator) -> Tensor:
    """`count` signals of shape (channels, …), zero mean and unit variance over all of them.

    >>> dead_leaves(2, (3, 16, 16), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 16, 16])
    """
    channels, *space = shape
    grid = torch.meshgrid(*(torch.arange(size, dtype=torch.float32) for size in space), indexing="ij")
    canvas = torch.zeros(count, channels, *space)
    size = max(space)
    for leaf in range(LEAVES):
        radius = _radii(count, size, pick) + (size / 2 if leaf < LEAVES // 10 else 0)
        centre = torch.rand(count, len(space), generator=pick) * torch.tensor(space)
        distance = sum((g - _wide(centre[:, i], g)) ** 2 for i, g in enumerate(grid))
        colour = _colours(count, channels, pick)
        inside = (distance < _wide(radius, grid[0]) ** 2)[:, None]  # type: ignore[operator]
        canvas = torch.where(inside, colour.view(count, channels, *(1 for _ in space)), canvas)
    return (canvas - canvas.mean()) / canvas.std()


def _radii(count: int, size: int, pick: torch.Generator) -> Tensor:
    """Density r⁻³ between a twenty-fourth and two fifths of the size: no scale stands out."""
    small, large = size / 24, size / 2.5
    uniform = torch.rand(count, generator=pick)
    return (uniform * (small**-2 - large**-2) + large**-2).rsqrt()


def _colours(count: int, channels: int, pick: torch.Generator) -> Tensor:
    brightness = torch.randn(count, 1, generator=pick)
    return 0.85 * brightness + 0.35 * torch.randn(count, channels, generator=pick)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *(1 for _ in like.shape))


def batches(example: Tensor, images: int, size: int, seed: int) -> Iterator[Tensor]:
    """Synthetic inputs like the example, batch by batch."""
    pick = torch.Generator().manual_seed(seed)
    for start in range(0, images, size):
        count = min(size, images - start)
        yield dead_leaves(count, example.shape[1:], pick).to(example)
