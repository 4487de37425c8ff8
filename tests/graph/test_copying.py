"""Models that cannot be copied."""

from __future__ import annotations

import threading

from torch import Tensor

from tests.failing import Branching, compressing, failing


class Locked(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def test_a_model_that_cannot_be_copied() -> None:
    failing(compressing(Locked()), "cannot be copied", "Locked")
