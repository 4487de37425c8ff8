"""Layers that are called as functions, and weights that are reshaped."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import FLAT, IMAGE, TOKENS, add, case


@case(
    "functional",
    FLAT,
    cut=("w", "v", "u", "y"),
    reads={"w": 1, "v": 0, "u": 1, "y": 1, "z": 0},
)
class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"w": (8, 6), "v": (8, 10), "u": (8, 10), "y": (6, 8), "z": (6, 3)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.bias, self.last = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.w, self.bias).relu()
        x = (x @ self.v).relu()
        x = torch.matmul(x, self.u.t()).relu()
        x = x.mm(self.y.T).relu()
        return torch.addmm(self.last, x, self.z)


@case("functional convolution", cut=("a", "b"), reads={"a": 1, "b": 1, "c": 1})
class FunctionalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(8, 3, 3, 3)), nn.Parameter(torch.empty(6, 8, 3, 3))
        self.c = nn.Parameter(torch.empty(4, 6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(F.relu(F.conv2d(x, self.a)), self.b)), self.c)


@case("functional einsum", TOKENS, cut=("b.weight",), reads={"w": 0})
class FunctionalEinsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(6, 8), nn.Parameter(torch.empty(8, 5))
        self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("btc,cd->btd", self.a(x).relu(), self.w).relu()
        return self.c(self.b(x).relu())


@case("reshaped weight", cut=("d.weight", "a.weight", "b.weight"))
class ReshapedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d, self.a = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.d(x).relu().mean((2, 3))
        return self.c(self.b(F.linear(x, self.a.weight.flatten(1), self.a.bias).relu()).relu())


@case("standardised weight", cut=("b.weight",), dead=False)
class StandardisedWeight(nn.Module):
    """Fewer input channels would change the statistics of the filters of `d`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
        self.b, self.c = nn.Conv2d(6, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.d.weight - self.d.weight.mean((1, 2, 3), keepdim=True)
        x = F.conv2d(self.a(x).relu(), weight / weight.std((1, 2, 3), keepdim=True), self.d.bias)
        return self.c(self.b(x.relu()).relu())


class SizedConv(nn.Conv2d):
    """A layer whose forward uses the size that it keeps as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.view(y.shape[0], self.out_channels, -1).view(y.shape)


add("layer that reads its own size", lambda: nn.Sequential(OrderedDict(a=SizedConv(3, 8, 3), **usual_tail())), IMAGE)


def usual_tail() -> dict[str, nn.Module]:
    return {"act": nn.ReLU(), "b": nn.Conv2d(8, 6, 3), "end": nn.ReLU(), "c": nn.Conv2d(6, 4, 1)}
