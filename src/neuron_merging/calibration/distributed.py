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
    own: MomentAccumulator | RowAccumulator, team: ProcessGroup | None
) -> MomentAccumulator | RowAccumulator:
    """What all processes have gathered of one layer."""
    if team is None or team.count == 1:
        return own
    return _reduce_moments(own, team) if isinstance(own, MomentAccumulator) else _gather_rows(own, team)


def _reduce_moments(own: MomentAccumulator, team: ProcessGroup) -> MomentAccumulator:
    """Every process's sums, moved to the same centre first."""
    assert own.shift is not None
    rows = _sum_counts(own.count, team)
    centre = tuple(team.total(shift.double() * own.count) / rows for shift in own.shift)
    moved = own.around(centre)  # type: ignore[arg-type]
    sums = tuple(team.total(part) for part in moved.sums)
    squares = {name: team.total(getattr(moved, name)) for name in ("xx", "xt", "tt", "yy")}
    return MomentAccumulator(rows, moved.shift, sums, **squares)  # type: ignore[arg-type]


def _gather_rows(own: RowAccumulator, team: ProcessGroup) -> RowAccumulator:
    """An equal share of rows from every process."""
    share = MAX_ROWS // team.count
    parts = [torch.cat([part[i] for part in own.parts])[:share] for i in range(3)]
    counts = team.total(
        _place_by_rank(torch.tensor([len(parts[0])], dtype=torch.float64, device=parts[0].device), team)
    )
    together = RowAccumulator()
    shares = [
        team.total(_place_by_rank(torch.nn.functional.pad(part, (0, 0, 0, share - len(part))), team)) for part in parts
    ]
    for i, count in enumerate(counts.flatten().int().tolist()):
        together.add(*(part[i, :count] for part in shares))
    return together


def _place_by_rank(values: Tensor, team: ProcessGroup) -> Tensor:
    """Values in this process's place of a table for all of them."""
    table = values.new_zeros(team.count, *values.shape)
    table[team.rank] = values
    return table


def check_all_have_batches(seen: int, team: ProcessGroup | None) -> None:
    """Refuse, in every process, if one of them has no batches: the others would wait for it."""
    if team is not None and _sum_counts(int(seen == 0), team):
        what = "a process has no calibration batch"
        raise MergingError(what, where="calibration=", fix="Give every process at least one, or start fewer.")


def check_same_channels(kept: Mapping[str, Units], team: ProcessGroup | None) -> None:
    """Refuse, in every process, if they did not choose the same channels: their statistics would not fit."""
    if team is None or team.count == 1:
        return
    text = repr([(name, list(map(int, units))) for name, units in kept.items()])
    number = float(zlib.crc32(text.encode()))
    mean = float(team.total(torch.tensor([number], dtype=torch.float64))) / team.count
    if _sum_counts(int(mean != number), team):
        what = "the processes chose different channels"
        fix = "Choose by a ratio and a criterion that looks at weights, or by expected-error."
        raise MergingError(what, where="calibration=", fix=fix)


def _sum_counts(number: int, team: ProcessGroup) -> int:
    return int(team.total(torch.tensor([float(number)], dtype=torch.float64)))
