"""Statistics of several processes as one: each has seen batches of its own, and only sums travel."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from neuron_merging.channels.labels import Units
from neuron_merging.errors import MergingError
from neuron_merging.statistics.regression import MOST_ROWS, Regression, Rows


class Team(Protocol):
    """The processes that measure together: see `training.processes.current`."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over the processes, in each of them."""
        ...


def gathered(own: Regression | Rows, team: Team | None) -> Regression | Rows:
    """What all processes have gathered of one layer."""
    if team is None or team.count == 1:
        return own
    return _sums_of_all(own, team) if isinstance(own, Regression) else _rows_of_all(own, team)


def _sums_of_all(own: Regression, team: Team) -> Regression:
    """Every process's sums, moved to the same centre first."""
    assert own.shift is not None
    rows = _all(own.count, team)
    centre = tuple(team.total(shift.double() * own.count) / rows for shift in own.shift)
    moved = own.around(centre)  # type: ignore[arg-type]
    sums = tuple(team.total(part) for part in moved.sums)
    squares = {name: team.total(getattr(moved, name)) for name in ("xx", "xt", "tt", "yy")}
    return Regression(rows, moved.shift, sums, **squares)  # type: ignore[arg-type]


def _rows_of_all(own: Rows, team: Team) -> Rows:
    """An equal share of rows from every process."""
    share = MOST_ROWS // team.count
    parts = [torch.cat([part[i] for part in own.parts])[:share] for i in range(3)]
    counts = team.total(_at(torch.tensor([len(parts[0])], dtype=torch.float64, device=parts[0].device), team))
    together = Rows()
    shares = [team.total(_at(torch.nn.functional.pad(part, (0, 0, 0, share - len(part))), team)) for part in parts]
    for i, count in enumerate(counts.flatten().int().tolist()):
        together.add(*(part[i, :count] for part in shares))
    return together


def _at(values: Tensor, team: Team) -> Tensor:
    """Values in this process's place of a table for all of them."""
    table = values.new_zeros(team.count, *values.shape)
    table[team.rank] = values
    return table


def check_batches_of_all(seen: int, team: Team | None) -> None:
    """Refuse, in every process, if one of them has no batches: the others would wait for it."""
    if team is not None and _all(int(seen == 0), team):
        what = "a process has no calibration batch"
        raise MergingError(what, where="calibration=", fix="Give every process at least one, or start fewer.")


def check_agreement(kept: Mapping[str, Units], team: Team | None) -> None:
    """Refuse, in every process, if they did not choose the same channels: their statistics would not fit."""
    if team is None or team.count == 1:
        return
    text = repr([(name, list(map(int, units))) for name, units in kept.items()])
    number = float(zlib.crc32(text.encode()))
    mean = float(team.total(torch.tensor([number], dtype=torch.float64))) / team.count
    if _all(int(mean != number), team):
        what = "the processes chose different channels"
        fix = "Choose by a ratio and a criterion that looks at weights, or by expected-error."
        raise MergingError(what, where="calibration=", fix=fix)


def _all(number: int, team: Team) -> int:
    return int(team.total(torch.tensor([float(number)], dtype=torch.float64)))
