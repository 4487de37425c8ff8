"""Modules and weights that are used more than once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import FLAT, case


@case("shared module", cut=("a.weight", "s.weight", "b.weight"))
class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.s = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.b, self.c = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.s(self.s(self.a(x).relu()).relu()).relu()
        return self.c(self.b(x).relu())


@case("shared head", ((2, 3, 8, 8), (2, 3, 6, 6)), cut=("a.weight", "d.weight", "b.weight"))
class SharedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.b, self.c = nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.c(self.b(self.a(x).relu()).relu()), self.c(self.b(self.d(y).tanh()).relu())


@case("shared batch norm", cut=("a.weight", "d.weight"))
class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d, self.norm, self.c = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.c(self.norm(self.a(x)).relu()), self.c(self.norm(self.d(x)).relu())


@case("module under two names", cut=("a.weight", "b.weight"))
class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.stem = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.stem(x).relu()).relu())


@case("tied autoencoder", FLAT, cut=("a.bias",), reads={"a.weight": 0}, dead=False)
class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias = nn.Linear(6, 8), nn.Parameter(torch.empty(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x).relu(), self.a.weight.t(), self.bias)


@case("tied layers", FLAT, cut=("a.weight", "s.weight"))
class TiedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.s, self.t, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.t.weight = self.s.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.t(self.s(self.a(x).relu()).relu()).relu())


@case("tied embedding", ((2, 5),), cut=("b.weight",), vocabulary=11, reads={"e.weight": 1}, dead=False)
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.b, self.d, self.c = nn.Embedding(11, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 11)
        self.c.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.e(x)
        return self.c(x + self.d(self.b(x).relu()))
