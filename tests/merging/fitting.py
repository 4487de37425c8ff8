"""Networks and helpers for tests of fitted merging methods."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import Tensor, nn

from neuron_merging.inputs import synthetic

keep_first = lambda rows: torch.arange(len(rows), 0.0, -1)  # noqa: E731


def distance(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((a(x) - b(x)).norm() / b(x).norm())


def batch_normed(seed: int = 0) -> nn.Module:
    """A fresh copy of a network whose batch norms have seen data."""
    return copy.deepcopy(_batch_normed(seed))


@cache
def _batch_normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=None), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, momentum=None), nn.ReLU(),
        nn.Conv2d(16, 8, 1, bias=False), nn.Flatten(), nn.Linear(8 * 64, 5),
    )  # fmt: skip
    model(synthetic.draw_dead_leaves(64, (3, 16, 16), torch.Generator().manual_seed(seed + 7)))
    return model.eval()


class Stream(nn.Module):
    """Blocks that add to a stream, with batch norms whose statistics are those of the data."""

    def __init__(self, width: int = 12, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))
