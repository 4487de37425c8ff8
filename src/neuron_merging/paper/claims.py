"""claims: what the paper's text says about its tables and figures, tested on our own figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from neuron_merging.paper.printed import ORIGINAL
from neuron_merging.paper.rows import Row

Similarities = Mapping[str, Sequence[float]]
"""By layer, from the front to the back."""


class Figures:
    """The rows of one target, asked for by what they are about."""

    def __init__(self, rows: Sequence[Row], similarities: Similarities | None = None) -> None:
        self.rows, self.similarities = rows, similarities or {}

    def value(self, metric: str, network: str, criterion: str, ratio: float, method: str) -> float | None:
        wanted = (metric, network, criterion, ratio, method)
        found = (r for r in self.rows if (r.metric, r.network, r.criterion, r.ratio, r.method) == wanted)
        return next((row.ours for row in found if row.threshold is None), None)

    def gains(self, metric: str = "accuracy", networks: str = "*", ratio: float | None = None) -> list[float]:
        """Merged minus pruned, wherever both were measured."""
        merged = self._merged(metric, networks, ratio)
        pruned = [self.value(metric, row.network, row.criterion, row.ratio, "none") for row in merged]
        return [row.ours - value for row, value in zip(merged, pruned, strict=True) if value is not None]

    def losses(self, networks: str, ratio: float) -> list[float]:
        """The original's accuracy minus the merged network's."""
        merged = self._merged("accuracy", networks, ratio)
        before = [self.value("accuracy", row.network, "", 0.0, ORIGINAL) for row in merged]
        return [value - row.ours for row, value in zip(merged, before, strict=True) if value is not None]

    def _merged(self, metric: str, networks: str, ratio: float | None) -> list[Row]:
        rows = (r for r in self.rows if r.method == "cosine" and r.metric == metric and r.threshold is None)
        return [r for r in rows if fnmatchcase(r.network, networks) and ratio in (None, r.ratio)]

    def best_thresholds(self) -> list[float]:
        """By criterion and ratio, the t of the highest accuracy."""
        groups: dict[tuple[str, str, float], list[Row]] = {}
        for row in self.rows:
            if row.threshold is not None and row.metric == "accuracy":
                groups.setdefault((row.network, row.criterion, row.ratio), []).append(row)
        best = (max(group, key=lambda row: row.ours).threshold for group in groups.values())
        return [threshold for threshold in best if threshold is not None]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and what it says about figures; None where they were not measured."""

    text: str
    test: Callable[[Figures], bool | None]


@dataclass(frozen=True)
class Verdict:
    """A claim with what became of it here."""

    claim: str
    holds: bool | None


def verdicts(target: str, rows: Sequence[Row], similarities: Similarities | None = None) -> tuple[Verdict, ...]:
    """Every claim about a target, with whether it holds in these figures."""
    figures = Figures(rows, similarities)
    return tuple(Verdict(claim.text, claim.test(figures)) for claim in CLAIMS[target])


def _all(values: Sequence[float], test: Callable[[float], bool]) -> bool | None:
    return all(map(test, values)) if values else None


def _better(figures: Figures) -> bool | None:
    return _all(figures.gains(), lambda gain: gain > 0)


def _grows(figures: Figures) -> bool | None:
    """The mean gain rises with the ratio."""
    ratios = sorted({row.ratio for row in figures.rows if row.method == "cosine"})
    means = [statistics.fmean(gains) for ratio in ratios if (gains := figures.gains(ratio=ratio))]
    return means == sorted(means) if len(means) > 1 else None


def _falls(figures: Figures) -> bool | None:
    """The layers' medians go down with depth: the correlation of the ranks is below -0.5."""
    medians = [statistics.median(values) for values in figures.similarities.values()]
    ranks = [sum(other < median for other in medians) for median in medians]
    return statistics.correlation(range(len(ranks)), ranks) < -0.5 if len(set(ranks)) > 2 else None


def _low_at_the_back(figures: Figures) -> bool | None:
    layers = list(figures.similarities.values())
    values = [value for layer in layers[-max(1, len(layers) // 3) :] for value in layer]
    return sum(0.1 <= value <= 0.3 for value in values) > len(values) / 2 if values else None


def _less_noisy(figures: Figures) -> bool | None:
    return _all(figures.gains("correlation"), lambda gain: gain > 0)


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "table1": (
        Claim("merging improves the accuracy in all cases", _better),
        Claim("the gain is more prominent as the ratio increases", _grows),
        Claim("at 80 % merging recovers more than 13 points", lambda f: _all(f.gains(ratio=0.8), lambda g: g > 13)),
    ),
    "table2": (
        Claim("merging recovers accuracy for all criteria", _better),
        Claim(
            "on CIFAR-10 the merged network drops by 0.6 points at most",
            lambda f: _all(f.losses("vgg-16", 0.5), lambda loss: loss <= 0.6),
        ),
    ),
    "table3": (
        Claim(
            "the merged network has the lower WARE in all cases", lambda f: _all(f.gains("ware"), lambda gain: gain < 0)
        ),
    ),
    "table4": (Claim("merging recovers the accuracy in all cases", _better),),
    "figure3": (
        Claim("merging increases the accuracy in all cases", _better),
        Claim(
            "ResNet-56 at 50 %: merging restores more than 30 points",
            lambda f: _all(f.gains(networks="resnet-56", ratio=0.5), lambda gain: gain > 30),
        ),
        Claim(
            "WideResNet at 50 %: merging loses less than 5 points",
            lambda f: _all(f.losses("wideresnet-*", 0.5), lambda loss: loss < 5),
        ),
        Claim(
            "WideResNet at 50 %: merging is 20 points better than pruning",
            lambda f: _all(f.gains(networks="wideresnet-*", ratio=0.5), lambda gain: gain >= 19.5),
        ),
    ),
    "figure4": (Claim("the merged maps are more like the original's than the pruned ones", _less_noisy),),
    "figure5": (
        Claim("the maximum similarity falls toward the back layers", _falls),
        Claim("in the back layers it lies mostly between 0.1 and 0.3", _low_at_the_back),
        Claim(
            "the highest accuracy lies near t = 0.15, for all ratios",
            lambda f: _all(f.best_thresholds(), lambda t: abs(t - 0.15) <= 0.05 + 1e-9),
        ),
    ),
}
