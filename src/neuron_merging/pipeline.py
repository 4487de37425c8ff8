"""pipeline: the one place that knows all stages.

A model is analysed (captured, its channels found, doubtful sizes tried); channels are chosen; a merger folds the
removed ones into the layers that read them; a plan says what is kept where; surgery makes the smaller network;
verification compares it with the original. Each stage is one function of another room, each result a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import torch
from torch import nn

from neuron_merging.budgets import PROBE_BATCHES, probe_count, within
from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.filters import filters_of
from neuron_merging.channels.groups import Channels, Group
from neuron_merging.channels.labels import Scores, Units
from neuron_merging.channels.masks import staying
from neuron_merging.channels.selection import Selection
from neuron_merging.choosing.budget import parse_budget
from neuron_merging.choosing.criteria import Criterion, score
from neuron_merging.choosing.elimination import EXPECTED_ERROR, Order, Source, orders
from neuron_merging.choosing.ratios import Ratio, keep, limits_of, resolve, why_whole
from neuron_merging.cutting import trial
from neuron_merging.cutting.judging import judged
from neuron_merging.cutting.plan import Plan, make_plan
from neuron_merging.cutting.surgery import apply_plan
from neuron_merging.cutting.trial import analyse, kept_units
from neuron_merging.cutting.verify import Verified
from neuron_merging.cutting.verify import verify as verified
from neuron_merging.errors import MergingError, NothingToPrune, VerificationError
from neuron_merging.folder.store import Compressed
from neuron_merging.graph.quiet import alone
from neuron_merging.measuring.accounting import account, gathered
from neuron_merging.measuring.size import Costs
from neuron_merging.measuring.summary import Inspection, Left, group_info, summarise
from neuron_merging.measuring.whatif import WhatIf
from neuron_merging.mergers import Merged, Merger, Moments
from neuron_merging.mergers.calibrated import as_batches
from neuron_merging.settings import Settings
from neuron_merging.statistics import synthetic

__all__ = ["Compressed", "Settings", "analyse", "compress", "inspect"]


def inspect(model: nn.Module | Analysis, example_inputs: Any = None) -> Inspection:
    """Which channels can be removed, what reads them, and what stands in the way of the rest.

    Parameters
    ----------
    model
        The network, or an analysis of it.
    example_inputs
        As for `analyse`.

    Returns
    -------
    Inspection
        Groups with their sizes and readers, and refusals with their reasons; printed, a table for people.

    Raises
    ------
    ModelError
        The model cannot be captured.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(inspect(net, torch.zeros(1, 4)))
    0: 8 channels -> 2
    refused 2: output is what the network returns
    reachable 96.6%, refused 3.4%, unused 0.0% of 58 parameters
      refused 3.4%: output is what the network returns (2)
    """
    analysis = analyse(model, example_inputs)
    costs, channels = Costs(analysis), analysis.channels
    groups = tuple(group_info(costs, group) for group in channels.groups)
    return Inspection(groups, channels.refusals, account(analysis))


def compress(
    model: nn.Module | Analysis,
    example_inputs: Any = None,
    *,
    ratio: Ratio | None = None,
    budget: Mapping[str, float | str] | None = None,
    limits: Mapping[str, float] | None = None,
    criterion: str | Criterion = "l2",
    merger: str | Merger | None = None,
    calibration: Iterable[Any] | None = None,
    scope: str = "internal",
    ignore: Iterable[str] = (),
    round_to: int = 1,
    seed: int = 0,
    verify: bool = True,
) -> Compressed:
    """Remove channels, as many as a budget or a ratio asks for, and merge them into the ones that stay.

    Parameters
    ----------
    model
        The network, which is not changed, or an analysis of it.
    example_inputs
        As for `analyse`.
    ratio
        The share of channels to remove from every group, or a mapping of patterns of layer names to shares; later
        patterns win. Left out, and without a budget, it is half.
    budget
        What the result may cost, in place of a ratio: "macs", "params", "weights" (bytes) and "latency" (of the example
        on this machine), each a share of the original's (0.5, "50%") or a figure ("1.2M", "3MB", "5ms"). How
        much each group loses is found by what that does to the network's answers.
    limits
        With a budget: patterns of layers, and the share that they may lose at most.
    criterion
        Which channels stay: a name (l1, l2, l2-gm, random), "expected-error" for those that the rest can replace
        least, or a function of the filters, one row per channel, to one score per row.
    merger
        A name or an object; left out, `calibrated` where there are batches and `moments` otherwise.
    calibration
        Unlabelled batches, in whatever form a data loader yields them, to measure statistics on.
    scope
        "internal", or "all" to cut residual streams too.
    ignore
        Patterns of layers to leave whole.
    round_to
        Keep a multiple of this many channels.
    seed
        For the criterion "random".
    verify
        Compare the result with the original, the removed channels zeroed.

    Returns
    -------
    Compressed
        The smaller network, of the same class, with the plan that rebuilds it and a summary.

    Raises
    ------
    NothingToPrune
        No group takes part; each has a reason.
    VerificationError
        The smaller network does not compute what it should.
    ModelError
        The model cannot be captured.
    MergingError
        An argument that cannot be meant.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> compress(net, torch.zeros(1, 4), ratio=0.5).model[0]
    Linear(in_features=4, out_features=4, bias=True)
    """
    allowed = None if budget is None else parse_budget(budget)
    settings = Settings(
        ratio, criterion, merger, scope, _patterns(ignore), round_to, seed, calibration, allowed, dict(limits or {})
    )
    settings.check()
    return compress_analysed(analyse(model, example_inputs), settings, verify=verify)


def _patterns(ignore: Any) -> tuple[str, ...]:
    listed = [ignore] if isinstance(ignore, str) or not isinstance(ignore, Iterable) else list(ignore)
    for pattern in listed:
        if not isinstance(pattern, str):
            what = f"{type(pattern).__name__} is not a pattern of layer names"
            raise MergingError(what, where="ignore=", fix='For instance ignore=["layer1.*"].')
    return tuple(listed)


def compress_analysed(analysis: Analysis, settings: Settings, *, verify: bool = True) -> Compressed:
    """Everything after the analysis, with settings that were checked.

    Where the smaller network does not do what it should because of a line of the model's own code, the layers that
    the line counts on stay whole, and the rest is tried again.
    """
    with alone():
        while True:
            torch.manual_seed(settings.seed)
            chosen = choose(analysis, settings)
            made = _cut(analysis, chosen.kept, settings)
            try:
                return _finished(analysis, made, verify, _left(analysis, made.kept, settings), chosen.notes)
            except VerificationError:
                fewer = trial.narrowed(analysis, made.plan, partial(_fault, analysis))
                if fewer is None:
                    raise
                analysis = fewer


def _fault(analysis: Analysis, kept: Mapping[str, Units]) -> VerificationError | None:
    """What is wrong with the network that keeps this, plainly pruned."""
    try:
        _finished(analysis, _cut(analysis, kept, Settings(merger="none")), verify=True)
    except VerificationError as error:
        return None if error.where == "example_inputs" else error  # such inputs say nothing of any group
    return None


def recut(plan: Plan, analysis: Analysis, settings: Settings) -> Compressed:
    """Remove a plan's channels from this network, and merge them as its own weights say."""
    with alone():
        torch.manual_seed(settings.seed)
        return _finished(analysis, _cut(analysis, kept_units(plan, analysis.channels), settings), verify=True)


