"""Render the HTML page of a compressed network or a sweep, and write it to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from neuron_merging import atomic
from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.model_folder import Compressed, build_stored_figures
from neuron_merging.data.eval_data import make_user_eval_set
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.eval_set import make_synthetic_eval_set
from neuron_merging.evaluation.figures import collect_figures, measure_latency
from neuron_merging.evaluation.verdict import DEFAULT_REQUEST
from neuron_merging.inputs.input_sets import make_heldout_inputs
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.report.charts import build_heatmap, build_sweep_chart
from neuron_merging.report.report_data import ReportData, build_report_data
from neuron_merging.report.templates import get_template_environment
from neuron_merging.selection.judge import Judgement, judge_network
from neuron_merging.sweeps.results import TABLE_HEADINGS, Sweep


def render_report_data(findings: ReportData) -> str:
    """The page as text; it loads nothing from anywhere.

    Parameters
    ----------
    findings
        What `collect_report_data` found.

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
    file: str | Path,
    small: Compressed,
    model: nn.Module | Analysis | None = None,
    example_inputs: Any = None,
    *,
    images: Any = None,
) -> Path:
    """Write the page about a compressed network: one HTML file that loads nothing.

    Parameters
    ----------
    file
        Where to.
    small
        What `compress` returned.
    model
        The original network, or its analysis, to measure the latency too, to compare with the same cut without
        merging, and to judge on `images`. Left out, the page shows what `compress` measured.
    example_inputs
        As for `analyse`.
    images
        Labelled data, as `neuron_merging.data` gives it, to judge the result on.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        Without the original: there are images to judge on, or nothing was measured yet. With it: the network returns
        no row of class scores for each image.

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
    """The page about a compressed network as text.

    Parameters
    ----------
    small
        What `compress` returned.
    model
        The original network, or its analysis, to measure more with: see `write_report`.
    example_inputs
        As for `analyse`.
    images
        Labelled data to judge the result on.

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
        raise MergingError("images need the original network", where="images=", fix="Give model= too.")
    stored = build_stored_figures(small, None)
    if stored is None:
        what = "nothing was measured of this network"
        raise MergingError(what, where="small", fix="Give the original network too, as model=.")
    return render_report_data(build_report_data(stored, small.recipe))


def measure_figures(
    small: Compressed, model: nn.Module | Analysis, example_inputs: Any = None, *, images: Any = None
) -> Compressed:
    """Measure what the page shows with the original network at hand, the latency included.

    Parameters
    ----------
    small
        What `compress` returned.
    model
        The original network, or its analysis.
    example_inputs
        As for `analyse`.
    images
        Labelled data to judge on; left out, the verdict stays, and the networks are compared on synthetic inputs.

    Returns
    -------
    Compressed
        The same network with its figures, and, on images, with the verdict on them.

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
    )
    verdict = judged.verdict if known is None or images is not None else known
    return replace_judgement(small, analysis, Judgement(verdict, judged.compared))


def replace_judgement(small: Compressed, analysis: Analysis, judged: Judgement) -> Compressed:
    """The same network judged anew; what else its page shows is measured where it is not known yet."""
    summary, known, merges = replace(small.summary, verdict=judged.verdict), small.figures, small.merged.merges
    if known is None:
        known = collect_figures(analysis, small.model, small.plan, summary, judged.compared, merges)
    latency = known.latency or measure_latency(analysis.model, small.model, analysis.inputs)
    figures = replace(known, summary=summary, fidelity=judged.compared, latency=latency)
    return replace(small, summary=summary, compared=judged.compared, figures=figures)
