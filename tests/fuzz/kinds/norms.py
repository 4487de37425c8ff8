"""Norms: modules, functions, and written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..site import SPATIAL, Block, Made, Site, kind, param

BATCH = {"signal": nn.BatchNorm1d, "image": nn.BatchNorm2d, "volume": nn.BatchNorm3d, "features": nn.BatchNorm1d}
INSTANCE = {"signal": nn.InstanceNorm1d, "image": nn.InstanceNorm2d, "volume": nn.InstanceNorm3d}


@kind(*BATCH)
def batch_norm(site: Site) -> Made:
    return BATCH[site.domain](site.width), site.width


@kind(*BATCH)
def batch_norm_plain(site: Site) -> Made:
    return BATCH[site.domain](site.width, affine=False), site.width


@kind(*SPATIAL)
def batch_norm_without_memory(site: Site) -> Made:
    return BATCH[site.domain](site.width, track_running_stats=False), site.width


@kind(*BATCH)
def batch_norm_functional(site: Site) -> Made:
    mean, var = torch.randn(site.width), torch.rand(site.width) + 0.5
    return Block(lambda b, x: F.batch_norm(x, b.mean, b.var, b.w), mean=mean, var=var, w=param(site.width)), site.width


@kind(*BATCH)
def batch_norm_by_hand(site: Site) -> Made:
    shape = (site.width, *[1] * site.spatial)
    mean, var = torch.randn(shape), torch.rand(shape) + 0.5

    def run(b: Block, x: Tensor) -> Tensor:
        return (x - b.mean) * torch.rsqrt(b.var + 1e-5) * b.w + b.v

    return Block(run, mean=mean, var=var, w=param(*shape), v=param(*shape)), site.width


@kind(*BATCH)
def conv_batch_relu(site: Site) -> Made:
    out = site.other()
    return nn.Sequential(site.mix(site.width, out, bias=False), BATCH[site.domain](out), nn.ReLU(inplace=True)), out


@kind("tokens")
def batch_norm_of_tokens(site: Site) -> Made:
    return Block(lambda b, x: b.f(x.transpose(1, 2)).transpose(1, 2), f=nn.BatchNorm1d(site.width)), site.width


@kind(*SPATIAL)
def instance_norm(site: Site) -> Made:
    return (INSTANCE[site.domain](site.width, affine=site.chance()), site.width) if site.size > 1 else None


@kind(*SPATIAL)
def instance_norm_with_memory(site: Site) -> Made:
    return INSTANCE[site.domain](site.width, affine=True, track_running_stats=True), site.width


@kind(*SPATIAL)
def instance_norm_by_hand(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        dims = tuple(range(2, x.dim()))
        return (x - x.mean(dims, keepdim=True)) / (x.std(dims, keepdim=True) + 1e-3)

    return Block(run), site.width


def _group_norm(name: str, groups: int) -> None:
    @kind(*SPATIAL, "features", name=name)
    def make(site: Site) -> Made:
        count = groups or site.width
        return (nn.GroupNorm(count, site.width), site.width) if site.width % count == 0 else None


for _name, _groups in {"group_norm_2": 2, "group_norm_4": 4, "group_norm_1": 1, "group_norm_each": 0}.items():
    _group_norm(_name, _groups)


@kind(*SPATIAL)
def group_norm_functional(site: Site) -> Made:
    return (Block(lambda b, x: F.group_norm(x, 2)), site.width) if site.width % 2 == 0 else None


@kind(*SPATIAL)
def group_norm_by_size(site: Site) -> Made:
    return (Block(lambda b, x: F.group_norm(x, x.shape[1] // 2)), site.width) if site.width % 2 == 0 else None


class GroupNorm(nn.Module):
    """A class of the user's with a familiar name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = param(width), param(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, 2, self.weight, self.bias)


@kind(*SPATIAL)
def group_norm_of_the_user(site: Site) -> Made:
    return (GroupNorm(site.width), site.width) if site.width % 2 == 0 else None


