"""Convolutions of every kind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..site import CONVOLUTION, SPATIAL, Block, Made, Site, kind, param

TRANSPOSED = {"signal": nn.ConvTranspose1d, "image": nn.ConvTranspose2d, "volume": nn.ConvTranspose3d}
FUNCTIONAL = {"signal": F.conv1d, "image": F.conv2d, "volume": F.conv3d}
TRANSPOSE = {"signal": F.conv_transpose1d, "image": F.conv_transpose2d, "volume": F.conv_transpose3d}


@kind(*SPATIAL)
def convolution(site: Site) -> Made:
    out = site.other()
    return site.mix(site.width, out), out


@kind(*SPATIAL)
def strided(site: Site) -> Made:
    out = site.other()
    return (site.mix(site.width, out, kernel=3, stride=2), out, (site.size + 1) // 2) if site.size >= 4 else None


@kind(*SPATIAL)
def dilated(site: Site) -> Made:
    out = site.other()
    return site.mix(site.width, out, kernel=3, dilation=2, padding=2), out


def _padded(mode: str) -> None:
    @kind(*SPATIAL, name=f"padding_{mode}")
    def padded(site: Site) -> Made:
        if site.size < 3:
            return None
        out = site.other()
        return site.mix(site.width, out, kernel=3, padding=1, padding_mode=mode), out


for _mode in ("circular", "replicate"):
    _padded(_mode)


@kind("image", "signal")
def padding_reflect(site: Site) -> Made:
    out = site.other()
    return (site.mix(site.width, out, kernel=3, padding_mode="reflect"), out) if site.size >= 3 else None


@kind(*SPATIAL)
def padding_same(site: Site) -> Made:
    out = site.other()
    return site.mix(site.width, out, kernel=3, padding="same", dilation=2), out


@kind(*SPATIAL)
def padding_valid(site: Site) -> Made:
    out = site.other()
    return (site.mix(site.width, out, kernel=3, padding="valid"), out, site.size - 2) if site.size >= 5 else None


@kind(*SPATIAL)
def grouped(site: Site) -> Made:
    groups = site.rng.choice([2, 3, 4])
    out = groups * site.rng.choice([1, 2, 3])
    return (site.mix(site.width, out, groups=groups), out) if site.width % groups == 0 else None


@kind(*SPATIAL)
def two_grouped(site: Site) -> Made:
    if site.width % 2:
        return None
    first, second = site.mix(site.width, 8, groups=2), site.mix(8, 8, groups=4)
    return nn.Sequential(first, nn.ReLU(), second), 8


@kind(*SPATIAL)
def depthwise(site: Site) -> Made:
    return site.mix(site.width, site.width, groups=site.width, kernel=3), site.width


@kind(*SPATIAL)
def depthwise_multiplier(site: Site) -> Made:
    return (site.mix(site.width, 2 * site.width, groups=site.width), 2 * site.width) if site.width <= 12 else None


@kind(*SPATIAL)
def depthwise_separable(site: Site) -> Made:
    out = site.other()
    depth = site.mix(site.width, site.width, groups=site.width, kernel=3)
    return nn.Sequential(depth, nn.ReLU6(), site.mix(site.width, out, kernel=1)), out


@kind(*SPATIAL)
def inverted_residual(site: Site) -> Made:
    wide = 2 * site.width
    if wide > 24:
        return None
    layers = nn.Sequential(
        site.mix(site.width, wide, kernel=1),
        nn.Hardswish(),
        site.mix(wide, wide, groups=wide, kernel=3),
        nn.ReLU(),
        site.mix(wide, site.width, kernel=1),
    )
    return Block(lambda b, x: x + b.layers(x), layers=layers), site.width


@kind(*SPATIAL)
def transposed(site: Site) -> Made:
    out = site.other()
    return TRANSPOSED[site.domain](site.width, out, 3, padding=1, bias=site.chance()), out


@kind(*SPATIAL)
def transposed_strided(site: Site) -> Made:
    out = site.other()
    return (TRANSPOSED[site.domain](site.width, out, 2, stride=2), out, 2 * site.size) if site.size <= 4 else None


@kind(*SPATIAL)
def transposed_grouped(site: Site) -> Made:
    out = 2 * site.rng.choice([2, 3, 4])
    return (TRANSPOSED[site.domain](site.width, out, 3, padding=1, groups=2), out) if site.width % 2 == 0 else None


@kind(*SPATIAL)
def transposed_depthwise(site: Site) -> Made:
    return TRANSPOSED[site.domain](site.width, site.width, 3, padding=1, groups=site.width), site.width


@kind(*SPATIAL)
def functional_convolution(site: Site) -> Made:
    out, conv = site.other(), FUNCTIONAL[site.domain]
    w, v = param(out, site.width, *[3] * site.spatial), param(out)
    return Block(lambda b, x: conv(x, b.w, b.v, padding=1), w=w, v=v), out


@kind(*SPATIAL)
def functional_transposed(site: Site) -> Made:
    out, conv = site.other(), TRANSPOSE[site.domain]
    return Block(lambda b, x: conv(x, b.w, padding=1), w=param(site.width, out, *[3] * site.spatial)), out


@kind(*SPATIAL)
def weight_of_another_order(site: Site) -> Made:
    """A weight stored with its inputs first, transposed on the way."""
    out, conv = site.other(), FUNCTIONAL[site.domain]
    return Block(lambda b, x: conv(x, b.w.transpose(0, 1)), w=param(site.width, out, *[1] * site.spatial)), out


@kind(*SPATIAL)
def fixed_blur(site: Site) -> Made:
    """A fixed kernel from a buffer, the same for every channel."""
    conv = FUNCTIONAL[site.domain]

    def run(b: Block, x: Tensor) -> Tensor:
        kernel = b.kernel.expand(x.shape[1], 1, *b.kernel.shape[2:])
        return conv(x, kernel, padding=1, groups=x.shape[1])

    return Block(run, kernel=torch.rand(1, 1, *[3] * site.spatial)), site.width


@kind(*SPATIAL)
def kernel_of_a_linear(site: Site) -> Made:
    """A matrix used as a convolution with a kernel of one."""
    out, conv, ones = site.other(), FUNCTIONAL[site.domain], [1] * site.spatial
    return Block(lambda b, x: conv(x, b.w.view(*b.w.shape, *ones)), w=param(out, site.width)), out


@kind("image")
def factorised(site: Site) -> Made:
    out = site.other()
    tall = nn.Conv2d(site.width, out, (3, 1), padding=(1, 0))
    return nn.Sequential(tall, nn.Tanh(), nn.Conv2d(out, out, (1, 3), padding=(0, 1))), out


@kind("image")
def patches(site: Site) -> Made:
    """A convolution written as unfold and a product."""
    out = site.other()

    def run(b: Block, x: Tensor) -> Tensor:
        columns = F.unfold(x, 3, padding=1)
        return (b.w @ columns).view(x.shape[0], -1, *x.shape[2:])

    return Block(run, w=param(out, 9 * site.width)), out


@kind(*SPATIAL)
def shared_convolution(site: Site) -> Made:
    """One layer called twice."""
    layer = site.mix(site.width, site.width)
    return Block(lambda b, x: b.f(b.f(x).relu()), f=layer), site.width


@kind(*SPATIAL)
def twin_branches(site: Site) -> Made:
    """One layer on two inputs."""
    out = site.other()
    second = CONVOLUTION[site.domain](out, out, 1)
    return Block(lambda b, x: b.g(b.f(x).relu() + b.f(x.tanh()).relu()), f=site.mix(site.width, out), g=second), out
