"""How a network ends: its head, and what it returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..site import DOMAINS, SPATIAL, Block, Site, param

Ending = Callable[[Site], nn.Module]
ENDINGS: dict[str, tuple[tuple[str, ...], Ending]] = {}


def ending(*domains: str) -> Callable[[Ending], Ending]:
    def register(make: Ending) -> Ending:
        ENDINGS[make.__name__] = (domains or DOMAINS, make)
        return make

    return register


def pooled(site: Site, x: Tensor) -> Tensor:
    """One vector for each sample."""
    if site.domain == "features":
        return x
    return x.mean(1) if site.domain == "tokens" else x.flatten(2).mean(-1)


def head(site: Site, out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(site.width, 6), nn.ReLU(), nn.Linear(6, out))


@ending()
def classes(site: Site) -> nn.Module:
    return Block(lambda b, x: b.f(pooled(site, x)), f=nn.Linear(site.width, 3))


@ending()
def hidden_then_classes(site: Site) -> nn.Module:
    return Block(lambda b, x: b.f(pooled(site, x)), f=head(site))


@ending()
def one_for_each_place(site: Site) -> nn.Module:
    return site.mix(site.width, 2)


@ending("image", "signal", "volume", "tokens")
def flattened(site: Site) -> nn.Module:
    extent = site.size ** max(1, site.spatial)
    return Block(lambda b, x: b.f(x.flatten(1)), f=nn.Linear(site.width * extent, 3))


@ending(*SPATIAL)
def flattened_pool(site: Site) -> nn.Module:
    def run(b: Block, x: Tensor) -> Tensor:
        y = nn.functional.adaptive_max_pool1d(x.flatten(2), 2)
        return b.f(y.view(x.shape[0], -1))

    return Block(run, f=nn.Linear(2 * site.width, 3))


@ending("tokens")
def last_token(site: Site) -> nn.Module:
    return Block(lambda b, x: b.f(b.norm(x)[:, -1]), f=nn.Linear(site.width, 3), norm=nn.LayerNorm(site.width))


@ending()
def pair(site: Site) -> nn.Module:
    return Block(lambda b, x: (b.f(pooled(site, x)), b.g(pooled(site, x.tanh()))), f=head(site), g=head(site, 2))


@ending()
def named(site: Site) -> nn.Module:
    def run(b: Block, x: Tensor) -> dict[str, object]:
        y = pooled(site, x)
        return {"logits": b.f(y), "more": [b.g(y), {"norm": b.g(y).norm()}]}

    return Block(run, f=head(site), g=nn.Linear(site.width, 2))


@ending()
def hidden_returned(site: Site) -> nn.Module:
    """Features that the caller sees must not be cut."""

    def run(b: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        y = b.f(pooled(site, x)).relu()
        return b.g(y), y

    return Block(run, f=nn.Linear(site.width, 6), g=nn.Linear(6, 3))


@ending()
def decisions(site: Site) -> nn.Module:
    def run(b: Block, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = b.f(pooled(site, x))
        return y, y > 0, y.argmax(-1)

    return Block(run, f=head(site))


@ending()
def complex_numbers(site: Site) -> nn.Module:
    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(pooled(site, x))
        return torch.complex(y[:, :2], y[:, 2:])

    return Block(run, f=head(site, 4))


@ending()
def spectrum(site: Site) -> nn.Module:
    return Block(lambda b, x: torch.fft.rfft(b.f(pooled(site, x))), f=head(site, 5))


@ending()
def unused_head(site: Site) -> nn.Module:
    return Block(lambda b, x: b.f(pooled(site, x)), f=head(site), g=head(site, 5))


@ending()
def training_head(site: Site) -> nn.Module:
    def run(b: Block, x: Tensor) -> object:
        y = pooled(site, x)
        return (b.f(y), b.g(y)) if b.training else b.f(y)

    return Block(run, f=head(site), g=head(site, 5))


@ending()
def none_and_numbers(site: Site) -> nn.Module:
    return Block(lambda b, x: (b.f(pooled(site, x)), None, 3), f=head(site))


@ending()
def probabilities(site: Site) -> nn.Module:
    return Block(lambda b, x: b.f(pooled(site, x)).softmax(-1), f=head(site, 4))


@ending()
def distances(site: Site) -> nn.Module:
    """Distances to prototypes."""
    return Block(lambda b, x: torch.cdist(b.f(pooled(site, x)), b.p), f=head(site, 4), p=param(5, 4))


@ending()
def masked_logits(site: Site) -> nn.Module:
    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(pooled(site, x))
        return y.masked_fill(torch.arange(y.shape[-1]) < 1, torch.finfo(y.dtype).min)

    return Block(run, f=head(site, 4))
