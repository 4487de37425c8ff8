"""Measure sensitivity: how much the network's outputs change when a single group is pruned at several ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Group
from neuron_merging.config import CompressConfig
from neuron_merging.errors import MergingError, NothingToPrune
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.summary import render_html_sentence, render_html_table
from neuron_merging.graph.process_state import exclusive_access, seed_rng
from neuron_merging.pipeline import prepare_inputs, rank_channels
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.selection.budget import LossCurve
from neuron_merging.selection.criteria import Criterion, check_ratio, compute_min_kept, resolve_ratios
from neuron_merging.selection.cut_simulator import CutSimulator

DEFAULT_RATIOS = (0.25, 0.5, 0.75, 0.875)
"""Shares of a group's channels to remove: 1/4, 1/2, 3/4 and 7/8."""
SKIP_RATIOS_ABOVE = 0.5
"""Share of the network's MACs. A group with more than this downstream is expensive to measure: every second ratio is
interpolated."""
NEGLIGIBLE_ERROR = 1e-12
"""Share of the variance at the consumer layers. A cut that loses less is rounding noise and is not run."""


@dataclass(frozen=True)
class CutLoss:
    """The divergence of the network's outputs from the original's after a cut of one group.

    If it was not `measured`, it is interpolated along the error at the group's consumer layers.
    """

    ratio: float
    kept: int
    divergence: float
    measured: bool = True


@dataclass(frozen=True)
class GroupSensitivity:
    """The losses of one group by ratio and, if known, the share of the network's costs that belongs to the group."""

    name: str
    channels: int
    losses: tuple[CutLoss, ...]
    macs: float | None = None
    parameters: float | None = None


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """The sensitivity of the network's outputs to cuts of each group. `str()` gives a table.

    Attributes
    ----------
    groups
        The groups in the order of the network, each with one loss per ratio.
    ratios
        The shares of channels that were removed.
    unit
        The unit of a loss: "Kullback-Leibler divergence" for class scores, else "squared error over variance".
    inputs
        A description of the inputs that the network was run on.
    merged
        Whether the consumer layers were refitted after the cut.
    passes
        The cost of the measurement, in forward passes over all inputs.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [(group.name, [loss.kept for loss in group.losses]) for group in nm.sensitivity(net, torch.zeros(1, 4)).groups]
    [('0', [6, 4, 2, 1])]
    """

    groups: tuple[GroupSensitivity, ...]
    ratios: tuple[float, ...]
    unit: str
    inputs: str
    merged: bool
    passes: float = field(compare=False)

    @property
    def title(self) -> str:
        """What the losses are, and what they were measured on."""
        return f"{self.unit} on {self.inputs}, one group cut {'and merged' if self.merged else 'and not merged'}"

    @property
    def verdict(self) -> str:
        """The groups that lose most and least at the largest ratio."""
        ranked = sorted((g for g in self.groups if g.losses), key=lambda g: g.losses[-1].divergence)
        if len(ranked) < 2:
            return ""
        return f"At {self.ratios[-1]:.4g} removed, {ranked[-1].name} is most sensitive and {ranked[0].name} least."

    def __repr__(self) -> str:
        ratios = ", ".join(f"{ratio:.4g}" for ratio in self.ratios)
        return f"<Sensitivity: {len(self.groups)} groups at {ratios} removed, {self.unit} on {self.inputs}>"

    def _repr_html_(self) -> str:
        """The table and its title, for notebooks."""
        headings = ("group", "channels", *(f"{ratio:.4g} removed" for ratio in self.ratios))
        rows = [(g.name, g.channels, *(format_loss(loss) for loss in g.losses)) for g in self.groups]
        return render_html_sentence(f"{self.title}. {self.verdict}".strip()) + render_html_table(headings, rows)

    def __str__(self) -> str:
        width = max(len(group.name) for group in self.groups)
        lines = [self.title]
        lines += [" " * width + "".join(f"{ratio:>10.4g}" for ratio in self.ratios)]
        lines += [g.name.ljust(width) + "".join(f"{format_loss(loss):>10}" for loss in g.losses) for g in self.groups]
        return "\n".join(lines)

    def lines(self) -> list[dict[str, object]]:
        """Return one record per group and ratio, for CSV files."""
        return [
            {
                "group": group.name,
                "channels": group.channels,
                "ratio": loss.ratio,
                "kept": loss.kept,
                "divergence": loss.divergence,
                "measured": loss.measured,
            }
            for group in self.groups
            for loss in group.losses
        ]


