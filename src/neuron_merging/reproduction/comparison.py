"""Compare measured values with the paper's: rows, text tables, pivot tables for the page, and tests of the claims in
the paper's text.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from neuron_merging.reproduction.experiments import PaperNetwork, PaperTarget
from neuron_merging.reproduction.measurements import PaperTrial
from neuron_merging.reproduction.paper_values import ORIGINAL_METHOD, PAPER_VALUES, PaperValue, ValueKey
from neuron_merging.sweeps.run_cells import CellResult

METRIC_HEADINGS = {
    "accuracy": "accuracy %",
    "top5": "top-5 %",
    "ware": "WARE",
    "parameters": "parameters",
    "correlation": "correlation",
    "error": "relative error",
}
"""Column headings by metric."""


@dataclass(frozen=True)
class PaperRow:
    """One value: the paper's, ours (the mean over checkpoints), and their difference."""

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
    """The standard deviation over checkpoints, if there are several."""
    checkpoints: int
    difference: float | None
    agrees: bool | None
    """Whether the difference is within the tolerance; None without a paper value."""
    source: str


def build_rows(
    target: PaperTarget, network: PaperNetwork, trial: PaperTrial, results: Sequence[CellResult]
) -> list[PaperRow]:
    """Build the rows of one trial, one for every metric of the target."""
    return [_build_row(target.name, network, trial, metric, [r[metric] for r in results]) for metric in target.metrics]


def _build_row(target: str, network: PaperNetwork, trial: PaperTrial, metric: str, values: Sequence[float]) -> PaperRow:
    ours = statistics.fmean(values)
    point = ValueKey(network.name, trial.criterion, trial.ratio, trial.label, metric)
    # The paper prints no numbers for its curves over t.
    reference = None if trial.threshold is not None else PAPER_VALUES.get(target, {}).get(point)
    return PaperRow(
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
        agrees=_is_close(ours, reference) if reference else None,
        source=reference.source if reference else "",
    )


def _is_close(ours: float, reference: PaperValue) -> bool:
    # 1e-9 for differences that equal the tolerance up to rounding.
    return abs(ours - reference.value) <= reference.tolerance + 1e-9


def build_text_table(rows: Sequence[PaperRow]) -> tuple[list[str], list[list[str]]]:
    """Return headings and lines of a text table, one line per network, cut and method."""
    metrics = list(dict.fromkeys(row.metric for row in rows))
    swept = any(row.threshold is not None for row in rows)
    lines: dict[tuple[object, ...], dict[str, PaperRow]] = {}
    for row in rows:
        key = (row.title, row.criterion, row.ratio, row.method, row.threshold)
        lines.setdefault(key, {})[row.metric] = row
    shown = [metric for metric in metrics if any(row.paper is not None for row in rows if row.metric == metric)]
    headings = ["network", "criterion", "removed", "method", *(["t"] if swept else [])]
    for metric in metrics:
        headings += (
            [f"{METRIC_HEADINGS[metric]}: paper", "ours", "difference"]
            if metric in shown
            else [METRIC_HEADINGS[metric]]
        )
    return headings, [_build_text_line(line, metrics, shown, swept) for line in lines.values()]


def _build_text_line(line: dict[str, PaperRow], metrics: list[str], shown: list[str], swept: bool) -> list[str]:
    row = next(iter(line.values()))
    original = row.method == ORIGINAL_METHOD
    texts = [row.title, row.criterion, "" if original else f"{row.ratio:.0%}", row.method]
    texts += [_format_threshold(row)] if swept else []
    for metric in metrics:
        texts += format_comparison(line[metric]) if metric in shown else format_comparison(line[metric])[1:2]
    return texts


def _format_threshold(row: PaperRow) -> str:
    return "" if row.threshold is None else f"{row.threshold:g}"


def format_comparison(row: PaperRow) -> list[str]:
    """Return the paper's value, ours and the difference as texts."""
    ours = format_metric(row.ours, row.metric) + (
        f" ± {format_metric(row.spread, row.metric)}" if row.spread is not None else ""
    )
    if row.paper is None or row.difference is None:
        return ["", ours, ""]
    difference = format_metric(row.difference, row.metric)
    return [format_metric(row.paper, row.metric), ours, difference if difference.startswith("-") else f"+{difference}"]


def format_metric(value: float, metric: str) -> str:
    """Format a value with the digits that the paper prints, and without negative zero.

    >>> format_metric(93.8799, "accuracy"), format_metric(-0.0001, "ware"), format_metric(5397034, "parameters")
    ('93.88', '0.000', '5,397,034')
    """
    digits = {"accuracy": 2, "top5": 2, "parameters": 0}.get(metric, 3)
    return f"{round(value, digits) + 0.0:,.{digits}f}"


