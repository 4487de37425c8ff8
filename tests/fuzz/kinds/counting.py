"""Blocks whose code computes with the number of channels, branches on it, or holds it as a constant."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..site import SPATIAL, Block, Made, Site, kind, param
from .wiring import bottleneck


def counted(name: str, run: Callable[[Tensor, int], Tensor], *domains: str) -> None:
    """Register run(f(x), axis) behind a layer, so that what it counts is hidden."""

    @kind(*domains, name=name)
    def make(site: Site) -> Made:
        axis, out = site.axis, 8
        return Block(lambda b, x: run(b.f(x), axis), f=site.mix(site.width, out)), out


counted("divided_by_count", lambda y, a: y / y.shape[a])
counted("times_root_of_count", lambda y, a: y * y.shape[a] ** -0.5)
counted("plus_count", lambda y, a: y + 0.1 * y.size(a))
counted("mean_by_hand", lambda y, a: y - y.sum(a, keepdim=True) / y.shape[a])
counted("numel", lambda y, a: y / (y.numel() / y.shape[0]))
counted("ones_of_count", lambda y, a: y + torch.ones(y.shape, dtype=y.dtype))
counted("steps_of_count", lambda y, a: y.movedim(a, -1).add(torch.arange(y.shape[a]) * 0.1).movedim(-1, a))
counted("branch_on_count", lambda y, a: y.relu() if y.shape[a] > 5 else y.tanh())
counted("branch_on_parity", lambda y, a: y * 2 if y.shape[a] % 2 == 0 else y)
counted("clamped_by_count", lambda y, a: y.clamp(max=y.shape[a] / 4))
counted("slice_by_count", lambda y, a: y.narrow(a, 0, y.shape[a] // 4 * 2).repeat_interleave(2, a)[:, : y.shape[1]])
counted("constant_view", lambda y, a: y.reshape(y.shape[0], 2, 4, *y.shape[2:]).tanh().reshape(y.shape), *SPATIAL)
counted("constant_width_view", lambda y, a: y.reshape(-1, 8).tanh().reshape(y.shape), "tokens", "features")
counted("constant_split", lambda y, a: torch.cat([p.tanh() for p in y.split([3, 5], a)], a))
counted("constant_slice", lambda y, a: torch.cat([y.narrow(a, 0, 3).relu(), y.narrow(a, 3, 5)], a))
counted("constant_index", lambda y, a: y.index_select(a, torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])))
counted(
    "constant_expand",
    lambda y, a: y + y.narrow(a, 0, 1).expand(*[8 if i == a else -1 for i in range(y.dim())]),
    *SPATIAL,
)
counted("constant_zeros", lambda y, a: y + torch.full((8, *[1] * (y.dim() - 2)), 0.3, dtype=y.dtype), *SPATIAL)
counted("single_entry", lambda y, a: y * y.narrow(a, 2, 1).sigmoid())
counted("last_entry", lambda y, a: y * y.select(a, -1).unsqueeze(a).sigmoid())


@kind()
def count_behind_the_reader(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x).relu()
        return b.g(y) * y.shape[site.axis] ** -0.5

    return Block(run, f=site.mix(site.width, 8), g=site.mix(8, 6)), 6


@kind()
def asserted_count(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x)
        assert y.shape[site.axis] == 8
        return y.relu()

    return Block(run, f=site.mix(site.width, 8)), 8


@kind("tokens", "features")
def features_attribute(site: Site) -> Made:
    """A number that the layer itself remembers."""

    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x).relu()
        return b.g(y) / b.f.out_features

    return Block(run, f=site.mix(site.width, 8), g=site.mix(8, 6)), 6


@kind("tokens", "features")
def weight_scaled_by_inputs(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = F.linear(x, b.w * b.w.shape[1] ** -0.5).relu()
        return F.linear(y, b.u * b.u.shape[1] ** -0.5)

    return Block(run, w=param(8, site.width), u=param(6, 8)), 6


@kind()
def residual_by_count(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        return x + b.f(x) / x.shape[site.axis]

    return Block(run, f=bottleneck(site)), site.width


@kind("tokens")
def heads_of_constant_size(site: Site) -> Made:
    """Heads of four features, as many as there are."""

    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x).view(*x.shape[:2], -1, 4)
        return b.g((y * y.sigmoid()).flatten(2))

    return Block(run, f=site.mix(site.width, 8), g=site.mix(8, site.width)), site.width


@kind("tokens", "features")
def sinusoids(site: Site) -> Made:
    """Positions made of sines, as wide as the input."""

    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x)
        rate = torch.exp(-torch.arange(y.shape[-1], dtype=x.dtype) / y.shape[-1])
        return y + rate.sin()

    return Block(run, f=site.mix(site.width, 8)), 8
