"""Networks that cut a tensor by the batch size: the statistics of larger batches are right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm


class Slicing(nn.Module):
    """The same network in four spellings, all but the plain one of which write the batch size into the graph."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.way = nn.Linear(6, 64), nn.Linear(6, 64), nn.Linear(64, 3), way

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.a(x), self.b(x)])
        if self.way == "plain":
            first, second = self.a(x), self.b(x)
        elif self.way == "slice":
            first, second = both[: x.shape[0]], both[x.shape[0] :]
        elif self.way == "narrow":
            first, second = both.narrow(0, 0, len(x)), both.narrow(0, len(x), len(x))
        else:
            first, second = both.split(len(x))
        return self.c(first.relu()) + self.c(second.relu())


def measure_fidelity(way: str, batch: int) -> float:
    torch.manual_seed(1)
    batches = [torch.randn(32, 6) for _ in range(8)]
    verdict = nm.compress(Slicing(way), torch.randn(batch, 6), calibration=batches).summary.verdict
    assert verdict is not None and verdict.fidelity is not None
    return verdict.fidelity


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("way", ["slice", "narrow", "split"])
def test_slices_by_the_batch_size_follow_it(way: str, batch: int) -> None:
    assert measure_fidelity(way, batch) == pytest.approx(measure_fidelity("plain", batch), abs=1e-3)
