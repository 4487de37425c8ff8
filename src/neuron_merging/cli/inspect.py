"""The commands `inspect` (prunable groups, and reasons for the rest) and `sensitivity`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from neuron_merging.cli import console, result_output
from neuron_merging.cli import model_options as sources
from neuron_merging.cli.model_options import JsonFlag, ModelOptions, TextList
from neuron_merging.errors import MergingError

if TYPE_CHECKING:
    from neuron_merging.channels.analysis import Analysis
    from neuron_merging.evaluation.summary import GroupInfo, Inspection
    from neuron_merging.sweeps import Sensitivity

Flag = Annotated[bool, Parameter(negative=())]
GROUP_COLUMNS = ("group", "channels", "parameters", "MACs", "residual", "read by", "can be merged")


def inspect(
    model: str, /, *, verbose: Flag = False, source: ModelOptions | None = None, json: JsonFlag = False
) -> None:
    """List the prunable groups of channels, and how many channels are not prunable for which reason.

    Parameters
    ----------
    model
        As for compress.
    verbose
        Print every consumer layer, and each reason with its layer and line of code.
    """
    chosen = sources.build_recipe_from_flags(model, source)
    console.print_message("loading")
    from neuron_merging import api

    network, inputs = sources.load_recipe_model(chosen, source)
    with console.show_step("analysing"):
        analysis = api.analyse(network, inputs)
        found = api.inspect(analysis)
        merging = _describe_merging(analysis)
    if json:
        return console.print_json({**msgspec.to_builtins(found), "merging": merging})
    if verbose:
        _print_details(found, merging)
    else:
        _print_short(found, merging)


def _print_short(found: Inspection, merging: dict[str, str]) -> None:
    """One line a group, and one for each reason why channels cannot be removed."""
    from neuron_merging.evaluation.parameter_coverage import count_refusals_by_reason

    headings = ("group", "channels", "parameters", "MACs", "residual", "merging")
    rows = [(*_format_sizes(g), re.split("[;:]", merging[g.name].removeprefix("by "))[0]) for g in found.groups]
    console.print_table("Groups", headings, rows, one_line=True)
    counts = [(f"{c.channels:,}", f"{c.layers:,}", c.why) for c in count_refusals_by_reason(found.refusals)]
    if counts:
        console.print_table("Not prunable", ("channels", "layers", "why"), counts, one_line=True)
    console.print_line(found.account.headline)
    console.print_message("--verbose gives every layer and its reason")


def _print_details(found: Inspection, merging: dict[str, str]) -> None:
    from neuron_merging.evaluation.parameter_coverage import merge_similar_refusals

    rows = [(*_format_sizes(g), ", ".join(g.consumers), merging[g.name]) for g in found.groups]
    console.print_table("Groups", GROUP_COLUMNS, rows)
    result_output.print_refusals(merge_similar_refusals(found.refusals))
    account = found.account
    parts = [(what, f"{account.share(count):.1%}", f"{count:,}", text) for what, count, text in account.lines]
    console.print_table(
        "Parameters", ("", "share", "parameters", ""), [*parts, ("", "100.0%", f"{account.parameters:,}", "")]
    )


def _format_sizes(group: GroupInfo) -> tuple[str, ...]:
    costs = f"{group.parameters:,}", f"{group.macs:,}"
    return group.name, str(group.channels), *costs, "yes" if group.residual else ""


def _describe_merging(analysis: Analysis) -> dict[str, str]:
    """Return for each group the methods that can merge it, or the reason why none can."""
    groups = analysis.channels.groups
    stored = {group.name: all(consumer.axis is not None for consumer in group.consumers) for group in groups}
    reasons = _explain_no_cosine(analysis)
    return {
        group.name: "by any method" if not why else f"by fitting; not by cosine: {why}" if stored[group.name] else why
        for group in groups
        for why in [reasons.get(group.name, "it has one channel" if group.size == 1 else "")]
    }


def _explain_no_cosine(analysis: Analysis) -> dict[str, str]:
    """Return, by group, the reason why the paper's merging does not apply; groups to which it applies are left out."""
    from neuron_merging.config import CompressConfig
    from neuron_merging.errors import NothingToPrune
    from neuron_merging.pipeline import compress_analysis

    # The method knows itself where it does not apply: run it on every group and collect its reasons.
    try:
        merged = compress_analysis(
            analysis, CompressConfig(merger="cosine", scope="all"), verify=False, judge=False
        ).merged
    except NothingToPrune:
        return {}
    reasons: dict[str, str] = {}
    for merge in merged.merges:
        if merge.reason is not None:
            reasons.setdefault(merge.group, str(merge.reason))
    return reasons


