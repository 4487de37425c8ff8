"""Blocks that scale their channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import case, conv_norm, op


class Gate(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


op("squeeze and excite", lambda: Gate(8, 4), cut=("a.weight", "op.down.weight", "op.up.weight", "b.weight"))


@case("linear gate", cut=("a.weight", "down.weight", "up.weight", "b.weight"))
class LinearGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        gate = self.up(self.down(x.mean((2, 3))).relu()).sigmoid()
        return self.c(self.b(x * gate.view(x.shape[0], x.shape[1], 1, 1)).relu())


@case("inverted bottleneck", cut=("stem.weight", "expand.0.weight", "depth.0.weight", "gate.down.weight"))
class Inverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, 2, padding=1), nn.Conv2d(8, 5, 1)
        self.expand, self.depth, self.gate = conv_norm(8, 24), conv_norm(24, 24, groups=24), Gate(24, 6)
        self.out = nn.Sequential(nn.Conv2d(24, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu6(self.depth(F.relu6(self.expand(x))))
        return self.head(x + self.out(self.gate(y)))


@case("gate of pieces of several sizes", cut=("a.weight", "into.weight"), dead=False)
class Pieces(nn.Module):
    """A gate for two pieces, one of which has filters of its own; a piece is as wide as the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.into, self.out, self.head = (nn.Conv2d(i, o, 1) for i, o in ((3, 4), (4, 24), (12, 4), (4, 2)))
        self.own, self.pieces = nn.Conv2d(4, 4, 3, padding=1, groups=4), (12, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        gate, plain, filtered = self.into(x).split(self.pieces, 1)
        return self.head(x + self.out(gate.sigmoid() * torch.cat([plain, self.own(filtered)], 1)))
