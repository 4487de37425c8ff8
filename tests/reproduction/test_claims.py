"""The paper's claims, tested on our own figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from neuron_merging.reproduction import comparison
from neuron_merging.reproduction.comparison import PaperRow


def row(method: str, ratio: float, ours: float, **more: Any) -> PaperRow:
    base: dict[str, Any] = dict(
        target="figure3", network="resnet-56", title="", criterion="" if method == "original" else "l1", ratio=ratio,
        method=method, threshold=None, metric="accuracy", paper=None, ours=ours, spread=None, checkpoints=1,
        difference=None, agrees=None, source="",
    )  # fmt: skip
    return PaperRow(**(base | more))


def holds(target: str, rows: Sequence[PaperRow], similarities: Any = None) -> list[bool | None]:
    return [verdict.holds for verdict in comparison.check_claims(target, rows, similarities)]


def test_claims_are_tested_on_our_own_figures() -> None:
    good = [row("original", 0, 90), row("none", 0.5, 20), row("cosine", 0.5, 60)]
    assert holds("figure3", good) == [True, True, None, None]
    assert holds("figure3", [*good[:2], row("cosine", 0.5, 45)]) == [True, False, None, None]
    wide = [replace(r, network="wideresnet-16-2") for r in (good[0], row("none", 0.5, 66), row("cosine", 0.5, 86))]
    assert holds("figure3", wide) == [True, None, True, True]
    assert holds("table1", [row("none", 0.8, 60), row("cosine", 0.8, 73)]) == [True, None, False]
    ware = [row("none", 0.5, 12, metric="ware"), row("cosine", 0.5, 5, metric="ware")]
    assert holds("table3", ware) == [True] and holds("table3", ware[:1]) == [None]


def test_claims_about_similarity_and_t() -> None:
    sweep = [row("cosine", 0.3, value, threshold=t) for t, value in ((0.0, 70.0), (0.15, 80.0), (0.4, 60.0))]
    layers = {"1-1": [0.6, 0.7], "2-1": [0.4, 0.5], "3-1": [0.2, 0.25]}
    assert holds("figure5", sweep, layers) == [True, True, True]
    backwards = dict(reversed(layers.items()))
    assert holds("figure5", [replace(r, threshold=0.4 - (r.threshold or 0)) for r in sweep[::2]], backwards) == [
        False,
        False,
        False,
    ]
    assert holds("figure5", []) == [None, None, None]
