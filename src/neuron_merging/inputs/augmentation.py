"""Change pictures at random: many different ones from a few, all within the range of those given.

The original answers for changed pictures as well as for the given ones, so no labels have to be changed along.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from neuron_merging.inputs.input_scale import is_channels_last, is_signal

WINDOW_RANGE = (0.55, 2.8)
"""Sides of the windows that are cut out, as shares of the picture's; where a window is larger, the picture is continued
by its mirror images."""
MAX_STRETCH = 1.33
"""Factor by which one side of a window may be longer than the picture's proportions make it."""
CONTRAST_RANGE = (0.6, 1.4)
MAX_BRIGHTNESS_SHIFT = 0.15
"""Largest change of the brightness, as a share of the range of the pictures."""
TINT_RANGE = (0.85, 1.15)
"""Factors of the contrast of single colours."""
JOIN_SHARE = 0.5
"""Share of the pictures of which a part is replaced by the same part of another picture."""


def augment_pictures(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Return changed copies: another window, mirrored, in other colours, and some joined from two pictures.

    >>> x = torch.rand(4, 3, 16, 16)
    >>> augment_pictures(x, torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3, 16, 16])
    """
    last = is_channels_last(pictures) and not is_signal(pictures)
    planes = (pictures.movedim(3, 1) if last else pictures).float()
    low, high = float(planes.min()), float(planes.max())
    changed = torch.stack([_change_colors(_cut_window(own, generator), low, high, generator) for own in planes])
    joined = _join_pairs(changed, generator)
    made = joined.movedim(1, 3).contiguous() if last else joined
    return made.to(pictures.dtype) if pictures.is_floating_point() else made.round().to(pictures.dtype)


def _draw(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, device="cpu"))


def _draw_factor(low: float, high: float, generator: torch.Generator) -> float:
    """Draw a factor: halving is as likely as doubling."""
    return math.exp(_draw(math.log(low), math.log(high), generator))


def _cut_window(picture: Tensor, generator: torch.Generator) -> Tensor:
    """Cut out a random window, stretch it to the picture's size, and mirror one in two."""
    scale, stretch = (
        _draw_factor(low, high, generator) for low, high in (WINDOW_RANGE, (MAX_STRETCH**-0.5, MAX_STRETCH**0.5))
    )
    lines = []
    for size, share in zip(picture.shape[1:], (scale * stretch, scale / stretch), strict=True):
        start = _draw(0, 1 - share, generator)
        # grid_sample counts from -1 to 1.
        lines.append(2 * (start + share * (torch.arange(size, device=picture.device) + 0.5) / size) - 1)
    rows, columns = lines
    columns = columns.flip(0) if _draw(0, 1, generator) < 0.5 else columns
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)
    return grid_sample(picture[None], grid[None], padding_mode="reflection", align_corners=False)[0]


def _change_colors(picture: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    contrast = _draw(*CONTRAST_RANGE, generator)
    shift = _draw(-MAX_BRIGHTNESS_SHIFT, MAX_BRIGHTNESS_SHIFT, generator) * (high - low)
    tints = torch.tensor([_draw(*TINT_RANGE, generator) for _ in picture], device=picture.device).view(-1, 1, 1)
    mean = picture.mean()
    return ((picture - mean) * contrast * tints + mean + shift).clamp(low, high)


def _join_pairs(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Replace what lies behind a random line, across or along, by the same part of the next picture."""
    joined = pictures.clone()
    for i, other in enumerate(pictures.roll(1, 0)):
        if _draw(0, 1, generator) >= JOIN_SHARE:
            continue
        dim = 1 if _draw(0, 1, generator) < 0.5 else 2
        size = pictures.shape[dim + 1]
        start = round(_draw(0.2, 0.8, generator) * size)
        joined[i].narrow(dim, start, size - start).copy_(other.narrow(dim, start, size - start))
    return joined
