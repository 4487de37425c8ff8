"""Networks as people write them, with one oddity each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Plain(nn.Module):
    """Two layers around a ReLU; the cases below add one oddity each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).relu())


class UnderNoGrad(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = torch.tanh(x).mean()
        result: Tensor = super().forward(x) + shift
        return result


class UnderAutocast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            shift = torch.tanh(x.float()).mean()
        result: Tensor = super().forward(x) + shift
        return result


class Masked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b((self.mask.softmax(-1) @ self.a(x)).relu())
        return result


class Counting(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(6))
        self.steps: Tensor
        self.average: Tensor

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        self.average.mul_(0.9).add_(x.mean(0) * 0.1)
        return super().forward(x - self.average)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x, src_key_padding_mask=padding).mean(1))
        return result


@dataclass
class Scores:
    logits: Tensor


torch.export.register_dataclass(Scores)


class ReturningADataclass(Plain):
    def forward(self, x: Tensor) -> Scores:
        return Scores(super().forward(x))


class Autoencoder(nn.Module):
    """A latent value with noise, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean = nn.Linear(6, 32), nn.Linear(32, 8)
        self.decode, self.last = nn.Linear(8, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(self.encode(x).relu())
        return self.last(self.decode(mean + torch.randn_like(mean)).relu()), mean


class AlwaysDropping(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.b(F.dropout(self.a(x).relu(), 0.3, True)) + self.b(self.a(x).relu())


class Attention(nn.Module):
    """The usual block, which takes its width from its input and so needs all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.qkv, self.out, self.head = (nn.Linear(*s) for s in ((6, 16), (16, 48), (16, 16), (16, 3)))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))
        result: Tensor = self.head(x + self.down(self.up(x).relu()))
        return result


class Particular(nn.MultiheadAttention):
    """One of the user's own, which looks at what it is given."""

    def forward(self, query: Tensor, *others: Any, **options: Any) -> Any:
        assert query.shape[-1] == 16, "an embedding dimension of 16, please"
        return super().forward(query, *others, **options)


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.more = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        self.attend = Particular(16, 4, kdim=7, vdim=9, batch_first=True)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self.more(self.out(self.attend(self.into(x), other[..., :7], other)[0]).relu())
        return result


class Unpooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(self.a(x).relu(), 2, return_indices=True)
        result: Tensor = self.d(self.c(F.max_unpool2d(self.b(y).relu(), places, 2)).relu())
        return result


class Complex(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(super().forward(x))


class Sum(nn.Module):
    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        return x + token


class HandingOn(Plain):
    """A parameter goes through a module of its own, as class tokens do."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.sum = nn.Parameter(torch.randn(1, 6)), Sum()

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.sum(x, self.token.expand(len(x), -1)))


def padding() -> Tensor:
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    return mask


def generator() -> nn.Module:
    last = nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False)
    return nn.Sequential(nn.ConvTranspose2d(8, 16, 4), nn.ReLU(), last)


VECTORS, WORDS = torch.randn(3, 6), torch.randn(2, 5, 6)
WORKING: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a block without gradients": (UnderNoGrad, VECTORS),
    "a block without autocast": (UnderAutocast, VECTORS),
    "a transposed reader without a bias": (generator, torch.randn(2, 8, 4, 4)),
    "a mask of minus infinities": (Masked, WORDS),
    "buffers that the network writes": (Counting, VECTORS),
    "padded attention": (Encoder, (torch.randn(2, 5, 16), padding())),
    "a dataclass": (ReturningADataclass, VECTORS),
    "noise in a latent value": (Autoencoder, VECTORS),
    "self-attention": (Attention, WORDS),
    "cross-attention": (CrossAttention, (WORDS, torch.randn(2, 4, 9))),
    "unpooling": (Unpooling, torch.randn(1, 3, 8, 8)),
    "complex numbers": (Complex, VECTORS),
    "a parameter that modules hand on": (HandingOn, VECTORS),
    "a wrapper for several devices": (lambda: nn.DataParallel(Plain()), VECTORS),
}
