"""Attention, transformers and mixers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import TOKENS, case


@case("transformer", ((2, 5, 16),), cut=("layer.linear1.weight",))
class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


@case("transformer in a wider stream", TOKENS, cut=("layer.linear1.weight",), dead=False, spans=True)
class WiderTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.a(x)).mean(1))


class Attention(nn.Module):
    """Queries, keys and values from three layers; `attend` says how they meet."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(self.q(x), self.k(x), self.v(x)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


@case("attention by bmm", TOKENS, cut=("v.weight",), contracts=True)
class BmmAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.35, -1), v)


@case("attention scaled by the size", TOKENS, cut=("v.weight",), contracts=True)
class ScaledAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


@case("attention by torch", TOKENS, cut=("v.weight",), contracts=True)
class TorchAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@case("attention with heads", TOKENS, cut=("a.weight",), contracts=True)
class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(6, 24), nn.Linear(8, 6), 2
        self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1)
        return self.c(self.a(self.out(y) + x).relu())


@case("mixer", ((2, 3, 8, 8),), cut=("token1.weight", "mix1.weight"), spans=True, dead=False)
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.n1, self.n2 = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.LayerNorm(8)
        self.token1, self.token2 = nn.Linear(4, 6), nn.Linear(6, 4)
        self.mix1, self.mix2, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.token2(F.gelu(self.token1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.mix2(F.gelu(self.mix1(self.n2(x))))
        return self.head(x.mean(1))


@case("vision transformer", cut=("patch.weight", "token", "places", "up.weight"))
class VisionTransformer(nn.Module):
    """Its stem and one feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.empty(1, 1, 8))
        self.places, self.up = nn.Parameter(torch.empty(1, 5, 8)), nn.Linear(8, 16)
        self.down, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head((x + self.down(F.gelu(self.up(x))))[:, 0])