OUTPUT_SUFFIXES = (".png", ".svg", ".csv", ".json")


def sensitivity(
    model: str,
    /,
    *,
    ratios: str | None = None,
    criterion: str | None = None,
    calibrate: str | None = None,
    calibrate_images: int | None = None,
    scope: str | None = None,
    ignore: TextList = None,
    seed: int | None = None,
    effort: str | None = None,
    no_merge: Flag = False,
    exact: Flag = False,
    to: TextList = None,
    source: ModelOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Measure how much the network's outputs change when a single group is cut.

    Parameters
    ----------
    model
        As for compress.
    ratios
        Shares of a group's channels to remove (default 0.25,0.5,0.75,0.875).
    criterion, calibrate, calibrate_images, scope, ignore, seed, effort
        As for compress.
    no_merge
        Prune without merging.
    exact
        Measure every ratio of every group. Without it, every second ratio of early layers is estimated, marked ≈.
    to
        Also write a picture or a table: NAME.png, .svg, .csv or .json; may be repeated.
    """
    flags = {"criterion": criterion, "calibrate": calibrate, "calibrate_images": calibrate_images, "scope": scope}
    chosen = sources.build_recipe_from_flags(model, source, **flags, ignore=ignore, seed=seed, effort=effort)
    shares = None if ratios is None else sources.parse_ratio_list(ratios, "--ratios")
    _check_output_files(to or ())
    console.print_message("loading")
    from neuron_merging.api import analyse
    from neuron_merging.checkpoint.recipe_names import config_from_recipe
    from neuron_merging.sweeps.group_sensitivity import DEFAULT_RATIOS, check_ratios, measure_sensitivity

    settings = config_from_recipe(chosen)
    at = check_ratios(shares or DEFAULT_RATIOS)
    network, inputs = sources.load_recipe_model(chosen, source)
    settings = sources.attach_data(settings, chosen, network, inputs)
    with console.show_step("trying cuts"):
        found = measure_sensitivity(analyse(network, inputs), settings, at, merge=not no_merge, exact=exact)
    for file in to or ():
        _write_sensitivity(file, found)
    console.print_json(found) if json else _print_sensitivity(found)


def _check_output_files(files: list[str] | tuple[str, ...]) -> None:
    """Raise for files that cannot be written, before any work is done."""
    from neuron_merging import atomic
    from neuron_merging.sweeps import results

    for file in files:
        if Path(file).suffix not in OUTPUT_SUFFIXES:
            raise MergingError(
                f"{file!r} has no suffix that can be written",
                where="--to",
                fix=f"End it in {', '.join(OUTPUT_SUFFIXES)}.",
            )
        if Path(file).suffix in (".png", ".svg"):
            results.check_matplotlib("--to")
        atomic.check_output_file(file)


def _write_sensitivity(file: str, found: Sensitivity) -> None:
    from neuron_merging.atomic import replace_file
    from neuron_merging.sweeps import results
    from neuron_merging.sweeps.results import format_csv

    kind = Path(file).suffix[1:]
    if kind == "csv":
        content = format_csv(found.lines())
    elif kind == "json":
        content = msgspec.json.format(msgspec.json.encode(found), indent=1)
    else:
        content = results.render_figure(results.plot_sensitivity(found), kind)
    console.print_message(f"written to {replace_file(file, content)}")


def _print_sensitivity(found: Sensitivity) -> None:
    from neuron_merging.sweeps.group_sensitivity import format_loss

    rows = [
        (g.name, g.channels, f"{g.macs:.1%}", f"{g.parameters:.1%}", *(format_loss(loss) for loss in g.losses))
        for g in found.groups
    ]
    headings = ("group", "channels", "MACs", "parameters", *(f"{ratio:.4g} removed" for ratio in found.ratios))
    merged = "cut and merged" if found.merged else "cut, not merged"
    console.print_table(f"{found.unit} on {found.inputs}, one group {merged}", headings, rows)
    console.print_message(f"{found.passes:.1f} forward passes of these inputs")
