"""The stages of `compress`, in order.

`prepare_inputs` makes everything that the network will be run on. `select_kept_channels` decides what stays,
`_merge_and_prune` merges the rest, makes the plan and the smaller network, `_verify_and_summarise` compares it with the
original, `_attach_verdict` judges it. Each stage is one function of another package; each result is a value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from neuron_merging.calibration.consumer_weights import find_consumer_weights
from neuron_merging.calibration.output_divergence import find_token_logits
from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.groups import Axis, Channels, Group, Scores, Units
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.channels.weight_views import filters_of
from neuron_merging.checkpoint.model_folder import Compressed
from neuron_merging.config import CompressConfig
from neuron_merging.data.eval_data import (
    FITTED_DESCRIPTION,
    make_calibration_eval_set,
    make_user_eval_set,
    split_heldout_batches,
)
from neuron_merging.errors import MergingError, NothingToPrune, VerificationError
from neuron_merging.evaluation.eval_set import (
    EvalSet,
    Metric,
    compute_metric,
    make_example_eval_set,
    make_synthetic_eval_set,
)
from neuron_merging.evaluation.figures import collect_figures
from neuron_merging.evaluation.parameter_coverage import merge_similar_refusals
from neuron_merging.evaluation.summary import SkippedGroup, summarise
from neuron_merging.evaluation.verdict import Verdict, check_required_fidelity, make_text_score
from neuron_merging.graph.graph_module import GraphNetwork
from neuron_merging.graph.process_state import exclusive_access, release_free_memory, seed_rng
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.inputs.input_scale import describe_input_scales
from neuron_merging.inputs.input_sets import (
    MAX_SEARCH_BATCHES,
    NOT_REQUESTED,
    InputRequest,
    InputSet,
    InputSets,
    count_samples,
    estimate_seconds,
    is_search_expensive,
    join_few_samples,
    make_input_sets,
    take_first_samples,
)
from neuron_merging.inputs.scale_from_norms import find_input_scales
from neuron_merging.inputs.synthetic import clip_to_deviations
from neuron_merging.inputs.text import find_text_input
from neuron_merging.inputs.user_batches import extract_inputs
from neuron_merging.merging import MergeResult, Moments
from neuron_merging.merging.fit import ROBUST_RIDGE
from neuron_merging.merging.protocol import FitsToData, ReasonCode, StatisticsSource, SynthesizesInputs, uses_data
from neuron_merging.models.pretrained_config import (
    DescribableKinds,
    explain_missing_config,
    find_describable_kinds,
    find_matching_config,
    is_transformers_model,
)
from neuron_merging.onnx.quantize import DEFAULT_INT8_LOSS, MAX_CALIBRATION_SAMPLES, OrtNetwork
from neuron_merging.progress import announce, log
from neuron_merging.pruning import trial_prune
from neuron_merging.pruning.plan import Plan, make_plan
from neuron_merging.pruning.reject_harmful import reject_harmful_merges
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.pruning.trial_prune import resolve_kept_units
from neuron_merging.pruning.verify import VerificationResult, verify_small_network
from neuron_merging.selection.budget import LossCurve
from neuron_merging.selection.criteria import (
    Criterion,
    Ratio,
    compute_min_kept,
    explain_unpruned,
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
    select_everything,
)
from neuron_merging.selection.gradient_costs import measure_sensitivities
from neuron_merging.selection.judge import judge_network
from neuron_merging.selection.search import (
    EXCHANGE_ROUNDS,
    SEARCH_TEMPERATURE,
    UniformKind,
    find_best_within_budget,
    find_smallest_good_enough,
    find_uniform_kinds,
)

NO_CONFIG_FIX = "Leave uniform= out (--uniform): nm.load reads the folder without a configuration."

SEARCH_RIDGE = 0.01
"""Ridge of the fits that channels are selected by, and of trial cuts."""


def compress_analysis(
    analysis: Analysis,
    settings: CompressConfig,
    *,
    verify: bool = True,
    judge: bool = True,
    compare_pruned: bool = False,
) -> Compressed:
    """Run all stages after the analysis, with checked settings.

    Verification may fail because a line of the model's code depends on the size of some layers. These layers are then
    left out, and the rest is tried again. `judge` adds a verdict; `compare_pruned` adds the same cut without merging to
    its comparison.
    """
    if not analysis.channels.groups:  # before inputs are synthesised, which may take minutes
        raise NothingToPrune(
            _explain_nothing_to_prune(analysis.channels, settings.share),
            fix=_suggest_fix(analysis.channels, settings.scope),
        )
    with exclusive_access():
        settings = settings.fitted_to(analysis.inputs)
        kinds = _find_uniform_kinds(analysis, settings)
        _announce_duration(analysis, settings)
        inputs = prepare_inputs(analysis, settings, judge)
        while True:
            seed_rng(settings.seed)  # in the loop: a second attempt must not depend on the first
            chosen = select_kept_channels(analysis, settings, inputs, kinds)
            cut = _merge_and_prune(analysis, chosen.kept, settings, inputs)
            _check_config_exists(cut, settings)
            try:
                skipped = _list_untouched_groups(analysis, cut.kept, settings)
                notes = (
                    *chosen.notes,
                    *_describe_inputs(analysis, settings),
                    *_explain_missing_text(analysis, inputs),
                )
                found = _verify_and_summarise(analysis, cut, verify, skipped, notes)
                found = replace(found, curves=chosen.curves)
                return _attach_verdict(analysis, cut, found, settings, inputs, compare_pruned) if judge else found
            except VerificationError:
                fewer = trial_prune.shrink_after_failure(
                    analysis, cut.plan, partial(_find_verification_error, analysis)
                )
                if fewer is None:
                    raise
                analysis, kinds = fewer, _find_uniform_kinds(fewer, settings)


def _find_uniform_kinds(analysis: Analysis, settings: CompressConfig) -> DescribableKinds | None:
    """With `uniform`: find the groups that keep equal numbers of channels, and for a network of transformers that its
    config can describe. Raise an error if there are none.
    """
    if not settings.uniform:
        return None
    ratios = resolve_ratios(analysis.channels, settings.share, settings.ignore, settings.scope)
    groups = [group for group in analysis.channels.groups if group.name in ratios]
    if not is_transformers_model(analysis.model):
        return DescribableKinds(find_uniform_kinds(groups))
    found = find_describable_kinds(analysis, groups, settings.round_to)
    if groups and not found.kinds:
        what = f"no smaller network has a configuration: {'; '.join(found.reasons)}"
        raise MergingError(what, where="uniform=", fix=NO_CONFIG_FIX)
    return found


def _check_config_exists(cut: _PrunedNetwork, settings: CompressConfig) -> None:
    """Raise an error if `uniform` was asked for and no config of transformers describes the result."""
    if not settings.uniform or not is_transformers_model(cut.small):
        return
    if find_matching_config(cut.small, cut.plan) is None:
        reasons = "; ".join(explain_missing_config(cut.small, cut.plan))
        raise MergingError(f"the result has no configuration: {reasons}", where="uniform=", fix=NO_CONFIG_FIX)


def _attach_verdict(
    analysis: Analysis,
    cut: _PrunedNetwork,
    found: Compressed,
    settings: CompressConfig,
    inputs: PreparedInputs,
    compare_pruned: bool,
    given_plan: bool = False,
) -> Compressed:
    """Add the verdict and the figures; raise an error if the fidelity is below `require`."""
    assert inputs.eval_set is not None
    found = replace(found, calibration_inputs=_take_calibration_inputs(analysis, inputs))
    if settings.int8:
        found = replace(found, int8=found.quantize(settings.int8_loss or DEFAULT_INT8_LOSS))
    request = settings.describe_request()
    score = None if settings.metric is None else _score_networks(settings.metric, analysis, cut.small)
    judged = judge_network(
        analysis,
        cut.small,
        cut.plan,
        inputs.eval_set,
        score=score,
        compare_pruned=compare_pruned,
        request=replace(request, target="plan") if given_plan else request,
        example=inputs.example,
        quantized=None if found.int8 is None else OrtNetwork(found.int8.data),
    )
    verdict = _add_own_text_score(judged.verdict, analysis, cut.small, settings, inputs)
    verdict = replace(verdict, unfitted=_list_unfitted_layers(cut.merged))
    check_required_fidelity(verdict, settings.require)
    is_warning = verdict.level == "warning" or verdict.unfitted
    log.log(logging.WARNING if is_warning else logging.INFO, "%s", verdict)
    summary = replace(found.summary, verdict=verdict)
    figures = collect_figures(
        analysis, cut.small, cut.plan, summary, judged.compared, cut.merged.merges, inputs.sets.fit.batches
    )
    light = cut.merged.without_weights()  # nothing needs the weights any more, and they may be large
    return replace(found, summary=summary, compared=judged.compared, figures=figures, merged=light)


ANNOUNCED_SECONDS = 20
"""Expected duration from which it is announced."""


def _announce_duration(analysis: Analysis, settings: CompressConfig) -> None:
    """Announce how long this will take, if that is long, and what effort="fast" would take."""
    if not isinstance(settings.method(), SynthesizesInputs):
        return
    search = settings.budget is not None or settings.max_loss is not None
    expected, fast = (estimate_seconds(analysis, effort, search) for effort in (settings.input_effort, "fast"))
    if expected > ANNOUNCED_SECONDS:
        shorter = f'; effort="fast" takes about {fast:.0f} s' if settings.input_effort != "fast" else ""
        announce(f"making inputs and trying cuts takes about {expected:.0f} s{shorter}")


def _describe_inputs(analysis: Analysis, settings: CompressConfig) -> list[str]:
    """Return a note on the scale of synthetic inputs, if the network is fitted to them or judged on them."""
    only_data = uses_data(settings.method()) or settings.images is not None
    scales = "" if only_data else describe_input_scales(find_input_scales(analysis))
    return [scales] if scales else []


def _list_unfitted_layers(merged: MergeResult) -> tuple[str, ...]:
    """Return the consumer layers that were not fitted because no inputs reach them."""
    blind = (m for m in merged.merges if m.reason is not None and m.reason.why is ReasonCode.NO_INPUTS)
    return tuple(dict.fromkeys(merge.reader for merge in blind))


def _take_calibration_inputs(
    analysis: Analysis, inputs: PreparedInputs
) -> tuple[tuple[InputBatch, ...], tuple[InputBatch, ...]]:
    """Return inputs to calibrate int8 ranges on, and others to measure the change on: the user's, else synthesised."""
    assert inputs.eval_set is not None
    held = take_first_samples(inputs.eval_set.iterate_inputs(), MAX_CALIBRATION_SAMPLES)
    if inputs.calibration is not None:
        given = extract_inputs(inputs.calibration, analysis, MAX_SEARCH_BATCHES)
        return take_first_samples(given, MAX_CALIBRATION_SAMPLES), held
    fit = take_first_samples(inputs.sets.fit.batches, MAX_CALIBRATION_SAMPLES)
    return tuple(clip_to_deviations(batch) for batch in fit), held


