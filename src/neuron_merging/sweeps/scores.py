"""Compress with one combination of settings and measure size, fidelity and score.

Also computes fingerprints (hashes) of networks and settings for the result cache.
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
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.config import CompressConfig
from neuron_merging.data.images import BatchedDataset
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.fidelity import compute_metric, make_synthetic_eval_set
from neuron_merging.graph.digests import compute_digest, compute_graph_digest
from neuron_merging.graph.example_inputs import flatten_inputs
from neuron_merging.inputs.input_sets import make_heldout_inputs
from neuron_merging.pipeline import compress_analysis, prepare_inputs

ScoreFunction = Callable[[nn.Module], float]
"""Returns the score of a network; higher is better."""
ACCURACY_BATCH_SIZE = 256


@dataclass(frozen=True)
class AccuracyScore:
    """Computes the accuracy of a network on labelled images, in percent."""

    images: BatchedDataset

    def __call__(self, model: nn.Module) -> float:
        return float(evaluation.accuracy(*evaluation.predict(model, self.images.batches(ACCURACY_BATCH_SIZE))))


@dataclass(frozen=True)
class SweepContext:
    """The data that all combinations of a sweep share."""

    analysis: Analysis
    evaluate: ScoreFunction | None = None
    calibration: Any = None
    """Calibration batches, for the mergers that use data."""
    images: Any = None
    """Labelled images on which the saved networks are evaluated."""


@dataclass(frozen=True)
class CellTask:
    """The settings of a combination without the shared data, to send to another process; None for the original."""

    settings: CompressConfig | None
    calibrated: bool = False

    def attach_data(self, subject: SweepContext) -> CompressConfig | None:
        """Return the settings with the shared data."""
        return (
            replace(self.settings, calibration=subject.calibration)
            if self.settings and self.calibrated
            else self.settings
        )


def make_cell_task(settings: CompressConfig | None) -> CellTask:
    """Strip the data from the settings, so that the task is small to send to another process."""
    if settings is None:
        return CellTask(None)
    return CellTask(replace(settings, calibration=None, held=None), settings.calibration is not None)


def measure_cell_task(subject: SweepContext, task: CellTask) -> dict[str, Any]:
    """Compress with the settings of a task and measure size and score; without settings, measure the original."""
    settings = task.attach_data(subject)
    start = time.perf_counter()
    if settings is None:
        costs = Costs(subject.analysis)
        size = {"parameters": evaluation.count_parameters(subject.analysis.model), "macs": costs.macs({})}
        return {**size, "fidelity": 1.0, **_measure_score(subject, subject.analysis.model), "seconds": 0.0}
    try:
        small = compress_analysis(subject.analysis, settings, judge=False)
    except MergingError as error:  # one failing combination must not end the sweep
        return {"refused": str(error)}
    # The time of the compression alone: how long a score takes is the user's affair.
    seconds = time.perf_counter() - start
    size = {"parameters": small.summary.parameters[1], "macs": small.summary.macs[1]}
    return {
        **size,
        **_measure_fidelity(subject.analysis, small, settings),
        **_measure_score(subject, small.model),
        "seconds": seconds,
    }


def prepare_all_inputs(analysis: Analysis, wanted: Sequence[CompressConfig]) -> None:
    """Synthesise inputs once for all combinations; the analysis caches them."""
    for settings in wanted:
        make_heldout_inputs(analysis, settings.input_effort, settings.seed)
        prepare_inputs(analysis, settings.adapt_data_to(analysis.inputs), judge=False)


def compress_with_verdict(subject: SweepContext, settings: CompressConfig) -> Compressed:
    """Compress with the settings of a combination, with a verdict."""
    judge = subject.evaluate if subject.images is None else subject.images
    return compress_analysis(subject.analysis, replace(settings, evaluate=judge), compare_pruned=True)


def _measure_fidelity(analysis: Analysis, small: Compressed, settings: CompressConfig) -> dict[str, float]:
    """Measure the fidelity to the original's outputs on held-out synthesised inputs."""
    heldout = make_heldout_inputs(analysis, settings.input_effort, settings.seed)
    eval_set = make_synthetic_eval_set(analysis, heldout, settings.seed)
    fidelity = eval_set.compare({"original": analysis.model, "small": small.model}).scores[-1].fidelity
    return {} if fidelity is None else {"fidelity": fidelity}


def _measure_score(subject: SweepContext, model: nn.Module) -> dict[str, float]:
    """Compute the user's score of a network; nothing without a score function."""
    return (
        {}
        if subject.evaluate is None
        else {"score": compute_metric(subject.evaluate, subject.analysis.move_to_user(model))}
    )


def fingerprint_value(value: Any) -> str:
    """Return the digest of a setting and of the code behind it, so that a changed function is measured again."""
    return compute_digest(_expose_content(value))[:32]


def _expose_content(value: Any) -> Any:
    """Convert a setting to plain values that determine it and that can be hashed."""
    if isinstance(value, CompressConfig):
        return {name: _expose_content(getattr(value, name)) for name in value.__dataclass_fields__}
    # The data determines this score, and its digest is cheaper than a pickle of all images.
    if isinstance(value, AccuracyScore):
        return value.images.digest
    if isinstance(value, list | tuple):
        return [_expose_content(part) for part in value]
    if value is None or isinstance(value, Tensor | str | int | float | Mapping):
        return value
    # Pickle stores an importable function by name, without its code; source lacks the values of a closure. Take both.
    return _get_source_code(value), cloudpickle.dumps(value)


def _get_source_code(value: Any) -> bytes:
    """Return the source of a function or of an object's class; pickle stores importable ones by name only."""
    try:
        return inspect.getsource(value if callable(value) and hasattr(value, "__name__") else type(value)).encode()
    except (OSError, TypeError):
        return b""


def fingerprint_network(analysis: Analysis) -> str:
    """Return the digest of a network and its example inputs."""
    return compute_digest(compute_graph_digest(analysis.graph), flatten_inputs(analysis.inputs))[:32]
