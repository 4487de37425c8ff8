"""Evaluation sets from the user's images or batches, and from held-out calibration batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from neuron_merging.calibration.output_divergence import find_output_parts
from neuron_merging.channels.analysis import Analysis
from neuron_merging.data.images import BatchedDataset
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.eval_set import EvalSet, check_eval_data
from neuron_merging.evaluation.fidelity import IMAGES_PER_BATCH, make_image_batches
from neuron_merging.graph.example_inputs import infer_batch_size
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs.user_batches import extract_inputs_and_labels

MIN_BATCHES_TO_HOLD_OUT = 8
"""Calibration batches of which the last is held apart from the fit."""
HELDOUT_DESCRIPTION = "held-out calibration samples"
FITTED_DESCRIPTION = "the calibration samples of the fit"
SAMPLES_TO_CHECK = 16
"""Samples of which it is seen whether they fit the network."""


def make_user_eval_set(images: Any, analysis: Analysis, where: str = "evaluate=") -> EvalSet:
    """Images, or batches of inputs with labels behind them; refused if they do not fit the network."""
    exam = (
        _make_image_eval_set(images, analysis)
        if isinstance(images, BatchedDataset)
        else _make_batch_eval_set(images, analysis, where)
    )
    first = next(iter(exam.open()), None)
    if first is None:
        raise MergingError("there is no batch to evaluate on", where=where, fix="Give at least one batch.")
    check_eval_data(analysis.model, *_take_samples_to_check(*first), getattr(images, "classes", 0), where=where)
    return exam


def _make_image_eval_set(images: BatchedDataset, analysis: Analysis) -> EvalSet:
    example = next(value for value in flatten_inputs(analysis.inputs) if isinstance(value, Tensor))

    def opened() -> Any:
        for (x,), y in make_image_batches(images)[0]:
            yield (x.to(example.device, example.dtype),), y

    length, parts = -(-len(images) // IMAGES_PER_BATCH), find_output_parts(analysis.graph)
    return EvalSet(
        opened, make_image_batches(images)[1], data=True, labelled=images.has_labels, length=length, parts=parts
    )


def _make_batch_eval_set(batches: Iterable[Any], analysis: Analysis, where: str) -> EvalSet:
    first = next(extract_inputs_and_labels(batches, analysis, where), None)
    labelled = first is not None and first[1] is not None
    said = "data of yours"
    if isinstance(batches, Sequence):
        pairs = extract_inputs_and_labels(batches, analysis, where)
        said = f"{sum(infer_batch_size(inputs) for inputs, _ in pairs):,} samples of {said}"
    parts = find_output_parts(analysis.graph)
    return EvalSet(
        lambda: extract_inputs_and_labels(batches, analysis, where), said, data=True, labelled=labelled, parts=parts
    )


def _take_samples_to_check(inputs: tuple[Any, ...], labels: Tensor | None) -> tuple[tuple[Any, ...], Tensor | None]:
    """The first samples, where a batch is one tensor: those are many where they are images."""
    if len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].ndim:
        return (inputs[0][:SAMPLES_TO_CHECK],), None if labels is None else labels[:SAMPLES_TO_CHECK]
    return inputs, labels


def split_heldout_batches(
    calibration: Iterable[Any], others: Iterable[Any] | None
) -> tuple[Iterable[Any], Iterable[Any], str]:
    """What to fit on, what to judge on, and what that is: samples of their own where there are enough."""
    if others is not None:
        return calibration, others, HELDOUT_DESCRIPTION
    if isinstance(calibration, Sequence) and len(calibration) >= MIN_BATCHES_TO_HOLD_OUT:
        return calibration[:-1], calibration[-1:], HELDOUT_DESCRIPTION
    return calibration, calibration, FITTED_DESCRIPTION


def make_calibration_eval_set(batches: Iterable[Any], analysis: Analysis, source: str) -> EvalSet:
    """Some calibration batches; labels that come with them have no part."""
    found = list(islice(extract_inputs_and_labels(batches, analysis), MIN_BATCHES_TO_HOLD_OUT))
    count = sum(infer_batch_size(inputs) for inputs, _ in found)
    pairs = [(inputs, None) for inputs, _ in found]
    return EvalSet(
        lambda: pairs, f"{count:,} {source}", data=True, length=len(pairs), parts=find_output_parts(analysis.graph)
    )
