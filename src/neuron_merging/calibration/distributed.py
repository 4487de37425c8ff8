"""Calibrate in several processes: each runs its own batches, and only sums are exchanged."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from neuron_merging.calibration.regression import MAX_ROWS, MomentAccumulator, RowAccumulator
from neuron_merging.channels.groups import Units
from neuron_merging.errors import MergingError


class ProcessGroup(Protocol):
    """Processes that share a calibration, as `reproduction.training.processes.detect_processes` returns them."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, in each of them."""
        ...


def reduce_over_processes(
    own: MomentAccumulator | RowAccumulator, processes: ProcessGroup
) -> MomentAccumulator | RowAccumulator:
    """Combine what all processes have accumulated for one layer."""
    if processes.count == 1:
        return own
    return _reduce_moments(own, processes) if isinstance(own, MomentAccumulator) else _gather_rows(own, processes)


def _reduce_moments(own: MomentAccumulator, processes: ProcessGroup) -> MomentAccumulator:
    """Add up the sums of all processes, after moving them to a common centre: sums around different ones do not add."""
    assert own.shift is not None
    rows = _sum_counts(own.count, processes)
    centre = tuple(processes.total(shift.double() * own.count) / rows for shift in own.shift)
    moved = own.recenter(centre)  # type: ignore[arg-type]
    sums = tuple(processes.total(part) for part in moved.sums)
    squares = {name: processes.total(getattr(moved, name)) for name in ("xx", "xt", "tt", "yy")}
    return MomentAccumulator(rows, moved.shift, sums, **squares)  # type: ignore[arg-type]


def _gather_rows(own: RowAccumulator, processes: ProcessGroup) -> RowAccumulator:
    """Collect an equal share of rows from every process."""
    # Only sums are exchanged, so each process writes its rows into its own slot of a table of zeros.
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
    """Return a table with one slot per process, zero except for this process's values."""
    table = values.new_zeros(processes.count, *values.shape)
    table[processes.rank] = values
    return table


def check_all_have_batches(seen: int, processes: ProcessGroup) -> None:
    """Raise an error in every process if one has no batches: otherwise the others would wait for it forever."""
    if _sum_counts(int(seen == 0), processes):
        what = "a process has no calibration batch"
        raise MergingError(what, where="calibration=", fix="Give every process at least one, or start fewer.")


def check_same_channels(kept: Mapping[str, Units], processes: ProcessGroup | None) -> None:
    """Raise an error in every process if they selected different channels: their statistics cannot be added."""
    if processes is None or processes.count == 1:
        return
    text = repr([(name, list(map(int, units))) for name, units in kept.items()])
    # A 32-bit checksum is exact in float64; equal checksums have a mean that equals each of them.
    number = float(zlib.crc32(text.encode()))
    mean = float(processes.total(torch.tensor([number], dtype=torch.float64))) / processes.count
    if _sum_counts(int(mean != number), processes):
        what = "the processes chose different channels"
        fix = "Choose by a ratio and a criterion that looks at weights, or by expected-error."
        raise MergingError(what, where="calibration=", fix=fix)


def _sum_counts(number: int, processes: ProcessGroup) -> int:
    return int(processes.total(torch.tensor([float(number)], dtype=torch.float64)))
