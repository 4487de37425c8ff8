"""exams: data that smaller networks are judged on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.selection import Selection
from neuron_merging.data.images import Batched
from neuron_merging.errors import MergingError
from neuron_merging.graph.trees import flat
from neuron_merging.measuring.exam import Exam
from neuron_merging.measuring.fidelity import BATCH, on_images
from neuron_merging.measuring.suitability import check_data
from neuron_merging.mergers.calibrated import with_labels
from neuron_merging.statistics.parts import parts_of
from neuron_merging.statistics.synthetic import batch_size

ENOUGH = 8
"""Calibration batches of which the last is held apart from the fit."""
HELD_APART = "calibration samples that were held apart"
FITTED_ON = "calibration samples, which it was fitted on"
LOOKED_AT = 16
"""Samples of which it is seen whether they fit the network."""


def on_data(images: Any, analysis: Analysis, where: str = "evaluate=") -> Exam:
    """Images, or batches of inputs with labels behind them; refused if they do not fit the network."""
    exam = _on_images(images, analysis) if isinstance(images, Batched) else _on_batches(images, analysis, where)
    first = next(iter(exam.open()), None)
    if first is None:
        raise MergingError("there is nothing to evaluate on", where=where, fix="Give at least one batch.")
    check_data(analysis.model, *_some(*first), getattr(images, "classes", 0), where=where)
    return exam


def _on_images(images: Batched, analysis: Analysis) -> Exam:
    example = next(value for value in flat(analysis.inputs) if isinstance(value, Tensor))

    def opened() -> Any:
        for (x,), y in on_images(images)[0]:
            yield (x.to(example.device, example.dtype),), y

    length, parts = -(-len(images) // BATCH), parts_of(analysis.graph)
    return Exam(opened, on_images(images)[1], data=True, labelled=images.labelled, length=length, parts=parts)


def _on_batches(batches: Iterable[Any], analysis: Analysis, where: str) -> Exam:
    selection = Selection(analysis, {})
    first = next(with_labels(batches, selection, where), None)
    labelled = first is not None and first[1] is not None
    said = "data of yours"
    if isinstance(batches, Sequence):
        said = f"{sum(batch_size(inputs) for inputs, _ in with_labels(batches, selection, where)):,} samples of {said}"
    parts = parts_of(analysis.graph)
    return Exam(lambda: with_labels(batches, selection, where), said, data=True, labelled=labelled, parts=parts)


def _some(inputs: tuple[Any, ...], labels: Tensor | None) -> tuple[tuple[Any, ...], Tensor | None]:
    """The first samples, where a batch is one tensor: those are many where they are images."""
    if len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].ndim:
        return (inputs[0][:LOOKED_AT],), None if labels is None else labels[:LOOKED_AT]
    return inputs, labels


def apart(calibration: Iterable[Any], others: Iterable[Any] | None) -> tuple[Iterable[Any], Iterable[Any], str]:
    """What to fit on, what to judge on, and what that is: samples of their own where there are enough."""
    if others is not None:
        return calibration, others, HELD_APART
    if isinstance(calibration, Sequence) and len(calibration) >= ENOUGH:
        return calibration[:-1], calibration[-1:], HELD_APART
    return calibration, calibration, FITTED_ON


def on_calibration(batches: Iterable[Any], analysis: Analysis, source: str) -> Exam:
    """Some calibration batches; labels that come with them have no part."""
    found = list(islice(with_labels(batches, Selection(analysis, {})), ENOUGH))
    count = sum(batch_size(inputs) for inputs, _ in found)
    pairs = [(inputs, None) for inputs, _ in found]
    return Exam(lambda: pairs, f"{count:,} {source}", data=True, length=len(pairs), parts=parts_of(analysis.graph))