# For a page


@dataclass(frozen=True)
class PivotEntry:
    """A value on the page: ours, and the paper's with the difference."""

    ours: str
    paper: str = ""
    agrees: bool | None = None


@dataclass(frozen=True)
class PivotTable:
    """The table of one network and metric: cuts and methods as rows, ratios (or values of t) as columns."""

    title: str
    original: PivotEntry | None
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[PivotEntry | None, ...]], ...]


def build_pivots(rows: Sequence[PaperRow]) -> list[PivotTable]:
    """Build one table per network and metric."""
    pairs = dict.fromkeys((row.title, row.metric) for row in rows)
    return [_build_pivot(title, [r for r in rows if (r.title, r.metric) == (title, m)], m) for title, m in pairs]


def _build_pivot(title: str, rows: Sequence[PaperRow], metric: str) -> PivotTable:
    swept = any(row.threshold is not None for row in rows)
    cut = [row for row in rows if row.method != ORIGINAL_METHOD]
    columns = list(dict.fromkeys(_format_column(row, swept) for row in cut))
    lines: dict[str, dict[str, PivotEntry]] = {}
    for row in cut:
        lines.setdefault(_format_row_label(row, swept), {})[_format_column(row, swept)] = _build_pivot_entry(row)
    return PivotTable(
        title=f"{title}, {METRIC_HEADINGS[metric]}",
        original=next((_build_pivot_entry(row) for row in rows if row.method == ORIGINAL_METHOD), None),
        columns=tuple(columns),
        lines=tuple((label, tuple(line.get(column) for column in columns)) for label, line in lines.items()),
    )


def _format_column(row: PaperRow, swept: bool) -> str:
    return (f"t = {_format_threshold(row)}" if row.threshold is not None else "–") if swept else f"{row.ratio:.0%}"


def _format_row_label(row: PaperRow, swept: bool) -> str:
    return " ".join([row.criterion, *([f"{row.ratio:.0%}"] if swept else []), row.method])


def _build_pivot_entry(row: PaperRow) -> PivotEntry:
    paper, ours, difference = format_comparison(row)
    return PivotEntry(ours, f"{paper} ({difference})" if paper else "", row.agrees)


LayerSimilarities = Mapping[str, Sequence[float]]
"""The similarities of a layer's channels by layer, in the order of the network."""


class MeasuredValues:
    """Looks up the measured values of one target."""

    def __init__(self, rows: Sequence[PaperRow], similarities: LayerSimilarities | None = None) -> None:
        self.rows, self.similarities = rows, similarities or {}

    def value(self, metric: str, network: str, criterion: str, ratio: float, method: str) -> float | None:
        wanted = (metric, network, criterion, ratio, method)
        found = (r for r in self.rows if (r.metric, r.network, r.criterion, r.ratio, r.method) == wanted)
        return next((row.ours for row in found if row.threshold is None), None)

    def compute_gains(self, metric: str = "accuracy", networks: str = "*", ratio: float | None = None) -> list[float]:
        """Return the difference between merged and pruned networks, for all pairs that were measured."""
        merged = self._find_merged_rows(metric, networks, ratio)
        pruned = [self.value(metric, row.network, row.criterion, row.ratio, "none") for row in merged]
        return [row.ours - value for row, value in zip(merged, pruned, strict=True) if value is not None]

    def losses(self, networks: str, ratio: float) -> list[float]:
        """Return the accuracy that merged networks lose against the original."""
        merged = self._find_merged_rows("accuracy", networks, ratio)
        before = [self.value("accuracy", row.network, "", 0.0, ORIGINAL_METHOD) for row in merged]
        return [value - row.ours for row, value in zip(merged, before, strict=True) if value is not None]

    def _find_merged_rows(self, metric: str, networks: str, ratio: float | None) -> list[PaperRow]:
        rows = (r for r in self.rows if r.method == "cosine" and r.metric == metric and r.threshold is None)
        return [r for r in rows if fnmatchcase(r.network, networks) and ratio in (None, r.ratio)]

    def find_best_thresholds(self) -> list[float]:
        """Return the t of the highest accuracy for every criterion and ratio."""
        groups: dict[tuple[str, str, float], list[PaperRow]] = {}
        for row in self.rows:
            if row.threshold is not None and row.metric == "accuracy":
                groups.setdefault((row.network, row.criterion, row.ratio), []).append(row)
        best = (max(group, key=lambda row: row.ours).threshold for group in groups.values())
        return [threshold for threshold in best if threshold is not None]


