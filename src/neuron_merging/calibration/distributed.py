"""Calibration in several processes: each runs batches of its own, and only sums are exchanged."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from neuron_merging.calibration.regression import MAX_ROWS, MomentAccumulator, RowAccumulator
from neuron_merging.channels.labels import Units
from neuron_merging.errors import MergingError


class ProcessGroup(Protocol):
    """The processes that measure together: see `reproduction.training.processes.detect_processes`."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over the processes, in each of them."""
        ...


def reduce_over_processes(
    own: MomentAccumulator | RowAccumulator, processes: ProcessGroup | None
) -> MomentAccumulator | RowAccumulator:
    """What all processes have gathered of one layer."""
    if processes is None or processes.count == 1:
        return own
    return _reduce_moments(own, processes) if isinstance(own, MomentAccumulator) else _gather_rows(own, processes)


def _reduce_moments(own: MomentAccumulator, processes: ProcessGroup) -> MomentAccumulator:
    """Every process's sums, moved to the same centre first."""
    assert own.shift is not None
    rows = _sum_counts(own.count, processes)
    centre = tuple(processes.total(shift.double() * own.count) / rows for shift in own.shift)
    moved = own.measure_variations(centre)  # type: ignore[arg-type]
    sums = tuple(processes.total(part) for part in moved.sums)
    squares = {name: processes.total(getattr(moved, name)) for name in ("xx", "xt", "tt", "yy")}
    return MomentAccumulator(rows, moved.shift, sums, **squares)  # type: ignore[arg-type]


def _gather_rows(own: RowAccumulator, processes: ProcessGroup) -> RowAccumulator:
    """An equal share of rows from every process."""
    share = MAX_ROWS // processes.count
    parts = [torch.cat([part[i] for part in own.parts])[:share] for i in range(3)]
    counts = processes.total(
        _place_by_rank(torch.tensor([len(parts[0])], dtype=torch.float64, device=parts[0].device), processes)
    )
    together = RowAccumulator()
    shares = [
        processes.total(_place_by_rank(torch.nn.functional.pad(part, (0, 0, 0, share - len(part))), processes))
        for part in parts
    ]
    for i, count in enumerate(counts.flatten().int().tolist()):
        together.add(*(part[i, :count] for part in shares))
    return together


def _place_by_rank(values: Tensor, processes: ProcessGroup) -> Tensor:
    """Values in this process's place of a table for all of them."""
    table = values.new_zeros(processes.count, *values.shape)
    table[processes.rank] = values
    return table


def check_all_have_batches(seen: int, processes: ProcessGroup | None) -> None:
    """Refuse, in every process, if one of them has no batches: the others would wait for it."""
    if processes is not None and _sum_counts(int(seen == 0), processes):
        what = "a process has no calibration batch"
        raise MergingError(what, where="calibration=", fix="Give every process at least one, or start fewer.")


def check_same_channels(kept: Mapping[str, Units], processes: ProcessGroup | None) -> None:
    """Refuse, in every process, if they did not choose the same channels: their statistics would not fit."""
    if processes is None or processes.count == 1:
        return
    text = repr([(name, list(map(int, units))) for name, units in kept.items()])
    number = float(zlib.crc32(text.encode()))
    mean = float(processes.total(torch.tensor([number], dtype=torch.float64))) / processes.count
    if _sum_counts(int(mean != number), processes):
        what = "the processes chose different channels"
        fix = "Choose by a ratio and a criterion that looks at weights, or by expected-error."
        raise MergingError(what, where="calibration=", fix=fix)


def _sum_counts(number: int, processes: ProcessGroup) -> int:
    return int(processes.total(torch.tensor([float(number)], dtype=torch.float64)))
