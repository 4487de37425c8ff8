"""The stages of `compress`, in order.

`prepare_inputs` makes everything that the network will be run on. `select_kept_channels` decides what stays,
`merge_and_prune` merges the rest, makes the plan and the smaller network, `verify_and_summarise` compares it with the
original, `distill_network` trains a language model, or a network for which the user gave pictures, `_attach_verdict`
judges the result. Each stage is one function of another package; each result is a value.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Units
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.config import CompressConfig
from neuron_merging.errors import MergingError, NothingToPrune, VerificationError
from neuron_merging.evaluation.fidelity import (
    Metric,
    compute_metric,
    explain_missing_fidelity,
    make_synthetic_eval_set,
)
from neuron_merging.evaluation.figures import collect_figures, compare_with_int8
from neuron_merging.evaluation.verdict import Verdict, check_required_fidelity, make_text_score
from neuron_merging.graph.compare import check_outputs_finite
from neuron_merging.graph.example_inputs import flatten_inputs, flatten_outputs
from neuron_merging.graph.interpreter import run_graph
from neuron_merging.graph.process_state import exclusive_access, release_free_memory, seed_rng
from neuron_merging.inputs.input_scale import describe_input_scales
from neuron_merging.inputs.input_sets import (
    NOT_REQUESTED,
    estimate_seconds,
    explain_fewer_steps,
    make_fallback_inputs,
)
from neuron_merging.inputs.scale_from_norms import find_input_scales
from neuron_merging.inputs.text import find_text_input
from neuron_merging.merging import MergeResult
from neuron_merging.merging.protocol import ReasonCode, SynthesizesInputs, uses_data
from neuron_merging.models.pretrained_config import (
    DescribableKinds,
    explain_missing_config,
    find_describable_kinds,
    find_matching_config,
    is_transformers_model,
)
from neuron_merging.onnx.quantize import DEFAULT_INT8_LOSS, OrtNetwork, check_quantizable
from neuron_merging.pipeline.build_network import (
    PrunedNetwork,
    list_untouched_groups,
    merge_and_prune,
    verify_and_summarise,
)
from neuron_merging.pipeline.distill import distill_network
from neuron_merging.pipeline.prepared_inputs import NO_INPUTS, PreparedInputs, prepare_inputs, take_calibration_inputs
from neuron_merging.pipeline.select_channels import explain_nothing_to_prune, select_kept_channels, suggest_fix
from neuron_merging.progress import announce, log
from neuron_merging.pruning import trial_prune
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.trial_prune import resolve_kept_units
from neuron_merging.selection.criteria import (
    resolve_ratios,
)
from neuron_merging.selection.judge import judge_network
from neuron_merging.selection.search import (
    find_uniform_kinds,
)

NO_CONFIG_FIX = "Leave uniform= out (--uniform): nm.load reads the folder without a configuration."


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
            explain_nothing_to_prune(analysis.channels, settings.share),
            fix=suggest_fix(analysis.channels, settings, {}),
        )
    if settings.int8:
        check_quantizable(analysis.model)
    with exclusive_access():
        if verify:
            _check_original_finite(analysis)
        analysis.drop_outdated_caches()
        settings = settings.adapt_data_to(analysis.inputs)
        kinds = _find_uniform_kinds(analysis, settings)
        _announce_missing_verdict(analysis, settings)
        _announce_duration(analysis, settings)
        inputs = prepare_inputs(analysis, settings, judge)
        release_free_memory()  # malloc keeps the pages of what was freed, here and below
        # This ends: each further round has fewer removable units than the one before.
        while True:
            seed_rng(settings.seed)  # in the loop: a second attempt must not depend on the first
            chosen = select_kept_channels(analysis, settings, inputs, kinds)
            release_free_memory()
            cut = merge_and_prune(analysis, chosen.kept, settings, inputs)
            # Before the verification, which takes much longer.
            _check_config_exists(cut, settings)
            try:
                skipped = list_untouched_groups(analysis, cut.kept, settings)
                notes = (
                    *chosen.notes,
                    *_describe_inputs(analysis, settings),
                    *explain_fewer_steps(inputs.sets.fit, settings.input_effort),
                    *_explain_missing_text(analysis, inputs),
                )
                found = verify_and_summarise(analysis, cut, verify, skipped, notes)
                found = replace(found, curves=chosen.curves)
                found = _add_notes(found, distill_network(analysis, cut, settings, inputs))
                return _attach_verdict(analysis, cut, found, settings, inputs, compare_pruned) if judge else found
            except VerificationError:
                fewer = trial_prune.shrink_after_failure(
                    analysis, cut.plan, partial(_find_verification_error, analysis)
                )
                if fewer is None:
                    raise
                # Groups may have gone, so the kinds of equal groups are found again.
                analysis, kinds = fewer, _find_uniform_kinds(fewer, settings)


def _add_notes(found: Compressed, notes: list[str]) -> Compressed:
    return replace(found, summary=replace(found.summary, notes=(*found.summary.notes, *notes)))


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


def _check_config_exists(cut: PrunedNetwork, settings: CompressConfig) -> None:
    """Raise an error if `uniform` was asked for and no config of transformers describes the result."""
    if not settings.uniform or not is_transformers_model(cut.small):
        return
    if find_matching_config(cut.small, cut.plan) is None:
        reasons = "; ".join(explain_missing_config(cut.small, cut.plan))
        raise MergingError(f"the result has no configuration: {reasons}", where="uniform=", fix=NO_CONFIG_FIX)


def _attach_verdict(
    analysis: Analysis,
    cut: PrunedNetwork,
    found: Compressed,
    settings: CompressConfig,
    inputs: PreparedInputs,
    compare_pruned: bool,
    given_plan: bool = False,
) -> Compressed:
    """Add the verdict and the figures; raise an error if the fidelity is below `require`."""
    assert inputs.eval_set is not None
    found = replace(found, calibration_inputs=take_calibration_inputs(analysis, inputs))
    if settings.int8:
        found = replace(found, int8=found.quantize(settings.int8_loss or DEFAULT_INT8_LOSS))
    streams = settings.scope == "internal" and any(group.residual for group in analysis.channels.groups)
    request = replace(settings.describe_request(), spares_streams=streams)
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
    verdict = _add_other_text_score(judged.verdict, analysis, cut.small, settings, inputs)
    verdict = replace(verdict, unfitted=_list_unfitted_layers(cut.merged))
    check_required_fidelity(verdict, settings.require)
    is_warning = verdict.level == "warning" or verdict.unfitted
    log.log(logging.WARNING if is_warning else logging.INFO, "%s", verdict)
    summary = replace(found.summary, verdict=verdict)
    figures = collect_figures(
        analysis, cut.small, cut.plan, summary, judged.compared, cut.merged.merges, inputs.sets.fit.batches
    )
    if found.int8 is not None:
        figures = replace(figures, int8=compare_with_int8(found.int8, judged.compared, verdict))
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


@torch.no_grad()
def _check_original_finite(analysis: Analysis) -> None:
    """Raise if the original's outputs on the example are no numbers: the verification would fail after all the work."""
    seed_rng(0)
    try:
        outputs = flatten_outputs(run_graph(analysis.graph, flatten_inputs(analysis.inputs), analysis.graph.tensors))
    except (RuntimeError, TypeError, IndexError, ValueError):
        return  # the verification says why the network does not run
    check_outputs_finite(outputs, outputs, "in the original")


