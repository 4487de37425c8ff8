"""page: findings in, one HTML file out."""

from __future__ import annotations

from neuron_merging.report.curve import curve_of
from neuron_merging.report.findings import Findings
from neuron_merging.report.shades import shaded
from neuron_merging.report.templates import environment
from neuron_merging.sweeping.outcome import HEADINGS, Sweep


def render(findings: Findings) -> str:
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
    >>> import torch, neuron_merging as nm
    >>> from neuron_merging.report import collect
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> found = collect(analysis, nm.compress(analysis), None, title="net", method="", load="")
    >>> render(found)[:15]
    '<!doctype html>'
    """
    known = findings.sensitivity
    return (
        environment()
        .get_template("page.html")
        .render(
            f=findings,
            curve=curve_of(findings.sweep) if findings.sweep else None,
            shades=shaded(known) if known else (),
        )
    )


def sweep_page(sweep: Sweep, title: str, asked: tuple[tuple[str, str], ...] = ()) -> str:
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
    >>> import torch, neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> sweep_page(nm.sweep(net, torch.zeros(1, 4), ratio=[0.25, 0.5], jobs=1), "net")[:15]
    '<!doctype html>'
    """
    headings = [sweep.metric if name == "score" else name for name in HEADINGS]
    return (
        environment()
        .get_template("sweep.html")
        .render(s=sweep, title=title, asked=asked, curve=curve_of(sweep), headings=headings)
    )
