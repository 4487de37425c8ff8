"""The demo's network."""

from __future__ import annotations

from torch import nn


class DigitNet(nn.Sequential):
    """Four convolutions with batch norm for 8 × 8 digits."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        for i, (width, pool) in enumerate([(32, False), (32, True), (64, False), (64, True)]):
            into = 1 if i == 0 else (32, 32, 64)[i - 1]
            self.add_module(f"conv{i + 1}", nn.Conv2d(into, width, 3, padding=1, bias=False))
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(width))
            self.add_module(f"relu{i + 1}", nn.ReLU())
            if pool:
                self.add_module(f"pool{i + 1}", nn.MaxPool2d(2))
        self.add_module("flatten", nn.Flatten())
        self.add_module("fc", nn.Linear(64 * 4, classes))
