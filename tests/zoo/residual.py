"""Blocks that add to a stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import FLAT, case, conv_norm


@case("residual", cut=("stem.0.weight", "a.0.weight", "b.0.weight", "d.0.weight", "e.0.weight", "short.weight"))
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv_norm(3, 8), conv_norm(8, 12), conv_norm(12, 8)
        self.d, self.e, self.short = conv_norm(8, 10, 2), conv_norm(10, 16), nn.Conv2d(8, 16, 1, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (self.b(self.a(x).relu()) + x).relu()
        x = (self.e(self.d(x).relu()) + self.short(x)).relu()
        return self.head(x.mean((2, 3)))


@case("pre-activation", cut=("stem.weight", "a.weight", "b.weight"))
class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.n1, self.a = nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3, padding=1, bias=False)
        self.n2, self.b = nn.BatchNorm2d(12), nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.n3 = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.a(F.relu(self.n1(x), inplace=True))
        x = x + self.b(F.dropout(self.n2(y).relu(), 0.3, self.training))
        return self.head(F.adaptive_avg_pool2d(self.n3(x).relu(), 1).flatten(1))


class PaddedShortcut(nn.Module):
    """Option A of the CIFAR residual networks: the shortcut's missing channels are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv_norm(3, 8), conv_norm(8, 10, 2), conv_norm(10, 16)
        self.d, self.e, self.head = conv_norm(16, 12), conv_norm(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.b(self.a(x).relu())
        x = (y + self.shortcut(x, y)).relu()
        x = (self.e(self.d(x).relu()) + x).relu()
        return self.head(x.mean((2, 3)))

    def shortcut(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


@case("option A", cut=("a.0.weight", "d.0.weight"))
class OptionA(PaddedShortcut):
    def shortcut(self, x: Tensor, y: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))


@case("option A by shape", cut=("a.0.weight", "d.0.weight"))
class OptionAByShape(PaddedShortcut):
    def shortcut(self, x: Tensor, y: Tensor) -> Tensor:
        missing = (y.shape[1] - x.shape[1]) // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, missing, missing))


@case("option A by cat", cut=("a.0.weight", "d.0.weight"))
class OptionAByCat(PaddedShortcut):
    def shortcut(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 1, 2)
        return torch.cat([x, torch.zeros_like(x)], 1)


@case("half of a stream is fixed", FLAT, cut=("a.weight", "b.weight", "d.weight"))
class HalfFixed(nn.Module):
    """A sum over a concatenation of the input and a layer: the input's half has to stay."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.d, self.e, self.head = nn.Linear(12, 8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.b(self.a(x).relu())], 1)
        return self.head(x + self.e(self.d(x).relu()))


@case("layer scale", cut=("stem.weight", "depth.weight", "up.weight", "down.weight"), dead=False, spans=True)
class LayerScale(nn.Module):
    """A ConvNeXt block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up, self.down, self.gamma = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.empty(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((-2, -1)))


@case("layer scale without norm", cut=("stem.weight", "up.weight", "down.weight"))
class LayerScaleAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)
        self.gamma, self.head = nn.Parameter(torch.empty(8, 1, 1)), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.gamma * self.down(F.gelu(self.up(x))))
