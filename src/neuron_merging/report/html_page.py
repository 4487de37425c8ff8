"""Render the HTML page of a compressed network or a sweep, and write it to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from neuron_merging import atomic
from neuron_merging.calibration.output_divergence import find_output_parts
from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.card import render_loading_code
from neuron_merging.checkpoint.model_folder import Compressed
from neuron_merging.evaluation.fidelity import (
    build_compared_networks,
    compare_networks,
    make_image_batches,
    make_synthetic_batches,
)
from neuron_merging.evaluation.verdict import make_verdict
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.report.charts import build_heatmap, build_sweep_chart
from neuron_merging.report.collect import collect_report_data
from neuron_merging.report.report_data import ReportData
from neuron_merging.report.templates import get_template_environment
from neuron_merging.sweeps.results import TABLE_HEADINGS, Sweep


def render_report_data(findings: ReportData) -> str:
    """The page as text; it loads nothing from anywhere.

    Parameters
    ----------
    findings
        What `collect` found.

    Returns
    -------
    str
        HTML.

    Examples
    --------
    >>> from neuron_merging.report import collect
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> found = collect(analysis, nm.compress(analysis), None, title="net", method="", load="")
    >>> render_report_data(found)[:15]
    '<!doctype html>'
    """
    known = findings.sensitivity
    return (
        get_template_environment()
        .get_template("page.html")
        .render(
            f=findings,
            curve=build_sweep_chart(findings.sweep) if findings.sweep else None,
            shades=build_heatmap(known) if known else (),
        )
    )


def render_sweep_report(sweep: Sweep, title: str, asked: tuple[tuple[str, str], ...] = ()) -> str:
    """The page about a sweep as text.

    Parameters
    ----------
    sweep
        What `nm.sweep` returned.
    title
        Of the network.
    asked
        Settings that all cells share, as pairs of texts.

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
        .render(s=sweep, title=title, asked=asked, curve=build_sweep_chart(sweep), headings=headings)
    )


def write_report(
    file: str | Path, small: Compressed, model: nn.Module | Analysis, example_inputs: Any = None, *, images: Any = None
) -> Path:
    """Compare `small` with what it was made from, and write the page: one HTML file that loads nothing.

    Parameters
    ----------
    file
        Where to.
    small
        What `compress` returned.
    model
        The original network, or its analysis.
    example_inputs
        As for `analyse`.
    images
        Labelled data, as `neuron_merging.data` gives it. Without, the networks are compared on synthetic inputs.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        The network returns no numbers to compare, or no row of class scores for each image.

    Examples
    --------
    >>> import tempfile, torch, neuron_merging as nm
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     write_report(f"{place}/page.html", nm.compress(analysis), analysis).name
    'page.html'
    """
    return atomic.replace_file(file, render_report(small, model, example_inputs, images=images).encode())


def render_report(
    small: Compressed, model: nn.Module | Analysis, example_inputs: Any = None, *, images: Any = None
) -> str:
    """The page as text, for those who put it elsewhere.

    Parameters
    ----------
    small
        What `compress` returned.
    model
        The original network, or its analysis.
    example_inputs
        As for `analyse`.
    images
        Labelled data; without, synthetic inputs.

    Returns
    -------
    str
        HTML.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        The networks cannot be compared on these data.

    Examples
    --------
    >>> render_report(nm.compress(net, torch.zeros(1, 4)), net, torch.zeros(1, 4))[:15]
    '<!doctype html>'
    """
    analysis = analyse(model, example_inputs)
    original, known = analysis.model, small.summary.verdict
    batches, said = make_image_batches(images) if images else make_synthetic_batches(analysis)
    fidelity = compare_networks(
        build_compared_networks(original, small.model, small.plan),
        batches,
        said,
        parts=find_output_parts(analysis.graph),
    )
    if images or known is None:
        verdict = make_verdict(fidelity, data=bool(images), score=known.score if known else None)
        small = replace(small, summary=replace(small.summary, verdict=verdict))
    removed = sum(group.removed for group in small.summary.groups)
    found = collect_report_data(
        analysis,
        small,
        fidelity,
        title=type(original).__name__,
        method=f"{removed:,} channels in {len(small.plan.groups)} groups removed.",
        load=render_loading_code(None),
    )
    return render_report_data(found)
