"""Operators within a channel: pooling, upsampling, padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..site import SPATIAL, Block, Made, Site, function, kind

MAX = {"signal": nn.MaxPool1d, "image": nn.MaxPool2d, "volume": nn.MaxPool3d}
AVERAGE = {"signal": nn.AvgPool1d, "image": nn.AvgPool2d, "volume": nn.AvgPool3d}
ADAPTIVE = {"signal": nn.AdaptiveAvgPool1d, "image": nn.AdaptiveAvgPool2d, "volume": nn.AdaptiveAvgPool3d}
ADAPTIVE_MAX = {"signal": nn.AdaptiveMaxPool1d, "image": nn.AdaptiveMaxPool2d, "volume": nn.AdaptiveMaxPool3d}


@kind(*SPATIAL)
def max_pool(site: Site) -> Made:
    return (MAX[site.domain](2), site.width, site.size // 2) if site.size >= 4 else None


@kind(*SPATIAL)
def max_pool_overlapping(site: Site) -> Made:
    return MAX[site.domain](3, 1, 1), site.width


@kind(*SPATIAL)
def average_pool(site: Site) -> Made:
    return AVERAGE[site.domain](3, 1, 1, count_include_pad=site.chance()), site.width


@kind(*SPATIAL)
def adaptive_pool(site: Site) -> Made:
    return ADAPTIVE[site.domain](3), site.width, 3


@kind(*SPATIAL)
def adaptive_max_pool(site: Site) -> Made:
    return ADAPTIVE_MAX[site.domain](2), site.width, 2


@kind("image")
def lp_pool(site: Site) -> Made:
    return (nn.LPPool2d(2, 2), site.width, site.size // 2) if site.size >= 4 else None


@kind("image")
def pool_with_indices(site: Site) -> Made:
    """Max pooling and its reverse."""

    def run(b: Block, x: Tensor) -> Tensor:
        y, where = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(y, where, 2, output_size=x.shape[2:])

    return (Block(run), site.width) if site.size % 2 == 0 else None


def _upsample(mode: str, domain: str) -> None:
    @kind(domain, name=f"upsample_{mode}")
    def make(site: Site) -> Made:
        up = nn.Upsample(scale_factor=2, mode=mode)
        return (nn.Sequential(up, AVERAGE[domain](2)), site.width) if site.size <= 8 else None


for _mode, _domain in {"bilinear": "image", "bicubic": "image", "linear": "signal", "trilinear": "volume"}.items():
    _upsample(_mode, _domain)


@kind(*SPATIAL)
def upsample_nearest(site: Site) -> Made:
    return (nn.Upsample(scale_factor=2), site.width, 2 * site.size) if site.size <= 4 else None


@kind(*SPATIAL)
def interpolate_to_size(site: Site) -> Made:
    return Block(lambda b, x: F.interpolate(x, size=[4] * (x.dim() - 2))), site.width, 4


@kind("image")
def pyramid(site: Site) -> Made:
    """A smaller picture, enlarged to the size of the first and added."""

    def run(b: Block, x: Tensor) -> Tensor:
        return x + F.interpolate(b.f(F.avg_pool2d(x, 2)), size=x.shape[2:], mode="bilinear")

    return (Block(run, f=site.mix(site.width, site.width)), site.width) if site.size >= 4 else None


@kind("image")
def pixel_shuffle(site: Site) -> Made:
    larger = nn.Sequential(nn.PixelShuffle(2), nn.MaxPool2d(2))
    return (larger, site.width // 4) if site.width % 4 == 0 and site.width >= 8 else None


@kind("image")
def pixel_shuffle_wide(site: Site) -> Made:
    out = site.rng.choice([3, 4])
    return (nn.Sequential(nn.Conv2d(site.width, 4 * out, 1), nn.PixelShuffle(2), nn.AvgPool2d(2)), out)


@kind("image")
def pixel_unshuffle(site: Site) -> Made:
    fits = site.width <= 6 and site.size % 2 == 0
    return (nn.PixelUnshuffle(2), 4 * site.width, site.size // 2) if fits else None


@kind("image")
def zero_padding(site: Site) -> Made:
    return nn.Sequential(nn.ZeroPad2d((1, 0, 0, 1)), nn.AvgPool2d(2, 1)), site.width


@kind("image")
def reflection_padding(site: Site) -> Made:
    pads = nn.Sequential(nn.ReflectionPad2d(1), nn.MaxPool2d(3, 1))
    return (pads, site.width) if site.size >= 3 else None


@kind("signal")
def constant_padding(site: Site) -> Made:
    return nn.Sequential(nn.ConstantPad1d((1, 1), 0.3), nn.AvgPool1d(3, 1)), site.width


@kind(*SPATIAL)
def dropout_of_channels(site: Site) -> Made:
    return {"signal": nn.Dropout1d, "image": nn.Dropout2d, "volume": nn.Dropout3d}[site.domain](0.3), site.width


function("spatial_softmax", lambda x: x.flatten(2).softmax(-1).view_as(x) * 4, *SPATIAL)
function("spatial_flip", lambda x: x.flip(-1), *SPATIAL)
function("spatial_roll", lambda x: x.roll(1, -1), *SPATIAL)
function("spatial_cumsum", lambda x: x.cumsum(-1) * 0.3, *SPATIAL)
function("spatial_sort", lambda x: x.sort(-1).values, *SPATIAL)
function("subtract_spatial_mean", lambda x: x - x.mean(-1, keepdim=True), *SPATIAL)
function("spatial_amax", lambda x: x - x.amax(-1, keepdim=True), *SPATIAL)
function("rotate", lambda x: torch.rot90(x, 1, (2, 3)), "image")
function("transpose_image", lambda x: x.transpose(2, 3), "image")
function("places_gathered", lambda x: torch.cat([x[:, :, ::2], x[:, :, 1::2]], 2), "image")
function("tokens_mean_removed", lambda x: x - x.mean(1, keepdim=True), "tokens")
function("tokens_shifted", lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], "tokens")
function("tokens_reversed", lambda x: x.flip(1), "tokens")
function("tokens_softmax", lambda x: x.softmax(1), "tokens")
function("tokens_cumulative", lambda x: x.cumsum(1) * 0.3, "tokens")
function("channels_last_memory", lambda x: x.contiguous(memory_format=torch.channels_last), "image")
