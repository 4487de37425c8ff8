"""Results that cannot be verified are not called so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import neuron_merging as nm
from tests.failing import Branching, compressing, failing
from tests.zoo.unusual import VECTORS, Plain


class Deciding(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).argmax(1)


def test_whole_numbers_are_not_called_verified() -> None:
    found = nm.compress(Deciding(), VECTORS)
    assert found.summary.error is None and any("not verified" in note for note in found.summary.notes)


class Scaled(Branching):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).relu())
        masked = torch.cat([y, torch.full_like(y[:, :1], -torch.inf)], 1)
        return self.factor * masked * self.factor


def test_outputs_that_are_not_finite() -> None:
    assert nm.compress(Scaled(1.0), torch.randn(2, 6)).summary.error is not None
    failing(compressing(Scaled(1e30), torch.randn(2, 6)), "output 0 is not finite", "example_inputs")
