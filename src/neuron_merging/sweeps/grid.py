"""Run every combination of targets (budgets or ratios), criteria and mergers on one analysis."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from neuron_merging import atomic, progress
from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.config import CompressConfig, build_config, load_batches_to_memory, takes_sweep_options
from neuron_merging.data.images import BatchedDataset
from neuron_merging.errors import MergingError
from neuron_merging.merging.protocol import uses_data
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.selection.budget import DEFAULT_KEY, parse_budget
from neuron_merging.sweeps import run_cells, scores
from neuron_merging.sweeps.results import Sweep, SweepRow, format_csv
from neuron_merging.sweeps.run_cells import ResultCache, TaskExecutor, count_processes, measure_cells
from neuron_merging.sweeps.scores import (
    AccuracyScore,
    ScoreFunction,
    SweepContext,
    fingerprint_network,
    fingerprint_value,
)

ORIGINAL_TARGET = "original"


@dataclass(frozen=True)
class SweepTrial:
    """One combination, in words and as settings; the original network has none."""

    target: str = ORIGINAL_TARGET
    criterion: str = ""
    merger: str = ""
    settings: CompressConfig | None = field(default=None, repr=False)
    recipe: Recipe | None = field(default=None, repr=False)
    """What the command line would call it, for the folder of the best."""

    def __str__(self) -> str:
        return " ".join(part for part in (self.target, self.criterion, self.merger) if part)


CutTarget = tuple[str, dict[str, Any]]
"""What a cut is to reach: its name, and the setting that asks for it."""


def expand_targets(budget: object = None, ratio: object = None) -> list[CutTarget]:
    """Budgets and ratios, each of which may be several.

    >>> [name for name, _ in expand_targets({"macs": ["90%", 0.5]}, 0.3)]
    ['macs 90%', 'macs 50%', 'ratio 0.3']
    """
    found: list[CutTarget] = []
    for one in _expand_budgets(budget):
        found.append((", ".join(f"{key} {_format_limit(value)}" for key, value in one.items()), {"budget": one}))
    for share in to_list(ratio):
        name = f"ratio {share:g}" if isinstance(share, int | float) else "ratios by layer"
        found.append((name, {"ratio": share}))
    if not found:
        raise MergingError(
            "no combination to run", where="budget=", fix='For instance budget={"macs": [0.9, 0.7, 0.5]}.'
        )
    return list({name: (name, asked) for name, asked in found}.values())


def _expand_budgets(budget: object) -> Iterator[dict[str, Any]]:
    """A mapping with lists stands for every combination; a number alone is a share of the multiply-accumulates."""
    if isinstance(budget, Mapping):
        for values in itertools.product(*(to_list(value) for value in budget.values())):
            yield dict(zip(budget, values, strict=True))
    else:
        for one in to_list(budget):
            yield from _expand_budgets(one if isinstance(one, Mapping) else {DEFAULT_KEY: one})


def _format_limit(value: object) -> str:
    return f"{100 * value:g}%" if isinstance(value, float) and value <= 1 else f"{value}"


def to_list(value: Any) -> list[Any]:
    """One thing or several, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def get_choice_name(choice: Any) -> str:
    """What a criterion or merger is called in tables."""
    if choice is None or isinstance(choice, str):
        return choice or "default"
    return str(getattr(choice, "__name__", None) or choice)


def build_trials(
    wanted: Sequence[CutTarget], criteria: Sequence[Any], mergers: Sequence[Any], base: CompressConfig
) -> list[SweepTrial]:
    """The original, then every combination, each checked."""
    found = [SweepTrial()]
    for (name, asked), criterion, merger in itertools.product(wanted, criteria, mergers):
        settings = replace(base, criterion=criterion, merger=merger, **asked)
        if merger is not None and not uses_data(settings.method()):
            settings = replace(settings, calibration=None)
        if settings.budget is None:
            settings = replace(settings, limits=None)
        settings.check()
        found.append(SweepTrial(name, get_choice_name(criterion), get_choice_name(merger), settings))
    return found