def prepare_calibration_inputs(
    analysis: Analysis, calibration: Iterable[Any] | None, effort: str
) -> tuple[tuple[InputBatch, ...], tuple[InputBatch, ...]]:
    """Return inputs to calibrate int8 ranges on, and others to measure the change on, for a network as it is."""
    settings = CompressConfig(calibration=calibration, merger=Moments(effort=effort)).fitted_to(analysis.inputs)
    return _take_calibration_inputs(analysis, prepare_inputs(analysis, settings))


def _add_own_text_score(
    verdict: Verdict, analysis: Analysis, small: nn.Module, settings: CompressConfig, inputs: PreparedInputs
) -> Verdict:
    """Add the score on self-generated text, where a language model was judged on text of the user."""
    if verdict.text is None or not verdict.data or not inputs.sets.heldout.batches:
        return verdict
    own = make_synthetic_eval_set(analysis, inputs.sets.heldout, settings.seed, inputs.sets.original)
    return replace(verdict, own_text=make_text_score(own.compare({"original": analysis.model, "merged": small})))


def _score_networks(metric: Metric, analysis: Analysis, small: nn.Module) -> tuple[float, float]:
    original, smaller = (compute_metric(metric, analysis.move_to_user(model)) for model in (analysis.model, small))
    return original, smaller


