"""Compress with one combination of settings and measure size, fidelity and score; fingerprints (hashes) of
networks and settings for the result cache.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
from torch import Tensor, nn

from neuron_merging import evaluation
from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.model_folder import Compressed
from neuron_merging.config import CompressConfig
from neuron_merging.data.images import BatchedDataset
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.eval_set import compute_metric, make_synthetic_eval_set
from neuron_merging.graph.digests import compute_digest, compute_graph_digest
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs.input_sets import make_heldout_inputs
from neuron_merging.pipeline import compress_analysis, prepare_inputs

ScoreFunction = Callable[[nn.Module], float]
ACCURACY_BATCH_SIZE = 256


@dataclass(frozen=True)
class AccuracyScore:
    """Of a network on labelled images, in percent."""

    images: BatchedDataset

    def __call__(self, model: nn.Module) -> float:
        return float(evaluation.accuracy(*evaluation.predict(model, self.images.batches(ACCURACY_BATCH_SIZE))))


@dataclass(frozen=True)
class SweepContext:
    """What all cells of a sweep have in common."""

    analysis: Analysis
    evaluate: ScoreFunction | None = None
    calibration: Any = None
    """For the cells whose merger uses data."""
    images: Any = None
    """What the networks that are kept are judged on."""


@dataclass(frozen=True)
class CellTask:
    """The settings of a cell, without the data, which all cells share; those of the original are None."""

    settings: CompressConfig | None
    calibrated: bool = False

    def filled(self, subject: SweepContext) -> CompressConfig | None:
        """The settings with the data."""
        return (
            replace(self.settings, calibration=subject.calibration)
            if self.settings and self.calibrated
            else self.settings
        )


def make_cell_task(settings: CompressConfig | None) -> CellTask:
    """What goes to another process."""
    if settings is None:
        return CellTask(None)
    return CellTask(replace(settings, calibration=None, held=None), settings.calibration is not None)


def measure_cell_task(subject: SweepContext, task: CellTask) -> dict[str, Any]:
    """Size and score of what these settings make of the network; without any, of the network itself."""
    settings = task.filled(subject)
    start = time.perf_counter()
    if settings is None:
        costs = Costs(subject.analysis)
        size = {"parameters": evaluation.count_parameters(subject.analysis.model), "macs": costs.macs({})}
        return {**size, "fidelity": 1.0, **_measure_score(subject, subject.analysis.model), "seconds": 0.0}
    try:
        small = compress_analysis(subject.analysis, settings, judge=False)
    except MergingError as error:  # the other cells may well work
        return {"refused": str(error)}
    seconds = time.perf_counter() - start
    size = {"parameters": small.summary.parameters[1], "macs": small.summary.macs[1]}
    return {
        **size,
        **_measure_fidelity(subject.analysis, small, settings),
        **_measure_score(subject, small.model),
        "seconds": seconds,
    }


def prepare_all_inputs(analysis: Analysis, wanted: Sequence[CompressConfig]) -> None:
    """Make once what many cells need and the analysis keeps: synthesised inputs."""
    for settings in wanted:
        make_heldout_inputs(analysis, settings.input_effort, settings.seed)
        prepare_inputs(analysis, settings.fitted_to(analysis.inputs), judge=False)


def compress_with_verdict(subject: SweepContext, settings: CompressConfig) -> Compressed:
    """The network of a cell, with a verdict."""
    judge = subject.evaluate if subject.images is None else subject.images
    return compress_analysis(subject.analysis, replace(settings, evaluate=judge), compare_pruned=True)


def _measure_fidelity(analysis: Analysis, small: Compressed, settings: CompressConfig) -> dict[str, float]:
    """To the original's answers, on inputs of our own making that nothing was fitted to."""
    heldout = make_heldout_inputs(analysis, settings.input_effort, settings.seed)
    exam = make_synthetic_eval_set(analysis, heldout, settings.seed)
    found = exam.compare({"original": analysis.model, "small": small.model}).scores[-1].fidelity
    return {} if found is None else {"fidelity": found}


def _measure_score(subject: SweepContext, model: nn.Module) -> dict[str, float]:
    """What the user's own function says of a network."""
    return (
        {}
        if subject.evaluate is None
        else {"score": compute_metric(subject.evaluate, subject.analysis.move_to_user(model))}
    )


def fingerprint_value(value: Any) -> str:
    """The digest of a setting, and of its code, which may change."""
    return compute_digest(_expose_content(value))[:32]


def _expose_content(value: Any) -> Any:
    """What makes one setting differ from another, as something that has a digest."""
    if isinstance(value, CompressConfig):
        return {name: _expose_content(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, AccuracyScore):
        return value.images.digest
    if isinstance(value, list | tuple):
        return [_expose_content(part) for part in value]
    if value is None or isinstance(value, Tensor | str | int | float | Mapping):
        return value
    return _get_source_code(value), cloudpickle.dumps(value)


def _get_source_code(value: Any) -> bytes:
    """The code of a function or of an object's class: pickled, one that can be imported is a name."""
    try:
        return inspect.getsource(value if callable(value) and hasattr(value, "__name__") else type(value)).encode()
    except (OSError, TypeError):
        return b""


def fingerprint_network(analysis: Analysis) -> str:
    """The digest of a network and of its example inputs."""
    return compute_digest(compute_graph_digest(analysis.graph), flatten_inputs(analysis.inputs))[:32]
