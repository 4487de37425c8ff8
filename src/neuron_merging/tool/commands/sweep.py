"""sweep: every combination of budgets, criteria and mergers on one network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from neuron_merging.errors import MergingError
from neuron_merging.folder import recipe as recipes
from neuron_merging.folder.recipe import Recipe
from neuron_merging.tool.commands import result, show
from neuron_merging.tool.commands import source as sources
from neuron_merging.tool.commands.source import Json, Source, Texts

if TYPE_CHECKING:
    from neuron_merging.settings import Settings
    from neuron_merging.sweeping.outcome import Sweep
    from neuron_merging.sweeping.scores import Subject
    from neuron_merging.sweeping.trials import Trial

Flag = Annotated[bool, Parameter(negative=())]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to go through, and where.

    Parameters
    ----------
    budget
        Budgets, as macs=90%,70%,50%; repeated, every combination.
    ratio
        Ratios, as 0.3,0.5, for those who want the same cut everywhere.
    criterion
        Criteria, as l2,l2-gm (default auto).
    merger
        Mergers, as none,cosine:threshold=0.2,bn=released,moments (default: the best for what is given).
    limits, ignore, scope, round_to, seed, effort, calibrate, calibrate_images, mean, std, resize, crop
        As for compress.
    eval
        Labelled images whose accuracy is the score, as for compress; otherwise it is fidelity to the original.
    metric
        A score of your own, as for compress.
    jobs
        Processes at a time (default: one for each processor).
    cluster
        The address of a Dask scheduler, as tcp://host:8786, in place of processes of this machine.
    save_best
        Write the folder of the best network of each budget too, into OUT/best.
    """

    budget: Texts = None
    ratio: str | None = None
    criterion: str | None = None
    merger: str | None = None
    limits: Texts = None
    ignore: Texts = None
    scope: str | None = None
    round_to: int | None = None
    seed: int | None = None
    effort: str | None = None
    calibrate: str | None = None
    calibrate_images: int | None = None
    mean: str | None = None
    std: str | None = None
    resize: int | None = None
    crop: int | None = None
    eval: str | None = None
    metric: str | None = None
    jobs: int | None = None
    cluster: str | None = None
    save_best: Flag = False

    def common(self) -> dict[str, Any]:
        """The keys of a recipe that all cells share."""
        data = ("calibrate", "calibrate_images", "eval", "metric", "mean", "std", "resize", "crop")
        names = ("ignore", "scope", "round_to", "seed", "effort", *data)
        return {**{name: getattr(self, name) for name in names}, "limits": recipes.pairs(self.limits, "--limits")}


def sweep(
    model: str, out: str, /, *, grid: Grid | None = None, source: Source | None = None, json: Json = False
) -> None:
    """Try every combination of budgets, criteria and mergers, and show which is best.

    A sweep that was cut off goes on where it was: run the same command again.

    Parameters
    ----------
    model
        As for compress.
    out
        The folder for the table, the curve, the page and what was measured so far.
    """
    asked = grid or Grid()
    chosen = sources.recipe(model, source, **asked.common())
    budget, ratio = budgets(asked.budget or ()), None if asked.ratio is None else sources.shares(asked.ratio, "--ratio")
    show.say("loading")
    from neuron_merging.pipeline import analyse
    from neuron_merging.settings import from_recipe
    from neuron_merging.sweeping import grid as running
    from neuron_merging.sweeping import pictures
    from neuron_merging.sweeping.scores import Accuracy, Subject
    from neuron_merging.sweeping.trials import goals

    pictures.check("sweep")
    running.checked_folder(out)
    network, inputs = sources.network(chosen, source)
    base = sources.with_data(from_recipe(msgspec.structs.replace(chosen, limits={})), chosen, network, inputs)
    wanted = trials(chosen, goals(budget, ratio), asked, base)
    pool = running.pool_for(wanted, asked.jobs, asked.cluster)
    try:
        with show.working("sweeping"):
            score = base.metric or (Accuracy(base.images) if getattr(base.images, "labelled", False) else None)
            subject = Subject(analyse(network, inputs), score, base.calibration, base.images)
            found = running.run(subject, wanted, out, pool, _keep if asked.save_best else None)
    except KeyboardInterrupt:
        show.say("what was measured is kept: the same command goes on from there")
        raise
    _write(found, chosen, Path(out))
    show.json({**msgspec.to_builtins(found), "best": found.best}) if json else _print(found)
    show.say(f"written to {out}")


