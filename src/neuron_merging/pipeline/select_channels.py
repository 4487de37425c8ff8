"""Select the channels that stay: by a ratio, within a budget, or for the smallest network that is good enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import nn

from neuron_merging.calibration.layer_stats import find_consumer_weights
from neuron_merging.calibration.output_divergence import find_token_logits
from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.groups import Axis, Channels, Group, Scores, Units
from neuron_merging.channels.weight_views import filters_of
from neuron_merging.config import CompressConfig
from neuron_merging.errors import MergingError, NothingToPrune, describe_error, raise_if_out_of_memory
from neuron_merging.evaluation.fidelity import (
    compute_metric,
    make_synthetic_eval_set,
)
from neuron_merging.evaluation.parameter_coverage import merge_similar_refusals
from neuron_merging.inputs.input_sets import (
    MAX_SEARCH_BATCHES,
    InputSet,
    count_samples,
    is_search_expensive,
    split_single_batch,
)
from neuron_merging.inputs.user_batches import extract_inputs
from neuron_merging.merging import Moments
from neuron_merging.merging.fit import ROBUST_RIDGE
from neuron_merging.merging.protocol import StatisticsSource, uses_data
from neuron_merging.models.pretrained_config import (
    DescribableKinds,
)
from neuron_merging.pipeline.build_network import merge_and_prune
from neuron_merging.pipeline.prepared_inputs import PreparedInputs
from neuron_merging.selection.budget import LossCurve
from neuron_merging.selection.criteria import (
    Criterion,
    Ratio,
    compute_min_kept,
    keep_units_by_count,
    keep_units_by_ratio,
    resolve_limits,
    resolve_ratios,
    score_channels,
)
from neuron_merging.selection.cut_simulator import CutSimulator
from neuron_merging.selection.elimination import (
    AUTO_CRITERION,
    EXPECTED_ERROR,
    EliminationOrder,
    compute_orders_by_group,
    measure_sensitivities,
    select_everything,
)
from neuron_merging.selection.search import (
    SEARCH_TEMPERATURE,
    Allocation,
    UniformKind,
    find_best_within_budget,
    find_smallest_good_enough,
)

SEARCH_RIDGE = 0.01
"""Ridge of the fits that channels are selected by, and of trial cuts."""


@dataclass(frozen=True)
class SelectedChannels:
    """The kept units of every participating group, by name, with notes on the search and the loss curves."""

    kept: Mapping[str, Units]
    notes: tuple[str, ...] = ()
    curves: Mapping[str, LossCurve] = field(default_factory=dict)


@torch.no_grad()
def select_kept_channels(
    analysis: Analysis, settings: CompressConfig, inputs: PreparedInputs, kinds: DescribableKinds | None = None
) -> SelectedChannels:
    """Select the kept channels of each group: the best ones, as many as the ratio or the budget allows."""
    channels = analysis.channels
    ratios = resolve_ratios(channels, settings.share, settings.ignore, settings.scope)
    groups = [group for group in channels.groups if group.name in ratios]
    if kinds is not None:
        alike = {name for kind in kinds.kinds for name in kind.names}
        groups = [group for group in groups if group.name in alike]
    notes = () if kinds is None else tuple(f"uniform: {reason}" for reason in kinds.reasons)
    # Without any group, the ratio's error message tells why nothing can be pruned.
    if not groups or (settings.budget is None and settings.max_loss is None):
        return _select_by_ratio(analysis, settings, inputs, groups, ratios, kinds, notes)
    search = _get_prepared_search(analysis, settings, groups, inputs)
    ranking, simulator = search.ranking, search.simulator
    limits = resolve_limits(channels, settings.limits)
    alike_kinds = None if kinds is None else kinds.kinds
    effort = settings.input_effort
    if settings.budget is not None:
        within_budget = partial(
            find_best_within_budget,
            simulator,
            settings.budget,
            round_to=settings.round_to,
            kinds=alike_kinds,
            orders=ranking.estimates,
            effort=effort,
        )
        found = _spare_unfitted_groups(within_budget, limits, search.unfitted)
    else:
        is_good = _NetworkTrials(analysis, settings, inputs, simulator)
        smallest = find_smallest_good_enough(
            simulator, limits, settings.round_to, is_good, alike_kinds, ranking.estimates, effort
        )
        found, notes = is_good.check_found(smallest), (f"the smallest of {len(is_good.scores)} that were tried", *notes)
    notes = (found.describe(str(search.probes)), *notes)
    if all(found.counts[group.name] == group.size for group in groups if group.name in found.counts):
        notes = ("nothing was removed: the original is within the budget", *notes)
    return SelectedChannels(simulator.select_kept_units(found.counts), notes, found.curves)


def _spare_unfitted_groups(
    within_budget: Callable[[Mapping[str, float]], Allocation], limits: Mapping[str, float], unfitted: frozenset[str]
) -> Allocation:
    """Search without the groups whose consumers cannot be fitted; with them only if the budget cannot be met."""
    if unfitted:
        try:
            return within_budget({**limits, **dict.fromkeys(unfitted, 0.0)})
        except MergingError:  # without them the budget cannot be met
            pass
    return within_budget(limits)


@dataclass(frozen=True)
class _PreparedSearch:
    """Everything that a search for a cut measures before it looks at the budget."""

    ranking: ChannelRanking
    unfitted: frozenset[str]
    """Groups whose consumers have no statistics, while others have: what they lose is not compensated."""
    simulator: CutSimulator
    probes: InputSet


def _get_prepared_search(
    analysis: Analysis, settings: CompressConfig, groups: Sequence[Group], inputs: PreparedInputs
) -> _PreparedSearch:
    """Return what a search needs; from the last search of this network, if that had the same inputs and settings."""
    if inputs.calibration is not None or uses_data(settings.method()):
        return _prepare_search(analysis, settings, groups, inputs)
    # Inputs and groups are compared as objects: both are made once for a network and kept with its analysis.
    objects = [inputs.sets.fit, *groups]
    method, effort = settings.method(), settings.input_effort
    options = method, effort, settings.criterion, settings.allocation, settings.uniform, settings.int8, settings.seed
    known = analysis.search_cache.get("last")
    if known is not None:
        same = len(known[0]) == len(objects) and all(a is b for a, b in zip(known[0], objects, strict=True))
        if same and known[1] == options:
            return cast(_PreparedSearch, known[2])
    found = _prepare_search(analysis, settings, groups, inputs)
    # With costs from gradients no cut is tried, and the simulator holds nothing.
    if found.ranking.estimates is not None or found.simulator.is_small:
        analysis.search_cache["last"] = objects, options, found
    return found


def _prepare_search(
    analysis: Analysis, settings: CompressConfig, groups: Sequence[Group], inputs: PreparedInputs
) -> _PreparedSearch:
    sensitivities = _measure_sensitivities(analysis, settings, groups, inputs)
    ranking = rank_channels(
        analysis, groups, *_rank_by_larger_input_set(analysis, settings, inputs), sensitivities=sensitivities
    )
    unfitted = _find_unfitted_groups(groups, ranking, settings, inputs)
    return _PreparedSearch(ranking, unfitted, *_build_cut_simulator(analysis, settings, ranking, inputs, unfitted))


def _find_unfitted_groups(
    groups: Sequence[Group], ranking: ChannelRanking, settings: CompressConfig, inputs: PreparedInputs
) -> frozenset[str]:
    """Return the groups whose consumers have no statistics; none if inputs reach all layers, or no layer at all."""
    if inputs.calibration is not None or inputs.sets.fit.batches or _resolve_criterion(settings) != EXPECTED_ERROR:
        return frozenset()
    return frozenset(group.name for group in groups if ranking.orders and group.name not in ranking.orders)


def _select_by_ratio(
    analysis: Analysis,
    settings: CompressConfig,
    inputs: PreparedInputs,
    groups: Sequence[Group],
    ratios: Mapping[str, float],
    kinds: DescribableKinds | None,
    notes: tuple[str, ...],
) -> SelectedChannels:
    """Select the best channels of each group, as many as its ratio leaves."""
    scores = rank_channels(analysis, groups, settings, inputs, ratios).scores
    kept = {g.name: keep_units_by_ratio(g, scores[g.name], ratios[g.name], settings.round_to) for g in groups}
    if kinds is not None:
        kept = _keep_equal_counts(groups, kept, scores, kinds.kinds, settings.round_to)
    # A group of which nothing goes takes no part in merging and planning.
    kept = {g.name: kept[g.name] for g in groups if len(kept[g.name]) < g.size}
    if not kept:
        channels = analysis.channels
        searched = settings.budget is not None or settings.max_loss is not None
        what = explain_nothing_to_prune(channels, None if searched else settings.share)
        raise NothingToPrune(what, fix=suggest_fix(channels, settings, ratios))
    return SelectedChannels(kept, notes)


class _NetworkTrials:
    """Builds the network of a cut and tells whether its score is within `max_loss` of the original's."""

    def __init__(
        self, analysis: Analysis, settings: CompressConfig, inputs: PreparedInputs, simulator: CutSimulator
    ) -> None:
        self._analysis, self._settings, self._inputs, self._simulator = analysis, settings, inputs, simulator
        self._score = _make_score_function(analysis, settings, inputs)
        self._allowed, self._original = settings.max_loss or 0.0, self._score(analysis.model)
        self.scores: list[float] = []

    def __call__(self, counts: Mapping[str, int]) -> bool:
        kept = self._simulator.select_kept_units(counts)
        self.scores.append(self._score(merge_and_prune(self._analysis, kept, self._settings, self._inputs).small))
        return self.scores[-1] >= self._original - self._allowed

    def check_found(self, found: Allocation | None) -> Allocation:
        """Return the cut that was found, or raise an error that names the best score."""
        if found is not None:
            return found
        what = f"no cut that was tried keeps the score within {self._allowed:g} of the original's {self._original:.4g}"
        best = max(self.scores, default=self._original)
        fix = "Allow a larger loss, give some data (calibration=), or let more layers take part."
        raise MergingError(f"{what}: the best has {best:.4g}", where="max_loss=", fix=fix)


