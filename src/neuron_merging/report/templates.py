"""templates: the pages' common design, and what their templates can say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

import neuron_merging

HOME = "neuron_merging.report"
BINS = 20


@cache
def environment(home: str = HOME) -> Environment:
    """Templates of a package, which may include those here."""
    loader = ChoiceLoader([PackageLoader(place, ".") for place in dict.fromkeys((home, HOME))])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"size": size, "change": change, "time": duration, "bars": histogram, "count": count}
    found.globals["version"] = neuron_merging.__version__
    return found


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
