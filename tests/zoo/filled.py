"""Constant tensors: they shrink with the channels that they are combined with, if the code allows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.registry import FLAT, TOKENS, case, op, refuse

op("times a full tensor", lambda: lambda x: x * torch.full((1, x.shape[1], 1, 1), 0.5))
op("new zeros and new ones", lambda: lambda x: x + x.new_zeros(x.shape) - x.new_ones(x.shape[1], 1, 1) / 2, dead=False)
op(
    "zeros that meet ones",
    lambda: lambda x: x + (torch.zeros(x.shape[1], 1, 1) + torch.ones(x.shape[1], 1, 1)),
    dead=False,
)
op("zeros beside channels", lambda: lambda x: torch.cat([x, torch.zeros(2, 4, 8, 8)], 1), out=12)
op("a filter of ones for every channel", lambda: blurred)
refuse("zeros of a fixed size", lambda: lambda x: x + torch.zeros(2, 8, 8, 8), "8, 8, 8")
refuse("as many as ones sum to", lambda: counted, "ones")
refuse("zeros that meet the input's size", lambda: lambda x: x + fitted(torch.zeros(x.shape[1])), "fixed")


def counted(x: Tensor) -> Tensor:
    ones = torch.ones(x.shape[1])
    return x * ones.view(-1, 1, 1) / ones.sum()


def blurred(x: Tensor) -> Tensor:
    return nn.functional.conv2d(x, torch.ones(x.shape[1], 1, 3, 3) / 9, groups=x.shape[1])


def fitted(zeros: Tensor) -> Tensor:
    return (zeros + torch.arange(8)).view(-1, 1, 1)


@case("zeros that are returned", FLAT, cut=("b.weight",), refused={"a": "returns"})
class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.a(x)
        shift = torch.zeros(x.shape[1])
        return self.c(self.b((x + shift).relu()).relu()), shift


@case("zeros that two layers meet", FLAT, cut=("a.weight", "d.weight", "b.weight"))
class Shared(nn.Module):
    """As many of one layer must stay as of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, d = self.a(x), self.d(x)
        shift = torch.zeros(a.shape[1])
        return self.c(self.b((a + shift).relu()).relu() + self.b((d + shift).tanh()).relu())


HEADS = tuple(f"{block}.{part}.weight" for block in ("first", "second") for part in "qkv")


class Block(nn.Module):
    """Attention that makes its own bias, one zero for each head and place, unless it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.heads, self.width = 4, 2

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (layer(x).view(*x.shape[:2], -1, self.width).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if bias is None:
            bias = torch.zeros(1, self.heads, x.shape[1], x.shape[1])
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1)), bias


@case("zeros for each head", TOKENS, cut=HEADS, contracts=True)
class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        x, bias = self.first(x, None)
        return self.head(x + self.second(x, bias)[0])