def as_compressed(plan: Plan, analysis: Analysis, small: nn.Module) -> Compressed:
    """A network that was read back, with its summary; how it was merged is not known."""
    return Compressed(small, plan, summarise(analysis, small, plan, None))


def verify_plan(plan: Plan, analysis: Analysis, small: nn.Module) -> Verified:
    """Whether `small` is the full network with the plan's removed units zeroed; how it was merged is not known."""
    stays = staying(analysis.channels, kept_units(plan, analysis.channels))
    return verified(analysis, plan, stays, small)


@dataclass(frozen=True)
class _Made:
    """A cut that was carried out."""

    kept: Mapping[str, Units]
    merged: Merged
    plan: Plan
    small: nn.Module


@torch.no_grad()
def _cut(analysis: Analysis, kept: Mapping[str, Units], settings: Settings) -> _Made:
    """Merge, plan and cut."""
    method, selection = settings.method(), Selection(analysis, kept, settings.calibration)
    merged = judged(selection, method.merge(selection), method)
    plan = make_plan(analysis.model, analysis.graph, analysis.channels, kept, merged.merges, analysis.followers)
    plan = msgspec.structs.replace(plan, baked=tuple(analysis.baked))
    return _Made(kept, merged, plan, apply_plan(analysis.model, plan, merged))