@kind("tokens", "features")
def layer_norm(site: Site) -> Made:
    return nn.LayerNorm(site.width, bias=site.chance()), site.width


@kind("tokens", "features")
def rms_norm(site: Site) -> Made:
    return nn.RMSNorm(site.width), site.width


@kind("tokens", "features")
def layer_norm_plain(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        x = x * b.scale
        kept = b.only(x)
        return b.back(F.layer_norm(kept, (kept.shape[-1],)), x)

    return Block(run, tap="scale", axis=-1, scale=param(site.width)), site.width


@kind("tokens", "features")
def layer_norm_functional(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        kept = b.only(x)
        return b.back(F.layer_norm(kept, kept.shape[-1:], b.only(b.w), b.only(b.v)), x)

    return Block(run, tap="w", axis=-1, w=param(site.width), v=param(site.width)), site.width


@kind()
def rms_norm_by_hand(site: Site) -> Made:
    axis = site.axis

    def run(b: Block, x: Tensor) -> Tensor:
        kept = b.only(x)
        return x * torch.rsqrt(kept.pow(2).mean(axis, keepdim=True) + 1e-6) * b.w

    return Block(run, tap="w", axis=axis, w=site.per_channel(site.width)), site.width


@kind()
def layer_norm_by_hand(site: Site) -> Made:
    axis = site.axis

    def run(b: Block, x: Tensor) -> Tensor:
        kept = b.only(x)
        mean, var = kept.mean(axis, keepdim=True), kept.var(axis, keepdim=True, unbiased=False)
        return (x - mean) / (var + 1e-5).sqrt() * b.w + b.v

    parts = {"w": site.per_channel(site.width), "v": site.per_channel(site.width)}
    return Block(run, tap="w", axis=axis, **parts), site.width


@kind("image")
def layer_norm_channels_last(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        return b.f(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    return Block(run, f=nn.LayerNorm(site.width)), site.width


@kind("image")
def convnext(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = b.norm(b.depth(x).permute(0, 2, 3, 1))
        return x + (b.gamma * b.narrow(F.gelu(b.wide(y)))).permute(0, 3, 1, 2)

    c = site.width
    depth = nn.Conv2d(c, c, 3, padding=1, groups=c)
    wide, narrow = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)
    return Block(run, depth=depth, norm=nn.LayerNorm(c), wide=wide, narrow=narrow, gamma=param(c)), c


@kind("image", "signal")
def layer_norm_over_all(site: Site) -> Made:
    return nn.LayerNorm([site.width, *[site.size] * site.spatial]), site.width


@kind(*SPATIAL)
def response_norm(site: Site) -> Made:
    """Global response normalisation: extents per channel, divided by their mean over the channels."""

    def run(b: Block, x: Tensor) -> Tensor:
        extent = x.pow(2).sum(tuple(range(2, x.dim())), keepdim=True).sqrt()
        return x * (extent / (b.only(extent).mean(1, keepdim=True) + 1e-6)) * b.w + x

    return Block(run, tap="w", w=site.per_channel(site.width)), site.width


@kind(*SPATIAL)
def local_response(site: Site) -> Made:
    return nn.LocalResponseNorm(3), site.width


@kind()
def unit_length(site: Site) -> Made:
    axis = site.axis

    def run(b: Block, x: Tensor) -> Tensor:
        return F.normalize(x, dim=axis)

    return Block(run), site.width


@kind(*SPATIAL)
def frozen_batch_norm(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        scale = b.w * (b.var + 1e-5).rsqrt()
        shape = (1, -1, *[1] * (x.dim() - 2))
        return x * scale.reshape(shape) + (b.v - b.mean * scale).reshape(shape)

    c = site.width
    return Block(run, w=torch.randn(c), v=torch.randn(c), mean=torch.randn(c), var=torch.rand(c) + 0.5), c