@dataclass(frozen=True)
class PaperClaim:
    """A statement of the paper with a test for it; the test returns None if the values were not measured."""

    text: str
    test: Callable[[MeasuredValues], bool | None]


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim, and whether it holds for the measured values."""

    claim: str
    holds: bool | None


def check_claims(
    target: str, rows: Sequence[PaperRow], similarities: LayerSimilarities | None = None
) -> tuple[ClaimVerdict, ...]:
    """Test every claim about a target on the measured values."""
    figures = MeasuredValues(rows, similarities)
    return tuple(ClaimVerdict(claim.text, claim.test(figures)) for claim in PAPER_CLAIMS[target])


def _all_satisfy(values: Sequence[float], test: Callable[[float], bool]) -> bool | None:
    return all(map(test, values)) if values else None


def _is_merging_better(figures: MeasuredValues) -> bool | None:
    return _all_satisfy(figures.compute_gains(), lambda gain: gain > 0)


def _has_growing_gain(figures: MeasuredValues) -> bool | None:
    """Return whether the mean gain rises with the ratio."""
    ratios = sorted({row.ratio for row in figures.rows if row.method == "cosine"})
    means = [statistics.fmean(gains) for ratio in ratios if (gains := figures.compute_gains(ratio=ratio))]
    return means == sorted(means) if len(means) > 1 else None


def _has_falling_similarity(figures: MeasuredValues) -> bool | None:
    """Return whether the layers' medians fall with depth: their rank correlation is below -0.5."""
    medians = [statistics.median(values) for values in figures.similarities.values()]
    ranks = [sum(other < median for other in medians) for median in medians]
    return statistics.correlation(range(len(ranks)), ranks) < -0.5 if len(set(ranks)) > 2 else None


def _has_low_similarity_at_end(figures: MeasuredValues) -> bool | None:
    layers = list(figures.similarities.values())
    values = [value for layer in layers[-max(1, len(layers) // 3) :] for value in layer]
    return sum(0.1 <= value <= 0.3 for value in values) > len(values) / 2 if values else None


def _has_better_maps(figures: MeasuredValues) -> bool | None:
    return _all_satisfy(figures.compute_gains("correlation"), lambda gain: gain > 0)


PAPER_CLAIMS: dict[str, tuple[PaperClaim, ...]] = {
    "table1": (
        PaperClaim("merging improves the accuracy in all cases", _is_merging_better),
        PaperClaim("the gain is more prominent as the ratio increases", _has_growing_gain),
        PaperClaim(
            "at 80 % merging recovers more than 13 points",
            lambda f: _all_satisfy(f.compute_gains(ratio=0.8), lambda g: g > 13),
        ),
    ),
    "table2": (
        PaperClaim("merging recovers accuracy for all criteria", _is_merging_better),
        PaperClaim(
            "on CIFAR-10 the merged network drops by 0.6 points at most",
            lambda f: _all_satisfy(f.losses("vgg-16", 0.5), lambda loss: loss <= 0.6),
        ),
    ),
    "table3": (
        PaperClaim(
            "the merged network has the lower WARE in all cases",
            lambda f: _all_satisfy(f.compute_gains("ware"), lambda gain: gain < 0),
        ),
    ),
    "table4": (PaperClaim("merging recovers the accuracy in all cases", _is_merging_better),),
    "figure3": (
        PaperClaim("merging increases the accuracy in all cases", _is_merging_better),
        PaperClaim(
            "ResNet-56 at 50 %: merging restores more than 30 points",
            lambda f: _all_satisfy(f.compute_gains(networks="resnet-56", ratio=0.5), lambda gain: gain > 30),
        ),
        PaperClaim(
            "WideResNet at 50 %: merging loses less than 5 points",
            lambda f: _all_satisfy(f.losses("wideresnet-*", 0.5), lambda loss: loss < 5),
        ),
        PaperClaim(
            "WideResNet at 50 %: merging is 20 points better than pruning",
            lambda f: _all_satisfy(f.compute_gains(networks="wideresnet-*", ratio=0.5), lambda gain: gain >= 19.5),
        ),
    ),
    "figure4": (PaperClaim("the merged maps are more like the original's than the pruned ones", _has_better_maps),),
    "figure5": (
        PaperClaim("the maximum similarity falls toward the back layers", _has_falling_similarity),
        PaperClaim("in the back layers it lies mostly between 0.1 and 0.3", _has_low_similarity_at_end),
        PaperClaim(
            "the highest accuracy lies near t = 0.15, for all ratios",
            lambda f: _all_satisfy(f.find_best_thresholds(), lambda t: abs(t - 0.15) <= 0.05 + 1e-9),
        ),
    ),
}