def format_loss(loss: CutLoss) -> str:
    """Format a loss with two digits, with "≈" before it if it was interpolated.

    >>> format_loss(CutLoss(0.5, 4, 0.01234)), format_loss(CutLoss(0.5, 4, 0.01234, measured=False))
    ('0.012', '≈0.012')
    """
    return ("" if loss.measured else "≈") + f"{loss.divergence:.2g}"


def sensitivity(
    model: nn.Module | Analysis,
    example_inputs: Any = None,
    *,
    ratios: Sequence[float] = DEFAULT_RATIOS,
    criterion: str | Criterion = "auto",
    calibration: Iterable[Any] | None = None,
    scope: str = "internal",
    ignore: Sequence[str] = (),
    seed: int = 0,
    effort: str | None = None,
    merge: bool = True,
    exact: bool = False,
) -> Sensitivity:
    """Measure how the network's outputs change when a single group is cut, for every group and several ratios.

    Only the part of the network behind the group's consumer layers is run. For a group with more than half of the MACs
    behind it, every second ratio is measured, and the others are interpolated along the error at its consumer layers.

    Parameters
    ----------
    model
        The network, which is not changed, or an analysis of it.
    example_inputs
        As for `analyse`.
    ratios
        Shares of a group's channels to remove.
    criterion
        The criterion that chooses the kept channels, as for `compress`.
    calibration
        Unlabelled batches to run the network on. Default: synthesised inputs.
    scope
        "internal", or "all" for residual streams too.
    ignore
        Patterns of layers to leave out.
    seed
        The seed of synthesised inputs and of the criterion "random".
    effort
        How much time to spend on synthesised inputs, as for `compress`.
    merge
        Refit the consumer layers after the cut; otherwise the channels are only removed.
    exact
        Measure every ratio of every group, which takes about 1.5 times as long.

    Returns
    -------
    Sensitivity
        Losses by group and ratio; `str()` gives a table.

    Raises
    ------
    NothingToPrune
        No group is prunable with these settings.
    ModelError
        The model cannot be captured.
    MergingError
        An argument is invalid.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = nm.sensitivity(net, torch.zeros(1, 4), ratios=[0.5])
    >>> found.groups[0].losses[0].kept
    4
    """
    settings = CompressConfig(
        criterion=criterion,
        calibration=calibration,
        scope=scope,
        ignore=ignore,
        seed=seed,
        effort=effort,
    )
    settings.check()
    return measure_sensitivity(analyse(model, example_inputs), settings, check_ratios(ratios), merge=merge, exact=exact)


def check_ratios(ratios: Iterable[float]) -> tuple[float, ...]:
    """Return the ratios sorted and without duplicates; raise if one is not between 0 and 1."""
    values = list(ratios)
    for ratio in values:
        check_ratio(ratio)
    if not values or not min(values) > 0:
        raise MergingError("there are no positive ratios", where="ratios=", fix="For instance ratios=[0.25, 0.5].")
    return tuple(sorted({float(ratio) for ratio in values}))


@torch.no_grad()
def measure_sensitivity(
    analysis: Analysis,
    settings: CompressConfig,
    ratios: Sequence[float] = DEFAULT_RATIOS,
    *,
    merge: bool = True,
    exact: bool = False,
) -> Sensitivity:
    """Measure the sensitivity with settings and ratios that were already checked; see `sensitivity`."""
    taking_part = resolve_ratios(analysis.channels, settings.share, settings.ignore, settings.scope)
    groups = [group for group in analysis.channels.groups if group.name in taking_part]
    if not groups:
        raise NothingToPrune(
            "no group of channels is prunable with these settings", fix="inspect() lists every group and every refusal."
        )
    with exclusive_access():
        seed_rng(settings.seed)
        settings = settings.adapt_data_to(analysis.inputs)
        inputs = prepare_inputs(analysis, settings, judge=False, search=True)
        assert inputs.sets.search is not None
        probes, scores = inputs.sets.search.probes, rank_channels(analysis, groups, settings, inputs).scores
        simulator = CutSimulator(analysis, probes.batches, scores, inputs.sets.search.fit, merge=merge)
        kept = {group.name: _count_kept_channels(group, simulator, ratios) for group in groups}
        # Interpolation follows the error of the fit, so without a fit every ratio is measured.
        measured = _measure_divergences(simulator, kept, exact or not merge)
    costs = Costs(analysis)
    return Sensitivity(
        groups=tuple(_build_group_sensitivity(group, simulator, kept[group.name], measured, costs) for group in groups),
        ratios=tuple(ratios),
        unit="Kullback-Leibler divergence" if simulator.is_classifier else "squared error over variance",
        inputs=str(probes),
        merged=merge,
        passes=simulator.passes,
    )


