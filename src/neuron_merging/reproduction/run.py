"""Run the trials of tables and figures with a result cache, and write CSV files, plots and an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from neuron_merging.errors import MergingError
from neuron_merging.reproduction import measurements, plots
from neuron_merging.reproduction.comparison import ClaimVerdict, PaperRow, build_rows, check_claims
from neuron_merging.reproduction.experiments import METHOD_TITLES, PaperTarget, filter_runnable_methods
from neuron_merging.reproduction.measurements import (
    PaperCell,
    PaperCheckpoint,
    PaperTrial,
    compute_similarities,
    format_layer_position,
    list_paper_trials,
    make_paper_cell,
)
from neuron_merging.reproduction.run_setup import (
    CheckpointFinder,
    PanelNetwork,
    ReproduceOptions,
    RunnableTarget,
    add_limit_to_title,
    describe_checkpoints,
)
from neuron_merging.reproduction.training.processes import find_device
from neuron_merging.sweeps.run_cells import CellResult, ResultCache, TaskExecutor, measure_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure
import base64
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from neuron_merging.atomic import replace_file
from neuron_merging.report.html_page import get_template_environment
from neuron_merging.reproduction.comparison import build_pivots
from neuron_merging.sweeps.results import format_csv, render_figure

MEASURE_FUNCTIONS = {"score": measurements.measure_trial_scores, "maps": measurements.measure_class_maps}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class MeasurementJob:
    """One measurement: a trial on a checkpoint, with its cache key."""

    entry: PanelNetwork
    checkpoint: PaperCheckpoint
    trial: PaperTrial
    cell: PaperCell


@dataclass(frozen=True)
class TargetOutcome:
    """The reproduced values of a table or figure."""

    target: PaperTarget
    rows: tuple[PaperRow, ...]
    verdicts: tuple[ClaimVerdict, ...]
    left_out: tuple[str, ...]
    subjects: tuple[dict[str, object], ...]
    pictures: dict[str, Figure]
    """Figures by file name without suffix."""
    similarities: tuple[dict[str, object], ...] = ()
    """One record per channel, for the figure on similarities."""


def reproduce_targets(options: ReproduceOptions) -> list[TargetOutcome]:
    """Measure what is not cached and return the outcome of every target."""
    device = find_device(options.device)
    with _create_progress_bar() as progress:
        task = progress.add_task("loading", total=None)
        finder = CheckpointFinder(options, device, lambda count: progress.advance(task, count))
        runnable_targets = finder.find_all()
        jobs = {runnable.target.name: list(_list_jobs(runnable, options)) for runnable in runnable_targets}
        results = _measure_jobs(
            [job for target_jobs in jobs.values() for job in target_jobs],
            ResultCache(options.out / "cache"),
            progress,
            task,
        )
        progress.update(task, description="drawing")
        judged = options.limit is None
        return [_build_outcome(runnable, jobs[runnable.target.name], results, judged) for runnable in runnable_targets]


def _create_progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _choose_measurement(target: PaperTarget) -> str:
    return "maps" if target.name == "figure4" else "score"


def _list_jobs(runnable: RunnableTarget, options: ReproduceOptions) -> Iterator[MeasurementJob]:
    for entry in runnable.entries:
        for trial in list_paper_trials(
            runnable.target, entry.panel, filter_runnable_methods(entry.network, options.methods)
        ):
            for checkpoint in entry.checkpoints:
                yield MeasurementJob(
                    entry,
                    checkpoint,
                    trial,
                    make_paper_cell(_choose_measurement(runnable.target), checkpoint, entry.panel, trial),
                )


def _measure_jobs(
    jobs: list[MeasurementJob], cache: ResultCache, progress: Progress, task: Any
) -> dict[str, CellResult]:
    """Return results by key; each is stored as soon as it is measured."""
    progress.update(
        task, total=_count_images(list({job.cell.key: job for job in jobs if cache.get(job.cell) is None}.values()))
    )

    def work(_: None, job: MeasurementJob) -> CellResult:
        description = f"{job.entry.network.title}, {job.trial}"
        progress.update(task, description=description)
        result = MEASURE_FUNCTIONS[job.cell.kind](job.checkpoint, job.entry.panel, job.trial)
        _check_result_finite(result, description)
        return result

    return measure_cells([(job.cell, job) for job in jobs], cache, TaskExecutor(), work, None)


def _check_result_finite(result: CellResult, where: str) -> None:
    for name, value in result.items():
        if isinstance(value, float) and not math.isfinite(value):
            fix = "The network's outputs are NaN or infinite: check its weights."
            raise MergingError(f"{name} is {value}", where=where, fix=fix)


def _count_images(jobs: list[MeasurementJob]) -> int:
    """Return the number of forward passes of single images, for the progress bar; each original runs once."""
    scored = [job for job in jobs if job.cell.kind == "score"]
    cut = sum(len(job.checkpoint.images) for job in scored if job.trial.method)
    return cut + sum(len(checkpoint.images) for checkpoint in {id(j.checkpoint): j.checkpoint for j in scored}.values())


# Outcomes


def _build_outcome(
    runnable: RunnableTarget, jobs: list[MeasurementJob], results: dict[str, CellResult], judged: bool
) -> TargetOutcome:
    """Put a target together; only figures of all test images are judged against the paper's."""
    rows = tuple(row for entry in runnable.entries for row in _collect_rows(runnable.target, entry, jobs, results))
    rows = rows if judged else tuple(replace(row, agrees=None) for row in rows)
    layers = {e.network.name: _collect_similarities(e) for e in runnable.entries} if runnable.target.thresholds else {}
    first = next(iter(layers.values()), None)
    return TargetOutcome(
        target=runnable.target,
        rows=rows,
        verdicts=check_claims(runnable.target.name, rows, first) if judged else (),
        left_out=runnable.left_out,
        subjects=tuple(describe_checkpoints(runnable)),
        pictures=dict(_draw_figures(runnable, rows, jobs, results, layers)),
        similarities=tuple(
            {"network": network, "layer": layer, "channel": channel, "maximum cosine": value}
            for network, similarities in layers.items()
            for layer, values in similarities.items()
            for channel, value in enumerate(values)
        ),
    )


