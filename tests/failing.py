"""Calls that must fail with one clear error, and the small networks that they fail on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm

X = torch.zeros(2, 6)


def small_net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3))


def failing(call: Callable[[], Any], *words: str) -> nm.MergingError:
    """The error of a call: it has a place and a remedy, and names what it should."""
    with pytest.raises(nm.MergingError) as caught:
        call()
    error = caught.value
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"
    placed = error.where or isinstance(error, nm.NothingToPrune)  # which gives a place for each of its reasons
    assert error.what and placed and error.fix, f"no place or no remedy: {error}"
    return error


def compressing(model: Any = None, inputs: Any = X, **options: Any) -> Callable[[], Any]:
    return lambda: nm.compress(small_net() if model is None else model, inputs, **options)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum() > 0:
            x = x.relu()
        return self.b(x)