def build_sensitivity_from_curves(curves: Mapping[str, LossCurve]) -> Sensitivity:
    """Build a sensitivity at the default ratios from the loss curves of a budget search; it has no cost shares."""
    sizes = {name: curve.counts[0] for name, curve in curves.items()}
    groups = []
    for name, curve in curves.items():
        # np.interp needs increasing positions, and the counts of kept channels fall.
        removed = [sizes[name] - count for count in curve.counts]
        # 1e-9, as in `_count_kept_channels`.
        kept = {ratio: math.floor(sizes[name] * (1 - ratio) + 1e-9) for ratio in DEFAULT_RATIOS}
        losses = [
            CutLoss(r, count, float(np.interp(sizes[name] - count, removed, curve.losses)), count in curve.measured)
            for r, count in kept.items()
        ]
        groups.append(GroupSensitivity(name, sizes[name], tuple(losses)))
    return Sensitivity(
        tuple(groups), DEFAULT_RATIOS, "divergence of the outputs", "the inputs of the budget search", True, 0.0
    )


def _count_kept_channels(group: Group, simulator: CutSimulator, ratios: Sequence[float]) -> dict[float, int]:
    """Return the number of kept channels for each ratio."""
    least, step = compute_min_kept(group, simulator.scores[group.name], 1.0)
    # 1e-9 keeps products such as 10 * (1 - 0.9) from being rounded down; `step` keeps grouped channels divisible.
    return {r: max(least, math.floor(group.size * (1 - r) / step + 1e-9) * step) for r in ratios}


def _measure_divergences(
    simulator: CutSimulator, kept: Mapping[str, Mapping[float, int]], every: bool
) -> dict[tuple[str, int], float]:
    """Measure the divergences of the cuts; those that change nothing at the consumer layers are 0 without a run."""
    divergences: dict[tuple[str, int], float] = {}
    wanted = {}
    for name, counts in kept.items():
        size = simulator.groups[name].size
        numbers = sorted(set(counts.values()))
        unchanged = [
            count for count in numbers if count == size or simulator.is_harmless(name, count, NEGLIGIBLE_ERROR)
        ]
        divergences |= {(name, count): 0.0 for count in unchanged}
        # numbers[0] is the largest cut, so [::2] always measures it and the others are interpolated, not extrapolated.
        run = numbers if every or simulator.downstream_share(name) <= SKIP_RATIOS_ABOVE else numbers[::2]
        wanted[name] = [count for count in run if count not in unchanged]
    sizes = {name: simulator.groups[name].size for name in kept}
    return divergences | simulator.measure_variations(sizes, wanted)


def _build_group_sensitivity(
    group: Group,
    simulator: CutSimulator,
    kept: Mapping[float, int],
    measured: Mapping[tuple[str, int], float],
    costs: Costs,
) -> GroupSensitivity:
    known = {count: loss for (name, count), loss in measured.items() if name == group.name}
    losses = [
        CutLoss(ratio, count, _interpolate_divergence(simulator, group, count, known), count in known)
        for ratio, count in kept.items()
    ]
    return GroupSensitivity(group.name, group.size, tuple(losses), *_compute_cost_shares(costs, group.name))


def _compute_cost_shares(costs: Costs, name: str) -> tuple[float, float]:
    """Return the shares of MACs and parameters that removing all of a group's channels would save."""
    # No plan may remove all channels, but the costs can be evaluated for it.
    without_group = {name: 0}
    return (
        1 - costs.macs(without_group) / max(1, costs.macs({})),
        1 - costs.parameters(without_group) / max(1, costs.parameters({})),
    )


def _interpolate_divergence(simulator: CutSimulator, group: Group, count: int, known: Mapping[int, float]) -> float:
    """Return the error at the consumer layers times the network's gain, interpolated between measured cuts.

    The gain of a measured cut is the divergence of the outputs divided by the error at the consumer layers.
    """
    if count in known:
        return known[count]
    # Where the local error is rounding, the gain would be an arbitrary quotient.
    gains = {
        c: loss / local
        for c, loss in known.items()
        if (local := simulator.consumer_error(group.name, c)) > NEGLIGIBLE_ERROR
    }
    removed = sorted(group.size - c for c in gains)
    gain = np.interp(group.size - count, removed, [gains[group.size - r] for r in removed]) if gains else 0.0
    return float(gain) * simulator.consumer_error(group.name, count)
