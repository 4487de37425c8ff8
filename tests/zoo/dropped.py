"""Layers whose result the code computes and drops: they read channels all the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.registry import TOKENS, case

DROPPED = "no layer reads"


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        self.drop(x)
        return self.c(self.b(x).relu())

    def drop(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@case("dropped pooler", TOKENS, refused={"pooler": DROPPED})
class Pooler(Tail):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(8, 8)

    def drop(self, x: Tensor) -> Tensor:
        return self.pooler(x[:, 0]).tanh()


@case("dropped head of two layers", TOKENS, cut=("a.weight", "b.weight", "first.weight"), refused={"second": DROPPED})
class Head(Tail):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def drop(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.mean(1)).relu())


@case("dropped product with a parameter", TOKENS, reads={"matrix": 1})
class Product(Tail):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.scale = nn.Parameter(torch.empty(5, 8)), nn.Parameter(torch.empty(5))

    def drop(self, x: Tensor) -> Tensor:
        return (x @ self.matrix.T) * self.scale


@case("dropped scale", TOKENS)
class Scale(Tail):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8))

    def drop(self, x: Tensor) -> Tensor:
        return x * self.scale
