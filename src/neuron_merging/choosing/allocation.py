"""allocation: how many channels each group keeps, so that least is lost within a budget.

Every group has a curve: what the network's answers lose if the group alone keeps so many channels. Near the
original these losses add up. Channels go where a unit of cost is cheapest in loss, on the convex hull of each
curve, with the costs of all groups together counted exactly at every step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from neuron_merging.errors import MergingError

Counts = dict[str, int]
Overspent = Callable[[Mapping[str, int]], float]
"""For counts by group, how far they are above the budget, in shares of it; at most 0 where they are within."""


@dataclass(frozen=True)
class Curve:
    """Numbers of kept channels, falling from all of them, and the loss at each."""

    counts: tuple[int, ...]
    losses: tuple[float, ...]

    def hull(self) -> list[tuple[int, float]]:
        """The corners of the largest convex curve below: between them, loss grows in proportion.

        >>> Curve((8, 6, 4, 2), (0.0, 3.0, 1.0, 5.0)).hull()
        [(8, 0.0), (4, 1.0), (2, 5.0)]
        """
        points = list(zip(self.counts, self.losses, strict=True))
        corners = [points[0]]
        while corners[-1][0] != points[-1][0]:
            here, loss = corners[-1]
            ahead = [point for point in points if point[0] < here]
            corners.append(min(ahead, key=lambda p: ((p[1] - loss) / (here - p[0]), p[0])))
        return corners

    def loss(self, count: int) -> float:
        """On the hull, at any number of channels.

        >>> Curve((8, 4), (0.0, 1.0)).loss(6)
        0.5
        """
        corners = self.hull()
        for (more, low), (fewer, high) in pairwise(corners):
            if count >= fewer:
                return low + (high - low) * (more - min(count, more)) / (more - fewer)
        return corners[-1][1]


def allocate(curves: Mapping[str, Curve], overspent: Overspent, steps: Mapping[str, int], grain: int = 24) -> Counts:
    """The numbers of kept channels that lose least, as far as the curves tell, and fit the budget.

    `steps` is by how many channels at a time each group can change. A group goes down by about a `grain`-th of
    its size at once, and what was cut too much in the end is given back channel by channel.
    """
    counts = {name: curve.counts[0] for name, curve in curves.items()}
    queue = [(price, name) for name in curves if (price := _price(curves, counts, name, overspent, steps, grain))]
    heapq.heapify(queue)
    while overspent(counts) > 0:
        if not queue:
            raise MergingError("the budget cannot be met", where="budget=", fix="Give a larger one.")
        _, name = heapq.heappop(queue)
        price = _price(curves, counts, name, overspent, steps, grain)
        if price is None:
            continue
        if queue and price > queue[0][0]:  # others were cut since, so that this saves less than it did
            heapq.heappush(queue, (price, name))
            continue
        counts[name] = _below(curves[name], counts[name], steps[name], grain)
        price = _price(curves, counts, name, overspent, steps, grain)
        if price is not None:
            heapq.heappush(queue, (price, name))
    return refilled(curves, counts, overspent, steps)


def _below(curve: Curve, count: int, step: int, grain: int) -> int:
    """The next number on the way down."""
    jump = max(step, curve.counts[0] // grain // step * step)
    return max(curve.counts[-1], count - jump)


def _price(
    curves: Mapping[str, Curve],
    counts: Counts,
    name: str,
    overspent: Overspent,
    steps: Mapping[str, int],
    grain: int,
) -> float | None:
    """Loss for each unit of the budget that the group's next step saves; None where there is no such step."""
    curve, count = curves[name], counts[name]
    fewer = _below(curve, count, steps[name], grain)
    if fewer >= count:
        return None
    saved = overspent(counts) - overspent({**counts, name: fewer})
    lost = curve.loss(fewer) - curve.loss(count)
    return lost / max(saved, 1e-12)


def refilled(
    curves: Mapping[str, Curve], counts: Mapping[str, int], overspent: Overspent, steps: Mapping[str, int]
) -> Counts:
    """Channels given back, those first that are worth most for their cost, as long as the budget holds."""
    counts = dict(counts)
    full = {name: curve.counts[0] for name, curve in curves.items()}
    open_ = {name for name in counts if counts[name] < full[name]}
    while open_:
        best = max(open_, key=lambda name: _worth(curves[name], counts, name, overspent, steps[name]))
        more = min(full[best], counts[best] + steps[best])
        if overspent({**counts, best: more}) <= 0:
            counts[best] = more
        if counts[best] != more or more == full[best]:
            open_.remove(best)
    return counts


def _worth(curve: Curve, counts: Mapping[str, int], name: str, overspent: Overspent, step: int) -> float:
    more = min(curve.counts[0], counts[name] + step)
    cost = overspent({**counts, name: more}) - overspent(counts)
    return (curve.loss(counts[name]) - curve.loss(more)) / max(cost, 1e-12)


def uniform(
    sizes: Mapping[str, int], overspent: Overspent, steps: Mapping[str, int], least: Mapping[str, int]
) -> Counts:
    """The same share of every group, the largest that fits."""

    def at(share: float) -> Counts:
        return {n: max(least[n], int(size * share + 1e-9) // steps[n] * steps[n]) for n, size in sizes.items()}

    low, high = 0.0, 1.0
    if overspent(at(low)) > 0:
        raise MergingError("the budget cannot be met", where="budget=", fix="Give a larger one.")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if overspent(at(middle)) <= 0 else (low, middle)
    return at(low)


def exchanged(
    counts: Mapping[str, int],
    slopes: Mapping[str, tuple[float, float]],
    reach: Mapping[str, tuple[int, int]],
    overspent: Overspent,
    steps: Mapping[str, int],
) -> Counts:
    """Channels moved from groups that lose little by it to groups that gain more, within reach and budget.

    `slopes` has, for each group, what a channel fewer costs and what a channel more brings; `reach` the fewest and
    the most channels to go to.
    """
    counts = dict(counts)
    for _ in range(sum((high - low) // steps[name] + 1 for name, (low, high) in reach.items())):
        givers = [n for n in counts if counts[n] - steps[n] >= reach[n][0]]
        takers = [n for n in counts if counts[n] + steps[n] <= reach[n][1]]
        cost = {n: _unit_cost(counts, n, overspent, steps[n]) for n in {*givers, *takers}}
        if not givers or not takers:
            break
        giver = min(givers, key=lambda n: slopes[n][0] * steps[n] / cost[n])
        taker = max(takers, key=lambda n: slopes[n][1] * steps[n] / cost[n])
        if (
            giver == taker
            or slopes[giver][0] * steps[giver] / cost[giver] >= slopes[taker][1] * steps[taker] / cost[taker]
        ):
            break
        counts[giver] -= steps[giver]
        while counts[taker] + steps[taker] <= reach[taker][1]:
            if overspent({**counts, taker: counts[taker] + steps[taker]}) > 0:
                break
            counts[taker] += steps[taker]
    return counts


def _unit_cost(counts: Mapping[str, int], name: str, overspent: Overspent, step: int) -> float:
    return max(1e-12, overspent(counts) - overspent({**counts, name: counts[name] - step}))
