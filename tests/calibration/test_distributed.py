"""Sums over several processes equal those of one process that reads all batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from neuron_merging.calibration.distributed import check_all_have_batches, check_same_channels, reduce_over_processes
from neuron_merging.calibration.regression import MomentAccumulator, RowAccumulator
from neuron_merging.errors import MergingError


class Thread:
    """One of several threads that stand for processes."""

    count = 2

    def __init__(self, rank: int, table: dict[int, Tensor], turn: threading.Barrier) -> None:
        self.rank, self._table, self._turn = rank, table, turn

    def total(self, values: Tensor) -> Tensor:
        self._table[self.rank] = values.clone()
        self._turn.wait(timeout=10)
        found = self._table[0] + self._table[1]
        self._turn.wait(timeout=10)
        return found


def in_both(work: Callable[[Thread], Any]) -> list[Any]:
    table: dict[int, Tensor] = {}
    turn, results = threading.Barrier(2), [None, None]

    def one(rank: int) -> None:
        try:
            results[rank] = work(Thread(rank, table, turn))
        except MergingError as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return results


def rows(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    pick = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=pick, dtype=torch.float64) + seed
    t = x[:, :3] * 0.5 + torch.randn(count, 3, generator=pick, dtype=torch.float64)
    return x, t, x[:, 2:] + t


def test_covariances_of_two_processes_are_those_of_one() -> None:
    given = [rows(1, 40), rows(7, 13)]
    whole = MomentAccumulator()
    for part in given:
        whole.add(*part)

    def one(processes: Thread) -> Any:
        own = MomentAccumulator()
        own.add(*given[processes.rank])
        return reduce_over_processes(own, processes).to_fit_statistics()

    for joint in in_both(one):
        for name in ("mean", "target", "xx", "xt", "tt", "yy"):
            torch.testing.assert_close(getattr(joint, name), getattr(whole.to_fit_statistics(), name))
        assert joint.rows == 53


def test_rows_of_two_processes_are_put_together() -> None:
    given = [rows(1, 6), rows(7, 3)]

    def one(processes: Thread) -> Any:
        own = RowAccumulator()
        own.add(*given[processes.rank])
        return reduce_over_processes(own, processes)

    for found in in_both(one):
        assert found.count == 9
        torch.testing.assert_close(
            torch.cat([x for x, _, _ in found.parts]), torch.cat([x for x, _, _ in given]).float()
        )


@pytest.mark.parametrize("said", ["no calibration batch", "different channels"])
def test_processes_that_cannot_go_on_together_all_say_so(said: str) -> None:
    def one(processes: Thread) -> None:
        if "batch" in said:
            check_all_have_batches(processes.rank, processes)
        check_same_channels({"a": np.array([0, processes.rank])}, processes)

    assert all(isinstance(error, MergingError) and said in str(error) for error in in_both(one))
