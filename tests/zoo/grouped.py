"""Grouped and depthwise convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.registry import CUBE, IMAGE, LINE, add, on_the_input, op, refuse

op("grouped", lambda: nn.Conv2d(8, 12, 3, groups=2), out=12, cut=("a.weight", "op.weight"))
op("grouped 1d", lambda: nn.Conv1d(8, 12, 3, groups=4), LINE, out=12, cut=("a.weight", "op.weight"))
op("grouped transposed", lambda: nn.ConvTranspose2d(8, 12, 3, groups=2), out=12, cut=("a.weight", "op.weight"))
op("grouped transposed 1d", lambda: nn.ConvTranspose1d(8, 8, 3, groups=4), LINE, cut=("a.weight", "op.weight"))
op("grouped transposed 3d", lambda: nn.ConvTranspose3d(8, 4, 2, groups=2), CUBE, out=4, cut=("a.weight", "op.weight"))
op(
    "groups of two sizes",
    lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=4)),
    out=16,
    cut=("a.weight", "op.0.weight", "op.3.weight"),
)
op("depthwise", lambda: nn.Conv2d(8, 8, 3, groups=8), cut=("a.weight", "op.weight"))
op("depthwise times two", lambda: nn.Conv2d(8, 16, 3, groups=8), out=16, cut=("a.weight", "op.weight"))
op("depthwise times three", lambda: nn.Conv2d(8, 24, 3, groups=8), out=24, cut=("a.weight", "op.weight"))
op("depthwise twice", lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1, groups=8)), out=16)
op("grouped, one channel out of each", lambda: nn.Conv2d(8, 4, 3, groups=4), out=4)
add("depthwise on the input", lambda: on_the_input(nn.Conv2d(3, 12, 3, groups=3)), IMAGE, cut=("b.weight",))
add("grouped on the input", lambda: on_the_input(nn.Conv2d(4, 12, 3, groups=2)), ((2, 4, 8, 8),))
op("depthwise 1d", lambda: nn.Conv1d(8, 8, 3, groups=8), LINE, cut=("a.weight", "op.weight"))
op("depthwise 3d", lambda: nn.Conv3d(8, 16, 3, groups=8), CUBE, out=16, cut=("a.weight", "op.weight"))
op("depthwise transposed", lambda: nn.ConvTranspose2d(8, 8, 2, stride=2, groups=8), cut=("a.weight", "op.bias"))
op("depthwise transposed times two", lambda: nn.ConvTranspose2d(8, 16, 2, groups=8), out=16, cut=("a.weight",))
refuse("depthwise with filters that are computed", lambda: computed, "computed, not stored")


def computed(x: Tensor) -> Tensor:
    filters = torch.arange(9 * x.shape[1]).view(-1, 1, 3, 3) / 9.0
    return nn.functional.conv2d(x, filters, groups=x.shape[1])
