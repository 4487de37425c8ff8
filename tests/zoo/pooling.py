"""Pooling and resampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import CUBE, LINE, flat, op, refuse


def beside(pool: Callable[..., Tensor], *sizes: Any) -> Callable[[Tensor], Tensor]:
    """Windows over a dimension of the image and the channels."""
    return lambda x: pool(x.movedim(1, -1), *sizes).movedim(-1, 1)


op("max pool 1d", lambda: nn.MaxPool1d(2), LINE)
op("max pool 2d", lambda: nn.MaxPool2d(3, stride=2, padding=1))
op("max pool 3d", lambda: nn.MaxPool3d(2), CUBE)
op("average pool 1d", lambda: nn.AvgPool1d(3, padding=1), LINE)
op("average pool 2d", lambda: nn.AvgPool2d(3, padding=1, ceil_mode=True))
op("average pool 3d", lambda: nn.AvgPool3d(2), CUBE)
op("adaptive average pool 1d", lambda: nn.AdaptiveAvgPool1d(5), LINE)
op("adaptive average pool 2d", lambda: nn.AdaptiveAvgPool2d((3, None)))
op("adaptive average pool 3d", lambda: nn.AdaptiveAvgPool3d(4), CUBE)
op("adaptive max pool 1d", lambda: nn.AdaptiveMaxPool1d(5), LINE)
op("adaptive max pool 2d", lambda: nn.AdaptiveMaxPool2d(4))
op("adaptive max pool 3d", lambda: nn.AdaptiveMaxPool3d(4), CUBE)
op("average pool beside channels", lambda: beside(F.avg_pool2d, (2, 1)))
op("max pool beside channels", lambda: beside(F.max_pool2d, (3, 1), (2, 1), (1, 0)))
refuse("average pool over channels", lambda: beside(F.avg_pool2d, (1, 2)), "pools over channels", out=4)
refuse("every other channel pooled", lambda: beside(F.max_pool2d, 1, (1, 2)), "pools over channels", out=4)
op("lp pool 1d", lambda: nn.LPPool1d(2, 2), LINE)
op("lp pool 2d", lambda: nn.LPPool2d(2, 2))
op("lp pool 3d", lambda: nn.LPPool3d(2, 2), CUBE)
op(
    "max pool and back",
    lambda: lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    cut=("b.weight",),
)
flat("global pool", lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), 8)
for _mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
    op(f"interpolate {_mode}", lambda mode=_mode: lambda x: F.interpolate(x, scale_factor=2, mode=mode))
op("interpolate linear", lambda: nn.Upsample(size=15, mode="linear"), LINE)
op("interpolate nearest 1d", lambda: nn.Upsample(scale_factor=2), LINE)
op("interpolate aligned", lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True))
op("interpolate antialiased", lambda: lambda x: F.interpolate(x, size=5, mode="bilinear", antialias=True))
op("interpolate trilinear", lambda: nn.Upsample(scale_factor=2, mode="trilinear"), CUBE)
op("interpolate nearest 3d", lambda: nn.Upsample(scale_factor=2), CUBE)
