"""Search for the best network within a budget, or for the smallest that is good enough.

The loss of each group is measured as the divergence of the network's outputs, and `selection.budget` turns these curves
into numbers of channels. Near the original, the divergence is quadratic in the perturbation and perturbations of
different groups are nearly uncorrelated, so losses add up. Far from it they do not. Therefore complete cuts are
measured too, channels are exchanged between groups in small steps, and a step is taken only if the measured divergence
falls. The uniform cut is always one of the candidates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from neuron_merging import progress
from neuron_merging.channels.groups import Group, Units
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.costs import Costs
from neuron_merging.onnx.export import quantize_model
from neuron_merging.onnx.quantize import OrtNetwork
from neuron_merging.pruning.plan import make_plan
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.selection.budget import (
    Budget,
    BudgetExcess,
    ChannelCounts,
    LossCurve,
    allocate_channels,
    allocate_uniformly,
    exchange_channels,
    measure_seconds,
    parse_budget,
    refill_channels,
)
from neuron_merging.selection.criteria import compute_min_kept, keep_units_by_count
from neuron_merging.selection.cut_simulator import CutSimulator
from neuron_merging.selection.elimination import EliminationOrder, build_loss_curve

ANCHOR_SHARES = {"fast": (0.5,), "normal": (0.25, 0.625), "best": (0.25, 0.625)}
"""Removed shares at which a group's loss is measured, by effort; in between it follows the error at the consumer
layers."""
CURVE_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Removed shares at which loss curves have points."""
EXCHANGE_ROUNDS = {"fast": 0, "normal": 2, "best": 3}
"""Rounds of exchange by effort; each costs two measurements per group."""
LATENCY_TRIES = 6
"""Networks whose latency is measured: bisection to 1/64 of the MACs."""
BISECTION_SCHEDULE = ((False, 6), (True, 3))
"""Bisection for the smallest network that is good enough: (whether channels are exchanged, number of cuts). The first
phase brackets the size cheaply, the second refines it with exchanged channels."""
RESTART_WIDTHS = 6.0
"""Where the second phase begins: below the first one's result by so many widths of its last interval. Exchanged
channels make smaller networks good enough."""
EXCHANGE_REACH = 0.25
"""Largest change of a group in one round, as a share of its channels; halved after a round without improvement."""
COARSE_GROUP_SIZE = 16
"""Groups of at most so many units, such as attention heads, lose a large part with each of them."""
MIN_LOSS_POWER = 2.0
"""Beyond the last measured point, loss grows at least with this power of the removed share: the divergence is
quadratic in the perturbation."""


SEARCH_TEMPERATURE = 4.0
"""Temperature of the divergences that cuts are compared by. At 1, a few inputs between two classes decide."""


@dataclass(frozen=True)
class Allocation:
    """Kept channels by group, the divergence of this cut and of the uniform one, and how it was found."""

    counts: ChannelCounts
    divergence: float | None
    """None if it was not measured: estimated curves are for networks whose runs are expensive."""
    uniform: ChannelCounts
    uniform_divergence: float | None
    rounds: int
    passes: float
    """Work of the search, in forward passes of all probes."""
    curves: Mapping[str, LossCurve] = field(repr=False)

    def describe(self, source: str) -> str:
        """Describe the result in one line, for the summary; `source` names the probes."""
        if self.divergence is None:
            return (
                f'shared out between layers by gradients on {source}; allocation="search" tries cuts, and takes longer'
            )
        uniform = f", of the uniform cut {self.uniform_divergence:.3g}" if self.uniform_divergence is not None else ""
        return f"divergence of the outputs on {source}: {self.divergence:.3g}{uniform}"


@dataclass(frozen=True)
class UniformKind:
    """Groups that keep equal numbers of units, which must be a multiple of the step."""

    names: tuple[str, ...]
    step: int = 1


def mask_numbers(name: str) -> str:
    """Replace the numbers in a layer's name, so that repeated layers have the same name.

    >>> mask_numbers("encoder.layer.11.output.dense")
    'encoder.layer.*.output.dense'
    """
    return re.sub(r"\d+", "*", name)


