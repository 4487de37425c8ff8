"""Reductions and sorting over the channels: for each, zeroed channels differ from removed ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..site import Block, Made, Site, kind, param


def over(name: str, run: Callable[[Tensor, int], Tensor]) -> None:
    """Register x + run(x · scale) with the axis of the channels; the scale makes removed channels zero."""

    @kind(name=name)
    def make(site: Site) -> Made:
        axis = site.axis

        def both(b: Block, x: Tensor) -> Tensor:
            return b.g(x) + run(x * b.scale, axis)

        return Block(both, scale=site.per_channel(site.width), g=site.mix(site.width, site.width)), site.width


over("softmax_channels", lambda x, a: x.softmax(a))
over("log_softmax_channels", lambda x, a: x.log_softmax(a))
over("cumsum_channels", lambda x, a: x.cumsum(a))
over("sort_channels", lambda x, a: x.sort(a).values)
over("mean_channels", lambda x, a: x.mean(a, keepdim=True))
over("sum_channels", lambda x, a: x.sum(a, keepdim=True))
over("max_channels", lambda x, a: x.amax(a, keepdim=True))
over("max_with_indices", lambda x, a: x.max(a, keepdim=True).values)
over("std_channels", lambda x, a: x.std(a, keepdim=True))
over("norm_channels", lambda x, a: x.norm(dim=a, keepdim=True))
over("logsumexp_channels", lambda x, a: x.logsumexp(a, keepdim=True))
over("product_channels", lambda x, a: (x + 1).prod(a, keepdim=True))
over("argmax_channels", lambda x, a: x.argmax(a, keepdim=True) * 0.1)
over("any_positive", lambda x, a: (x > 0).any(a, keepdim=True) * 0.5)
over("median_channels", lambda x, a: x.median(a, keepdim=True).values)
over("total_mean", lambda x, a: x.mean())
over("total_norm", lambda x, a: x / (x.norm() + 1))
over("spread_entries", lambda x, a: x.flatten(1).std(1).view(-1, *[1] * (x.dim() - 1)))


@kind()
def topk_channels(site: Site) -> Made:
    axis, scale = site.axis, site.per_channel(site.width)
    return (Block(lambda b, x: (x * b.scale).topk(3, axis).values, scale=scale), 3) if site.width >= 3 else None


@kind()
def topk_mask(site: Site) -> Made:
    axis = site.axis

    def run(b: Block, x: Tensor) -> Tensor:
        level = x.topk(2, axis).values.narrow(axis, 1, 1)
        return x * (x >= level)

    return (Block(run), site.width) if site.width >= 2 else None


@kind("tokens", "features")
def product_with_itself(site: Site) -> Made:
    """A Gram matrix of the channels."""

    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x)
        gram = y.unsqueeze(-1) * y.unsqueeze(-2)
        return x + gram.sum((-1, -2)).unsqueeze(-1) * 0.1

    return Block(run, f=site.mix(site.width, 6)), site.width


@kind("image")
def bilinear_pooling(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x).flatten(2)
        gram = y @ y.transpose(1, 2) / y.shape[-1]
        return x + gram.diagonal(dim1=1, dim2=2).sum(1).view(-1, 1, 1, 1)

    return Block(run, f=site.mix(site.width, 6)), site.width


@kind()
def weighted_sum_of_channels(site: Site) -> Made:
    """A map of attention over places, with one weight for each channel."""
    axis = site.axis

    def run(b: Block, x: Tensor) -> Tensor:
        return x * (x * b.w).sum(axis, keepdim=True).sigmoid()

    return Block(run, w=site.per_channel(site.width)), site.width


@kind("tokens", "features")
def dot_with_vector(site: Site) -> Made:
    return Block(lambda b, x: x * torch.sigmoid(x @ b.w).unsqueeze(-1), w=param(site.width)), site.width
