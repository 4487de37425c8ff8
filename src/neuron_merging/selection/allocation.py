"""How many channels each group keeps, so that a budget is met at the least loss.

Every group has a loss curve: the loss of the network's outputs if this group alone keeps so many channels. Near the
original these losses add up. Channels are removed where a unit of cost is cheapest in loss, on the convex hull of
each curve, and the cost of all groups together is counted exactly at every step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from neuron_merging.errors import MergingError

ChannelCounts = dict[str, int]
BudgetExcess = Callable[[Mapping[str, int]], float]
"""For counts by group, how far they are above the budget, in shares of it; at most 0 where they are within."""


@dataclass(frozen=True)
class LossCurve:
    """Numbers of kept channels, falling from all of them, and the loss at each."""

    counts: tuple[int, ...]
    losses: tuple[float, ...]

    def compute_hull(self) -> list[tuple[int, float]]:
        """The corners of the largest convex curve below: between them, loss grows in proportion.

        >>> LossCurve((8, 6, 4, 2), (0.0, 3.0, 1.0, 5.0)).compute_hull()
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

        >>> LossCurve((8, 4), (0.0, 1.0)).loss(6)
        0.5
        """
        corners = self.compute_hull()
        for (more, low), (fewer, high) in pairwise(corners):
            if count >= fewer:
                return low + (high - low) * (more - min(count, more)) / (more - fewer)
        return corners[-1][1]


def previous_multiple(count: int, step: int) -> int:
    """The largest multiple of the step below a number.

    >>> previous_multiple(40, 12), previous_multiple(36, 12)
    (36, 24)
    """
    return (count - 1) // step * step


def next_multiple(count: int, step: int) -> int:
    """The smallest multiple of the step above a number.

    >>> next_multiple(36, 12), next_multiple(40, 12)
    (48, 48)
    """
    return (count // step + 1) * step


def allocate_channels(
    curves: Mapping[str, LossCurve], overspent: BudgetExcess, steps: Mapping[str, int], grain: int = 24
) -> ChannelCounts:
    """The numbers of kept channels that lose least, as far as the curves tell, and fit the budget.

    `steps` is by how many channels at a time each group can change. A group goes down by about a `grain`-th of
    its size at once, and what was cut too much in the end is given back channel by channel.
    """
    counts = {name: curve.counts[0] for name, curve in curves.items()}
    prices = {name: _compute_price(curves, counts, name, overspent, steps, grain) for name in curves}
    queue = [(price, name) for name, price in prices.items() if price is not None]
    heapq.heapify(queue)
    while overspent(counts) > 0:
        if not queue:
            raise MergingError("the budget cannot be met", where="budget=", fix="Give a larger one.")
        _, name = heapq.heappop(queue)
        price = _compute_price(curves, counts, name, overspent, steps, grain)
        if price is None:
            continue
        if queue and price > queue[0][0]:  # others were cut since, so that this saves less than it did
            heapq.heappush(queue, (price, name))
            continue
        counts[name] = _step_down(curves[name], counts[name], steps[name], grain)
        price = _compute_price(curves, counts, name, overspent, steps, grain)
        if price is not None:
            heapq.heappush(queue, (price, name))
    return refill_channels(curves, counts, overspent, steps)


def _step_down(curve: LossCurve, count: int, step: int, grain: int) -> int:
    """The next number on the way down: a multiple of the step, which the group's size need not be."""
    jump = max(step, curve.counts[0] // grain // step * step)
    return max(curve.counts[-1], -(-(count - jump) // step) * step)


def _compute_price(
    curves: Mapping[str, LossCurve],
    counts: ChannelCounts,
    name: str,
    overspent: BudgetExcess,
    steps: Mapping[str, int],
    grain: int,
) -> float | None:
    """Loss for each unit of the budget that the group's next step saves; None where there is no such step."""
    curve, count = curves[name], counts[name]
    fewer = _step_down(curve, count, steps[name], grain)
    if fewer >= count:
        return None
    saved = overspent(counts) - overspent({**counts, name: fewer})
    lost = curve.loss(fewer) - curve.loss(count)
    return lost / max(saved, 1e-12)


def refill_channels(
    curves: Mapping[str, LossCurve], counts: Mapping[str, int], overspent: BudgetExcess, steps: Mapping[str, int]
) -> ChannelCounts:
    """Channels given back, those first that are worth most for their cost, as long as the budget holds."""
    counts = dict(counts)
    full = {name: curve.counts[0] for name, curve in curves.items()}
    open_ = {name for name in counts if counts[name] < full[name]}
    while open_:
        best = max(open_, key=lambda name: _compute_worth(curves[name], counts, name, overspent, steps[name]))
        more = min(full[best], next_multiple(counts[best], steps[best]))
        if overspent({**counts, best: more}) <= 0:
            counts[best] = more
        if counts[best] != more or more == full[best]:
            open_.remove(best)
    return counts


def _compute_worth(curve: LossCurve, counts: Mapping[str, int], name: str, overspent: BudgetExcess, step: int) -> float:
    more = min(curve.counts[0], next_multiple(counts[name], step))
    cost = overspent({**counts, name: more}) - overspent(counts)
    return (curve.loss(counts[name]) - curve.loss(more)) / max(cost, 1e-12)


def allocate_uniformly(
    sizes: Mapping[str, int], overspent: BudgetExcess, steps: Mapping[str, int], least: Mapping[str, int]
) -> ChannelCounts:
    """The same share of every group, the largest that fits."""

    def at(share: float) -> ChannelCounts:
        return {n: max(least[n], int(size * share + 1e-9) // steps[n] * steps[n]) for n, size in sizes.items()}

    low, high = 0.0, 1.0
    if overspent(at(low)) > 0:
        raise MergingError("the budget cannot be met", where="budget=", fix="Give a larger one.")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if overspent(at(middle)) <= 0 else (low, middle)
    return at(low)


def exchange_channels(
    counts: Mapping[str, int],
    slopes: Mapping[str, tuple[float, float]],
    reach: Mapping[str, tuple[int, int]],
    overspent: BudgetExcess,
    steps: Mapping[str, int],
) -> ChannelCounts:
    """Channels moved from groups that lose little by it to groups that gain more, within reach and budget.

    `slopes` has, for each group, what a channel fewer costs and what a channel more brings; `reach` the fewest and
    the most channels to go to.
    """
    counts = dict(counts)
    for _ in range(sum((high - low) // steps[name] + 1 for name, (low, high) in reach.items())):
        givers = [n for n in counts if counts[n] > reach[n][0]]
        takers = [n for n in counts if counts[n] < reach[n][1]]
        if not givers or not takers:
            break
        fewer = {n: previous_multiple(counts[n], steps[n]) for n in {*givers, *takers}}
        cost = {n: max(1e-12, overspent(counts) - overspent({**counts, n: fewer[n]})) for n in fewer}
        loss = {n: slopes[n][0] * (counts[n] - fewer[n]) / cost[n] for n in givers}
        gain = {n: slopes[n][1] * (counts[n] - fewer[n]) / cost[n] for n in takers}
        giver, taker = min(givers, key=lambda n: loss[n]), max(takers, key=lambda n: gain[n])
        if giver == taker or loss[giver] >= gain[taker]:
            break
        counts[giver] = fewer[giver]
        while counts[taker] < reach[taker][1]:
            more = min(reach[taker][1], next_multiple(counts[taker], steps[taker]))
            if overspent({**counts, taker: more}) > 0:
                break
            counts[taker] = more
    return counts
