"""scores: one cut of a network, carried out and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from neuron_merging import measuring
from neuron_merging.channels.analysis import Analysis
from neuron_merging.data.images import Batched
from neuron_merging.errors import MergingError
from neuron_merging.folder.store import Compressed
from neuron_merging.measuring.exam import scored, without_data
from neuron_merging.measuring.size import Costs
from neuron_merging.mergers import Moments
from neuron_merging.pipeline import compress_analysed
from neuron_merging.settings import Settings
from neuron_merging.statistics.made import recall

Evaluate = Callable[[nn.Module], float]
BATCH = 256


@dataclass(frozen=True)
class Accuracy:
    """Of a network on labelled images, in percent."""

    images: Batched

    def __call__(self, model: nn.Module) -> float:
        return float(measuring.accuracy(*measuring.predict(model, self.images.batches(BATCH))))


@dataclass(frozen=True)
class Subject:
    """What all cells of a sweep have in common."""

    analysis: Analysis
    evaluate: Evaluate | None = None
    calibration: Any = None
    """For the cells whose merger uses data."""
    images: Any = None
    """What the networks that are kept are judged on."""


@dataclass(frozen=True)
class Task:
    """The settings of a cell, without the data, which all cells share; those of the original are None."""

    settings: Settings | None
    calibrated: bool = False

    def filled(self, subject: Subject) -> Settings | None:
        """The settings with the data."""
        return (
            replace(self.settings, calibration=subject.calibration)
            if self.settings and self.calibrated
            else self.settings
        )


def task_of(settings: Settings | None) -> Task:
    """What goes to another process."""
    if settings is None:
        return Task(None)
    return Task(replace(settings, calibration=None, held=None), settings.calibration is not None)


def measured(subject: Subject, task: Task) -> dict[str, Any]:
    """Size and score of what these settings make of the network; without any, of the network itself."""
    settings = task.filled(subject)
    start = time.perf_counter()
    if settings is None:
        costs = Costs(subject.analysis)
        size = {"parameters": measuring.count_parameters(subject.analysis.model), "macs": costs.macs({})}
        return {**size, "fidelity": 1.0, **_score(subject, subject.analysis.model), "seconds": 0.0}
    try:
        small = compress_analysed(subject.analysis, settings, judge=False)
    except MergingError as error:  # the other cells may well work
        return {"refused": str(error)}
    seconds = time.perf_counter() - start
    size = {"parameters": small.summary.parameters[1], "macs": small.summary.macs[1]}
    return {**size, **_fidelity(subject.analysis, small, settings), **_score(subject, small.model), "seconds": seconds}


def prepare(analysis: Analysis, wanted: Sequence[Settings]) -> None:
    """Make once what many cells need and the analysis keeps: inputs that the network remembers."""
    for settings in wanted:
        without_data(analysis, settings.own_inputs, settings.seed)
        if settings.calibration is None and (settings.budget is not None or isinstance(settings.method(), Moments)):
            recall(analysis, settings.own_inputs, settings.seed)


def made(subject: Subject, settings: Settings) -> Compressed:
    """The network of a cell, with a verdict."""
    metric = subject.evaluate if subject.images is None else None
    return compress_analysed(subject.analysis, replace(settings, images=subject.images, metric=metric), pruned=True)


def _fidelity(analysis: Analysis, small: Compressed, settings: Settings) -> dict[str, float]:
    """To the original's answers, on inputs of our own making that nothing was fitted to."""
    exam = without_data(analysis, settings.own_inputs, settings.seed)
    found = exam.compare({"original": analysis.model, "small": small.model}).scores[-1].fidelity
    return {} if found is None else {"fidelity": found}


def _score(subject: Subject, model: nn.Module) -> dict[str, float]:
    """What the user's own function says of a network."""
    return {} if subject.evaluate is None else {"score": scored(subject.evaluate, model)}