CELLS_FOLDER, TABLE_FILE, DOCUMENT_FILE, BEST_FOLDER = "cells", "sweep.csv", "sweep.json", "best"
"""What a sweep's folder holds."""


class SweepCell(run_cells.Cell, frozen=True, kw_only=True):
    """A trial on a network, scored in some way: sums of all that has a say, and names for people."""

    network: str
    target: str
    criterion: str
    merger: str
    settings: str
    scoring: str


def make_sweep_cell(trial: SweepTrial, network: str, scoring: str) -> SweepCell:
    """The measurement of a trial."""
    return SweepCell(
        network=network,
        target=trial.target,
        criterion=trial.criterion,
        merger=trial.merger,
        settings=fingerprint_value(trial.settings),
        scoring=scoring,
    )


@takes_sweep_options
def sweep(
    model: nn.Module | Analysis,
    example_inputs: Any = None,
    *,
    out: str | Path | None = None,
    evaluate: ScoreFunction | BatchedDataset | None = None,
    calibration: Iterable[Any] | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    save_best: bool = False,
    **options: Any,
) -> Sweep:
    """Every combination of budgets or ratios, criteria and mergers, each carried out and scored, on one analysis.

    Parameters
    ----------
    model
        The network, which is not changed, or an analysis of it.
    example_inputs
        As for `analyse`.
    out
        A folder for the results, cell by cell: the same call goes on where an earlier one was cut off.
    evaluate
        A function of a network that returns its score, the larger the better, or labelled images for the accuracy.
        Left out, networks are ranked by their fidelity to the original on inputs of our own making. A function that
        measures time has an attribute `timed` that is true: the networks are then scored one at a time.
    calibration
        Unlabelled batches, for the mergers that use data.
    jobs
        Processes at a time; left out, one for each processor.
    cluster
        The address of a Dask scheduler, in place of processes of this machine.
    save_best
        Write the best network of each target into the folder too.
    **options
        Those of `compress` that a sweep can go through or that all its networks can share.

    Returns
    -------
    Sweep
        A row for each combination; printed, a table.

    Raises
    ------
    MergingError
        An argument that cannot be meant, a score that is no number, or a cluster that is not there.
    ModelError
        The model cannot be captured.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> found = nm.sweep(net, torch.zeros(1, 4), budget={"params": [0.8, 0.5]}, jobs=1)
    >>> [(row.target, row.parameters) for row in found.rows]
    [('params 80%', 86), ('params 50%', 51)]
    """
    batches = None if calibration is None else list(load_batches_to_memory(calibration))
    swept = {name: options.pop(name, None) for name in ("budget", "ratio", "criterion", "merger")}
    base = build_config({**options, "calibration": batches}, "sweep")
    criteria, mergers = to_list(swept["criterion"]) or [base.criterion], to_list(swept["merger"]) or [None]
    wanted = build_trials(expand_targets(swept["budget"], swept["ratio"]), criteria, mergers, base)
    if save_best and out is None:
        raise MergingError("there is no folder for the best networks", where="save_best=", fix="Give out=.")
    pool = create_executor(wanted, jobs, cluster, evaluate)
    images = evaluate if isinstance(evaluate, BatchedDataset) else None
    metric: Any = evaluate if images is None else AccuracyScore(images)
    subject = SweepContext(analyse(model, example_inputs), metric, batches, images)
    return run_sweep(subject, wanted, out, pool, _save_best_network if save_best else None)


def create_executor(
    wanted: Sequence[SweepTrial], jobs: int | None, cluster: str | None, score: object = None
) -> TaskExecutor:
    """Where to work; in one process where a budget or the score times something: others would disturb the clock."""
    processes = count_processes(jobs, len(wanted))
    limits = [x for t in wanted if t.settings and t.settings.budget for x in parse_budget(t.settings.budget)]
    if not any(limit.kind.is_timed for limit in limits) and not getattr(score, "timed", False):
        return TaskExecutor(processes, cluster)
    if cluster is not None:
        what = "time is measured, and a cluster runs several cells at a time"
        raise MergingError(what, where="cluster=", fix="Leave it out: the cells run one after the other here.")
    if (jobs or 1) > 1:
        progress.log.warning("the cells run one at a time: several would disturb one another's clocks")
    return TaskExecutor(1)


