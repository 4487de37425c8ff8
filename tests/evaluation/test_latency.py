"""Seconds of a forward pass, where the work is only queued by the call."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from neuron_merging.evaluation.latency import measure_timings


class QueueingDevice:
    """An accelerator: a call returns at once, and its second is over when it was waited for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.queued = 0.0, 0.0
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "synchronize", self.synchronize)
        patch.setattr(time, "perf_counter", lambda: self.now)

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0


def test_the_work_that_a_call_queues_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = QueueingDevice(monkeypatch)

    class Slow(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: Tensor) -> Tensor:
            device.queued += self.seconds
            return x

    networks = {"slow": Slow(3.0), "fast": Slow(1.0)}
    found = measure_timings(networks, (torch.zeros(1, 2),), (1,), runs=5)
    assert {name: (timing[1].low, timing[1].high) for name, timing in found.items()} == {
        "slow": (3.0, 3.0),
        "fast": (1.0, 1.0),
    }
