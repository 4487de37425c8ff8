"""Blocks that append to a stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import case, conv_norm
from tests.zoo.shuffles import shuffle_by_hand


@case("dense block", cut=("stem.weight", "a.weight", "b.weight", "d.weight"))
class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.n1, self.a = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)
        self.n2, self.b = nn.BatchNorm2d(12), nn.Conv2d(12, 4, 3, padding=1)
        self.n3, self.d, self.head = nn.BatchNorm2d(16), nn.Conv2d(16, 6, 1), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        features.append(self.a(self.n1(features[0]).relu()))
        features.append(self.b(self.n2(torch.cat(features, 1)).relu()))
        return self.head(self.d(self.n3(torch.cat(features, 1)).relu()))


@case("u-net", cut=("down1.0.weight", "down2.0.weight", "up.weight", "join.0.weight"))
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = conv_norm(3, 8), conv_norm(8, 12)
        self.up, self.join = nn.ConvTranspose2d(12, 6, 2, stride=2), conv_norm(14, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x).relu()
        low = self.down2(F.max_pool2d(skip, 2)).relu()
        return self.head(self.join(torch.cat([skip, self.up(low)], 1)).relu())


@case("inception", cut=("stem.weight", "one.weight", "three.weight", "wide.0.weight", "pool.weight", "b.weight"))
class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.three = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 6, 3, padding=1)
        self.wide = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, (1, 3), padding=(0, 1)))
        self.pool, self.b, self.c = nn.Conv2d(8, 3, 1), nn.Conv2d(18, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        pooled = self.pool(F.avg_pool2d(x, 3, 1, 1))
        x = torch.cat([self.one(x), self.three(x), self.wide(x), pooled], 1).relu()
        return self.c(self.b(x).relu())


@case("shuffle unit", cut=("stem.weight", "a.0.weight", "b.weight"))
class ShuffleUnit(nn.Module):
    """ShuffleNet v2: one half goes through, the halves are interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = nn.Conv2d(3, 16, 3, padding=1), conv_norm(8, 8)
        self.b, self.c = nn.Conv2d(16, 6, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, x = self.stem(x).chunk(2, 1)
        x = shuffle_by_hand(torch.cat([kept, self.a(x).relu()], 1))
        return self.c(self.b(x).relu())
