"""How a network begins: what it is given, and its first layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..site import Block, Site, param

Inputs = Callable[[int, int], tuple[Any, ...]]
VOCABULARY = 9


@dataclass(frozen=True)
class Opening:
    """A first module, and inputs for a number of samples and an extent."""

    module: nn.Module
    inputs: Inputs


OPENINGS: dict[str, tuple[str, Callable[[Site], Opening]]] = {}


def opening(domain: str) -> Callable[[Callable[[Site], Opening]], Callable[[Site], Opening]]:
    def register(make: Callable[[Site], Opening]) -> Callable[[Site], Opening]:
        OPENINGS[make.__name__] = (domain, make)
        return make

    return register


def noise(channels: int, dimensions: int) -> Callable[[int, int], Tensor]:
    return lambda batch, size: torch.randn(batch, channels, *[size] * dimensions)


@opening("image")
def picture(site: Site) -> Opening:
    draw = noise(3, 2)
    return Opening(site.mix(3, site.width, kernel=3), lambda n, s: (draw(n, s),))


@opening("image")
def two_pictures_summed(site: Site) -> Opening:
    draw = noise(3, 2)
    module = Block(lambda b, x, y: b.f(x) + b.g(y), f=site.mix(3, site.width), g=site.mix(3, site.width))
    return Opening(module, lambda n, s: (draw(n, s), draw(n, s)))


@opening("image")
def two_pictures_joined(site: Site) -> Opening:
    draw = noise(3, 2)
    module = Block(lambda b, x, y: b.f(torch.cat([x, y], 1)), f=site.mix(6, site.width))
    return Opening(module, lambda n, s: (draw(n, s), draw(n, s)))


@opening("image")
def dictionary(site: Site) -> Opening:
    draw = noise(3, 2)
    module = Block(lambda b, d: b.f(d["x"]) * d["scale"], f=site.mix(3, site.width))
    return Opening(module, lambda n, s: ({"x": draw(n, s), "scale": torch.rand(n, 1, 1, 1) + 0.5},))


@opening("image")
def picture_and_vector(site: Site) -> Opening:
    draw = noise(3, 2)
    module = Block(
        lambda b, x, v: b.f(x) + b.g(v)[:, :, None, None], f=site.mix(3, site.width), g=nn.Linear(5, site.width)
    )
    return Opening(module, lambda n, s: (draw(n, s), torch.randn(n, 5)))


@opening("image")
def list_of_pictures(site: Site) -> Opening:
    draw = noise(3, 2)
    module = Block(lambda b, xs: b.f(xs[0] + xs[1]), f=site.mix(3, site.width))
    return Opening(module, lambda n, s: ([draw(n, s), draw(n, s)],))


@opening("image")
def scaled_by_a_number(site: Site) -> Opening:
    draw = noise(3, 2)
    module = Block(lambda b, x, t, flag: b.f(x) * t if flag else b.f(x), f=site.mix(3, site.width))
    return Opening(module, lambda n, s: (draw(n, s), 0.7, True))


@opening("signal")
def wave(site: Site) -> Opening:
    draw = noise(2, 1)
    return Opening(site.mix(2, site.width), lambda n, s: (draw(n, s),))


@opening("signal")
def wave_with_mask(site: Site) -> Opening:
    draw = noise(2, 1)
    module = Block(lambda b, x, keep: b.f(x).masked_fill(~keep, 0.0), f=site.mix(2, site.width))
    return Opening(module, lambda n, s: (draw(n, s), torch.rand(n, 1, s) > 0.3))


@opening("volume")
def scan(site: Site) -> Opening:
    draw = noise(2, 3)
    return Opening(site.mix(2, site.width), lambda n, s: (draw(n, s),))


@opening("features")
def vector(site: Site) -> Opening:
    return Opening(nn.Linear(6, site.width), lambda n, s: (torch.randn(n, 6),))


@opening("features")
def two_vectors(site: Site) -> Opening:
    module = Block(lambda b, x, y: b.f(x) * b.g(y).sigmoid(), f=nn.Linear(6, site.width), g=nn.Linear(4, site.width))
    return Opening(module, lambda n, s: (torch.randn(n, 6), torch.randn(n, 4)))


@opening("features")
def categories(site: Site) -> Opening:
    """A table for a category beside numbers."""
    module = Block(
        lambda b, x, i: b.f(torch.cat([x, b.table(i)], 1)), f=nn.Linear(10, site.width), table=nn.Embedding(5, 4)
    )
    return Opening(module, lambda n, s: (torch.randn(n, 6), torch.randint(5, (n,))))


@opening("features")
def picture_pooled(site: Site) -> Opening:
    draw = noise(3, 2)
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, site.width)
    )
    return Opening(layers, lambda n, s: (draw(n, s + 7),))


@opening("tokens")
def sequence(site: Site) -> Opening:
    return Opening(nn.Linear(5, site.width), lambda n, s: (torch.randn(n, s, 5),))


@opening("tokens")
def words(site: Site) -> Opening:
    table = nn.Embedding(VOCABULARY, site.width, padding_idx=0 if site.chance() else None)
    return Opening(table, lambda n, s: (torch.randint(VOCABULARY, (n, s)),))


@opening("tokens")
def words_with_positions(site: Site) -> Opening:
    module = Block(
        lambda b, i: b.table(i) + b.place[: i.shape[1]],
        table=nn.Embedding(VOCABULARY, site.width),
        place=param(16, site.width),
    )
    return Opening(module, lambda n, s: (torch.randint(VOCABULARY, (n, s)),))


@opening("tokens")
def one_hot(site: Site) -> Opening:
    def run(b: Block, i: Tensor) -> Tensor:
        return b.f(nn.functional.one_hot(i, VOCABULARY).to(b.f.weight.dtype))

    return Opening(Block(run, f=nn.Linear(VOCABULARY, site.width)), lambda n, s: (torch.randint(VOCABULARY, (n, s)),))


@opening("tokens")
def patches_of_a_picture(site: Site) -> Opening:
    """Six tokens whatever the extent: the other blocks know how many there are."""
    draw = noise(3, 2)
    layers = nn.Sequential(nn.AdaptiveAvgPool2d((4, 2 * site.size)), nn.Conv2d(3, site.width, (4, 2), stride=(4, 2)))
    module = Block(lambda b, x: b.f(x).flatten(2).transpose(1, 2), f=layers)
    return Opening(module, lambda n, s: (draw(n, s),))
