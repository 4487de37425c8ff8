"""Make evaluation sets from the user's images or batches, and from held-out calibration batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from neuron_merging.calibration.output_divergence import find_output_parts
from neuron_merging.channels.analysis import Analysis
from neuron_merging.data.images import BatchedDataset
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.fidelity import IMAGES_PER_BATCH, EvalSet, check_eval_data, make_image_batches
from neuron_merging.graph.compare import MIN_SAMPLES_FOR_MEANS
from neuron_merging.graph.example_inputs import flatten_inputs, infer_batch_size
from neuron_merging.inputs.text import find_text_input, split_texts
from neuron_merging.inputs.user_batches import extract_inputs_and_labels

MIN_BATCHES_TO_HOLD_OUT = 8
"""Calibration batches from which on some are held out of the fit: one of fewer would cost the fit too much."""
HELDOUT_SAMPLES, MAX_HELDOUT_SHARE = 16, 0.25
"""Samples that are held out if there are enough, and the largest share of the batches: one sample alone would give a
noisy verdict."""
MAX_FITTED_BATCHES = 8
"""Batches of the fit that a network is judged on, if none are held out."""
HELDOUT_DESCRIPTION = "held-out calibration samples"
FITTED_DESCRIPTION = "calibration samples of the fit"
SAMPLES_TO_CHECK = 16
"""Samples of the first batch that are run to check that the data fits the network."""


def make_user_eval_set(images: Any, analysis: Analysis, where: str = "evaluate=") -> EvalSet:
    """Make an evaluation set from images, or from batches of inputs with optional labels.

    Data that does not fit the network is refused.
    """
    eval_set = (
        _make_image_eval_set(images, analysis)
        if isinstance(images, BatchedDataset)
        else _make_batch_eval_set(images, analysis, where)
    )
    first = next(iter(eval_set.open()), None)
    if first is None:
        raise MergingError("there is no batch to evaluate on", where=where, fix="Give at least one batch.")
    # A few samples are enough for the check, unless the network takes only whole batches.
    to_check = first if analysis.fixed_batch_size is not None else _take_samples_to_check(*first)
    check_eval_data(analysis.model, *to_check, getattr(images, "classes", 0), where=where)
    return eval_set


def _make_image_eval_set(images: BatchedDataset, analysis: Analysis) -> EvalSet:
    example = next(value for value in flatten_inputs(analysis.inputs) if isinstance(value, Tensor))

    size = analysis.fixed_batch_size or IMAGES_PER_BATCH

    def iterate_batches() -> Any:
        for (x,), y in make_image_batches(images, size)[0]:
            # A network of one batch size cannot run the remainder.
            if len(x) == analysis.fixed_batch_size or analysis.fixed_batch_size is None:
                yield (x.to(example.device, example.dtype),), y

    length, parts = -(-len(images) // size), find_output_parts(analysis.graph)
    return EvalSet(
        iterate_batches,
        make_image_batches(images)[1],
        data=True,
        labelled=images.has_labels,
        length=length,
        parts=parts,
    )


def _make_batch_eval_set(batches: Iterable[Any], analysis: Analysis, where: str) -> EvalSet:
    first = next(extract_inputs_and_labels(batches, analysis, where), None)
    labelled = first is not None and first[1] is not None
    description = "your data"
    if isinstance(batches, Sequence):  # any other iterable is too expensive to count
        pairs = extract_inputs_and_labels(batches, analysis, where)
        description = f"{sum(infer_batch_size(inputs) for inputs, _ in pairs):,} samples of {description}"
    parts = find_output_parts(analysis.graph)
    return EvalSet(
        lambda: _split_labelled_texts(extract_inputs_and_labels(batches, analysis, where), analysis),
        description,
        data=True,
        labelled=labelled,
        parts=parts,
        text_input=find_text_input(analysis),
    )


def _split_labelled_texts(
    pairs: Iterable[tuple[tuple[Any, ...], Tensor | None]], analysis: Analysis
) -> Iterator[tuple[tuple[Any, ...], Tensor | None]]:
    """Yield batches of texts in smaller parts. Labels belong to whole batches, which then stay as they are."""
    for inputs, labels in pairs:
        yield from (
            [(inputs, labels)] if labels is not None else ((part, None) for part in split_texts(analysis, inputs))
        )


def _take_samples_to_check(inputs: tuple[Any, ...], labels: Tensor | None) -> tuple[tuple[Any, ...], Tensor | None]:
    """Take the first samples of a batch that is one tensor; any other batch is returned unchanged."""
    if len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].ndim:
        return (inputs[0][:SAMPLES_TO_CHECK],), None if labels is None else labels[:SAMPLES_TO_CHECK]
    return inputs, labels


def split_heldout_batches(
    calibration: Iterable[Any], others: Iterable[Any] | None
) -> tuple[Iterable[Any], Iterable[Any], str]:
    """Return batches for the fit, batches for the verdict, and a description of the latter.

    Without `others` the last calibration batches are held out, if there are enough; else both are the same.
    """
    if others is not None:
        return calibration, others, HELDOUT_DESCRIPTION
    if isinstance(calibration, Sequence) and len(calibration) >= MIN_BATCHES_TO_HOLD_OUT:
        kept = len(calibration) - _count_heldout_batches(calibration)
        # So few single samples are worth more to the fit than to a verdict, which would be noise.
        if sum(infer_batch_size((batch,)) for batch in calibration[kept:]) >= MIN_SAMPLES_FOR_MEANS:
            return calibration[:kept], calibration[kept:], HELDOUT_DESCRIPTION
    return calibration, calibration, FITTED_DESCRIPTION


def _count_heldout_batches(batches: Sequence[Any]) -> int:
    """Return how many batches at the end have `HELDOUT_SAMPLES` samples; at most `MAX_HELDOUT_SHARE` of them."""
    most, samples = int(MAX_HELDOUT_SHARE * len(batches)), 0
    for count, batch in enumerate(reversed(batches), 1):
        samples += infer_batch_size((batch,))
        if samples >= HELDOUT_SAMPLES or count == most:
            break
    return count


def make_calibration_eval_set(batches: Iterable[Any], analysis: Analysis, source: str) -> EvalSet:
    """Make an evaluation set from calibration batches, without their labels: all that are held out, else the first."""
    most = MAX_FITTED_BATCHES if source == FITTED_DESCRIPTION else None
    batch_inputs = [inputs for inputs, _ in extract_inputs_and_labels(batches, analysis, max_batches=most)]
    count = sum(infer_batch_size(inputs) for inputs in batch_inputs)
    pairs = [(part, None) for inputs in batch_inputs for part in split_texts(analysis, inputs)]
    return EvalSet(
        lambda: pairs,
        f"{count:,} {source}",
        data=True,
        length=len(pairs),
        parts=find_output_parts(analysis.graph),
        fitted=source == FITTED_DESCRIPTION,
        text_input=find_text_input(analysis),
    )