def _explain_missing_text(analysis: Analysis, inputs: PreparedInputs) -> list[str]:
    """Return why a language model was not fitted to text of its own, if text was asked for."""
    refusal = inputs.sets.fit.refusal
    if not refusal or inputs.sets.fit is NOT_REQUESTED or find_text_input(analysis) is None:
        return []
    return [f"no self-generated text was used: {refusal}"]


def _find_verification_error(analysis: Analysis, kept: Mapping[str, Units]) -> VerificationError | None:
    """Return the error of verification if these units are kept and nothing is merged; None if it passes."""
    try:
        cut = _merge_and_prune(analysis, kept, CompressConfig(merger="none"), NO_INPUTS)
        _verify_and_summarise(analysis, cut, verify=True)
    except VerificationError as error:
        return None if error.where == "example_inputs" else error  # the example inputs are unsuitable, whatever is cut
    return None


def compress_with_plan(plan: Plan, analysis: Analysis, settings: CompressConfig, *, judge: bool = True) -> Compressed:
    """Remove a plan's channels from this network, and merge them with its weights."""
    with exclusive_access():
        settings = settings.fitted_to(analysis.inputs)
        inputs = prepare_inputs(analysis, settings, judge)
        seed_rng(settings.seed)
        cut = _merge_and_prune(analysis, resolve_kept_units(plan, analysis.channels), settings, inputs)
        found = _verify_and_summarise(analysis, cut, verify=True, notes=_describe_inputs(analysis, settings))
        if not judge:
            return found
        return _attach_verdict(analysis, cut, found, settings, inputs, compare_pruned=True, given_plan=True)


