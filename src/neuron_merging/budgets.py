"""budgets: the best network that fits.

What each group's channels are worth is measured on the whole network's answers (`measuring.whatif`), and
`choosing.allocation` turns that into numbers of channels. Far from the original, losses of single groups no longer
add up: so the cut is measured as a whole, channels are exchanged between groups in small steps, and a step is taken
only if the measured divergence falls. The uniform cut is always one of the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from neuron_merging import progress
from neuron_merging.choosing.allocation import Counts, Curve, Overspent, allocate, exchanged, uniform
from neuron_merging.measuring.whatif import WhatIf

ANCHORS = (0.25, 0.625)
"""Shares removed at which a group's loss is measured; in between it follows the error at the group's readers."""
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Shares removed at which curves have points."""
ROUNDS = 3
REACH = 0.25
"""How far, in shares of a group's channels, one round may go; half of it after a round that did not pay."""
STEEPEST = 2.0
"""Beyond what was measured, loss grows at least with this power of the share that is removed."""


@dataclass(frozen=True)
class Allocation:
    """Numbers of kept channels by group, what they cost in divergence, and how they were found."""

    counts: Counts
    divergence: float
    uniform: Counts
    uniform_divergence: float
    rounds: int
    passes: float
    """Forward passes of all probes that it took."""
    curves: Mapping[str, Curve] = field(repr=False)


@dataclass(frozen=True)
class Room:
    """How far a group may be cut: all its channels, the fewest that must stay, and the step between two numbers."""

    size: int
    least: int
    step: int


def sensitivities(whatif: WhatIf, rooms: Mapping[str, Room], anchors: Sequence[float] = ANCHORS) -> dict[str, Curve]:
    """For each group the divergence of the whole network's answers over the number of channels that it keeps."""
    full = {name: room.size for name, room in rooms.items()}
    at = {name: sorted({_count(room, share) for share in anchors}, reverse=True) for name, room in rooms.items()}
    measured = whatif.around(full, at)
    return {name: _curve(whatif, name, room, {c: measured[name, c] for c in at[name]}) for name, room in rooms.items()}


def _count(room: Room, share: float) -> int:
    return max(room.least, math.floor(room.size * (1 - share) / room.step + 1e-9) * room.step)


def _curve(whatif: WhatIf, name: str, room: Room, measured: Mapping[int, float]) -> Curve:
    counts = sorted({room.size, room.least, *measured, *(_count(room, share) for share in SHARES)}, reverse=True)
    local = {count: whatif.local_error(name, count) for count in counts[1:]}
    losses = [0.0, *(_between(count, local, measured, room) for count in counts[1:])]
    return Curve(tuple(counts), tuple(float(loss) for loss in np.maximum.accumulate(losses)))


def _between(count: int, local: Mapping[int, float], measured: Mapping[int, float], room: Room) -> float:
    """The loss at a number of channels: measured, or the readers' error times what the network makes of such errors."""
    if count in measured:
        return measured[count]
    known = sorted(measured, reverse=True)
    gains = [math.log(max(measured[c], 1e-12) / max(local[c], 1e-12)) for c in known]
    removed = [room.size - c for c in known]
    gain = float(np.interp(room.size - count, removed, gains))
    loss = math.exp(gain) * local[count]
    if count < known[-1]:  # an error of one has no more to lose, the network may
        power = ((room.size - count) / (room.size - known[-1])) ** STEEPEST
        loss = max(loss, measured[known[-1]] * power)
    return loss


def best_fit(
    whatif: WhatIf, rooms: Mapping[str, Room], overspent: Overspent, curves: Mapping[str, Curve], rounds: int = ROUNDS
) -> Allocation:
    """The cut within the budget whose measured divergence is the smallest that was found."""
    steps = {name: room.step for name, room in rooms.items()}
    sizes = {name: room.size for name, room in rooms.items()}
    same = uniform(sizes, overspent, steps, {name: room.least for name, room in rooms.items()})
    candidates = [same, allocate(curves, overspent, steps)]
    measured = [whatif.divergence(counts) for counts in candidates]
    best = int(np.argmin(measured))
    counts, divergence = candidates[best], measured[best]
    reach, taken = REACH, 0
    for _ in progress.each(range(rounds), "exchanging channels between layers"):
        new = _round(whatif, rooms, counts, divergence, reach, overspent)
        found = whatif.divergence(new) if new != counts else divergence
        if found < divergence:
            counts, divergence, taken = new, found, taken + 1
        else:
            reach /= 2
    return Allocation(counts, divergence, same, measured[0], taken, whatif.passes, curves)


def _round(
    whatif: WhatIf, rooms: Mapping[str, Room], counts: Counts, base: float, reach: float, overspent: Overspent
) -> Counts:
    """Channels exchanged by what one group more or less does to the cut as it is."""
    near = {name: _near(room, counts[name], reach) for name, room in rooms.items()}
    others = {name: [c for c in pair if c != counts[name]] for name, pair in near.items()}
    found = whatif.around(counts, others)
    slopes = {}
    for name, (low, high) in near.items():
        dearer = found.get((name, low), math.inf) - base
        better = base - found.get((name, high), base)
        slopes[name] = (max(0.0, dearer) / max(1, counts[name] - low), max(0.0, better) / max(1, high - counts[name]))
    return exchanged(counts, slopes, near, overspent, {name: room.step for name, room in rooms.items()})


def _near(room: Room, count: int, reach: float) -> tuple[int, int]:
    jump = max(1, round(count * reach / room.step)) * room.step
    return max(room.least, count - jump), min(room.size, count + jump)


def smallest(fits: Callable[[float], bool], low: float, high: float, tries: int = 8) -> float:
    """The smallest share of the original's cost at which something still holds, by bisection; it holds at `high`."""
    for _ in progress.each(range(tries), "looking for the smallest that is good enough"):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
