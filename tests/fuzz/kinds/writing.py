"""Writes in place, through views, and into buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..site import SPATIAL, Block, Made, Site, kind


def written(name: str, run: Callable[[Tensor], Tensor], *domains: str) -> None:
    """Register a function that may write into its argument, which is fresh from a layer."""

    @kind(*domains, name=name)
    def make(site: Site) -> Made:
        out = site.rng.choice([4, 8])
        return Block(lambda b, x: run(b.f(x)), f=site.mix(site.width, out)), out


def first_place(y: Tensor) -> Tensor:
    y[:, :, 0].mul_(0.5)
    return y


def view_read_again(y: Tensor) -> Tensor:
    flat = y.flatten(2)
    y[:, :, 0].mul_(0.5)
    return flat.view_as(y).tanh()


def view_written(y: Tensor) -> Tensor:
    y = y.contiguous()
    y.view(len(y), -1)[:, ::2].add_(0.3)
    return y


def half_written(y: Tensor) -> Tensor:
    y[:, : y.shape[1] // 2] = y[:, : y.shape[1] // 2].relu()
    return y


def one_channel_written(y: Tensor) -> Tensor:
    y[:, 0] = 0.5
    return y


def assigned_from_other(y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    z[:, ::2] = y[:, ::2].relu()
    z[:, 1::2] = y[:, 1::2].tanh()
    return z


def half_gated(y: Tensor) -> Tensor:
    half = y.shape[1] // 2
    y[:, :half].mul_(y[:, half:].sigmoid())
    return y


def chain(y: Tensor) -> Tensor:
    return y.mul_(0.5).add_(0.1).relu_().clamp_(max=2)


def transposed_written(y: Tensor) -> Tensor:
    t = y.transpose(1, -1)
    t += 0.2
    return y


def masked_write(y: Tensor) -> Tensor:
    y[y < 0] = 0
    return y


def copied_into(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z.copy_(y.tanh())
    return z


def old_value_kept(y: Tensor) -> Tensor:
    before = y.clone()
    y.relu_()
    return before - y


def alias_kept(y: Tensor) -> Tensor:
    alias = y
    y.relu_()
    return alias + y


def index_add(y: Tensor) -> Tensor:
    return y.index_add(1, torch.tensor([0, 1]), y[:, 2:4])


def fill_diagonal(y: Tensor) -> Tensor:
    return y.index_fill(1, torch.tensor([1]), 0.25)


for _run in (half_written, one_channel_written, assigned_from_other, half_gated, index_add, fill_diagonal):
    written(_run.__name__, _run, *SPATIAL, "features")
for _run in (chain, masked_write, copied_into, old_value_kept, alias_kept):
    written(_run.__name__, _run)
for _run in (first_place, view_read_again):
    written(_run.__name__, _run, "image", "signal", "volume")
for _run in (view_written, transposed_written):
    written(_run.__name__, _run, "signal", "image")


@kind()
def last_seen(site: Site) -> Made:
    """A buffer that is written while the network runs, and not read."""
    axis = site.axis

    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x)
        dims = [i for i in range(y.dim()) if i != axis % y.dim()]
        b.seen.copy_(y.detach().mean(dims))
        return y.relu()

    return Block(run, f=site.mix(site.width, 6), seen=torch.zeros(6)), 6


@kind()
def calls_counted(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        b.calls += 1
        return b.f(x).relu()

    return Block(run, f=site.mix(site.width, 6), calls=torch.zeros((), dtype=torch.long)), 6


@kind()
def running_average(site: Site) -> Made:
    """A buffer that is read and written."""
    axis = site.axis

    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x)
        dims = [i for i in range(y.dim()) if i != axis % y.dim()]
        b.mean.mul_(0.9).add_(0.1 * y.detach().mean(dims))
        return (y.movedim(axis, -1) - b.mean).movedim(-1, axis)

    return Block(run, f=site.mix(site.width, 6), mean=torch.randn(6)), 6


@kind()
def attribute_left_behind(site: Site) -> Made:
    """The last activation, kept on the module for others to look at."""

    def run(b: Block, x: Tensor) -> Tensor:
        b.last = {"count": x.dim()}
        return b.g(b.f(x).relu())

    return Block(run, f=site.mix(site.width, 6), g=site.mix(6, 6)), 6
