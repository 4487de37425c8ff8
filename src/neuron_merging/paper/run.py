"""run: every trial of the targets, measured or read from the cache, as rows, verdicts and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from neuron_merging.errors import MergingError
from neuron_merging.measuring.device import find_device
from neuron_merging.paper import maps, plots, scores
from neuron_merging.paper.casting import Cast, Casting, Entry, subjects
from neuron_merging.paper.cells import Cell
from neuron_merging.paper.checkpoint import Checkpoint
from neuron_merging.paper.claims import Verdict, verdicts
from neuron_merging.paper.methods import TITLES, runnable
from neuron_merging.paper.options import Options
from neuron_merging.paper.rows import Row, rows
from neuron_merging.paper.settings import Target
from neuron_merging.paper.similarity import place, similarities
from neuron_merging.paper.trials import Trial, cell, trials
from neuron_merging.sweeping.cells import Cache, Result
from neuron_merging.sweeping.pool import Pool
from neuron_merging.sweeping.running import measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {"score": scores.score, "maps": maps.maps}
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Job:
    """One measurement that has to be there."""

    entry: Entry
    checkpoint: Checkpoint
    trial: Trial
    cell: Cell


@dataclass(frozen=True)
class Outcome:
    """A table or figure as it came out."""

    target: Target
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    left_out: tuple[str, ...]
    subjects: tuple[dict[str, object], ...]
    pictures: dict[str, Figure]
    """By the name of the file without its ending."""
    similarities: tuple[dict[str, object], ...] = ()
    """One line per channel, where the figure is about them."""


def run(options: Options) -> list[Outcome]:
    """Measure what is not in the cache yet, and put everything together."""
    device = find_device(options.device)
    with _progress() as progress:
        task = progress.add_task("loading", total=None)
        casting = Casting(options, device, lambda count: progress.advance(task, count))
        casts = casting.casts()
        jobs = {cast.target.name: list(_jobs(cast, options)) for cast in casts}
        results = _measured([job for own in jobs.values() for job in own], Cache(options.out / "cache"), progress, task)
        progress.update(task, description="drawing")
        return [_outcome(cast, jobs[cast.target.name], results) for cast in casts]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _kind(target: Target) -> str:
    return "maps" if target.name == "figure4" else "score"


def _jobs(cast: Cast, options: Options) -> Iterator[Job]:
    for entry in cast.entries:
        for trial in trials(cast.target, entry.panel, runnable(entry.network, options.methods)):
            for checkpoint in entry.checkpoints:
                yield Job(entry, checkpoint, trial, cell(_kind(cast.target), checkpoint, entry.panel, trial))


def _measured(jobs: list[Job], cache: Cache, progress: Progress, task: Any) -> dict[str, Result]:
    """Results by the key of their cell; each is kept as soon as it is there."""
    progress.update(
        task, total=_images(list({job.cell.key: job for job in jobs if cache.get(job.cell) is None}.values()))
    )

    def work(_: None, job: Job) -> Result:
        said = f"{job.entry.network.title}, {job.trial}"
        progress.update(task, description=said)
        found = MEASURES[job.cell.kind](job.checkpoint, job.entry.panel, job.trial)
        _check_finite(found, said)
        return found

    return measured([(job.cell, job) for job in jobs], cache, Pool(), work, None)


def _check_finite(result: Result, where: str) -> None:
    for name, value in result.items():
        if isinstance(value, float) and not math.isfinite(value):
            fix = "The network's outputs are too large or not numbers: look at its weights."
            raise MergingError(f"{name} is {value}", where=where, fix=fix)


def _images(jobs: list[Job]) -> int:
    """How many images have to go through networks; each original runs once."""
    scored = [job for job in jobs if job.cell.kind == "score"]
    cut = sum(len(job.checkpoint.images) for job in scored if job.trial.method)
    return cut + sum(len(checkpoint.images) for checkpoint in {id(j.checkpoint): j.checkpoint for j in scored}.values())


# Putting together


def _outcome(cast: Cast, jobs: list[Job], results: dict[str, Result]) -> Outcome:
    found = tuple(row for entry in cast.entries for row in _rows(cast.target, entry, jobs, results))
    layers = {e.network.name: _layers(e) for e in cast.entries} if cast.target.thresholds else {}
    first = next(iter(layers.values()), None)
    return Outcome(
        target=cast.target,
        rows=found,
        verdicts=verdicts(cast.target.name, found, first),
        left_out=cast.left_out,
        subjects=tuple(subjects(cast)),
        pictures=dict(_pictures(cast, found, jobs, results, layers)),
        similarities=tuple(
            {"network": network, "layer": layer, "channel": channel, "maximum cosine": value}
            for network, own in layers.items()
            for layer, values in own.items()
            for channel, value in enumerate(values)
        ),
    )


def _rows(target: Target, entry: Entry, jobs: list[Job], results: dict[str, Result]) -> Iterator[Row]:
    by_trial: dict[Trial, list[Result]] = {}
    for job in jobs:
        if job.entry is entry:
            by_trial.setdefault(job.trial, []).append(results[job.cell.key])
    for trial, found in by_trial.items():
        yield from rows(target, entry.network, trial, found)


def _layers(entry: Entry) -> dict[str, list[float]]:
    """Similarities by layer, of the first checkpoint."""
    return {place(name): values.tolist() for name, values in similarities(entry.checkpoints[0]).items()}


def _pictures(
    cast: Cast, found: tuple[Row, ...], jobs: list[Job], results: dict[str, Result], layers: dict[str, Any]
) -> Iterator[tuple[str, Figure]]:
    name = cast.target.name
    if not cast.entries:
        return
    if _kind(cast.target) == "score" and not layers:
        shown = [metric for metric in cast.target.metrics if metric != "parameters"]
        yield name, plots.comparison(found, shown)
        return
    for entry in cast.entries:
        file = name if len(cast.entries) == 1 else f"{name}-{entry.network.name}"
        own = [row for row in found if row.network == entry.network.name]
        if layers:
            yield file, plots.similarity(layers[entry.network.name], own, entry.network.title)
        else:
            yield file, _heat_maps(entry, [job for job in jobs if job.entry is entry], results)


def _heat_maps(entry: Entry, jobs: list[Job], results: dict[str, Result]) -> Figure:
    """The maps of the first checkpoint."""
    checkpoint = entry.checkpoints[0]
    x, labels = maps.pictures(checkpoint)
    several = len({(job.trial.criterion, job.trial.ratio) for job in jobs if job.trial.method}) > 1
    shown = {_title(job.trial, several): results[job.cell.key]["maps"] for job in jobs if job.checkpoint is checkpoint}
    names = [CIFAR10[label] if entry.network.data == "cifar-10" else f"class {label}" for label in labels.tolist()]
    return plots.heat_maps(maps.visible(x, checkpoint.images), shown, names)


def _title(trial: Trial, several: bool) -> str:
    title = TITLES.get(trial.label, trial.label)
    return f"{title}\n{trial.criterion} {trial.ratio:.0%}" if trial.method and several else title
