"""rows: what was measured beside what was printed, ready for tables, files and pictures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from neuron_merging.paper.printed import ORIGINAL, PRINTED, Point, Reference
from neuron_merging.paper.settings import Network, Target
from neuron_merging.paper.trials import Trial
from neuron_merging.sweeping.cells import Result

COLUMNS = {
    "accuracy": "accuracy %",
    "top5": "top-5 %",
    "ware": "WARE",
    "parameters": "parameters",
    "correlation": "correlation",
    "error": "relative error",
}
"""Metrics, with their headings."""


@dataclass(frozen=True)
class Row:
    """One figure: of the paper, ours (the mean over checkpoints) and how far they are apart."""

    target: str
    network: str
    title: str
    criterion: str
    ratio: float
    method: str
    threshold: float | None
    metric: str
    paper: float | None
    ours: float
    spread: float | None
    """The standard deviation over checkpoints, where there are several."""
    checkpoints: int
    difference: float | None
    agrees: bool | None
    """Whether ours is as close as a right implementation comes on the paper's checkpoint."""
    source: str


def rows(target: Target, network: Network, trial: Trial, results: Sequence[Result]) -> list[Row]:
    """The figures of one trial, one for every metric of the target."""
    return [_row(target.name, network, trial, metric, [r[metric] for r in results]) for metric in target.metrics]


def _row(target: str, network: Network, trial: Trial, metric: str, values: Sequence[float]) -> Row:
    ours = statistics.fmean(values)
    point = Point(network.name, trial.criterion, trial.ratio, trial.label, metric)
    reference = None if trial.threshold is not None else PRINTED.get(target, {}).get(point)
    return Row(
        target=target,
        network=network.name,
        title=network.title,
        criterion=trial.criterion,
        ratio=trial.ratio,
        method=trial.label,
        threshold=trial.threshold,
        metric=metric,
        paper=reference.value if reference else None,
        ours=ours,
        spread=statistics.stdev(values) if len(values) > 1 else None,
        checkpoints=len(values),
        difference=ours - reference.value if reference else None,
        agrees=_close(ours, reference) if reference else None,
        source=reference.source if reference else "",
    )


def _close(ours: float, reference: Reference) -> bool:
    return abs(ours - reference.value) <= reference.tolerance + 1e-9


def grid(found: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines for people: one line per network, cut and method."""
    metrics = list(dict.fromkeys(row.metric for row in found))
    swept = any(row.threshold is not None for row in found)
    lines: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in found:
        key = (row.title, row.criterion, row.ratio, row.method, row.threshold)
        lines.setdefault(key, {})[row.metric] = row
    shown = [metric for metric in metrics if any(row.paper is not None for row in found if row.metric == metric)]
    headings = ["network", "criterion", "removed", "method", *(["t"] if swept else [])]
    for metric in metrics:
        headings += [f"{COLUMNS[metric]}: paper", "ours", "difference"] if metric in shown else [COLUMNS[metric]]
    return headings, [_line(line, metrics, shown, swept) for line in lines.values()]


def _line(line: dict[str, Row], metrics: list[str], shown: list[str], swept: bool) -> list[str]:
    row = next(iter(line.values()))
    original = row.method == ORIGINAL
    texts = [row.title, row.criterion, "" if original else f"{row.ratio:.0%}", row.method]
    texts += [_threshold(row)] if swept else []
    for metric in metrics:
        texts += figures(line[metric]) if metric in shown else figures(line[metric])[1:2]
    return texts


def _threshold(row: Row) -> str:
    return "" if row.threshold is None else f"{row.threshold:g}"


def figures(row: Row) -> list[str]:
    """Paper, ours and difference as texts."""
    ours = number(row.ours, row.metric) + (f" ± {number(row.spread, row.metric)}" if row.spread is not None else "")
    if row.paper is None or row.difference is None:
        return ["", ours, ""]
    difference = number(row.difference, row.metric)
    return [number(row.paper, row.metric), ours, difference if difference.startswith("-") else f"+{difference}"]


def number(value: float, metric: str) -> str:
    """With the digits that the paper prints; no negative zero.

    >>> number(93.8799, "accuracy"), number(-0.0001, "ware"), number(5397034, "parameters")
    ('93.88', '0.000', '5,397,034')
    """
    digits = {"accuracy": 2, "top5": 2, "parameters": 0}.get(metric, 3)
    return f"{round(value, digits) + 0.0:,.{digits}f}"


# For a page


@dataclass(frozen=True)
class Entry:
    """A figure on the page: ours, and how it stands to the paper's."""

    ours: str
    paper: str = ""
    agrees: bool | None = None


@dataclass(frozen=True)
class Pivot:
    """One network and metric on one screen: cuts and methods down, ratios (or values of t) across."""

    title: str
    original: Entry | None
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Entry | None, ...]], ...]


def pivots(found: Sequence[Row]) -> list[Pivot]:
    """A table for each network and metric."""
    pairs = dict.fromkeys((row.title, row.metric) for row in found)
    return [_pivot(title, [r for r in found if (r.title, r.metric) == (title, m)], m) for title, m in pairs]


def _pivot(title: str, own: Sequence[Row], metric: str) -> Pivot:
    swept = any(row.threshold is not None for row in own)
    cut = [row for row in own if row.method != ORIGINAL]
    columns = list(dict.fromkeys(_column(row, swept) for row in cut))
    lines: dict[str, dict[str, Entry]] = {}
    for row in cut:
        lines.setdefault(_label(row, swept), {})[_column(row, swept)] = _entry(row)
    return Pivot(
        title=f"{title}, {COLUMNS[metric]}",
        original=next((_entry(row) for row in own if row.method == ORIGINAL), None),
        columns=tuple(columns),
        lines=tuple((label, tuple(line.get(column) for column in columns)) for label, line in lines.items()),
    )


def _column(row: Row, swept: bool) -> str:
    return (f"t = {_threshold(row)}" if row.threshold is not None else "–") if swept else f"{row.ratio:.0%}"


def _label(row: Row, swept: bool) -> str:
    return " ".join([row.criterion, *([f"{row.ratio:.0%}"] if swept else []), row.method])


def _entry(row: Row) -> Entry:
    paper, ours, difference = figures(row)
    return Entry(ours, f"{paper} ({difference})" if paper else "", row.agrees)
