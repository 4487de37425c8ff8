"""Sensitivity: how much the network's outputs change when one group alone is pruned at several ratios."""

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
from neuron_merging.graph.process_state import exclusive_access, seed_rng
from neuron_merging.pipeline import prepare_inputs, score_groups
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.selection.budget import LossCurve
from neuron_merging.selection.criteria import Criterion, check_ratio, compute_min_kept, resolve_ratios
from neuron_merging.selection.cut_simulator import CutSimulator

DEFAULT_RATIOS = (0.25, 0.5, 0.75, 0.875)
SKIP_RATIOS_ABOVE = 0.5
"""Share of the network's work: a group with more than that behind it is measured at every second ratio."""
NEGLIGIBLE_ERROR = 1e-12
"""Share of the readers' variance: a cut that loses less changes nothing, and need not be tried."""


@dataclass(frozen=True)
class CutLoss:
    """What a cut of one group does: the divergence of the network's answers from the original's.

    Where it was not `measured`, it follows the error at the group's readers between ratios that were.
    """

    ratio: float
    kept: int
    divergence: float
    measured: bool = True


@dataclass(frozen=True)
class GroupSensitivity:
    """One group's losses, by ratio, and, if known, the shares of the network's costs that all of its channels have."""

    name: str
    channels: int
    losses: tuple[CutLoss, ...]
    macs: float | None = None
    parameters: float | None = None


