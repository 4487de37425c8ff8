"""Budgets: the kinds of costs that can be limited, and the allocation of kept channels to groups within a budget.

This module does not import torch when it is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from neuron_merging.errors import MergingError, suggest_names

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.selection.search import CutCosts
import heapq
from functools import cached_property
from itertools import pairwise

LATENCY_RUNS, LATENCY_SECONDS = 20, 1.0
"""A latency is the median of so many forward passes, or of as many as fit into so many seconds."""
DEFAULT_KEY = "macs"
"""The cost that a share without a name limits."""
LARGEST_PERCENTAGE = 100.0
"""Numbers above 1 and up to this, without a unit, are rejected: they were probably meant as percentages."""


@dataclass(frozen=True)
class BudgetKind:
    """One kind of cost that can be limited. It is either counted (`count`) or measured (`measure`)."""

    key: str
    """Its name in a budget."""
    meaning: str
    units: Mapping[str, float]
    """Factors of units, in lower case; "" is present where a number may have no unit."""
    count: Callable[[CutCosts], float] | None = None
    """Counts the cost of a cut without carrying it out."""
    measure: Callable[[nn.Module, tuple[Any, ...]], float] | None = None
    """Measures the cost by running a network. Measurements take time and must not run in parallel."""

    @property
    def is_timed(self) -> bool:
        """Whether the cost is measured by running the network."""
        return self.measure is not None


def measure_seconds(model: nn.Module, inputs: tuple[Any, ...], runtime: str = "") -> float:
    """Return the median time of a forward pass of the example inputs.

    Without a `runtime`, a network that was read from an ONNX file runs in onnxruntime, any other in torch.
    """
    import torch

    from neuron_merging.evaluation.latency import measure_latencies
    from neuron_merging.graph.copying import copy_without_hooks
    from neuron_merging.graph.example_inputs import infer_batch_size
    from neuron_merging.onnx.export import make_ort_callable
    from neuron_merging.onnx.network import OnnxNetwork

    size, own = infer_batch_size(inputs), copy_without_hooks(model).eval()
    in_ort = runtime == "onnxruntime" or (not runtime and isinstance(model, OnnxNetwork))
    run = make_ort_callable(own, inputs, torch.get_num_threads()) if in_ort else own
    return measure_latencies({"it": run}, inputs, (size,), LATENCY_RUNS, LATENCY_SECONDS)["it"][size]


_NUMBER_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_BYTE_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIME_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
BUDGET_KINDS = {
    kind.key: kind
    for kind in (
        BudgetKind("macs", "multiply-accumulates", {**_NUMBER_UNITS, "t": 1e12}, lambda cut: cut.macs),
        BudgetKind("params", "parameters", {**_NUMBER_UNITS, "b": 1e9}, lambda cut: cut.parameters),
        BudgetKind("weights", "bytes of weights", _BYTE_UNITS, lambda cut: cut.weight_bytes),
        BudgetKind("latency", "seconds of a forward pass", _TIME_UNITS, measure=measure_seconds),
        BudgetKind(
            "latency@torch",
            "seconds of a forward pass in torch",
            _TIME_UNITS,
            measure=partial(measure_seconds, runtime="torch"),
        ),
        BudgetKind(
            "latency@onnxruntime",
            "seconds of a forward pass in onnxruntime",
            _TIME_UNITS,
            measure=partial(measure_seconds, runtime="onnxruntime"),
        ),
    )
}
"""Kinds of costs by key."""


@dataclass(frozen=True)
class BudgetLimit:
    """A limit on one cost: a share of the original's cost, or an absolute amount."""

    key: str
    amount: float
    share: bool
    unit: str = ""
    """The unit as the user wrote it; "" for a plain number."""

    @property
    def kind(self) -> BudgetKind:
        """The kind of cost that is limited."""
        return BUDGET_KINDS[self.key]

    @property
    def value(self) -> float | str:
        """The limit as it is written in a budget; `parse_budget` returns the same limit for it.

        >>> [limit.value for limit in parse_budget({"latency": "5ms", "macs": "50%", "params": 0.5})]
        ['5ms', '50%', 0.5]
        """
        return f"{self.amount / self._scale:.15g}{self.unit}" if self.unit else self.amount

    def compute_allowed(self, original: float) -> float:
        """Return the largest allowed cost."""
        return self.amount * original if self.share else self.amount

    def format_cost(self, cost: float, original: float) -> str:
        """Format a cost in the unit of the limit.

        >>> limit, share = parse_budget({"params": "1.2M", "macs": "50%"})
        >>> limit.format_cost(795_000, 3e6), share.format_cost(795_000, 3e6)
        ('0.795M', '26.5%')
        """
        figure = (cost / original if self.share else cost) / self._scale
        return f"{figure:,.0f}" if not self.unit and not self.share else f"{figure:.4g}{self.unit}"

    @property
    def _scale(self) -> float:
        return 0.01 if self.unit == "%" else self.kind.units[self.unit.lower()] if self.unit else 1.0

    def __str__(self) -> str:
        return f"{self.key} {self.value}"


