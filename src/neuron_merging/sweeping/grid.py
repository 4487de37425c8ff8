"""grid: every combination of targets, criteria and mergers on one analysis, cell by cell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from neuron_merging import atomic
from neuron_merging.channels.analysis import Analysis
from neuron_merging.choosing.criteria import Criterion
from neuron_merging.cutting.trial import analyse
from neuron_merging.data.images import Batched
from neuron_merging.errors import MergingError
from neuron_merging.mergers import Merger
from neuron_merging.settings import Settings, in_memory
from neuron_merging.sweeping import cells, scores
from neuron_merging.sweeping.cells import Cache
from neuron_merging.sweeping.lines import as_csv
from neuron_merging.sweeping.outcome import Row, Sweep
from neuron_merging.sweeping.pool import Pool, processes
from neuron_merging.sweeping.running import measured
from neuron_merging.sweeping.scores import Accuracy, Evaluate, Subject
from neuron_merging.sweeping.sums import network_sum, sum_of
from neuron_merging.sweeping.trials import Trial, goals, listed, trials

CELLS, TABLE, DOCUMENT, BEST = "cells", "sweep.csv", "sweep.json", "best"
"""What a sweep's folder holds."""


class Cell(cells.Cell, frozen=True, kw_only=True):
    """A trial on a network, scored in some way: sums of all that has a say, and names for people."""

    network: str
    target: str
    criterion: str
    merger: str
    settings: str
    scoring: str


def cell_of(trial: Trial, network: str, scoring: str) -> Cell:
    """The measurement of a trial."""
    return Cell(
        network=network,
        target=trial.target,
        criterion=trial.criterion,
        merger=trial.merger,
        settings=sum_of(trial.settings),
        scoring=scoring,
    )


