"""The Jinja environment of the HTML pages and its filters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

import neuron_merging

TEMPLATE_PACKAGE = "neuron_merging.report"
HISTOGRAM_BINS = 20


@cache
def get_template_environment(home: str = TEMPLATE_PACKAGE) -> Environment:
    """Templates of a package, which may include those here."""
    loader = ChoiceLoader([PackageLoader(place, ".") for place in dict.fromkeys((home, TEMPLATE_PACKAGE))])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {
        "size": format_bytes,
        "change": format_change,
        "time": format_duration,
        "bars": build_histogram,
        "count": format_count,
    }
    found.globals["version"] = neuron_merging.__version__
    return found


def format_count(number: int) -> str:
    """
    >>> format_count(67754)
    '67,754'
    >>> format_count(4089184256)
    '4.09 G'
    """
    return f"{number:,}" if number < 10**9 else f"{number / 10**9:,.2f} G"


def format_bytes(number: int) -> str:
    """
    >>> format_bytes(67754)
    '67.8 kB'
    """
    value, unit = float(number), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def format_change(pair: Sequence[float]) -> str:
    """
    >>> format_change((200, 50))
    '−75 %'
    """
    share = round(100 * (pair[1] / pair[0] - 1)) if pair[0] else 0
    return f"{share:+d} %".replace("-", "−") if share else "±0 %"


def format_duration(seconds: float) -> str:
    """
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
    """For each bin its edges, how many values are in it, and that as a share of the fullest bin."""
    low = min(0.0, np.floor(10 * min(values)) / 10)
    counts, edges = np.histogram(np.clip(values, low, 1), HISTOGRAM_BINS, (low, 1))
    top = max(int(counts.max()), 1)
    return [(float(edges[i]), float(edges[i + 1]), int(n), int(n) / top) for i, n in enumerate(counts)]
