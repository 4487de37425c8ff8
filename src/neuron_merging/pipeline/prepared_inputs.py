"""Prepare everything that the network will be run on: to fit on, to search on, to judge on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from neuron_merging.calibration.output_divergence import find_token_logits
from neuron_merging.channels.analysis import Analysis
from neuron_merging.config import CompressConfig
from neuron_merging.data.eval_data import (
    FITTED_DESCRIPTION,
    make_calibration_eval_set,
    make_user_eval_set,
    split_heldout_batches,
)
from neuron_merging.evaluation.fidelity import (
    EvalSet,
    make_example_eval_set,
    make_synthetic_eval_set,
)
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.inputs.input_sets import (
    MAX_SEARCH_BATCHES,
    NOT_REQUESTED,
    InputRequest,
    InputSets,
    add_zoomed_pictures,
    join_few_samples,
    make_fallback_inputs,
    make_input_sets,
    take_first_samples,
)
from neuron_merging.inputs.synthetic import clip_to_deviations
from neuron_merging.inputs.user_batches import extract_inputs
from neuron_merging.merging import Moments
from neuron_merging.merging.protocol import FitsToData, SynthesizesInputs, uses_data
from neuron_merging.onnx.quantize import MAX_CALIBRATION_SAMPLES, MAX_TRIAL_SAMPLES
from neuron_merging.selection.elimination import (
    EXPECTED_ERROR,
)


def take_calibration_inputs(
    analysis: Analysis, inputs: PreparedInputs
) -> tuple[tuple[InputBatch, ...], tuple[InputBatch, ...]]:
    """Return inputs to calibrate int8 ranges on, and others to measure the change on: the user's, else synthesised."""
    assert inputs.eval_set is not None
    held = take_first_samples(inputs.eval_set.iterate_inputs(), MAX_TRIAL_SAMPLES)
    if inputs.calibration is not None:
        given = extract_inputs(inputs.calibration, analysis, MAX_SEARCH_BATCHES)
        return take_first_samples(given, MAX_CALIBRATION_SAMPLES), held
    # Without norms nothing is synthesised, and the example may be noise.
    made = inputs.sets.fit.batches or make_fallback_inputs(analysis, MAX_CALIBRATION_SAMPLES, 0).batches
    fit = take_first_samples(made, MAX_CALIBRATION_SAMPLES)
    # Synthesised inputs have rare extreme values, and one of them would widen an int8 range for all.
    return tuple(clip_to_deviations(batch) for batch in fit), held


def prepare_calibration_inputs(
    analysis: Analysis, calibration: Iterable[Any] | None, effort: str
) -> tuple[tuple[InputBatch, ...], tuple[InputBatch, ...]]:
    """Return inputs to calibrate int8 ranges on, and others to measure the change on, for a network as it is."""
    settings = CompressConfig(calibration=calibration, merger=Moments(effort=effort)).adapt_data_to(analysis.inputs)
    return take_calibration_inputs(analysis, prepare_inputs(analysis, settings))


@dataclass(frozen=True)
class PreparedInputs:
    """All inputs of one compression; later stages make none themselves.

    Attributes
    ----------
    sets
        Synthesised inputs: to fit on, to search on, held out.
    calibration
        The user's batches to fit on, if any; synthesised inputs and changed copies may join few samples.
    given
        The user's batches among them.
    eval_set
        The inputs that the result is judged on.
    example
        The example inputs, if they are real and no other data was given: the result is judged on them, too.
    """

    sets: InputSets
    calibration: Iterable[Any] | None = None
    given: Iterable[Any] | None = None
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
    # The best data to judge on comes first: the user's, then what is held out of the calibration, then batches of the
    # merger.
    if judge and settings.images is not None:
        eval_set = make_user_eval_set(settings.images, analysis)
    elif judge and calibration is not None:
        calibration, held, source = split_heldout_batches(calibration, settings.held)
        eval_set = make_calibration_eval_set(held, analysis, source)
    elif judge and method_batches is not None:
        eval_set = make_calibration_eval_set(method_batches, analysis, FITTED_DESCRIPTION)
    given = calibration
    if calibration is not None and uses_data(method):
        calibration = add_zoomed_pictures(analysis, calibration, settings.seed)
    search = search or settings.budget is not None or settings.max_loss is not None
    # With text of the user, a language model is also fitted to its own, each with half of the weight.
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
        return PreparedInputs(sets, calibration, given, eval_set, make_example_eval_set(analysis))
    return PreparedInputs(sets, calibration, given, eval_set)


def open_eval_set(analysis: Analysis, settings: CompressConfig) -> EvalSet:
    """Open the evaluation set for an existing result, without inputs to fit or to search on."""
    plain = replace(settings.adapt_data_to(analysis.inputs), merger="none", criterion="l2", budget=None, max_loss=None)
    eval_set = prepare_inputs(analysis, plain).eval_set
    assert eval_set is not None
    return eval_set
