"""Building blocks of kinds: the place of a block in a network, a module written as one function, the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

DOMAINS = ("image", "signal", "volume", "tokens", "features")
SPATIAL = ("image", "signal", "volume")
DIMENSIONS = {"signal": 1, "image": 2, "volume": 3}
CONVOLUTION = {"signal": nn.Conv1d, "image": nn.Conv2d, "volume": nn.Conv3d}
WIDTHS = (4, 6, 8, 12)


@dataclass(frozen=True)
class Site:
    """The place of a block: the kind of tensor that it gets, its channels and size, and a random generator."""

    domain: str
    width: int
    size: int
    rng: Random

    @property
    def axis(self) -> int:
        """The dimension of the channels."""
        return -1 if self.domain == "tokens" else 1

    @property
    def spatial(self) -> int:
        return DIMENSIONS.get(self.domain, 0)

    def chance(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def other(self) -> int:
        """Draw another width."""
        return self.rng.choice(WIDTHS)

    def mix(self, c: int, out: int, **options: Any) -> nn.Module:
        """Make a linear layer or a convolution between two widths."""
        bias = options.pop("bias", self.chance(0.7))
        if not self.spatial:
            return nn.Linear(c, out, bias=bias)
        kernel = options.pop("kernel", self.rng.choice([1, 3]))
        return CONVOLUTION[self.domain](
            c, out, kernel, padding=options.pop("padding", kernel // 2), bias=bias, **options
        )

    def per_channel(self, c: int) -> nn.Parameter:
        """Make a parameter that broadcasts along all dimensions but the channels."""
        return param(c, *[1] * self.spatial)


Made = tuple[nn.Module, int] | tuple[nn.Module, int, int] | None
Maker = Callable[[Site], Made]


@dataclass(frozen=True)
class Kind:
    """A kind of block: its name, the domains that it fits, and a function that makes one, or None for some widths."""

    name: str
    domains: tuple[str, ...]
    make: Maker


KINDS: dict[str, Kind] = {}


def kind(*domains: str, name: str = "") -> Callable[[Maker], Maker]:
    """Register a maker for these domains; for all of them where none is given."""

    def register(make: Maker) -> Maker:
        called = name or make.__name__
        assert called not in KINDS, called
        KINDS[called] = Kind(called, domains or DOMAINS, make)
        return make

    return register


def function(name: str, run: Callable[[Tensor], Tensor], *domains: str) -> None:
    """Register a block without parameters that keeps the width."""
    kind(*domains, name=name)(lambda site: (Block(lambda b, x: run(x)), site.width))


class Block(nn.Module):
    """A module written as one function of itself and its input.

    `tap` names a per-channel tensor of the block. From the plan's cut of it, the oracle learns which channels stay at
    this place, and stores them in `keep`: then `only` drops the others and `back` puts zeros in their place.
    """

    def __init__(self, run: Callable[..., Any], tap: str = "", axis: int = 1, **parts: Any) -> None:
        super().__init__()
        self.run, self.tap, self.axis = run, tap, axis
        self.keep: list[int] | None = None
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *x: Any) -> Any:
        return self.run(self, *x)

    def only(self, x: Tensor) -> Tensor:
        """Select the kept channels in the oracle's network; in the network itself, return all."""
        return x if self.keep is None else x.index_select(self.axis, torch.tensor(self.keep))

    def back(self, y: Tensor, x: Tensor) -> Tensor:
        """Restore `y` to the size of `x`, with zeros at the removed channels."""
        return y if self.keep is None else torch.zeros_like(x).index_copy(self.axis, torch.tensor(self.keep), y)


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)