SaveBest = Callable[[Path, SweepTrial, SweepContext, Sweep], None]
"""Writes the folder of a network that is the best of its target."""


def run_sweep(
    subject: SweepContext,
    wanted: Sequence[SweepTrial],
    out: str | Path | None,
    pool: TaskExecutor,
    keep: SaveBest | None = None,
) -> Sweep:
    """Measure what is not known yet, and put everything together; with a folder, all of it is kept there."""
    place = None if out is None else check_sweep_folder(out)
    if place is None:
        return _measure_trials(subject, wanted, None, pool)
    (place / CELLS_FOLDER).mkdir(parents=True, exist_ok=True)
    with atomic.lock_path(place, patient=False):
        found = _measure_trials(subject, wanted, ResultCache(place / CELLS_FOLDER), pool)
        atomic.replace_file(place / TABLE_FILE, format_csv(found.lines()))
        atomic.replace_file(place / DOCUMENT_FILE, msgspec.json.format(msgspec.json.encode(found), indent=1))
        if keep is not None:
            for row in found.best.values():
                keep(place / BEST_FOLDER / make_folder_name(row.target), _find_trial(wanted, row), subject, found)
    return found


def _find_trial(wanted: Sequence[SweepTrial], row: SweepRow) -> SweepTrial:
    """The combination that a row is about."""
    names = row.target, row.criterion, row.merger
    return next(trial for trial in wanted if (trial.target, trial.criterion, trial.merger) == names)


def _measure_trials(
    subject: SweepContext, wanted: Sequence[SweepTrial], cache: ResultCache | None, pool: TaskExecutor
) -> Sweep:
    network, scoring = fingerprint_network(subject.analysis), fingerprint_value(subject.evaluate)
    jobs = [(make_sweep_cell(trial, network, scoring), trial) for trial in wanted]
    tasks = [(cell, scores.make_cell_task(trial.settings)) for cell, trial in jobs]
    if cache is None or any(cache.get(cell) is None for cell, _ in jobs):
        scores.prepare_all_inputs(subject.analysis, [trial.settings for trial in wanted if trial.settings])
    results = measure_cells(tasks, cache, pool, scores.measure_cell_task, subject)
    rows = [SweepRow(trial.target, trial.criterion, trial.merger, **results[cell.key]) for cell, trial in jobs]
    metric = "fidelity" if subject.evaluate is None else "score"
    return Sweep(rows[0], tuple(rows[1:]), "accuracy %" if isinstance(subject.evaluate, AccuracyScore) else metric)


def check_sweep_folder(out: str | Path) -> Path:
    """The folder of a sweep: one of ours, or one that is not there yet."""
    place = atomic.resolve_path(out)
    if place.exists() and not place.is_dir():
        raise MergingError("that is a file", where=str(out), fix="Give the name of a folder.")
    if place.is_dir() and any(place.iterdir()) and not (place / CELLS_FOLDER).is_dir():
        raise MergingError("something else is there", where=str(out), fix="Give another folder.")
    atomic.check_writable(place / CELLS_FOLDER)
    return place


def make_folder_name(target: str) -> str:
    """A target as the name of a folder.

    >>> make_folder_name("macs 50%, params 1.2M")
    'macs-50-params-1.2M'
    """
    return re.sub(r"[^\w.]+", "-", target).strip("-.")


def _save_best_network(place: Path, trial: SweepTrial, subject: SweepContext, sweep: Sweep) -> None:
    assert trial.settings is not None
    place.parent.mkdir(exist_ok=True)
    scores.compress_with_verdict(subject, trial.settings).save(place, overwrite=place.exists())