def _keep_equal_counts(
    groups: Sequence[Group],
    kept: Mapping[str, Units],
    scores: Mapping[str, Scores],
    kinds: Sequence[UniformKind],
    round_to: int,
) -> dict[str, Units]:
    """Let all groups of a kind keep the largest number of units among them, rounded up to a multiple of its step."""
    known = {group.name: group for group in groups}
    counts: dict[str, int] = {}
    for kind in kinds:
        size = known[kind.names[0]].size
        steps = (compute_min_kept(known[name], scores[name], 1.0, round_to)[1] for name in kind.names)
        # One count has to suit every group of the kind.
        step = math.lcm(kind.step, *steps)
        count = min(size, -(-max(len(kept[name]) for name in kind.names) // step) * step)
        counts |= dict.fromkeys(kind.names, count)
    return {name: keep_units_by_count(known[name], scores[name], count) for name, count in counts.items()}


def _measure_sensitivities(
    analysis: Analysis, settings: CompressConfig, groups: Sequence[Group], inputs: PreparedInputs
) -> dict[Axis, float] | None:
    """Measure by one backward pass how the outputs react to errors of layers; None if cuts are tried instead."""
    uses_gradients = settings.allocation == "gradient" or (
        settings.allocation == "auto" and is_search_expensive(analysis, settings.input_effort)
    )
    if not uses_gradients or _resolve_criterion(settings) != EXPECTED_ERROR:
        return None
    assert inputs.sets.search is not None
    weights = find_consumer_weights(select_everything(Selection(analysis, {}), groups))
    temperature = _choose_search_temperature(analysis)
    try:
        return measure_sensitivities(analysis, weights, inputs.sets.search.probes.batches, temperature, settings.seed)
    except RuntimeError as error:  # the network's code writes in place into a value that a gradient needs
        raise_if_out_of_memory(error)
        if settings.allocation != "gradient":
            return None
        what = f"the network cannot be differentiated: {describe_error(error)}"
        raise MergingError(what, where="allocation=", fix="Leave allocation= out: cuts are tried instead.") from error


def _choose_search_temperature(analysis: Analysis) -> float:
    """Return the temperature of divergences: 1 for a language model, whose scores at many tokens are compared."""
    return SEARCH_TEMPERATURE if find_token_logits(analysis.graph) is None else 1.0


def _build_cut_simulator(
    analysis: Analysis,
    settings: CompressConfig,
    ranking: ChannelRanking,
    inputs: PreparedInputs,
    unfitted: frozenset[str] = frozenset(),
) -> tuple[CutSimulator, InputSet]:
    """Return a simulator for the search, and the probes that it runs on."""
    search = inputs.sets.search
    assert search is not None, "a search was asked for when the inputs were made"
    simulator = CutSimulator(
        analysis,
        split_single_batch(search.probes.batches, analysis),
        ranking.scores,
        search.fit,
        ridge=SEARCH_RIDGE,
        biases=not settings.uniform,
        orders={} if ranking.by_gradients else ranking.orders,
        temperature=_choose_search_temperature(analysis),
        int8=settings.int8,
        unfitted=unfitted,
    )
    return simulator, search.probes


def _rank_by_larger_input_set(
    analysis: Analysis, settings: CompressConfig, inputs: PreparedInputs
) -> tuple[CompressConfig, PreparedInputs]:
    """Return settings and inputs for scoring: without the calibration data, if there are more synthesised inputs.

    A budget may remove nearly all channels of a layer, and few samples do not tell which should go last.
    """
    if inputs.calibration is None or find_token_logits(analysis.graph) is not None:
        return settings, inputs
    given = extract_inputs(inputs.calibration, analysis, MAX_SEARCH_BATCHES)
    if count_samples(given) >= count_samples(inputs.sets.fit.batches):
        return settings, inputs
    merger = None if uses_data(settings.method()) else settings.merger
    return replace(settings, calibration=None, merger=merger), replace(inputs, calibration=None)


def _make_score_function(
    analysis: Analysis, settings: CompressConfig, inputs: PreparedInputs
) -> Callable[[nn.Module], float]:
    """Return the score of a network: the user's metric, else the accuracy on labelled data, else the fidelity."""
    if settings.metric is not None:
        metric = settings.metric
        return lambda model: compute_metric(metric, analysis.move_to_user(model))
    # There is none if no verdict is asked for; the search needs a score all the same.
    eval_set = inputs.eval_set or make_synthetic_eval_set(
        analysis, inputs.sets.heldout, settings.seed, inputs.sets.original
    )
    return eval_set.accuracy if eval_set.labelled else partial(eval_set.fidelity, analysis.model)


@dataclass(frozen=True)
class ChannelRanking:
    """Scores of the channels of each group, and the elimination orders that they are the ranks of, where known."""

    scores: Mapping[str, Scores]
    orders: Mapping[str, EliminationOrder]
    by_gradients: bool = False
    """Whether the errors of the orders are estimated divergences of the network's outputs."""

    @property
    def estimates(self) -> Mapping[str, EliminationOrder] | None:
        """The orders, if their errors are divergences."""
        return self.orders if self.by_gradients and self.orders else None


@torch.no_grad()
def rank_channels(
    analysis: Analysis,
    groups: Sequence[Group],
    settings: CompressConfig,
    inputs: PreparedInputs,
    shares: Mapping[str, float] | None = None,
    sensitivities: Mapping[Axis, float] | None = None,
) -> ChannelRanking:
    """Rank the channels of these groups; `shares` holds the share of each group that will be removed.

    With `sensitivities`, errors of consumer layers are turned into estimated divergences of the outputs.
    """
    uncut = Selection(analysis, {}, inputs.calibration, input_sets=inputs.sets)
    criterion = _resolve_criterion(settings)
    ranked: dict[str, EliminationOrder] = {}
    if criterion == EXPECTED_ERROR:
        method = settings.method()
        source = method if isinstance(method, StatisticsSource) else Moments()
        # A search may cut a group down to its last channel, so the whole order is needed.
        wanted = {group.name: 1.0 if shares is None else shares[group.name] for group in groups}
        ridge = SEARCH_RIDGE if sensitivities is None else ROBUST_RIDGE
        ranked = compute_orders_by_group(uncut, wanted, source, ridge, sensitivities)
    scores = {
        g.name: ranked[g.name].scores if g.name in ranked else _score_by_filters(analysis, g, criterion) for g in groups
    }
    return ChannelRanking(scores, ranked, sensitivities is not None)


def _resolve_criterion(settings: CompressConfig) -> str | Criterion:
    """Return the requested criterion; for "auto", the expected error if the method has statistics, else l2."""
    if settings.criterion != AUTO_CRITERION:
        return settings.criterion
    return EXPECTED_ERROR if isinstance(settings.method(), StatisticsSource) else "l2"


def _score_by_filters(analysis: Analysis, group: Group, criterion: str | Criterion) -> Scores:
    """Score by the filters alone. The expected error falls back to l2 for groups whose consumers have no statistics."""
    scores: Scores = (
        score_channels("l2" if criterion == EXPECTED_ERROR else criterion, filters_of(analysis.graph, group))
        .double()
        .cpu()
        .numpy()
    )
    return scores


def explain_nothing_to_prune(channels: Channels, ratio: Ratio | None) -> str:
    reasons = "; ".join(str(refusal) for refusal in merge_similar_refusals(channels.refusals)[:6])
    if not channels.groups:
        return "nothing can be removed: " + (reasons or "the network has no layer with channels of its own")
    cut = "no group takes part" if ratio is None else f"ratio {ratio} removes nothing from the groups that take part"
    return cut + (f": {reasons}" if reasons else "")


def suggest_fix(channels: Channels, settings: CompressConfig, ratios: Mapping[str, float]) -> str:
    """Return what to change if nothing is removed. `ratios` are those of the groups that take part."""
    if any(ratios.values()) and settings.round_to > 1:
        return (
            f"No smaller multiple of round_to={settings.round_to} is left: give a smaller round_to or a larger ratio."
        )
    if settings.share == 0:
        return "Give a ratio above 0."
    if settings.scope == "internal" and any(group.residual for group in channels.groups):
        return 'The remaining groups are residual streams: scope="all" (--scope all) includes them.'
    if channels.groups and not ratios and settings.ignore:
        return "Leave some layers out of ignore=."
    return "inspect() lists every group and every refusal."
