"""Render the HTML page of a compressed network or a sweep, and write it to a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from torch import nn

import neuron_merging
from neuron_merging import atomic
from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.checkpoint.save_folder import build_stored_figures
from neuron_merging.data.eval_data import make_user_eval_set
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.fidelity import make_synthetic_eval_set
from neuron_merging.evaluation.figures import collect_figures, compare_with_int8, measure_latency
from neuron_merging.evaluation.verdict import DEFAULT_REQUEST
from neuron_merging.inputs.input_sets import make_heldout_inputs
from neuron_merging.onnx.quantize import OrtNetwork
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.report.charts import build_heatmap, build_sweep_chart
from neuron_merging.report.report_data import ReportData, build_report_data
from neuron_merging.selection.judge import Judgement, judge_network
from neuron_merging.sweeps.results import TABLE_HEADINGS, Sweep

TEMPLATE_PACKAGE = "neuron_merging.report"
HISTOGRAM_BINS = 20
"""Bars of a histogram; page.html draws them 32 units wide in a chart of 640."""


@cache
def get_template_environment(package: str = TEMPLATE_PACKAGE) -> Environment:
    """Return the environment for the templates of a package, which may include those of this one."""
    loader = ChoiceLoader([PackageLoader(name, ".") for name in dict.fromkeys((package, TEMPLATE_PACKAGE))])
    # Layers and files have names from users: everything is escaped. A missing figure is an error, not a gap.
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "size": format_bytes,
        "change": format_change,
        "time": format_duration,
        "bars": build_histogram,
        "count": format_count,
    }
    environment.globals["version"] = neuron_merging.__version__
    return environment


def format_count(number: int) -> str:
    """Format a number with thousands separators, or in units of 10⁹.

    >>> format_count(67754)
    '67,754'
    >>> format_count(4089184256)
    '4.09 G'
    """
    return f"{number:,}" if number < 10**9 else f"{number / 10**9:,.2f} G"


def format_bytes(number: int) -> str:
    """Format a number of bytes with three digits and a decimal unit.

    >>> format_bytes(67754)
    '67.8 kB'
    """
    # Decimal units, as disks and downloads are labelled.
    value, unit = float(number), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def format_change(pair: Sequence[float]) -> str:
    """Format the change from the first to the second value in percent.

    >>> format_change((200, 50))
    '−75 %'
    """
    share = round(100 * (pair[1] / pair[0] - 1)) if pair[0] else 0
    return f"{share:+d} %".replace("-", "−") if share else "±0 %"


def format_duration(seconds: float) -> str:
    """Format seconds with three digits and a suitable unit.

    >>> format_duration(0.00123)
    '1.23 ms'
    """
    value, unit = seconds * 1e6, "µs"
    for larger in ("ms", "s"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def build_histogram(values: Sequence[float]) -> list[tuple[float, float, int, float]]:
    """Return for each bin its two edges, its count, and its count relative to the fullest bin."""
    # Cosines end at 1; start at 0, or lower if there are negative ones.
    low = min(0.0, np.floor(10 * min(values)) / 10)
    counts, edges = np.histogram(np.clip(values, low, 1), HISTOGRAM_BINS, (low, 1))
    top = max(int(counts.max()), 1)
    return [(float(edges[i]), float(edges[i + 1]), int(n), int(n) / top) for i, n in enumerate(counts)]


def render_report_data(findings: ReportData) -> str:
    """Render the page about a compressed network as one HTML text that loads no other files.

    Parameters
    ----------
    findings
        The data of the page, as `collect_report_data` returns it.

    Returns
    -------
    str
        HTML.

    Examples
    --------
    >>> from neuron_merging.report import collect_report_data
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> found = collect_report_data(analysis, nm.compress(analysis), None, title="net", method="", load="")
    >>> render_report_data(found)[:15]
    '<!doctype html>'
    """
    sensitivity = findings.sensitivity
    return (
        get_template_environment()
        .get_template("page.html")
        .render(
            f=findings,
            curve=build_sweep_chart(findings.sweep) if findings.sweep else None,
            heatmap=build_heatmap(sensitivity) if sensitivity else (),
        )
    )


def render_sweep_report(sweep: Sweep, title: str, settings: tuple[tuple[str, str], ...] = ()) -> str:
    """Render the page about a sweep as HTML.

    Parameters
    ----------
    sweep
        The sweep that `nm.sweep` returned.
    title
        The name of the network.
    settings
        Settings that all combinations share, as pairs of name and value.

    Returns
    -------
    str
        HTML.

    Examples
    --------
    >>> render_sweep_report(nm.sweep(net, torch.zeros(1, 4), ratio=[0.25, 0.5], jobs=1), "net")[:15]
    '<!doctype html>'
    """
    headings = [sweep.metric if name == "score" else name for name in TABLE_HEADINGS]
    return (
        get_template_environment()
        .get_template("sweep.html")
        .render(s=sweep, title=title, settings=settings, curve=build_sweep_chart(sweep), headings=headings)
    )


def write_report(
    file: str | Path,
    small: Compressed,
    model: nn.Module | Analysis | None = None,
    example_inputs: Any = None,
    *,
    images: Any = None,
) -> Path:
    """Write the page about a compressed network as one HTML file that loads no other files.

    Parameters
    ----------
    file
        The file to write.
    small
        The network that `compress` returned.
    model
        The original network or its analysis. Needed to measure the latency, to compare with the same cut without
        merging, and to evaluate on `images`. Without it, the page shows what `compress` measured.
    example_inputs
        As for `analyse`.
    images
        Labelled images from `neuron_merging.data`, to evaluate the result on.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        Without the original: images were given, or nothing was measured yet. With it: the network does not return one
        row of class scores per image.

    Examples
    --------
    >>> import tempfile, torch, neuron_merging as nm
    >>> small = nm.compress(net, torch.zeros(1, 4))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     write_report(f"{place}/page.html", small).name
    'page.html'
    """
    return atomic.replace_file(file, render_report(small, model, example_inputs, images=images).encode())


def render_report(
    small: Compressed, model: nn.Module | Analysis | None = None, example_inputs: Any = None, *, images: Any = None
) -> str:
    """Render the page about a compressed network as HTML.

    Parameters
    ----------
    small
        The network that `compress` returned.
    model
        The original network or its analysis, for further measurements: see `write_report`.
    example_inputs
        As for `analyse`.
    images
        Labelled images to evaluate the result on.

    Returns
    -------
    str
        HTML.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        See `write_report`.

    Examples
    --------
    >>> render_report(nm.compress(net, torch.zeros(1, 4)))[:15]
    '<!doctype html>'
    """
    if model is not None:
        small = measure_figures(small, model, example_inputs, images=images)
    elif images is not None:
        raise MergingError("the original network is needed to evaluate images", where="images=", fix="Give model=.")
    stored = build_stored_figures(small, None)
    if stored is None:
        what = "this network has no measured figures"
        raise MergingError(what, where="small", fix="Give the original network too, as model=.")
    return render_report_data(build_report_data(stored, small.recipe))


def measure_figures(
    small: Compressed, model: nn.Module | Analysis, example_inputs: Any = None, *, images: Any = None
) -> Compressed:
    """Measure all figures of the page with the original network, including the latency.

    Parameters
    ----------
    small
        The network that `compress` returned.
    model
        The original network or its analysis.
    example_inputs
        As for `analyse`.
    images
        Labelled images to evaluate on. Without them, the verdict of `compress` is kept, and the networks are compared
        on synthesised inputs.

    Returns
    -------
    Compressed
        The same network with its figures and, if images were given, with a verdict based on them.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        The networks cannot be compared on these data.

    Examples
    --------
    >>> found = measure_figures(nm.compress(net, torch.zeros(1, 4)), net, torch.zeros(1, 4))
    >>> [score.network for score in found.figures.fidelity.scores]
    ['original', 'pruned', 'merged']
    """
    analysis, known = analyse(model, example_inputs), small.summary.verdict
    if images is None:
        eval_set = make_synthetic_eval_set(analysis, make_heldout_inputs(analysis))
    else:
        eval_set = make_user_eval_set(images, analysis, "images=")
    judged = judge_network(
        analysis,
        small.model,
        small.plan,
        eval_set,
        score=known.score if known else None,
        compare_pruned=True,
        request=known.request if known else DEFAULT_REQUEST,
        quantized=None if small.int8 is None else OrtNetwork(small.int8.data),
    )
    # The known verdict may rest on the user's data, which synthesised inputs must not replace.
    verdict = judged.verdict if known is None or images is not None else known
    return replace_judgement(small, analysis, Judgement(verdict, judged.compared))


def replace_judgement(small: Compressed, analysis: Analysis, judged: Judgement) -> Compressed:
    """Replace the verdict of a network; measure the other figures of its page if they are missing."""
    summary, known, merges = replace(small.summary, verdict=judged.verdict), small.figures, small.merged.merges
    if known is None:
        known = collect_figures(analysis, small.model, small.plan, summary, judged.compared, merges)
    # Measured here and not in `compress`, because it takes seconds and the page alone shows it.
    latency = known.latency or measure_latency(analysis.model, small.model, analysis.inputs)
    figures = replace(known, summary=summary, fidelity=judged.compared, latency=latency)
    if small.int8 is not None:
        figures = replace(figures, int8=compare_with_int8(small.int8, judged.compared, judged.verdict))
    return replace(small, summary=summary, compared=judged.compared, figures=figures)