def _left(analysis: Analysis, kept: Mapping[str, Units], settings: Settings) -> list[Left]:
    """The groups that were to lose channels and do not; a budget may well leave some whole."""
    if settings.budget is not None:
        return []
    ratios = resolve(analysis.channels, settings.share, settings.ignore, settings.scope)
    whole = [group for group in analysis.channels.groups if group.name in ratios and group.name not in kept]
    return [Left(g.name, g.size, why_whole(g, ratios[g.name], settings.round_to)) for g in whole]


def _finished(
    analysis: Analysis, made: _Made, verify: bool, left: Iterable[Left] = (), notes: Iterable[str] = ()
) -> Compressed:
    """Verify and summarise."""
    stays = staying(analysis.channels, made.kept)
    found = verified(analysis, made.plan, stays, made.small, made.merged) if verify else None
    summary = summarise(analysis, made.small, made.plan, found, left, notes)
    return Compressed(made.small, made.plan, summary, made.merged)


@dataclass(frozen=True)
class Chosen:
    """The units that every participating group keeps, by the group's name, and what there is to say of the choice."""

    kept: Mapping[str, Units]
    notes: tuple[str, ...] = ()


@torch.no_grad()
def choose(analysis: Analysis, settings: Settings) -> Chosen:
    """Which channels stay: the best of each group, as many as the ratio or the budget lets it have."""
    channels = analysis.channels
    ratios = resolve(channels, settings.share, settings.ignore, settings.scope)
    ranked = _ranked(analysis, settings, list(ratios)) if settings.criterion == EXPECTED_ERROR else {}
    groups = [group for group in channels.groups if group.name in ratios]
    scores = {g.name: ranked[g.name].scores if g.name in ranked else _scores(analysis, g, settings) for g in groups}
    if settings.budget is not None and groups:
        return _within_budget(analysis, settings, scores)
    kept = {g.name: keep(g, scores[g.name], ratios[g.name], settings.round_to) for g in groups}
    kept = {g.name: kept[g.name] for g in groups if len(kept[g.name]) < g.size}
    if not kept:
        raise NothingToPrune(_nothing(channels, settings.share), fix=_remedy(channels, settings.scope))
    return Chosen(kept)


def _within_budget(analysis: Analysis, settings: Settings, scores: Mapping[str, Scores]) -> Chosen:
    """The cut that fits and whose answers are nearest to the original's, on batches or on inputs of our own making."""
    assert settings.budget is not None
    if settings.calibration is not None:
        given = as_batches(settings.calibration, Selection(analysis, {}))
        probes, source = list(islice(given, PROBE_BATCHES)), "calibration batches"
    else:
        count = probe_count(analysis)
        tokens = synthetic.tokens_of(analysis.graph)
        probes, source = list(synthetic.probes(analysis.inputs, count, settings.seed, tokens)), "synthetic inputs"
    whatif = WhatIf(analysis, probes, scores)
    found = within(whatif, settings.budget, limits_of(analysis.channels, settings.limits), settings.round_to)
    return Chosen(whatif.kept(found.counts), (found.said(source),))


def _ranked(analysis: Analysis, settings: Settings, names: list[str]) -> dict[str, Order]:
    """The order in which channels go by the error that is expected without them."""
    method = settings.method()
    source = method if isinstance(method, Source) else Moments()
    return orders(Selection(analysis, {}, settings.calibration), names, source)


def _scores(analysis: Analysis, group: Group, settings: Settings) -> Scores:
    """By the filters alone; for groups of whose readers nothing is known, by their norms."""
    by = "l2" if settings.criterion == EXPECTED_ERROR else settings.criterion
    scores: Scores = score(by, filters_of(analysis.graph, group)).double().cpu().numpy()
    return scores


def _nothing(channels: Channels, ratio: Ratio) -> str:
    reasons = "; ".join(str(refusal) for refusal in gathered(channels.refusals)[:6])
    if not channels.groups:
        return "nothing can be removed: " + (reasons or "the network has no layer with channels of its own")
    return f"ratio {ratio} removes nothing from the groups that take part" + (f": {reasons}" if reasons else "")


def _remedy(channels: Channels, scope: str) -> str:
    if scope == "internal" and any(group.residual for group in channels.groups):
        return 'The remaining groups are residual streams: scope="all" includes them.'
    return "inspect() lists every group and every refusal."