def build_compressed(plan: Plan, analysis: Analysis, small: nn.Module) -> Compressed:
    """Wrap a network that was read from disk, with its summary; the details of its merge are not stored."""
    scales = describe_input_scales(find_input_scales(analysis))
    summary = summarise(analysis, small, plan, None, remarks=[scales] if scales else [])
    return Compressed(small, plan, summary, inputs=analysis.inputs)


def verify_plan(plan: Plan, analysis: Analysis, small: nn.Module) -> VerificationResult:
    """Check that `small` equals the original with the plan's removed units zeroed; the merge itself is not checked."""
    stays = build_keep_mask(analysis.channels, resolve_kept_units(plan, analysis.channels))
    return verify_small_network(analysis, plan, stays, small)


@dataclass(frozen=True)
class _PrunedNetwork:
    """A pruned and merged network, with the units that it keeps, the merge result and the plan."""

    kept: Mapping[str, Units]
    merged: MergeResult
    plan: Plan
    small: nn.Module


@torch.no_grad()
def _merge_and_prune(
    analysis: Analysis, kept: Mapping[str, Units], settings: CompressConfig, inputs: PreparedInputs
) -> _PrunedNetwork:
    """Merge the removed channels, make the plan, and build the smaller network."""
    selection = Selection(analysis, kept, inputs.calibration, not settings.uniform, inputs.sets)
    method = settings.method()
    merged = reject_harmful_merges(selection, method.merge(selection), method)
    release_free_memory()  # statistics of large networks are freed, but malloc keeps their pages
    plan = make_plan(analysis.model, analysis.graph, analysis.channels, kept, merged.merges, analysis.size_attributes)
    plan = msgspec.structs.replace(plan, baked=tuple(analysis.folded_weights))
    return _PrunedNetwork(kept, merged, plan, apply_plan(analysis.model, plan, merged))


def _list_untouched_groups(
    analysis: Analysis, kept: Mapping[str, Units], settings: CompressConfig
) -> list[SkippedGroup]:
    """Return the groups that a ratio should cut but does not; with a budget or `max_loss`, uncut groups are normal."""
    if settings.budget is not None or settings.max_loss is not None:
        return []
    ratios = resolve_ratios(analysis.channels, settings.share, settings.ignore, settings.scope)
    uncut = [group for group in analysis.channels.groups if group.name in ratios and group.name not in kept]
    if settings.uniform:
        return [SkippedGroup(g.name, g.size, "uniform=True lets it keep all of them") for g in uncut]
    return [SkippedGroup(g.name, g.size, explain_unpruned(g, ratios[g.name], settings.round_to)) for g in uncut]