@dataclass(frozen=True)
class Sensitivity:
    """What each group is worth to the answers of the whole network. Printed, a table for people.

    Attributes
    ----------
    groups
        In the order of the network, each with one loss for every ratio.
    ratios
        The shares of channels that were removed.
    unit
        What a loss is: "Kullback-Leibler divergence" of class scores, otherwise "squared error over variance".
    inputs
        What the network was run on.
    merged
        Whether the readers of removed channels were fitted anew.
    passes
        What it took, in forward passes of all inputs.

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

    def __str__(self) -> str:
        width = max(len(group.name) for group in self.groups)
        lines = [f"{self.unit} on {self.inputs}, one group cut {'and merged' if self.merged else 'and not merged'}"]
        lines += [" " * width + "".join(f"{ratio:>10.4g}" for ratio in self.ratios)]
        lines += [g.name.ljust(width) + "".join(f"{format_loss(loss):>10}" for loss in g.losses) for g in self.groups]
        return "\n".join(lines)

    def lines(self) -> list[dict[str, object]]:
        """One for each group and ratio, for files."""
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
    """A loss in two digits; with a sign before it where it was not measured.

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
    """What a cut of one group alone does to the answers of the whole network, for every group and a few ratios.

    The network runs from the group's readers onward only. Of a group behind which more than half of the work lies,
    every second ratio is measured, and the others follow the error at its readers.

    Parameters
    ----------
    model
        The network, which is not changed, or an analysis of it.
    example_inputs
        As for `analyse`.
    ratios
        Shares of a group's channels to remove.
    criterion
        Which channels stay, as for `compress`.
    calibration
        Unlabelled batches to run the network on; left out, inputs of our own making.
    scope
        "internal", or "all" for residual streams too.
    ignore
        Patterns of layers to leave out.
    seed
        For made-up inputs and the criterion "random".
    effort
        How much may be spent on made-up inputs, as for `compress`.
    merge
        Fit the readers of removed channels anew; otherwise the channels are just removed.
    exact
        Measure every ratio of every group, which takes half as long again.

    Returns
    -------
    Sensitivity
        Losses by group and ratio; printed, a table.

    Raises
    ------
    NothingToPrune
        No group takes part.
    ModelError
        The model cannot be captured.
    MergingError
        An argument that cannot be meant.

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
    """Shares in order, each once."""
    found = list(ratios)
    for ratio in found:
        check_ratio(ratio)
    if not found or not min(found) > 0:
        raise MergingError(
            "no share of the channels to remove", where="ratios=", fix="For instance ratios=[0.25, 0.5]."
        )
    return tuple(sorted({float(ratio) for ratio in found}))


@torch.no_grad()
def measure_sensitivity(
    analysis: Analysis,
    settings: CompressConfig,
    ratios: Sequence[float] = DEFAULT_RATIOS,
    *,
    merge: bool = True,
    exact: bool = False,
) -> Sensitivity:
    """The same, with settings and ratios that were checked."""
    taking_part = resolve_ratios(analysis.channels, settings.share, settings.ignore, settings.scope)
    groups = [group for group in analysis.channels.groups if group.name in taking_part]
    if not groups:
        raise NothingToPrune("no group of channels takes part", fix="inspect() lists every group and every refusal.")
    with exclusive_access():
        seed_rng(settings.seed)
        settings = settings.fitted_to(analysis.inputs)
        inputs = prepare_inputs(analysis, settings, judge=False, search=True)
        assert inputs.sets.search is not None
        probes, scores = inputs.sets.search.probes, score_groups(analysis, groups, settings, inputs)
        simulator = CutSimulator(analysis, probes.batches, scores, inputs.sets.search.fit, merge=merge)
        kept = {group.name: _count_kept_channels(group, simulator, ratios) for group in groups}
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
    """What the search for a budget has found out of each group, at the usual ratios; not what each group costs."""
    sizes = {name: curve.counts[0] for name, curve in curves.items()}
    groups = []
    for name, curve in curves.items():
        removed = [sizes[name] - count for count in curve.counts]
        kept = {ratio: math.floor(sizes[name] * (1 - ratio) + 1e-9) for ratio in DEFAULT_RATIOS}
        losses = [
            CutLoss(r, count, float(np.interp(sizes[name] - count, removed, curve.losses)), measured=False)
            for r, count in kept.items()
        ]
        groups.append(GroupSensitivity(name, sizes[name], tuple(losses)))
    return Sensitivity(
        tuple(groups), DEFAULT_RATIOS, "divergence of the answers", "the probes of the budget", True, 0.0
    )


def _count_kept_channels(group: Group, simulator: CutSimulator, ratios: Sequence[float]) -> dict[float, int]:
    """How many channels stay, by ratio."""
    least, step = compute_min_kept(group, simulator.scores[group.name], 1.0)
    return {r: max(least, math.floor(group.size * (1 - r) / step + 1e-9) * step) for r in ratios}


def _measure_divergences(
    simulator: CutSimulator, kept: Mapping[str, Mapping[float, int]], every: bool
) -> dict[tuple[str, int], float]:
    """The divergences that are worth a run; what changes nothing at the readers needs none."""
    found: dict[tuple[str, int], float] = {}
    wanted = {}
    for name, counts in kept.items():
        whole = simulator.groups[name].size
        numbers = sorted(set(counts.values()))
        same = [count for count in numbers if count == whole or simulator.is_harmless(name, count, NEGLIGIBLE_ERROR)]
        found |= {(name, count): 0.0 for count in same}
        some = (
            numbers if every or simulator.downstream_share(name) <= SKIP_RATIOS_ABOVE else numbers[::2]
        )  # the largest cut is one of them
        wanted[name] = [count for count in some if count not in same]
    sizes = {name: simulator.groups[name].size for name in kept}
    return found | simulator.measure_variations(sizes, wanted)


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
    """Of multiply-accumulates and parameters, those that would go with all of a group's channels."""
    gone = {name: 0}
    return (
        1 - costs.macs(gone) / max(1, costs.macs({})),
        1 - costs.parameters(gone) / max(1, costs.parameters({})),
    )


def _interpolate_divergence(simulator: CutSimulator, group: Group, count: int, known: Mapping[int, float]) -> float:
    """The readers' error, times what the network makes of such errors at the nearest cuts that were measured."""
    if count in known:
        return known[count]
    gains = {
        c: loss / local
        for c, loss in known.items()
        if (local := simulator.consumer_error(group.name, c)) > NEGLIGIBLE_ERROR
    }
    removed = sorted(group.size - c for c in gains)
    gain = np.interp(group.size - count, removed, [gains[group.size - r] for r in removed]) if gains else 0.0
    return float(gain) * simulator.consumer_error(group.name, count)
