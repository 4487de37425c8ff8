"""Contractions: einsum in its several uses, experts whose matrices are one tensor, windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.attention import ALL, WholeHeads
from tests.zoo.registry import FLAT, IMAGE, TOKENS, case, op, refuse


@case("einsum as layers", TOKENS, cut=("up", "down"), reads={"up": 0, "down": 1})
class EinsumLayers(nn.Module):
    """A product with a matrix, and one with its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.c = nn.Parameter(torch.empty(6, 8)), nn.Parameter(torch.empty(5, 8)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bnd,df->bnf", x, self.up).relu()
        return self.c(torch.einsum("...f,df->...d", hidden, self.down).relu())


@case("einsum over heads", TOKENS, cut=ALL, contracts=True)
class EinsumHeads(WholeHeads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], -1, 4) for f in (self.q, self.k, self.v))
        share = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5).softmax(-1)
        return self.c(x + self.out(torch.einsum("bhqk,bkhd->bqhd", share, v).flatten(2)))


@case("einsum with heads of its own", TOKENS, cut=("into", "back"), contracts=True, dead=False)
class EinsumProjections(nn.Module):
    """Weights of three dimensions, heads being one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Parameter(torch.empty(6, 4, 5)), nn.Parameter(torch.empty(4, 5, 7))
        self.c = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bnd,dhk->bhnk", x, self.into).relu()
        return self.c(torch.einsum("bhnk,hko->bno", y, self.back).relu())


@case("experts", TOKENS, cut=("up", "a.weight"), reads={"up": 1, "down": 1})
class Experts(nn.Module):
    """Three of them, each with a gated layer of hidden units of its own; a gate weighs what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(3, 6, 16)), nn.Parameter(torch.empty(3, 8, 6))
        self.gate, self.a, self.c = nn.Linear(6, 3), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, gate = (tokens @ self.up).chunk(2, -1)
        said = torch.bmm(F.silu(gate) * share, self.down)
        weights = self.gate(tokens).softmax(-1).T.unsqueeze(-1)
        return self.c(self.a((said * weights).sum(0)).relu())


op("unfold and fold", lambda: lambda x: F.fold(F.unfold(x, 3, padding=1).relu(), (8, 8), 3, padding=1))
op("windows", lambda: lambda x: x.unfold(2, 2, 2).amax(-1), IMAGE)
refuse("windows over channels", lambda: lambda x: x.unfold(1, 2, 1).amax(-1), "windows", FLAT, out=7)
