"""The command `sweep`: every combination of budgets, criteria and mergers on one network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import msgspec
from cyclopts import Parameter

from neuron_merging.checkpoint.recipe import RECIPE_KEYS, Recipe
from neuron_merging.cli import console, result_output
from neuron_merging.cli import model_options as sources
from neuron_merging.cli.model_options import SOURCE_KEYS, JsonFlag, ModelOptions, make_options_class, read_flags
from neuron_merging.config.text_values import LONE_VALUE_STARTS
from neuron_merging.errors import MergingError
from neuron_merging.selection.budget import DEFAULT_KEY

if TYPE_CHECKING:
    from neuron_merging.config import CompressConfig
    from neuron_merging.sweeps.grid import SweepTrial
    from neuron_merging.sweeps.results import Sweep
    from neuron_merging.sweeps.scores import SweepContext

SWEPT_KEYS = {
    name: replace(key, help=key.sweep, type=key.type if get_origin(key.type) is dict else str | None)
    for name, key in RECIPE_KEYS.items()
    if isinstance(key.sweep, str)
}
"""The keys that may have several values in a sweep."""
SHARED_KEYS = {name: key for name, key in RECIPE_KEYS.items() if key.sweep is True and name not in SOURCE_KEYS}
"""The keys that all combinations share."""
SweepOptions: Any = make_options_class(
    "SweepOptions",
    [*SWEPT_KEYS.values(), *SHARED_KEYS.values()],
    jobs=(
        Annotated[int | None, Parameter(help="Number of parallel processes (default: one for each processor).")],
        None,
    ),
    cluster=(
        Annotated[
            str | None,
            Parameter(help="The address of a Dask scheduler, as tcp://host:8786, to use instead of local processes."),
        ],
        None,
    ),
    save_best=(
        Annotated[
            bool,
            Parameter(negative=(), help="Also write the best network of each budget, as a folder in OUT/best."),
        ],
        False,
    ),
)
"""The flags of a sweep."""


def sweep(
    model: str,
    out: str,
    /,
    *,
    grid: SweepOptions | None = None,
    source: ModelOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Run every combination of budgets, criteria and merging methods, and show which is best.

    To continue an interrupted sweep, run the same command again.

    Parameters
    ----------
    model
        As for compress.
    out
        The folder for the table, the chart, the page and the stored results.
    """
    options = grid or SweepOptions()
    shared = {name: value for name, value in vars(options).items() if name in SHARED_KEYS}
    chosen = sources.build_recipe_from_flags(model, source, **read_flags(shared))
    budget, ratio = (
        parse_budget_lists(options.budget or ()),
        None if options.ratio is None else sources.parse_ratio_list(options.ratio, "--ratio"),
    )
    console.print_message("loading")
    from neuron_merging.api import analyse
    from neuron_merging.checkpoint.recipe_names import config_from_recipe
    from neuron_merging.sweeps import grid as sweep_grid
    from neuron_merging.sweeps import results
    from neuron_merging.sweeps.grid import expand_targets
    from neuron_merging.sweeps.scores import AccuracyScore, SweepContext

    results.check_matplotlib("sweep")
    sweep_grid.check_sweep_folder(out)
    network, inputs = sources.load_recipe_model(chosen, source)
    # Limits belong to budgets. Trials by ratio would refuse them, so every trial gets only what applies to it.
    base = sources.attach_data(config_from_recipe(msgspec.structs.replace(chosen, limits={})), chosen, network, inputs)
    wanted = build_trials_with_recipes(chosen, expand_targets(budget, ratio), options, base)
    pool = sweep_grid.create_executor(wanted, options.jobs, options.cluster, base.metric)
    try:
        with console.show_step("sweeping"):
            score = base.metric or (AccuracyScore(base.images) if getattr(base.images, "has_labels", False) else None)
            subject = SweepContext(analyse(network, inputs), score, base.calibration, base.images)
            result = sweep_grid.run_sweep(subject, wanted, out, pool, _save_best_folder if options.save_best else None)
    except KeyboardInterrupt:
        console.print_message("results so far are stored: the same command continues")
        raise
    _write_sweep(result, chosen, Path(out))
    console.print_json({**msgspec.to_builtins(result), "best": result.best}) if json else _print_sweep(result)
    console.print_message(f"written to {out}")


