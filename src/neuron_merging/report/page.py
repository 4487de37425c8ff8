"""page: findings in, one HTML file out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import numpy as np
from jinja2 import Environment, StrictUndefined, Template

import neuron_merging
from neuron_merging.report.findings import Findings

BINS = 20


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
    return _template().render(f=findings, version=neuron_merging.__version__)


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": size, "change": change, "time": duration, "bars": histogram, "count": count}
    return environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def count(number: int) -> str:
    """
    >>> count(67754)
    '67,754'
    >>> count(4089184256)
    '4.09 G'
    """
    return f"{number:,}" if number < 10**9 else f"{number / 10**9:,.2f} G"


def size(number: int) -> str:
    """
    >>> size(67754)
    '67.8 kB'
    """
    value, unit = float(number), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def change(pair: Sequence[float]) -> str:
    """
    >>> change((200, 50))
    '−75 %'
    """
    share = round(100 * (pair[1] / pair[0] - 1)) if pair[0] else 0
    return f"{share:+d} %".replace("-", "−") if share else "±0 %"


def duration(seconds: float) -> str:
    """
    >>> duration(0.00123)
    '1.23 ms'
    """
    value, unit = seconds * 1e6, "µs"
    for larger in ("ms", "s"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def histogram(values: Sequence[float]) -> list[tuple[float, float, int, float]]:
    """For each bin its edges, how many values are in it, and that as a share of the fullest bin."""
    low = min(0.0, np.floor(10 * min(values)) / 10)
    counts, edges = np.histogram(np.clip(values, low, 1), BINS, (low, 1))
    top = max(int(counts.max()), 1)
    return [(float(edges[i]), float(edges[i + 1]), int(n), int(n) / top) for i, n in enumerate(counts)]