def _verify_and_summarise(
    analysis: Analysis,
    cut: _PrunedNetwork,
    verify: bool,
    skipped: Iterable[SkippedGroup] = (),
    notes: Iterable[str] = (),
) -> Compressed:
    """Compare the smaller network with the original, and summarise the cut."""
    stays = build_keep_mask(analysis.channels, cut.kept)
    found = verify_small_network(analysis, cut.plan, stays, cut.small, cut.merged) if verify else None
    notes = (*notes, *_note_fixed_batch(cut.small))
    summary = summarise(analysis, cut.small, cut.plan, found, skipped, notes, statistics=cut.merged.fitted_to)
    return Compressed(cut.small, cut.plan, summary, cut.merged, analysis.inputs)


def _note_fixed_batch(small: nn.Module) -> list[str]:
    """Return a note on a graph that takes only the batch size of its example."""
    if not isinstance(small, GraphNetwork) or small.any_batch_size:
        return []
    size = small.example_batch_size
    return [f"the graph takes batches of {size} only: no rule was found by which its sizes follow the batch"]


@dataclass(frozen=True)
class SelectedChannels:
    """The kept units of every participating group, by name, with notes on the search and the loss curves."""

    kept: Mapping[str, Units]
    notes: tuple[str, ...] = ()
    curves: Mapping[str, LossCurve] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedInputs:
    """All inputs of one compression; later stages make none themselves.

    Attributes
    ----------
    sets
        Synthesised inputs: to fit on, to search on, held out.
    calibration
        The user's batches to fit on, if any.
    eval_set
        The inputs that the result is judged on.
    example
        The example inputs, if they are real and no other data was given: the result is judged on them, too.
    """

    sets: InputSets
    calibration: Iterable[Any] | None = None
    eval_set: EvalSet | None = None
    example: EvalSet | None = None


NO_INPUTS = PreparedInputs(InputSets(NOT_REQUESTED, NOT_REQUESTED))


def prepare_inputs(
    analysis: Analysis, settings: CompressConfig, judge: bool = True, search: bool = False
) -> PreparedInputs:
    """Make or load the inputs to fit on, to search on and to judge on: often the most expensive stage."""
    method = settings.method()
    request = method.input_request if isinstance(method, SynthesizesInputs) else None
    method_batches = method.batches if isinstance(method, FitsToData) else None
    calibration, eval_set = settings.calibration, None
    if judge and settings.images is not None:
        eval_set = make_user_eval_set(settings.images, analysis)
    elif judge and calibration is not None:
        calibration, held, source = split_heldout_batches(calibration, settings.held)
        eval_set = make_calibration_eval_set(held, analysis, source)
    elif judge and method_batches is not None:
        eval_set = make_calibration_eval_set(method_batches, analysis, FITTED_DESCRIPTION)
    search = search or settings.budget is not None or settings.max_loss is not None
    # A language model's own text has half of the say beside the user's text.
    own_text = uses_data(method) and find_token_logits(analysis.graph) is not None
    sets = make_input_sets(
        analysis,
        request or InputRequest(settings.input_effort, settings.seed),
        fit=request is not None or settings.criterion == EXPECTED_ERROR or settings.calibration is not None,
        heldout=request is not None or own_text or (eval_set is None and (judge or settings.max_loss is not None)),
        search=search,
        calibration=calibration,
    )
    if calibration is not None and uses_data(method) and not own_text:
        calibration = join_few_samples(analysis, calibration, sets.fit)
    if judge and eval_set is None:
        eval_set = make_synthetic_eval_set(analysis, sets.heldout, settings.seed, sets.original)
        return PreparedInputs(sets, calibration, eval_set, make_example_eval_set(analysis))
    return PreparedInputs(sets, calibration, eval_set)