def parse_budget_lists(entries: list[str] | tuple[str, ...]) -> dict[str, list[str]] | None:
    """Parse `KEY=VALUE,VALUE` flags into lists by key; values without a key are shares of the MACs.

    >>> parse_budget_lists(["macs=90%,50%", "params=1.2M"]), parse_budget_lists(["70%"])
    ({'macs': ['90%', '50%'], 'params': ['1.2M']}, {'macs': ['70%']})
    """
    budgets: dict[str, list[str]] = {}
    for entry in entries:
        key, equals, values = entry.rpartition("=")
        if bool(equals) != bool(key) or not values or not (equals or values[0] in LONE_VALUE_STARTS):
            raise MergingError(f"{entry!r} is not KEY=VALUE,…", where="--budget", fix="Write --budget macs=90%,70%.")
        budgets.setdefault(key or DEFAULT_KEY, []).extend(values.split(","))
    return budgets or None


def parse_merger_list(text: str | None) -> list[str | None]:
    """Parse mergers separated by commas; a part without a name before its "=" is a further option of the last merger.

    >>> parse_merger_list("none,cosine:bn=paper,threshold=0.2,moments")
    ['none', 'cosine:bn=paper,threshold=0.2', 'moments']
    """
    mergers: list[str | None] = []
    for part in (text or "").split(","):
        head, equals, _ = part.partition("=")
        if equals and ":" not in head and mergers:
            mergers[-1] = f"{mergers[-1]},{part}"
        elif part:
            mergers.append(part)
    return mergers or [None]


def build_trials_with_recipes(
    chosen: Recipe, targets: list[tuple[str, dict[str, Any]]], options: SweepOptions, base: CompressConfig
) -> list[SweepTrial]:
    """Build every combination, each with the recipe that reproduces it on the command line."""
    from neuron_merging.config.text_values import parse_criterion, parse_merger
    from neuron_merging.sweeps.grid import build_trials

    criteria = {name: parse_criterion(name) for name in (options.criterion or "auto").split(",")}
    methods = {name or "": None if name is None else parse_merger(name) for name in parse_merger_list(options.merger)}
    shared = replace(base, evaluate=None, limits=chosen.limits or None)
    first, *rest = build_trials(targets, list(criteria.values()), list(methods.values()), shared)
    names = [(asks, criterion, merger) for _, asks in targets for criterion in criteria for merger in methods]
    return [
        first,
        *(_attach_recipe(trial, chosen, *combination) for trial, combination in zip(rest, names, strict=True)),
    ]


def _attach_recipe(trial: SweepTrial, chosen: Recipe, asks: dict[str, Any], criterion: str, merger: str) -> SweepTrial:
    assert trial.settings is not None
    overrides = {"criterion": criterion, "merger": merger or None, "limits": dict(trial.settings.limits or {})}
    # A method without data would refuse --calibrate when the recipe is run.
    data = chosen.calibrate if trial.settings.calibration is not None else None
    recipe = msgspec.structs.replace(chosen, **asks, **overrides, calibrate=data)
    return replace(trial, criterion=criterion, merger=merger or "default", recipe=recipe)


def _save_best_folder(place: Path, trial: SweepTrial, subject: SweepContext, sweep: Sweep) -> None:
    """Write the folder that compress would write, with the sweep's chart on its page."""
    from neuron_merging.sweeps.scores import compress_with_verdict

    assert trial.settings is not None and trial.recipe is not None
    small, recipe = compress_with_verdict(subject, trial.settings), trial.recipe.with_absolute_paths()
    place.parent.mkdir(exist_ok=True)
    result_output.write_result_folder(
        result_output.CompressionResult(subject.analysis, small),
        msgspec.structs.replace(recipe, overwrite=place.exists()),
        place,
        sweep,
    )


def _write_sweep(found: Sweep, chosen: Recipe, out: Path) -> None:
    """Write the chart as PNG and SVG, and the page."""
    from neuron_merging import report
    from neuron_merging.atomic import replace_file
    from neuron_merging.checkpoint.recipe_names import format_network_title
    from neuron_merging.sweeps import results

    figure = results.plot_sweep(found)
    for kind in ("png", "svg"):
        replace_file(out / f"curve.{kind}", results.render_figure(figure, kind))
    title = format_network_title(chosen.model, "network")
    page = report.render_sweep_report(found, title, _describe_shared_settings(chosen))
    replace_file(out / "index.html", page.encode())


def _describe_shared_settings(chosen: Recipe) -> tuple[tuple[str, str], ...]:
    """Return the settings that all combinations share, as text."""
    from neuron_merging.report.report_data import describe_settings

    return tuple((key, value) for key, value in describe_settings(chosen) if key not in ("criterion", "merger"))


def _print_sweep(found: Sweep) -> None:
    from neuron_merging.sweeps.results import TABLE_HEADINGS

    console.print_table("", [found.metric if name == "score" else name for name in TABLE_HEADINGS], found.table())