def find_uniform_kinds(groups: Iterable[Group]) -> tuple[UniformKind, ...]:
    """Collect groups of one size whose names differ only in numbers."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for group in groups:
        kinds.setdefault((mask_numbers(group.name), group.size), []).append(group.name)
    return tuple(UniformKind(tuple(names)) for names in kinds.values())


def find_best_within_budget(
    simulator: CutSimulator,
    budget: object,
    limits: Mapping[str, float],
    round_to: int = 1,
    kinds: Sequence[UniformKind] | None = None,
    orders: Mapping[str, EliminationOrder] | None = None,
    effort: str = "normal",
) -> Allocation:
    """Return the best cut found within a budget; raise an error if the smallest possible network exceeds it.

    With `kinds`, the groups of a kind keep equal numbers of units, and groups of no kind keep all of theirs. With
    `orders`, whose errors are divergences of the outputs, no group is tried by itself: costs of cuts follow from the
    orders, and nothing is measured. `effort` decides how much is measured.
    """
    ranges = find_cut_ranges(simulator, limits, round_to, kinds)
    spending = BudgetSpending(simulator, parse_budget(budget))
    spending.check({name: cut_range.min_kept for name, cut_range in ranges.items()})
    if not spending.needs_cut:
        return _allocate_everything(simulator, ranges)
    curves, rounds = _get_loss_curves(simulator, ranges, orders, effort)

    if not spending.is_measured:
        return find_best_cut(simulator, ranges, spending.over, curves, rounds, kinds, orders is not None)
    return spending.find_fast_enough(
        lambda over: find_best_cut(simulator, ranges, over, curves, rounds, kinds, orders is not None)
    )


def _get_loss_curves(
    simulator: CutSimulator,
    ranges: Mapping[str, CutRange],
    orders: Mapping[str, EliminationOrder] | None,
    effort: str,
) -> tuple[dict[str, LossCurve], int]:
    """Return the loss curve of each group, measured or from its elimination order, and the rounds of exchange."""
    if orders is None:
        key = tuple(sorted((name, own.size, own.min_kept, own.step) for name, own in ranges.items()))
        if key not in simulator.loss_curves:
            simulator.loss_curves[key] = measure_loss_curves(simulator, ranges, ANCHOR_SHARES[effort])
        return dict(simulator.loss_curves[key]), EXCHANGE_ROUNDS[effort]
    known = {name: own for name, own in ranges.items() if name in orders}
    return {name: build_loss_curve(orders[name], own.min_kept, own.step) for name, own in known.items()}, 0


def find_cut_ranges(
    simulator: CutSimulator,
    limits: Mapping[str, float],
    round_to: int,
    kinds: Sequence[UniformKind] | None = None,
) -> dict[str, CutRange]:
    """Return how far each group may be cut; groups that must keep all channels are left out."""
    ranges = {}
    for name, group in simulator.groups.items():
        least, step = compute_min_kept(group, simulator.scores[name], limits.get(name, 1.0), round_to)
        ranges[name] = CutRange(group.size, least, step)
    if kinds is not None:
        ranges = {name: own for kind in kinds for name, own in join_cut_ranges(kind, ranges).items()}
    return {name: own for name, own in ranges.items() if own.min_kept < own.size}


def join_cut_ranges(kind: UniformKind, ranges: Mapping[str, CutRange]) -> dict[str, CutRange]:
    """Return the range that suits all groups of a kind, for each of them."""
    own = [ranges[name] for name in kind.names]
    step = math.lcm(kind.step, *(one.step for one in own))
    least = min(own[0].size, -(-max(one.min_kept for one in own) // step) * step)
    return dict.fromkeys(kind.names, CutRange(own[0].size, least, step))


def find_smallest_good_enough(
    simulator: CutSimulator,
    limits: Mapping[str, float],
    round_to: int,
    is_good: Callable[[ChannelCounts], bool],
    kinds: Sequence[UniformKind] | None = None,
    orders: Mapping[str, EliminationOrder] | None = None,
    effort: str = "normal",
) -> Allocation | None:
    """Return the cut with the fewest multiply-accumulates that `is_good` accepts; None if it accepts none.

    This bisects the share of multiply-accumulates, first with cuts that follow from the curves alone, then, starting
    slightly below their result, with channels exchanged between layers.
    """
    ranges = find_cut_ranges(simulator, limits, round_to, kinds)
    if not ranges:
        return None
    spending = BudgetSpending(simulator, ())
    curves, rounds = _get_loss_curves(simulator, ranges, orders, effort)
    floor = spending.share({name: cut_range.min_kept for name, cut_range in ranges.items()})
    low, high, best = floor, 1.0, None
    for exchanges, tries in BISECTION_SCHEDULE:
        for _ in progress.track_progress(range(tries), "looking for the smallest that is good enough"):
            share = (low + high) / 2
            over = partial(spending.excess_with_share, share)
            found = find_best_cut(simulator, ranges, over, curves, exchanges and rounds, kinds, orders is not None)
            good = is_good(found.counts)
            low, high, best = (low, share, found) if good else (share, high, best)
        low = max(floor, high - RESTART_WIDTHS * (high - low))
    return best


def _allocate_everything(simulator: CutSimulator, ranges: Mapping[str, CutRange]) -> Allocation:
    sizes = {name: cut_range.size for name, cut_range in ranges.items()}
    return Allocation(sizes, 0.0, sizes, 0.0, 0, simulator.passes, {})


class CutCosts:
    """Costs of a cut, counted without carrying it out; `BudgetKind.count` reads them."""

    def __init__(self, counter: CostCounter, counts: Mapping[str, int]) -> None:
        self._counter, self._counts = counter, counts

    @cached_property
    def _kept_units(self) -> dict[str, Any]:
        return self._counter.resolve_units(self._counts)

    @property
    def macs(self) -> float:
        """Multiply-accumulates."""
        return self._counter.costs.macs(self._kept_units)

    @property
    def parameters(self) -> float:
        """Parameters, including the biases that merging adds."""
        return self._counter.costs.parameters(self._kept_units) + (
            self._counter.simulator.new_biases if self._counts else 0
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of parameters and buffers; buffers are counted at their original size."""
        return self.parameters * self._counter.bytes_per_parameter + self._counter.buffer_bytes