CHECKED_INPUTS = 4
"""Synthetic inputs on which the outputs are looked at before the work."""


def _announce_missing_verdict(analysis: Analysis, settings: CompressConfig) -> None:
    """Announce before the work that there will be no verdict without data, if the example's outputs foretell it."""
    if settings.calibration is not None or settings.evaluate is not None:
        return
    batches = (analysis.inputs, *make_fallback_inputs(analysis, CHECKED_INPUTS, settings.seed).batches)
    if why := explain_missing_fidelity(analysis, batches):
        announce(f"there may be no verdict: {why}, on the example and on synthetic ones. {GIVE_DATA}")


GIVE_DATA = "Real inputs as the example, or data (calibration=, --calibrate), may help."


def _describe_inputs(analysis: Analysis, settings: CompressConfig) -> list[str]:
    """Return a note on the scale of synthetic inputs, if the network is fitted to them or judged on them."""
    only_data = uses_data(settings.method()) or settings.images is not None
    scales = "" if only_data else describe_input_scales(find_input_scales(analysis))
    return [scales] if scales else []


def _list_unfitted_layers(merged: MergeResult) -> tuple[str, ...]:
    """Return the consumer layers that were not fitted because no inputs reach them."""
    unfitted = (m for m in merged.merges if m.reason is not None and m.reason.why is ReasonCode.NO_INPUTS)
    return tuple(dict.fromkeys(merge.reader for merge in unfitted))


def _add_other_text_score(
    verdict: Verdict, analysis: Analysis, small: nn.Module, settings: CompressConfig, inputs: PreparedInputs
) -> Verdict:
    """Add the score on held-out text of another source, where a language model was judged on text of the user."""
    if verdict.text is None or not verdict.data or not inputs.sets.heldout.batches:
        return verdict
    eval_set = make_synthetic_eval_set(analysis, inputs.sets.heldout, settings.seed, inputs.sets.original)
    compared = eval_set.compare({"original": analysis.model, "merged": small})
    score = make_text_score(compared)
    return verdict if score is None else replace(verdict, other_text=(score, compared.inputs))


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
        cut = merge_and_prune(analysis, kept, CompressConfig(merger="none"), NO_INPUTS)
        verify_and_summarise(analysis, cut, verify=True)
    except VerificationError as error:
        # Only errors of the cut itself help to find the group that causes it.
        return None if error.where == "example_inputs" else error  # the example inputs are unsuitable, whatever is cut
    return None


def compress_with_plan(plan: Plan, analysis: Analysis, settings: CompressConfig, *, judge: bool = True) -> Compressed:
    """Remove a plan's channels from this network, and merge them with its weights."""
    with exclusive_access():
        settings = settings.adapt_data_to(analysis.inputs)
        inputs = prepare_inputs(analysis, settings, judge)
        seed_rng(settings.seed)
        cut = merge_and_prune(analysis, resolve_kept_units(plan, analysis.channels), settings, inputs)
        found = verify_and_summarise(analysis, cut, verify=True, notes=_describe_inputs(analysis, settings))
        found = _add_notes(found, distill_network(analysis, cut, settings, inputs))
        if not judge:
            return found
        return _attach_verdict(analysis, cut, found, settings, inputs, compare_pruned=True, given_plan=True)
