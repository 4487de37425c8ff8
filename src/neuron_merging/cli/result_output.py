"""Write and print a compressed network, for compress, apply, report and sweep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_merging import atomic
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.cli import console

if TYPE_CHECKING:
    from pathlib import Path

    from neuron_merging.channels.analysis import Analysis
    from neuron_merging.checkpoint.compressed import Compressed
    from neuron_merging.checkpoint.manifest import StoredFigures
    from neuron_merging.config import CompressConfig
    from neuron_merging.evaluation.fidelity import Fidelity
    from neuron_merging.evaluation.summary import Summary
    from neuron_merging.onnx.export import ExportResult
    from neuron_merging.onnx.quantize import Int8Network
    from neuron_merging.sweeps.results import Sweep


@dataclass(frozen=True)
class CompressionResult:
    """A compressed network and the analysis of its original."""

    analysis: Analysis
    small: Compressed


def write_and_print_result(result: CompressionResult, chosen: Recipe, out: str) -> None:
    """Write and print a result; a warning is printed first."""
    from neuron_merging.onnx.formats import find_format

    verdict, fidelity = result.small.summary.verdict, result.small.compared
    scores = verdict.accuracy if verdict else None
    # Before the tables, which would scroll it away.
    if verdict and verdict.level == "warning":
        console.print_warning(str(verdict))
    folder = find_format(out) is None
    file = None if folder or chosen.dry_run else _export_network(result, out)
    if folder and not chosen.dry_run:
        write_result_folder(result, chosen, out)
    if chosen.page and not chosen.dry_run:
        _write_page(result, chosen)
    if chosen.json:
        more = {
            "accuracy": scores,
            "fidelity": fidelity,
            "written": None if chosen.dry_run else out,
            "file": file and file.facts(),
        }
        return console.print_json({**msgspec.to_builtins(result.small.summary), **more})
    print_summary(result.small.summary)
    print_fidelity(fidelity)
    if file is not None:
        console.print_facts(file.facts(), False)
    if verdict and verdict.level != "warning":
        console.print_verdict(str(verdict), calm=verdict.level == "good")
    console.print_message("nothing written (dry run)" if chosen.dry_run else f"written to {out}")


def _export_network(result: CompressionResult, out: str) -> ExportResult | Int8Network:
    """Export the small network to a file and compare it with the module; write its int8 file, if there is one."""
    from neuron_merging.onnx.export import export_model

    with console.show_step(f"writing {out}"):
        if result.small.int8 is not None:
            result.small.int8.write(out)
            return result.small.int8
        return export_model(result.small.model, result.analysis.inputs, out)


def fill_recipe(chosen: Recipe, settings: CompressConfig) -> Recipe:
    """Return the recipe with the chosen merger and ratio filled in and with absolute paths."""
    from neuron_merging.merging import MERGERS

    names: dict[type, str] = {kind: name for name, kind in MERGERS.items()}
    merger = chosen.merger or names[type(settings.method())]
    # A default may change in a later version, so the recipe records the value that was used.
    default_share = settings.ratio is None and settings.budget is None and settings.max_loss is None
    ratio = settings.share if default_share else chosen.ratio
    return msgspec.structs.replace(chosen, merger=merger, ratio=ratio).with_absolute_paths()


# Writing


def write_result_folder(result: CompressionResult, chosen: Recipe, out: str | Path, sweep: Sweep | None = None) -> None:
    """Write the folder of a result with its figures and, unless the recipe disables it, the HTML page."""
    from neuron_merging.checkpoint import save_folder
    from neuron_merging.inputs.input_sets import find_largest_input_set

    small = result.small
    if chosen.report:
        with console.show_step("measuring the latency and writing the page"):
            small = _measure_latency(small, result.analysis)
    plain = None if sweep is None else msgspec.to_builtins(sweep)
    stored = save_folder.build_stored_figures(small, chosen, sweep=plain)
    save_folder.save(
        small,
        out,
        recipe=chosen,
        overwrite=chosen.overwrite,
        page=render_stored_page(stored, chosen) if chosen.report and stored else None,
        inputs=find_largest_input_set(result.analysis) if chosen.keep_inputs else None,
        figures=stored,
    )


def _write_page(result: CompressionResult, chosen: Recipe) -> None:
    """Write the page alone, with float and int8 side by side if there is an int8 file."""
    from neuron_merging.checkpoint.save_folder import build_stored_figures

    assert chosen.page is not None
    with console.show_step(f"measuring the latency and writing {chosen.page}"):
        stored = build_stored_figures(_measure_latency(result.small, result.analysis), chosen)
        if stored is not None:
            atomic.replace_file(chosen.page, render_stored_page(stored, chosen).encode())


def _measure_latency(small: Compressed, analysis: Analysis) -> Compressed:
    from neuron_merging.evaluation.figures import measure_latency

    if small.figures is None:
        return small
    latency = measure_latency(analysis.model, small.model, analysis.inputs)
    return replace(small, figures=replace(small.figures, latency=latency))


def render_stored_page(stored: StoredFigures, chosen: Recipe | None) -> str:
    """Render the page about a result from its stored figures."""
    from neuron_merging import report

    return report.render_report_data(report.build_report_data(stored, chosen))


# Printing


def print_summary(summary: Summary) -> None:
    """Print the sizes before and after, the groups, and the layers that are not prunable."""
    console.print_table("", ("", "before", "after", "change"), summary.sizes)
    groups = [(g.name, g.before, g.after, "; ".join(g.descriptions)) for g in summary.groups]
    console.print_table("Channels", ("group", "before", "after", "how"), groups)
    print_refusals(summary.refusals)
    for note in summary.notes:
        console.print_message(f"note: {note}")


def print_fidelity(fidelity: Fidelity | None) -> None:
    """Print the comparison of the networks, on data or on synthesised inputs."""
    if fidelity is None:
        return
    formats = {
        "accuracy": "{:.2f} %",
        "fidelity": "{:.3f}",
        "same": "{:.2f} %",
        "agreement": "{:.3f}",
        "kl": "{:.3f}",
        "perplexity": "{:.2f}",
    }
    titles = {"same": "same class as the original", "agreement": "agreement of outputs", "kl": "KL, nats per token"}
    shown = {key: form for key, form in formats.items() if getattr(fidelity.scores[0], key) is not None}
    rows = [
        (own.network, *("–" if (value := getattr(own, key)) is None else shown[key].format(value) for key in shown))
        for own in fidelity.scores
    ]
    console.print_table(f"On {fidelity.inputs}", ("", *(titles.get(key, key) for key in shown)), rows)


def print_refusals(refusals: Iterable[Any]) -> None:
    """Print the channels that cannot be removed, with reason and source line."""
    rows = [(r.layer, r.channels, f"{r.operator} {r.why}", r.place) for r in refusals]
    if rows:
        console.print_table("Not prunable", ("layer", "channels", "why", "where"), rows)
