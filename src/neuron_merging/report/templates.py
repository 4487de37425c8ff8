"""The Jinja environment of the HTML pages and its filters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

import neuron_merging

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
