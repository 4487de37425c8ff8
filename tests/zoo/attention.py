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


@case("attention of a value with itself", TOKENS, cut=("b.weight",), refused={"a": "scales by their number"})
class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(nn.functional.scaled_dot_product_attention(x, x, x)).relu())


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


def _rotated(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.5, 1.0, 0.5], dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


class WholeHeads(nn.Module):
    """Four heads of width four; `keys` of them have keys and values of their own."""

    def __init__(self, keys: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(6, 4 * keys), nn.Linear(6, 4 * keys)
        self.out, self.c, self.times = nn.Linear(16, 6), nn.Linear(6, 3), 4 // keys

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.c(x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.5).softmax(-1) @ v


ALL = ("q.weight", "k.weight", "v.weight")


@case("heads by hand", TOKENS, cut=ALL, contracts=True)
class HeadsByHand(WholeHeads):
    pass


@case("heads with rotary positions", TOKENS, cut=ALL, contracts=True)
class RotaryHeads(WholeHeads):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)


@case("heads with relative positions", TOKENS, cut=(*ALL, "places"), contracts=True)
class RelativeHeads(WholeHeads):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.empty(9, 4))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[-2])
        return (q @ k.mT * 0.5 + self.places[at[:, None] - at + 4].permute(2, 0, 1)).softmax(-1) @ v


@case("groups of heads", TOKENS, cut=ALL, contracts=True)
class GroupedHeads(WholeHeads):
    def __init__(self) -> None:
        super().__init__(keys=2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, n, d = k.shape
        k, v = (x[:, :, None].expand(-1, -1, self.times, -1, -1).reshape(b, -1, n, d) for x in (k, v))
        return super().attend(q, k, v)


@case("groups of heads by torch", TOKENS, cut=ALL, contracts=True)
class GroupedByTorch(WholeHeads):
    def __init__(self) -> None:
        super().__init__(keys=2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@case("heads that share keys", TOKENS, cut=("q.weight",), contracts=True, dead=False)
class SharedKeys(WholeHeads):
    def __init__(self) -> None:
        super().__init__(keys=1)


@case("fused heads", TOKENS, cut=("qkv.weight",), contracts=True)
class FusedHeads(WholeHeads):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 48)
        del self.q, self.k, self.v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, -1, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return self.c(x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)))


@case("fused heads, each with its keys", TOKENS, cut=("qkv.weight",), contracts=True)
class InterleavedHeads(FusedHeads):
    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], -1, 3, 4)
        q, k, v = (parts[..., i, :].transpose(1, 2) for i in range(3))
        return self.c(x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)))


@case("heads and their values", TOKENS, cut=ALL, contracts=True)
class HeadsAndValues(WholeHeads):
    """The values' width is nobody's constant: they lose heads, and channels of every head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for f in (self.q, self.k))
        v = self.v(x).view(*x.shape[:2], q.shape[1], -1).transpose(1, 2)
        return self.c(x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)))


@case("attention of torch's own", TOKENS, cut=("f.in_proj_weight",), contracts=True)
class TorchHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.c = nn.MultiheadAttention(6, 3, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x + self.f(x, x, x)[0])
