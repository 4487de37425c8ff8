"""augment: random crops and mirror images of a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shuffle:
    """What chance decides about one epoch: the order of the images, their crops, their mirroring.

    All of it is drawn before the epoch starts, so it depends on nothing but the generator: neither
    on the size of a batch nor on how many processes share it.
    """

    order: Tensor
    shift: Tensor
    """(N, 2): the row and the column at which the crop of an image starts."""
    mirror: Tensor


def shuffle(count: int, generator: torch.Generator, crop: int = 0, flip: bool = False) -> Shuffle:
    """Draw an epoch of `count` images."""
    order = torch.randperm(count, generator=generator)
    shift = torch.randint(2 * crop + 1, (count, 2), generator=generator)
    mirror = torch.rand(count, generator=generator) < (0.5 if flip else 0)
    return Shuffle(order, shift, mirror)


def crop_and_flip(x: Tensor, shift: Tensor, mirror: Tensor, pad: int) -> Tensor:
    """Images (N, C, H, W) padded with black, cut back to their size from `shift` on, then mirrored.

    >>> x = torch.tensor([[[[1, 2], [3, 4]]]])
    >>> crop_and_flip(x, torch.tensor([[0, 1]]), torch.tensor([False]), pad=1).tolist()
    [[[[0, 0], [1, 2]]]]
    >>> crop_and_flip(x, torch.tensor([[1, 1]]), torch.tensor([True]), pad=1).tolist()
    [[[[2, 1], [4, 3]]]]
    """
    height, width = x.shape[2:]
    rows = shift[:, :1] + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device).expand(len(x), -1)
    columns = shift[:, 1:] + torch.where(mirror[:, None], width - 1 - columns, columns)
    image = torch.arange(len(x), device=x.device)[:, None, None]
    padded = F.pad(x, (pad, pad, pad, pad))
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