def open_eval_set(analysis: Analysis, settings: CompressConfig) -> EvalSet:
    """Open the evaluation set for an existing result, without inputs to fit or to search on."""
    plain = replace(settings.fitted_to(analysis.inputs), merger="none", criterion="l2", budget=None, max_loss=None)
    eval_set = prepare_inputs(analysis, plain).eval_set
    assert eval_set is not None
    return eval_set


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
    if groups and (settings.budget is not None or settings.max_loss is not None):
        sensitivities = _measure_sensitivities(analysis, settings, groups, inputs)
        ranking = rank_channels(
            analysis, groups, *_rank_by_larger_input_set(analysis, settings, inputs), sensitivities=sensitivities
        )
        search = _select_within_budget if settings.budget is not None else _select_smallest_good_enough
        found = search(analysis, settings, ranking, inputs, None if kinds is None else kinds.kinds)
        return replace(found, notes=(*found.notes, *notes))
    scores = rank_channels(analysis, groups, settings, inputs, ratios).scores
    kept = {g.name: keep_units_by_ratio(g, scores[g.name], ratios[g.name], settings.round_to) for g in groups}
    if kinds is not None:
        kept = _keep_equal_counts(groups, kept, scores, kinds.kinds, settings.round_to)
    kept = {g.name: kept[g.name] for g in groups if len(kept[g.name]) < g.size}
    if not kept:
        raise NothingToPrune(
            _explain_nothing_to_prune(channels, settings.share), fix=_suggest_fix(channels, settings.scope)
        )
    return SelectedChannels(kept, notes)


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
        step = math.lcm(kind.step, *steps)
        count = min(size, -(-max(len(kept[name]) for name in kind.names) // step) * step)
        counts |= dict.fromkeys(kind.names, count)
    return {name: keep_units_by_count(known[name], scores[name], count) for name, count in counts.items()}


def _measure_sensitivities(
    analysis: Analysis, settings: CompressConfig, groups: Sequence[Group], inputs: PreparedInputs
) -> dict[Axis, float] | None:
    """Measure by one backward pass how the outputs react to errors of layers; None if cuts are tried instead."""
    uses_gradients = settings.allocation == "gradient" or (
        settings.allocation == "auto" and is_search_expensive(analysis)
    )
    uncut = Selection(analysis, {}, inputs.calibration, input_sets=inputs.sets)
    if not uses_gradients or _resolve_criterion(settings, uncut) != EXPECTED_ERROR:
        return None
    assert inputs.sets.search is not None
    weights = find_consumer_weights(select_everything(Selection(analysis, {}), groups))
    temperature = _choose_search_temperature(analysis)
    return measure_sensitivities(analysis, weights, inputs.sets.search.probes.batches, temperature, settings.seed)


def _choose_search_temperature(analysis: Analysis) -> float:
    """Return the temperature of divergences: 1 for a language model, whose scores at many tokens are compared."""
    return SEARCH_TEMPERATURE if find_token_logits(analysis.graph) is None else 1.0


def _select_within_budget(
    analysis: Analysis,
    settings: CompressConfig,
    ranking: ChannelRanking,
    inputs: PreparedInputs,
    kinds: Sequence[UniformKind] | None = None,
) -> SelectedChannels:
    """Select the cut within the budget whose outputs are closest to the original's."""
    assert settings.budget is not None
    simulator, probes = _build_cut_simulator(analysis, settings, ranking, inputs)
    limits = resolve_limits(analysis.channels, settings.limits)
    found = find_best_within_budget(
        simulator,
        settings.budget,
        limits,
        settings.round_to,
        kinds,
        ranking.estimates,
        EXCHANGE_ROUNDS[settings.input_effort],
    )
    return SelectedChannels(simulator.select_kept_units(found.counts), (found.describe(str(probes)),), found.curves)


def _build_cut_simulator(
    analysis: Analysis, settings: CompressConfig, ranking: ChannelRanking, inputs: PreparedInputs
) -> tuple[CutSimulator, InputSet]:
    """Return a simulator for the search, and the probes that it runs on."""
    search = inputs.sets.search
    assert search is not None, "a search was asked for when the inputs were made"
    simulator = CutSimulator(
        analysis,
        search.probes.batches,
        ranking.scores,
        search.fit,
        ridge=SEARCH_RIDGE if ranking.estimates is None else ROBUST_RIDGE,
        restore=ranking.estimates is None,
        biases=not settings.uniform,
        temperature=_choose_search_temperature(analysis),
        int8=settings.int8,
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


def _select_smallest_good_enough(
    analysis: Analysis,
    settings: CompressConfig,
    ranking: ChannelRanking,
    inputs: PreparedInputs,
    kinds: Sequence[UniformKind] | None = None,
) -> SelectedChannels:
    """Select the smallest network found whose score is within `max_loss`; each candidate is built and scored."""
    allowed = settings.max_loss or 0.0
    score = _make_score_function(analysis, settings, inputs)
    simulator, probes = _build_cut_simulator(analysis, settings, ranking, inputs)
    limits, original = resolve_limits(analysis.channels, settings.limits), score(analysis.model)
    tried: list[float] = []

    def is_good(counts: Mapping[str, int]) -> bool:
        tried.append(score(_merge_and_prune(analysis, simulator.select_kept_units(counts), settings, inputs).small))
        return tried[-1] >= original - allowed

    found = find_smallest_good_enough(
        simulator, limits, settings.round_to, is_good, kinds, ranking.estimates, EXCHANGE_ROUNDS[settings.input_effort]
    )
    if found is None:
        what = f"no cut that was tried keeps the score within {allowed:g} of the original's {original:.4g}"
        fix = "Allow a larger loss, give some data (calibration=), or let more layers take part."
        raise MergingError(f"{what}: the best has {max(tried, default=original):.4g}", where="max_loss=", fix=fix)
    return SelectedChannels(
        simulator.select_kept_units(found.counts),
        (found.describe(str(probes)), f"the smallest of {len(tried)} that were tried"),
    )


def _make_score_function(
    analysis: Analysis, settings: CompressConfig, inputs: PreparedInputs
) -> Callable[[nn.Module], float]:
    """Return the score of a network: the user's metric, else the accuracy on labelled data, else the fidelity."""
    if settings.metric is not None:
        metric = settings.metric
        return lambda model: compute_metric(metric, analysis.move_to_user(model))
    eval_set = inputs.eval_set or make_synthetic_eval_set(
        analysis, inputs.sets.heldout, settings.seed, inputs.sets.original
    )
    return eval_set.accuracy if eval_set.labelled else partial(eval_set.fidelity, analysis.model)


@dataclass(frozen=True)
class ChannelRanking:
    """Scores of the channels of each group; and elimination orders whose errors are divergences, if estimated."""

    scores: Mapping[str, Scores]
    estimates: Mapping[str, EliminationOrder] | None = None


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
    criterion = _resolve_criterion(settings, uncut)
    ranked: dict[str, EliminationOrder] = {}
    if criterion == EXPECTED_ERROR:
        method = settings.method()
        source = method if isinstance(method, StatisticsSource) else Moments()
        wanted = {group.name: 1.0 if shares is None else shares[group.name] for group in groups}
        ridge = SEARCH_RIDGE if sensitivities is None else ROBUST_RIDGE
        ranked = compute_orders_by_group(uncut, wanted, source, ridge, sensitivities)
    scores = {
        g.name: ranked[g.name].scores if g.name in ranked else _score_by_filters(analysis, g, criterion) for g in groups
    }
    return ChannelRanking(scores, ranked if sensitivities is not None and ranked else None)


def _resolve_criterion(settings: CompressConfig, uncut: Selection) -> str | Criterion:
    """Return the requested criterion; for "auto", the expected error if the statistics are reliable, else l2."""
    if settings.criterion != AUTO_CRITERION:
        return settings.criterion
    method = settings.method()
    is_reliable = isinstance(method, StatisticsSource) and method.has_reliable_statistics(uncut)
    return EXPECTED_ERROR if is_reliable else "l2"


def _score_by_filters(analysis: Analysis, group: Group, criterion: str | Criterion) -> Scores:
    """Score by the filters alone. The expected error falls back to l2 for groups whose consumers have no statistics."""
    scores: Scores = (
        score_channels("l2" if criterion == EXPECTED_ERROR else criterion, filters_of(analysis.graph, group))
        .double()
        .cpu()
        .numpy()
    )
    return scores


def _explain_nothing_to_prune(channels: Channels, ratio: Ratio) -> str:
    reasons = "; ".join(str(refusal) for refusal in merge_similar_refusals(channels.refusals)[:6])
    if not channels.groups:
        return "nothing can be removed: " + (reasons or "the network has no layer with channels of its own")
    return f"ratio {ratio} removes nothing from the groups that take part" + (f": {reasons}" if reasons else "")


def _suggest_fix(channels: Channels, scope: str) -> str:
    if scope == "internal" and any(group.residual for group in channels.groups):
        return 'The remaining groups are residual streams: scope="all" includes them.'
    return "inspect() lists every group and every refusal."