Budget = tuple[BudgetLimit, ...]


def parse_budget(budget: object) -> Budget:
    """Parse a mapping of costs to shares (0.5, "50%") or amounts ("1.2M", "5ms", "3MB").

    A value without a name limits the MACs. Parsed limits are returned unchanged.

    >>> [str(limit) for limit in parse_budget({"macs": "50%", "params": "1.2M"})]
    ['macs 50%', 'params 1.2M']
    """
    if isinstance(budget, tuple) and budget and all(isinstance(limit, BudgetLimit) for limit in budget):
        return budget
    if isinstance(budget, str | Real) and not isinstance(budget, bool):
        budget = {DEFAULT_KEY: budget}
    if not isinstance(budget, Mapping) or not budget:
        what = f"{budget!r} is not a mapping of what is limited to how much"
        raise MergingError(what, where="budget=", fix='For instance budget={"macs": 0.5}.')
    limits = tuple(_parse_limit(key, value) for key, value in budget.items())
    if sum(limit.kind.is_timed for limit in limits) > 1:
        raise MergingError("the time of a pass is limited twice", where="budget=", fix="Limit it in one runtime.")
    return limits


USUAL_NAMES = {
    "flops": "macs",
    "size": "weights",
    "bytes": "weights",
    "memory": "weights",
    "time": "latency",
}
"""Other words for budgets that people try."""


def _parse_limit(key: object, value: object) -> BudgetLimit:
    kind = BUDGET_KINDS.get(key) if isinstance(key, str) else None
    if kind is None:
        meant = USUAL_NAMES.get(str(key).lower())
        fix = f"Did you mean {meant}?" if meant else suggest_names(str(key), BUDGET_KINDS)
        raise MergingError(f"there is no budget of {key!r}", where="budget=", fix=fix)
    if isinstance(value, str):
        return _parse_limit_text(kind, value)
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise _make_limit_error(kind, value)
    return _make_plain_limit(kind, float(value), value)


