"""Weights and buffers that are no layer's own, or that are computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.registry import FLAT, case


@case("per-channel buffers", dead=False)
class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.register_buffer("scale", torch.rand(8, 1, 1) + 0.5)
        self.register_buffer("shift", torch.randn(1, 8, 1, 1), persistent=False)
        self.register_buffer("floor", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.a(x) * self.scale + self.shift).relu()
        x = torch.maximum(self.b(x), self.floor[None, :, None, None])
        return self.c(x)


@case("parameters with space", cut=("a.weight", "scale", "shift"), dead=False)
class SpatialParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.scale, self.shift = nn.Parameter(torch.empty(8, 6, 6)), nn.Parameter(torch.empty(1, 8, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x) * self.scale + self.shift).relu())


@case("tensor that is no buffer", cut=("b.weight",), refused={"a": "self.a(x) * self.scale"})
class PlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.scale = torch.linspace(0.5, 1.5, 8).view(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x) * self.scale).relu())


@case("embedding", ((2, 5),), cut=("e.weight", "b.weight"), vocabulary=11)
class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.b, self.c = nn.Embedding(11, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.e(x)).relu().mean(1))


@case("weight norm")
class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
        self.b, self.c = nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


@case("weight norm of the reader", cut=("a.weight", "b.weight", "c.weight"))
class WeightNormReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 3), nn.Conv2d(6, 3, 1)
        self.b, self.c = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 6, 3)), nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).relu()).relu()).relu())


@case("spectral norm")
class SpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))
        self.b, self.c = nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


@case("bias that stands alone", FLAT, dead=False)
class LoneBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8, bias=False), nn.Linear(8, 6), nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b((self.a(x) + self.shift).sigmoid()).relu())
