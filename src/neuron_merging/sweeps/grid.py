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
    """One combination of target, criterion and merger; the original network has no settings."""

    target: str = ORIGINAL_TARGET
    criterion: str = ""
    merger: str = ""
    settings: CompressConfig | None = field(default=None, repr=False)
    recipe: Recipe | None = field(default=None, repr=False)
    """The recipe that reproduces the trial on the command line, for the folder of the best network."""

    def __str__(self) -> str:
        return " ".join(part for part in (self.target, self.criterion, self.merger) if part)


CutTarget = tuple[str, dict[str, Any]]
"""The name of a target, and the setting of `compress` that requests it."""


def expand_targets(budget: object = None, ratio: object = None) -> list[CutTarget]:
    """List all targets from budgets and ratios, each of which may be a list.

    >>> [name for name, _ in expand_targets({"macs": ["90%", 0.5]}, 0.3)]
    ['macs 90%', 'macs 50%', 'ratio 0.3']
    """
    targets: list[CutTarget] = []
    for limits in _expand_budgets(budget):
        targets.append(
            (", ".join(f"{key} {_format_limit(value)}" for key, value in limits.items()), {"budget": limits})
        )
    for share in to_list(ratio):
        name = f"ratio {share:g}" if isinstance(share, int | float) else "ratios by layer"
        targets.append((name, {"ratio": share}))
    if not targets:
        raise MergingError(
            "no combination to run", where="budget=", fix='For instance budget={"macs": [0.9, 0.7, 0.5]}.'
        )
    # Targets of the same name would be measured, and stored, twice.
    return list({name: (name, setting) for name, setting in targets}.values())


def _expand_budgets(budget: object) -> Iterator[dict[str, Any]]:
    """Yield single budgets. A mapping of lists means every combination; a number alone is a share of the MACs."""
    if isinstance(budget, Mapping):
        for values in itertools.product(*(to_list(value) for value in budget.values())):
            yield dict(zip(budget, values, strict=True))
    else:
        for entry in to_list(budget):
            yield from _expand_budgets(entry if isinstance(entry, Mapping) else {DEFAULT_KEY: entry})


def _format_limit(value: object) -> str:
    return f"{100 * value:g}%" if isinstance(value, float) and value <= 1 else f"{value}"


def to_list(value: Any) -> list[Any]:
    """Return a list unchanged, None as an empty list, and anything else as a list of one."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def get_choice_name(choice: Any) -> str:
    """Return the name of a criterion or merger for tables."""
    if choice is None or isinstance(choice, str):
        return choice or "default"
    return str(getattr(choice, "__name__", None) or choice)


def build_trials(
    targets: Sequence[CutTarget], criteria: Sequence[Any], mergers: Sequence[Any], base: CompressConfig
) -> list[SweepTrial]:
    """Return the original, then every combination with checked settings."""
    trials = [SweepTrial()]
    for (name, setting), criterion, merger in itertools.product(targets, criteria, mergers):
        settings = replace(base, criterion=criterion, merger=merger, **setting)
        # Settings that a trial does not use are dropped: its cached result is then valid for any value of them.
        if merger is not None and not uses_data(settings.method()):
            settings = replace(settings, calibration=None)
        if settings.budget is None:
            settings = replace(settings, limits=None)
        settings.check()
        trials.append(SweepTrial(name, get_choice_name(criterion), get_choice_name(merger), settings))
    return trials


CELLS_FOLDER, TABLE_FILE, DOCUMENT_FILE, BEST_FOLDER = "cells", "sweep.csv", "sweep.json", "best"
"""Names in the folder of a sweep."""


class SweepCell(run_cells.Cell, frozen=True, kw_only=True):
    """The cache key of a trial: digests of network, settings and score function, and readable names."""

    network: str
    target: str
    criterion: str
    merger: str
    settings: str
    scoring: str


def make_sweep_cell(trial: SweepTrial, network: str, scoring: str) -> SweepCell:
    """Build the cache key of a trial."""
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
    """Run and score every combination of budgets or ratios, criteria and mergers on one analysis.

    Parameters
    ----------
    model
        The network, which is not changed, or an analysis of it.
    example_inputs
        As for `analyse`.
    out
        A folder for the results. Each result is stored as soon as it is measured: repeat the call to continue an
        interrupted sweep.
    evaluate
        A function that returns the score of a network (higher is better), or labelled images for the accuracy. Default:
        the fidelity to the original on synthesised inputs. If the function measures time, set its attribute `timed` to
        True: the networks are then scored one at a time.
    calibration
        Unlabelled batches, for the mergers that use data.
    jobs
        The number of parallel processes. Default: one per processor.
    cluster
        The address of a Dask scheduler, to use instead of local processes.
    save_best
        Also write the best network of each target into the folder.
    **options
        Options of `compress`. `budget`, `ratio`, `criterion` and `merger` may be lists; the others are shared by all
        combinations.

    Returns
    -------
    Sweep
        One row per combination; `str()` gives a table.

    Raises
    ------
    MergingError
        An argument is invalid, a score is not a finite number, or the cluster does not respond.
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
    # A list, because every trial reads the batches again.
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
    """Create the executor; a single process if a budget or the score measures time, which others would disturb."""
    processes = count_processes(jobs, len(wanted))
    limits = [x for t in wanted if t.settings and t.settings.budget for x in parse_budget(t.settings.budget)]
    if not any(limit.kind.is_timed for limit in limits) and not getattr(score, "timed", False):
        return TaskExecutor(processes, cluster)
    if cluster is not None:
        what = "a cluster runs several combinations at a time, which distorts the measured times"
        raise MergingError(
            what, where="cluster=", fix="Leave cluster out: the combinations then run one after the other."
        )
    if (jobs or 1) > 1:
        progress.log.warning(
            "the combinations run one at a time, because parallel runs would distort the measured times"
        )
    return TaskExecutor(1)