def _collect_rows(
    target: PaperTarget, entry: PanelNetwork, jobs: list[MeasurementJob], results: dict[str, CellResult]
) -> Iterator[PaperRow]:
    by_trial: dict[PaperTrial, list[CellResult]] = {}
    for job in jobs:
        if job.entry is entry:
            by_trial.setdefault(job.trial, []).append(results[job.cell.key])
    for trial, found in by_trial.items():
        yield from build_rows(target, entry.network, trial, found)


def _collect_similarities(entry: PanelNetwork) -> dict[str, list[float]]:
    """Return the similarities of the first checkpoint, by layer."""
    return {
        format_layer_position(name): values.tolist()
        for name, values in compute_similarities(entry.checkpoints[0]).items()
    }


def _draw_figures(
    runnable: RunnableTarget,
    rows: tuple[PaperRow, ...],
    jobs: list[MeasurementJob],
    results: dict[str, CellResult],
    layers: dict[str, Any],
) -> Iterator[tuple[str, Figure]]:
    name = runnable.target.name
    if not runnable.entries:
        return
    if _choose_measurement(runnable.target) == "score" and not layers:
        shown = [metric for metric in runnable.target.metrics if metric != "parameters"]
        yield name, plots.plot_comparison(rows, shown)
        return
    for entry in runnable.entries:
        file = name if len(runnable.entries) == 1 else f"{name}-{entry.network.name}"
        network_rows = [row for row in rows if row.network == entry.network.name]
        if layers:
            yield file, plots.plot_similarity(layers[entry.network.name], network_rows, entry.network.title)
        else:
            yield file, _draw_class_maps(entry, [job for job in jobs if job.entry is entry], results)


def _draw_class_maps(entry: PanelNetwork, jobs: list[MeasurementJob], results: dict[str, CellResult]) -> Figure:
    """Draw the class activation maps of the first checkpoint."""
    checkpoint = entry.checkpoints[0]
    x, labels = measurements.load_class_images(checkpoint)
    several = len({(job.trial.criterion, job.trial.ratio) for job in jobs if job.trial.method}) > 1
    shown = {
        _format_title(job.trial, several): results[job.cell.key]["maps"] for job in jobs if job.checkpoint is checkpoint
    }
    names = [
        CIFAR10_CLASSES[label] if entry.network.data == "cifar-10" else f"class {label}" for label in labels.tolist()
    ]
    return plots.plot_class_maps(measurements.denormalise_images(x, checkpoint.images), shown, names)


def _format_title(trial: PaperTrial, several: bool) -> str:
    title = METHOD_TITLES.get(trial.label, trial.label)
    return f"{title}\n{trial.criterion} {trial.ratio:.0%}" if trial.method and several else title


INDEX_PAGE = "index.html"


def save_outcomes(outcomes: Sequence[TargetOutcome], options: ReproduceOptions) -> list[Path]:
    """Write all files of a run and return their paths; the page is written last."""
    written = {}
    parts = []
    for outcome in outcomes:
        pictures = {name: render_figure(figure, "png") for name, figure in outcome.pictures.items()}
        for name, figure in outcome.pictures.items():
            written[f"{name}.png"] = pictures[name]
            written[f"{name}.svg"] = render_figure(figure, "svg")
        if outcome.rows:
            written[f"{outcome.target.name}.csv"] = format_csv([asdict(row) for row in outcome.rows])
        if outcome.similarities:
            written[f"{outcome.target.name}-similarity.csv"] = format_csv(outcome.similarities)
        parts.append(_describe_outcome(outcome, pictures))
    written[INDEX_PAGE] = _render_page(parts, options).encode()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, content in written.items():
        replace_file(options.out / name, content)
    return [options.out / name for name in written]


def _describe_outcome(outcome: TargetOutcome, pictures: dict[str, bytes]) -> dict[str, Any]:
    return {
        "name": outcome.target.name,
        "title": outcome.target.title,
        "pivots": build_pivots(outcome.rows),
        "verdicts": outcome.verdicts if outcome.rows else (),
        "sources": ", ".join(dict.fromkeys(row.source for row in outcome.rows if row.source)),
        "subjects": outcome.subjects,
        "left_out": outcome.left_out,
        "pictures": {name: base64.b64encode(content).decode() for name, content in pictures.items()},
    }


def _render_page(parts: list[dict[str, Any]], options: ReproduceOptions) -> str:
    return (
        get_template_environment("neuron_merging.reproduction")
        .get_template("reproduce.html")
        .render(
            title=parts[0]["title"]
            if len(parts) == 1
            else add_limit_to_title("The paper's figures, recomputed", options.limit),
            judged=options.limit is None,
            torch=torch.__version__,
            methods=", ".join(method.label for method in options.methods),
            parts=parts,
        )
    )


def outcomes_to_json(outcomes: Sequence[TargetOutcome], files: Sequence[Path]) -> dict[str, Any]:
    """Return a run as a JSON document."""
    return {
        "targets": [
            {
                "name": outcome.target.name,
                "title": outcome.target.title,
                "rows": outcome.rows,
                "claims": outcome.verdicts if outcome.rows else (),
                "networks": outcome.subjects,
                "left out": outcome.left_out,
            }
            for outcome in outcomes
        ],
        "files": [str(file) for file in files],
    }