def sweep(
    model: nn.Module | Analysis,
    example_inputs: Any = None,
    *,
    out: str | Path | None = None,
    budget: Any = None,
    ratio: Any = None,
    limits: Mapping[str, float] | None = None,
    criterion: str | Criterion | Sequence[str | Criterion] = "auto",
    merger: str | Merger | Sequence[str | Merger] | None = None,
    evaluate: Evaluate | Batched | None = None,
    calibration: Iterable[Any] | None = None,
    scope: str = "internal",
    ignore: Iterable[str] = (),
    round_to: int = 1,
    seed: int = 0,
    effort: str | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    save_best: bool = False,
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
    budget
        A mapping as for `compress` whose values may be lists, {"macs": [0.9, 0.7, 0.5]}, or a list of mappings or of
        shares of the multiply-accumulates.
    ratio
        A ratio as for `compress`, or a list of them.
    limits
        With budgets: patterns of layers, and the share that they may lose at most.
    criterion
        One as for `compress`, or a list.
    merger
        One as for `compress`, or a list.
    evaluate
        A function of a network that returns its score, the larger the better, or labelled images for the accuracy.
        Left out, networks are ranked by their fidelity to the original on inputs of our own making.
    calibration
        Unlabelled batches, for the mergers that use data.
    scope
        As for `compress`.
    ignore
        As for `compress`.
    round_to
        As for `compress`.
    seed
        As for `compress`.
    effort
        As for `compress`.
    jobs
        Processes at a time; left out, one for each processor.
    cluster
        The address of a Dask scheduler, in place of processes of this machine.
    save_best
        Write the best network of each target into the folder too.

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
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    batches = None if calibration is None else in_memory(calibration)
    batches = list(batches) if batches is not None else None
    base = Settings(
        scope=scope,
        ignore=patterns,
        round_to=round_to,
        seed=seed,
        calibration=batches,
        limits=dict(limits or {}),
        effort=effort,
    )
    wanted = trials(goals(budget, ratio), listed(criterion), listed(merger) or [None], base)
    if save_best and out is None:
        raise MergingError("there is no folder for the best networks", where="save_best=", fix="Give out=.")
    pool = pool_for(wanted, jobs, cluster)
    images = evaluate if isinstance(evaluate, Batched) else None
    metric: Any = evaluate if images is None else Accuracy(images)
    subject = Subject(analyse(model, example_inputs), metric, batches, images)
    return run(subject, wanted, out, pool, _saved if save_best else None)


def pool_for(wanted: Sequence[Trial], jobs: int | None, cluster: str | None) -> Pool:
    """Where to work; in one process where the time of a pass is limited: others would be in the way of measuring it."""
    timed = any(limit.key == "latency" for t in wanted if t.settings for limit in t.settings.budget or ())
    return Pool(processes(1 if timed and jobs is None else jobs, len(wanted)), cluster)


Keep = Callable[[Path, Trial, Subject, Sweep], None]
"""Writes the folder of a network that is the best of its target."""


def run(
    subject: Subject, wanted: Sequence[Trial], out: str | Path | None, pool: Pool, keep: Keep | None = None
) -> Sweep:
    """Measure what is not known yet, and put everything together; with a folder, all of it is kept there."""
    place = None if out is None else checked_folder(out)
    if place is None:
        return _swept(subject, wanted, None, pool)
    (place / CELLS).mkdir(parents=True, exist_ok=True)
    with atomic.locked(place, patient=False):
        found = _swept(subject, wanted, Cache(place / CELLS), pool)
        atomic.replace_file(place / TABLE, as_csv(found.lines()))
        atomic.replace_file(place / DOCUMENT, msgspec.json.format(msgspec.json.encode(found), indent=1))
        if keep is not None:
            for row in found.best.values():
                keep(place / BEST / slug(row.target), _trial(wanted, row), subject, found)
    return found


def _trial(wanted: Sequence[Trial], row: Row) -> Trial:
    """The combination that a row is about."""
    names = row.target, row.criterion, row.merger
    return next(trial for trial in wanted if (trial.target, trial.criterion, trial.merger) == names)


def _swept(subject: Subject, wanted: Sequence[Trial], cache: Cache | None, pool: Pool) -> Sweep:
    network, scoring = network_sum(subject.analysis), sum_of(subject.evaluate)
    jobs = [(cell_of(trial, network, scoring), trial) for trial in wanted]
    tasks = [(cell, scores.task_of(trial.settings)) for cell, trial in jobs]
    if cache is None or any(cache.get(cell) is None for cell, _ in jobs):
        scores.prepare(subject.analysis, [trial.settings for trial in wanted if trial.settings])
    results = measured(tasks, cache, pool, scores.measured, subject)
    rows = [Row(trial.target, trial.criterion, trial.merger, **results[cell.key]) for cell, trial in jobs]
    metric = "fidelity" if subject.evaluate is None else "score"
    return Sweep(rows[0], tuple(rows[1:]), "accuracy %" if isinstance(subject.evaluate, Accuracy) else metric)


def checked_folder(out: str | Path) -> Path:
    """The folder of a sweep: one of ours, or one that is not there yet."""
    place = atomic.place_of(out)
    if place.exists() and not place.is_dir():
        raise MergingError("that is a file", where=str(out), fix="Give the name of a folder.")
    if place.is_dir() and any(place.iterdir()) and not (place / CELLS).is_dir():
        raise MergingError("something else is there", where=str(out), fix="Give another folder.")
    atomic.check_writable(place / CELLS)
    return place


def slug(target: str) -> str:
    """A target as the name of a folder.

    >>> slug("macs 50%, params 1.2M")
    'macs-50-params-1.2M'
    """
    return re.sub(r"[^\w.]+", "-", target).strip("-.")


def _saved(place: Path, trial: Trial, subject: Subject, sweep: Sweep) -> None:
    assert trial.settings is not None
    place.parent.mkdir(exist_ok=True)
    scores.made(subject, trial.settings).save(place, overwrite=place.exists())