SaveBest = Callable[[Path, SweepTrial, SweepContext, Sweep], None]
"""Writes the folder of the best network of a target."""


def run_sweep(
    subject: SweepContext,
    wanted: Sequence[SweepTrial],
    out: str | Path | None,
    pool: TaskExecutor,
    save_best: SaveBest | None = None,
) -> Sweep:
    """Measure the trials that are not cached and return all results; with `out`, store them there."""
    place = None if out is None else check_sweep_folder(out)
    if place is None:
        return _measure_trials(subject, wanted, None, pool)
    (place / CELLS_FOLDER).mkdir(parents=True, exist_ok=True)
    # Two sweeps into one folder would replace each other's table.
    with atomic.lock_path(place, patient=False):
        result = _measure_trials(subject, wanted, ResultCache(place / CELLS_FOLDER), pool)
        atomic.replace_file(place / TABLE_FILE, format_csv(result.lines()))
        atomic.replace_file(place / DOCUMENT_FILE, msgspec.json.format(msgspec.json.encode(result), indent=1))
        if save_best is not None:
            for row in result.best.values():
                save_best(place / BEST_FOLDER / make_folder_name(row.target), _find_trial(wanted, row), subject, result)
    return result


def _find_trial(wanted: Sequence[SweepTrial], row: SweepRow) -> SweepTrial:
    """Return the trial of a row."""
    names = row.target, row.criterion, row.merger
    return next(trial for trial in wanted if (trial.target, trial.criterion, trial.merger) == names)


def _measure_trials(
    subject: SweepContext, wanted: Sequence[SweepTrial], cache: ResultCache | None, pool: TaskExecutor
) -> Sweep:
    network, scoring = fingerprint_network(subject.analysis), fingerprint_value(subject.evaluate)
    jobs = [(make_sweep_cell(trial, network, scoring), trial) for trial in wanted]
    tasks = [(cell, scores.make_cell_task(trial.settings)) for cell, trial in jobs]
    # Inputs are synthesised here, once: the analysis carries them to the other processes.
    # A repeated sweep whose results are all stored synthesises nothing.
    if cache is None or any(cache.get(cell) is None for cell, _ in jobs):
        scores.prepare_all_inputs(subject.analysis, [trial.settings for trial in wanted if trial.settings])
    results = measure_cells(tasks, cache, pool, scores.measure_cell_task, subject)
    rows = [SweepRow(trial.target, trial.criterion, trial.merger, **results[cell.key]) for cell, trial in jobs]
    metric = "fidelity" if subject.evaluate is None else "score"
    return Sweep(rows[0], tuple(rows[1:]), "accuracy %" if isinstance(subject.evaluate, AccuracyScore) else metric)


def check_sweep_folder(out: str | Path) -> Path:
    """Return the folder of a sweep; raise unless it is new, empty or the folder of an earlier sweep."""
    place = atomic.resolve_path(out)
    if place.exists() and not place.is_dir():
        raise MergingError("that is a file", where=str(out), fix="Give the name of a folder.")
    # The folder of cells tells that a sweep has written here.
    if place.is_dir() and any(place.iterdir()) and not (place / CELLS_FOLDER).is_dir():
        raise MergingError("something else is there", where=str(out), fix="Give another folder.")
    atomic.check_writable(place / CELLS_FOLDER)
    return place


def make_folder_name(target: str) -> str:
    """Turn a target into the name of a folder.

    >>> make_folder_name("macs 50%, params 1.2M")
    'macs-50-params-1.2M'
    """
    return re.sub(r"[^\w.]+", "-", target).strip("-.")


def _save_best_network(place: Path, trial: SweepTrial, subject: SweepContext, sweep: Sweep) -> None:
    assert trial.settings is not None
    place.parent.mkdir(exist_ok=True)
    scores.compress_with_verdict(subject, trial.settings).save(place, overwrite=place.exists())