class CostCounter:
    """Counts the costs of cuts of one network."""

    def __init__(self, simulator: CutSimulator, int8: bool = False) -> None:
        self.simulator, self.costs, self.int8 = simulator, Costs(simulator.analysis), int8
        self._units: dict[tuple[str, int], Units] = {}

    def of(self, counts: Mapping[str, int]) -> CutCosts:
        """Return the costs of the network whose groups keep so many units; of the original for an empty mapping."""
        return CutCosts(self, counts)

    def resolve_units(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Return the number of kept units by group; for groups whose units differ in cost, the units themselves."""
        found: dict[str, Any] = dict(counts)
        for name in self.costs.uneven_groups & counts.keys():
            key = name, counts[name]
            if key not in self._units:
                self._units[key] = keep_units_by_count(
                    self.simulator.groups[name], self.simulator.scores[name], counts[name]
                )
            found[name] = self._units[key]
        return found

    @cached_property
    def bytes_per_parameter(self) -> float:
        """Mean number of bytes per parameter; one in an int8 file."""
        if self.int8:
            return 1.0
        own = list(self.simulator.analysis.model.parameters())
        return sum(p.numel() * p.element_size() for p in own) / max(1, sum(p.numel() for p in own))

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in self.simulator.analysis.model.buffers())


class BudgetSpending:
    """Compares the costs of cuts with a budget."""

    def __init__(self, simulator: CutSimulator, budget: Budget) -> None:
        self._simulator, self._counter = simulator, CostCounter(simulator, simulator.int8)
        original = CostCounter(simulator)  # in float, also if the result will be an int8 file
        self._measured = next((limit for limit in budget if limit.kind.is_timed), None)
        self._counted = [limit for limit in budget if limit.kind.count is not None]
        self._count = {limit.key: limit.kind.count for limit in budget if limit.kind.count is not None}
        self._original = {key: count(original.of({})) for key, count in self._count.items()}
        self._allowed = {limit.key: limit.compute_allowed(self._original[limit.key]) for limit in self._counted}

    @property
    def needs_cut(self) -> bool:
        """Whether the original exceeds the budget, or may exceed a limit that has to be measured."""
        return self._measured is not None or self.over({}) > 0

    def over(self, counts: Mapping[str, int]) -> float:
        """Return the excess over the budget, as shares of the limits, summed over exceeded ones; negative within it."""
        costs = self._counter.of(counts)
        shares = [count(costs) / self._allowed[key] - 1 for key, count in self._count.items()]
        # Summed: a step that helps one exceeded limit counts, even while another limit is exceeded by more.
        return sum(max(0.0, share) for share in shares) or max(shares, default=-1.0)

    def check(self, least: Mapping[str, int]) -> None:
        """Raise an error for a budget that no cut meets."""
        for limit in self._counted:
            smallest, original = self._count[limit.key](self._counter.of(least)), self._original[limit.key]
            if smallest > self._allowed[limit.key]:
                refused = self._simulator.analysis.channels.refusals
                reasons = "; ".join(str(refusal) for refusal in refused[:3])
                allowed = limit.format_cost(self._allowed[limit.key], original)
                raise MergingError(
                    f"the budget of {limit.kind.meaning} cannot be met: {allowed} are allowed, the smallest "
                    f"possible network has {limit.format_cost(smallest, original)}"
                    + (f" ({reasons})" if reasons else ""),
                    where=f"budget[{limit.key!r}]",
                    fix='Give more, or let more layers take part: scope="all", fewer ignore= and limits=.',
                )

    @property
    def is_measured(self) -> bool:
        """Whether the budget limits a cost that has to be measured, such as the latency."""
        return self._measured is not None

    def find_fast_enough(self, fit: Callable[[BudgetExcess], Allocation]) -> Allocation:
        """Return the largest network within the measured limit, by bisection over the share of MACs.

        Latency depends on shapes, not on values, so candidates are built by plain pruning.
        """
        limit = self._measured
        assert limit is not None and limit.kind.measure is not None
        measure, inputs = limit.kind.measure, self._simulator.analysis.inputs
        original = measure(self._simulator.analysis.model, inputs)
        allowed, fastest = limit.compute_allowed(original), math.inf
        low, high, best = 0.0, 1.0, None
        for _ in progress.track_progress(range(LATENCY_TRIES), "looking for the largest that is fast enough"):
            share = (low + high) / 2
            try:
                found = fit(partial(self.excess_with_share, share))
            except MergingError:  # no cut is that small
                low = share
                continue
            cost = self._measure_cut(measure, found.counts)
            low, high, best = (share, high, found) if cost <= allowed else (low, share, best)
            fastest = min(fastest, cost)
        if best is None:
            seen = f": the fastest takes {limit.format_cost(fastest, original)}" if fastest < math.inf else ""
            what = f"no cut that was tried takes at most {limit.value} of {limit.kind.meaning}{seen}"
            fix = "Give more time, or let more layers take part."
            raise MergingError(what, where=f"budget[{limit.key!r}]", fix=fix)
        return best

    def excess_with_share(self, share: float, counts: Mapping[str, int]) -> float:
        """Return the excess with a share of the multiply-accumulates as an additional limit."""
        return max(self.over(counts), self.share(counts) / share - 1)

    def share(self, counts: Mapping[str, int]) -> float:
        """Return the share of the original's multiply-accumulates."""
        return self._counter.of(counts).macs / max(1, self._counter.of({}).macs)

    def _measure_cut(self, measure: Callable[[nn.Module, tuple[Any, ...]], float], counts: Mapping[str, int]) -> float:
        """Measure a cut, as an int8 file if the result will be one; its ranges do not change the time it takes."""
        model, inputs = self._build_cut_model(counts), self._simulator.analysis.inputs
        if not self._simulator.int8:
            return measure(model, inputs)
        network = OrtNetwork(quantize_model(model, inputs, max_loss=math.inf).data, torch.get_num_threads())
        return measure_seconds(network, inputs, "torch")  # the module runs onnxruntime itself

    def _build_cut_model(self, counts: Mapping[str, int]) -> nn.Module:
        analysis = self._simulator.analysis
        plan = make_plan(
            analysis.model,
            analysis.graph,
            analysis.channels,
            self._simulator.select_kept_units(counts),
            size_attributes=analysis.size_attributes,
        )
        return apply_plan(analysis.model, plan)


@dataclass(frozen=True)
class CutRange:
    """How far a group may be cut: its size, the fewest channels that must stay, and the step between two counts."""

    size: int
    min_kept: int
    step: int


def measure_loss_curves(
    simulator: CutSimulator, ranges: Mapping[str, CutRange], anchors: Sequence[float] = ANCHOR_SHARES["normal"]
) -> dict[str, LossCurve]:
    """Measure, for each group, the divergence of the network's outputs as a function of its kept channels."""
    full = {name: cut_range.size for name, cut_range in ranges.items()}
    at = {
        name: sorted({_count_at_share(cut_range, share) for share in anchors}, reverse=True)
        for name, cut_range in ranges.items()
    }
    measured = simulator.measure_variations(full, at)
    curves = {}
    for name, cut_range in ranges.items():
        curves[name] = _build_loss_curve(simulator, name, cut_range, {c: measured[name, c] for c in at[name]})
    return curves


def _count_at_share(cut_range: CutRange, share: float) -> int:
    return max(cut_range.min_kept, math.floor(cut_range.size * (1 - share) / cut_range.step + 1e-9) * cut_range.step)


def _build_loss_curve(
    simulator: CutSimulator, name: str, cut_range: CutRange, measured: Mapping[int, float]
) -> LossCurve:
    counts = sorted(
        {cut_range.size, cut_range.min_kept, *measured, *(_count_at_share(cut_range, share) for share in CURVE_SHARES)},
        reverse=True,
    )
    local = {}  # relative errors at the consumer layers: cheap, since they need no run of the network
    for count in counts[1:]:
        local[count] = simulator.consumer_error(name, count)
    losses = [0.0, *(_interpolate_loss(count, local, measured, cut_range) for count in counts[1:])]
    # Measurements are noisy, but fewer channels never lose less.
    rising = (float(loss) for loss in np.maximum.accumulate(losses))
    return LossCurve(tuple(counts), tuple(rising), tuple(sorted(measured, reverse=True)))


def _interpolate_loss(
    count: int, local: Mapping[int, float], measured: Mapping[int, float], cut_range: CutRange
) -> float:
    """Return the loss at a number of channels: the measured one, else the consumers' error times an interpolated gain.

    The gain is the ratio of divergence to local error at the measured points: how strongly the rest of the network
    reacts to errors of this group. It varies over orders of magnitude, so its logarithm is interpolated.
    """
    if count in measured:
        return measured[count]
    known = sorted(measured, reverse=True)
    gains = [math.log(max(measured[c], 1e-12) / max(local[c], 1e-12)) for c in known]
    removed = [cut_range.size - c for c in known]
    gain = float(np.interp(cut_range.size - count, removed, gains))
    loss = math.exp(gain) * local[count]
    if count < known[-1]:  # a relative error saturates at 1, the divergence does not
        power = ((cut_range.size - count) / (cut_range.size - known[-1])) ** MIN_LOSS_POWER
        loss = max(loss, measured[known[-1]] * power)
    return loss


def find_best_cut(
    simulator: CutSimulator,
    ranges: Mapping[str, CutRange],
    overspent: BudgetExcess,
    curves: Mapping[str, LossCurve],
    rounds: int = EXCHANGE_ROUNDS["normal"],
    kinds: Sequence[UniformKind] | None = None,
    estimated: bool = False,
) -> Allocation:
    """Return the cut within the budget with the smallest measured divergence that was found.

    With `kinds`, the groups of a kind keep equal numbers of channels, and no channels are exchanged. `estimated` curves
    are not measured; then groups of few large units, such as attention heads, are spared if the budget allows it.
    """
    steps = {name: cut_range.step for name, cut_range in ranges.items()}
    sizes = {name: cut_range.size for name, cut_range in ranges.items()}
    same = allocate_uniformly(sizes, overspent, steps, {name: cut_range.min_kept for name, cut_range in ranges.items()})
    allocate = (
        partial(_allocate_by_curves, ranges, overspent)
        if kinds is None
        else partial(_allocate_by_kind, kinds, ranges, overspent)
    )
    if estimated:
        counts = _allocate_fine_groups_first(ranges, curves, allocate)
        return Allocation(counts, None, same, None, 0, simulator.passes, curves)
    candidates = [same, allocate(curves)]
    measured = [simulator.measure_divergence(counts) for counts in candidates]
    best = int(np.argmin(measured))
    counts, divergence = candidates[best], measured[best]
    if kinds is not None:
        return Allocation(counts, divergence, same, measured[0], 0, simulator.passes, curves)
    reach, taken = EXCHANGE_REACH, 0
    for _ in progress.track_progress(range(rounds), "exchanging channels between layers"):
        new = _exchange_once(simulator, ranges, counts, reach, overspent)
        found = simulator.measure_divergence(new) if new != counts else divergence
        # Slopes were measured one group at a time, and their sum may mislead: accept only a measured improvement.
        if found < divergence:
            counts, divergence, taken = new, found, taken + 1
        else:
            reach /= 2
    # Steps of exchange leave some budget unused.
    full = refill_channels(curves, counts, overspent, steps)
    if full != counts and (found := simulator.measure_divergence(full)) <= divergence:
        counts, divergence = full, found
    return Allocation(counts, divergence, same, measured[0], taken, simulator.passes, curves)


def _allocate_by_curves(
    ranges: Mapping[str, CutRange], overspent: BudgetExcess, curves: Mapping[str, LossCurve]
) -> ChannelCounts:
    """Allocate channels by the curves; groups without a curve keep everything."""
    whole = {name: cut_range.size for name, cut_range in ranges.items() if name not in curves}
    steps = {name: ranges[name].step for name in curves}
    return {**whole, **allocate_channels(curves, lambda counts: overspent({**whole, **counts}), steps)}


def _allocate_fine_groups_first(
    ranges: Mapping[str, CutRange],
    curves: Mapping[str, LossCurve],
    allocate: Callable[[Mapping[str, LossCurve]], ChannelCounts],
) -> ChannelCounts:
    """Return the allocation that spares groups of few large units; all groups are cut if the budget needs it.

    Removing one of few units is no small perturbation. In SmolLM2 the estimates of hidden units were too low by nearly
    the same factor in most layers, those of attention heads by widely different ones, so the two cannot be compared.
    """
    fine = {name: curve for name, curve in curves.items() if ranges[name].size > COARSE_GROUP_SIZE}
    try:
        return allocate(fine or curves)
    except MergingError:  # the budget cannot be met without the others
        return allocate(curves)


def _allocate_by_kind(
    kinds: Sequence[UniformKind],
    ranges: Mapping[str, CutRange],
    overspent: BudgetExcess,
    curves: Mapping[str, LossCurve],
) -> ChannelCounts:
    """Allocate channels such that all groups of a kind keep equal numbers of channels."""
    members = {kind.names[0]: kind.names for kind in kinds if all(name in curves for name in kind.names)}

    alike = {name for names in members.values() for name in names}
    whole = {name: cut_range.size for name, cut_range in ranges.items() if name not in alike}

    def expand_to_members(counts: Mapping[str, int]) -> ChannelCounts:
        return {**whole, **{name: counts[first] for first, names in members.items() for name in names}}

    losses = {first: zip(*(curves[name].losses for name in names), strict=True) for first, names in members.items()}
    summed = {first: LossCurve(curves[first].counts, tuple(map(sum, losses[first]))) for first in members}
    steps = {first: ranges[first].step for first in members}
    return expand_to_members(allocate_channels(summed, lambda counts: overspent(expand_to_members(counts)), steps))


def _exchange_once(
    simulator: CutSimulator,
    ranges: Mapping[str, CutRange],
    counts: ChannelCounts,
    reach: float,
    overspent: BudgetExcess,
) -> ChannelCounts:
    """Exchange channels by the slopes of the divergence, measured with one group larger or smaller at a time."""
    near = {name: _find_nearby_counts(cut_range, counts[name], reach) for name, cut_range in ranges.items()}
    others = {name: [c for c in pair if c != counts[name]] for name, pair in near.items()}
    base, found = simulator.measure_nearby(counts, others)
    slopes = {}
    for name, (low, high) in near.items():
        # A group at its minimum was not measured below it and cannot give; a whole group cannot take.
        dearer = found.get((name, low), math.inf) - base
        better = base - found.get((name, high), base)
        slopes[name] = (max(0.0, dearer) / max(1, counts[name] - low), max(0.0, better) / max(1, high - counts[name]))
    return exchange_channels(
        counts, slopes, near, overspent, {name: cut_range.step for name, cut_range in ranges.items()}
    )


def _find_nearby_counts(cut_range: CutRange, count: int, reach: float) -> tuple[int, int]:
    """Return the fewest and the most channels within reach: multiples of the step, or the group's size."""
    jump = max(1, round(count * reach / cut_range.step)) * cut_range.step
    return max(cut_range.min_kept, -(-(count - jump) // cut_range.step) * cut_range.step), min(
        cut_range.size, count + jump
    )