def _parse_limit_text(kind: BudgetKind, text: str) -> BudgetLimit:
    found = re.fullmatch(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(%|[A-Za-zµ]*)\s*", text)
    if found is None:
        raise _make_limit_error(kind, text)
    number, unit = float(found[1].replace(",", "").replace("_", "")), found[2]
    if not 0 < number < math.inf:
        raise _make_limit_error(kind, text)
    if not unit:
        return _make_plain_limit(kind, number, text)
    if unit == "%":
        if number > 100:
            raise _make_limit_error(kind, text)
        return BudgetLimit(kind.key, number / 100, share=True, unit=unit)
    if unit.lower() not in kind.units:
        raise _make_limit_error(kind, text)
    return BudgetLimit(kind.key, number * kind.units[unit.lower()], share=False, unit=unit)


def _make_plain_limit(kind: BudgetKind, number: float, given: object) -> BudgetLimit:
    """Return the limit of a number without a unit: a share up to 1, else an absolute amount."""
    if number <= 1:
        return BudgetLimit(kind.key, number, share=True)
    if "" not in kind.units:
        raise _make_limit_error(kind, given)
    if number <= LARGEST_PERCENTAGE:
        what = f"{given!r} is a figure of {kind.meaning}, not a share"
        raise MergingError(what, where=f"budget[{kind.key!r}]", fix=f'Did you mean "{number:g}%"?')
    return BudgetLimit(kind.key, number, share=False)


def _make_limit_error(kind: BudgetKind, value: object) -> MergingError:
    known = ", ".join(unit for unit in kind.units if unit)
    if isinstance(value, str) and "=" in value:
        fix = "Give each budget by itself: --budget macs=50% --budget params=50%."
        return MergingError(f"{value!r} is more than one limit", where=f"budget[{kind.key!r}]", fix=fix)
    return MergingError(
        f"{value!r} is not a limit of {kind.meaning}",
        where=f"budget[{kind.key!r}]",
        fix=f'Give a share of the original\'s, as 0.5 or "50%", or a figure with a unit ({known}).',
    )


ChannelCounts = dict[str, int]
BudgetExcess = Callable[[Mapping[str, int]], float]
"""Returns the excess over the budget, as a share of it, for counts by group; at most 0 within the budget."""


@dataclass(frozen=True)
class LossCurve:
    """The loss at several numbers of kept channels, which fall from the group's size."""

    counts: tuple[int, ...]
    losses: tuple[float, ...]
    measured: tuple[int, ...] = ()
    """The numbers of channels at which the network was run; the losses at the others are interpolated."""

    def compute_hull(self) -> list[tuple[int, float]]:
        """Return the corners of the lower convex hull.

        On a convex curve each further step costs more, so that greedy allocation by price is optimal.

        >>> LossCurve((8, 6, 4, 2), (0.0, 3.0, 1.0, 5.0)).compute_hull()
        [(8, 0.0), (4, 1.0), (2, 5.0)]
        """
        points = list(zip(self.counts, self.losses, strict=True))
        corners = [points[0]]
        while corners[-1][0] != points[-1][0]:
            here, loss = corners[-1]
            ahead = [point for point in points if point[0] < here]
            # The smallest rise per channel; of equal ones the farthest point, so that no corner lies inside an edge.
            corners.append(min(ahead, key=lambda p: ((p[1] - loss) / (here - p[0]), p[0])))
        return corners

    @cached_property
    def _corners(self) -> list[tuple[int, float]]:
        # An allocation asks for losses thousands of times.
        return self.compute_hull()

    def loss(self, count: int) -> float:
        """Return the loss at any number of channels, interpolated on the hull.

        >>> LossCurve((8, 4), (0.0, 1.0)).loss(6)
        0.5
        """
        corners = self._corners
        for (more, low), (fewer, high) in pairwise(corners):
            if count >= fewer:
                return low + (high - low) * (more - min(count, more)) / (more - fewer)
        return corners[-1][1]


def previous_multiple(count: int, step: int) -> int:
    """Return the largest multiple of the step below a number.

    >>> previous_multiple(40, 12), previous_multiple(36, 12)
    (36, 24)
    """
    return (count - 1) // step * step


def next_multiple(count: int, step: int) -> int:
    """Return the smallest multiple of the step above a number.

    >>> next_multiple(36, 12), next_multiple(40, 12)
    (48, 48)
    """
    return (count // step + 1) * step


def allocate_channels(
    curves: Mapping[str, LossCurve], overspent: BudgetExcess, steps: Mapping[str, int], grain: int = 24
) -> ChannelCounts:
    """Return the numbers of kept channels with the smallest sum of losses within the budget.

    Greedily cut the group with the smallest loss per saved cost. `steps` holds the granularity of each group. One step
    removes about a `grain`-th of a group; channels that were cut too many in the end are given back one by one.
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
        if queue and price > queue[0][0]:  # cuts of other groups made this step save less, so it is queued again
            heapq.heappush(queue, (price, name))
            continue
        counts[name] = _step_down(curves[name], counts[name], steps[name], grain)
        price = _compute_price(curves, counts, name, overspent, steps, grain)
        if price is not None:
            heapq.heappush(queue, (price, name))
    return refill_channels(curves, counts, overspent, steps)


def _step_down(curve: LossCurve, count: int, step: int, grain: int) -> int:
    """Return the next smaller number of channels: a multiple of the step, even if the group's size is none."""
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
    """Return the loss per saved cost of a group's next step; None if it is at its minimum."""
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
    """Give channels back, those with the largest gain per cost first, as long as the budget holds."""
    counts = dict(counts)
    full = {name: curve.counts[0] for name, curve in curves.items()}
    open_ = {name for name in counts if counts[name] < full[name]}
    while open_:
        best = max(open_, key=lambda name: _compute_worth(curves[name], counts, name, overspent, steps[name]))
        more = min(full[best], next_multiple(counts[best], steps[best]))
        if overspent({**counts, best: more}) <= 0:
            counts[best] = more
        # Done with this group: one more step is too dear, or it is whole again. Cheaper groups may still fit.
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
    """Keep the same share of every group: the largest within the budget, by bisection."""

    def at(share: float) -> ChannelCounts:
        return {n: max(least[n], int(size * share + 1e-9) // steps[n] * steps[n]) for n, size in sizes.items()}

    low, high = 0.0, 1.0
    if overspent(at(low)) > 0:
        raise MergingError("the budget cannot be met", where="budget=", fix="Give a larger one.")
    # To 2⁻⁴⁰ of the share, far less than one channel of any group.
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
    """Move channels from groups that lose little to groups that gain more, within reach and budget.

    `slopes` holds, for each group, the loss of one channel fewer and the gain of one channel more; `reach` holds the
    fewest and the most channels.
    """
    counts = dict(counts)
    # No more exchanges than there are steps within reach: two groups must not trade for ever.
    for _ in range(sum((high - low) // steps[name] + 1 for name, (low, high) in reach.items())):
        givers = [n for n in counts if counts[n] > reach[n][0]]
        takers = [n for n in counts if counts[n] < reach[n][1]]
        if not givers or not takers:
            break
        fewer = {n: previous_multiple(counts[n], steps[n]) for n in {*givers, *takers}}
        cost = {n: max(1e-12, overspent(counts) - overspent({**counts, n: fewer[n]})) for n in fewer}
        loss = {n: slopes[n][0] * (counts[n] - fewer[n]) / cost[n] for n in givers}
        gain = {n: slopes[n][1] * (counts[n] - fewer[n]) / cost[n] for n in takers}
        # Compare per cost: channels of different layers cost different amounts.
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