def budgets(entries: list[str] | tuple[str, ...]) -> dict[str, list[str]] | None:
    """`KEY=VALUE,VALUE` flags as lists by key.

    >>> budgets(["macs=90%,50%", "params=1.2M"])
    {'macs': ['90%', '50%'], 'params': ['1.2M']}
    """
    found: dict[str, list[str]] = {}
    for entry in entries:
        key, equals, values = entry.partition("=")
        if not equals or not values:
            raise MergingError(f"{entry!r} is not KEY=VALUE,…", where="--budget", fix="Write --budget macs=90%,70%.")
        found.setdefault(key, []).extend(values.split(","))
    return found or None


def mergers(text: str | None) -> list[str | None]:
    """Names with options, after commas; what has no name before its "=" is one more option.

    >>> mergers("none,cosine:bn=paper,threshold=0.2,moments")
    ['none', 'cosine:bn=paper,threshold=0.2', 'moments']
    """
    found: list[str | None] = []
    for part in (text or "").split(","):
        head, equals, _ = part.partition("=")
        if equals and ":" not in head and found:
            found[-1] = f"{found[-1]},{part}"
        elif part:
            found.append(part)
    return found or [None]


def trials(chosen: Recipe, wanted: list[tuple[str, dict[str, Any]]], asked: Grid, base: Settings) -> list[Trial]:
    """Every combination, each with the recipe that the command line would have."""
    from neuron_merging.settings import criterion_of, merger_of
    from neuron_merging.sweeping.trials import trials

    criteria = {name: criterion_of(name) for name in (asked.criterion or "auto").split(",")}
    methods = {name or "": None if name is None else merger_of(name) for name in mergers(asked.merger)}
    plain = replace(base, metric=None, images=None, limits=chosen.limits)
    first, *rest = trials(wanted, list(criteria.values()), list(methods.values()), plain)
    names = [(asks, criterion, merger) for _, asks in wanted for criterion in criteria for merger in methods]
    return [first, *(_with_recipe(trial, chosen, *own) for trial, own in zip(rest, names, strict=True))]


def _with_recipe(trial: Trial, chosen: Recipe, asks: dict[str, Any], criterion: str, merger: str) -> Trial:
    assert trial.settings is not None
    own = {"criterion": criterion, "merger": merger or None, "limits": dict(trial.settings.limits)}
    data = chosen.calibrate if trial.settings.calibration is not None else None
    recipe = msgspec.structs.replace(chosen, **asks, **own, calibrate=data)
    return replace(trial, criterion=criterion, merger=merger or "default", recipe=recipe)


def _keep(place: Path, trial: Trial, subject: Subject, sweep: Sweep) -> None:
    """The folder that compress would have written, with the sweep's curve on its page."""
    from neuron_merging.folder import store
    from neuron_merging.sweeping.scores import made

    assert trial.settings is not None and trial.recipe is not None
    small, recipe = made(subject, trial.settings), trial.recipe.anywhere()
    page = result.written_page(result.Result(subject.analysis, small), recipe, small.compared, sweep=sweep)
    place.parent.mkdir(exist_ok=True)
    store.save(small, place, recipe=recipe, overwrite=place.exists(), page=page)


def _write(found: Sweep, chosen: Recipe, out: Path) -> None:
    """The curve as pictures, and the page."""
    from neuron_merging import report
    from neuron_merging.atomic import replace_file
    from neuron_merging.sweeping import pictures

    figure = pictures.curve(found)
    for kind in ("png", "svg"):
        replace_file(out / f"curve.{kind}", pictures.image(figure, kind))
    page = report.sweep_page(found, chosen.model or "", _shared(chosen))
    replace_file(out / "index.html", page.encode())


def _shared(chosen: Recipe) -> tuple[tuple[str, str], ...]:
    """The settings of all cells."""
    from neuron_merging.report.asked import asked

    return tuple((key, value) for key, value in asked(chosen) if key not in ("criterion", "merger"))


def _print(found: Sweep) -> None:
    from neuron_merging.sweeping.outcome import HEADINGS

    show.table("", [found.metric if name == "score" else name for name in HEADINGS], found.table())
