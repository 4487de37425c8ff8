"""Norms over channels, groups and space."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import CUBE, FLAT, LINE, op, refuse


class ResponseNorm(nn.Module):
    """Each channel by its norm over space, relative to the mean of all channels', as ConvNeXt V2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(8, 1, 1)), nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(dim=(-2, -1), keepdim=True)
        return self.gain * (x * (size / (size.mean(1, keepdim=True) + 1e-6))) + self.shift + x


op("batch norm 1d flat", lambda: nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), FLAT)
op("batch norm 1d", lambda: nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), LINE)
op("batch norm 2d", lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
op("batch norm 3d", lambda: nn.Sequential(nn.BatchNorm3d(8), nn.ReLU()), CUBE)
op("batch norm after", lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(8)))
op("batch norm plain", lambda: nn.Sequential(nn.BatchNorm2d(8, affine=False), nn.ReLU()), dead=False)
op("batch norm of the batch", lambda: nn.Sequential(nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()))
op("group norm", lambda: nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU()))
op("group norm of singles", lambda: nn.Sequential(nn.GroupNorm(8, 8), nn.ReLU()))
op("group norm plain", lambda: nn.GroupNorm(4, 8, affine=False), LINE)
op("group norm then grouped", lambda: nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 1, groups=2)), mid=16)
op("group norm of all", lambda: nn.GroupNorm(1, 8), spans=True, dead=False)
op("group norm of all, plain", lambda: lambda x: F.group_norm(x, 1), LINE, spans=True, dead=False)
op("instance norm", lambda: nn.InstanceNorm2d(8, affine=True))
op("instance norm plain", lambda: nn.InstanceNorm2d(8))
op("instance norm tracked", lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
op("instance norm 1d", lambda: nn.InstanceNorm1d(8, affine=True), LINE)
op("instance norm 3d", lambda: nn.InstanceNorm3d(8, affine=True), CUBE)
op("layer norm over channels", lambda: nn.LayerNorm(8), FLAT, spans=True, dead=False)
op("layer norm over all", lambda: nn.LayerNorm([8, 8, 8]), cut=("b.weight",), spans=True, dead=False)
op("layer norm over space", lambda: nn.LayerNorm([8, 8]), dead=False)
op("layer norm over length", lambda: nn.LayerNorm(12, elementwise_affine=False), LINE)
op("rms norm over space", lambda: nn.RMSNorm([8, 8]))
op("local response norm", lambda: nn.LocalResponseNorm(3), cut=("b.weight",), dead=False)
op("normalise over space", lambda: lambda x: F.normalize(x, dim=2), LINE)
refuse("normalise over channels", lambda: lambda x: F.normalize(x, dim=1), "F.normalize(x, dim=1)", dead=False)
op("global response norm", ResponseNorm, spans=True, dead=False)
