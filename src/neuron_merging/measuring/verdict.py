"""verdict: does the smaller network answer like the original? In one number, in words, and who is to blame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from neuron_merging.channels.analysis import Analysis
from neuron_merging.cutting.plan import Choice, Plan
from neuron_merging.errors import FidelityError
from neuron_merging.graph.macs import total_macs
from neuron_merging.measuring.fidelity import Fidelity
from neuron_merging.measuring.whatif import WhatIf
from neuron_merging.statistics.remembered import Batch
from neuron_merging.statistics.standin import some
from neuron_merging.statistics.synthetic import batch_size

Level = Literal["good", "caution", "warning", "unknown"]
CAUTION, WARNING = 0.9, 0.6
"""Fidelities below which a verdict is no longer good, and below which it is a warning."""
SHOWN = 3
"""Groups that are named."""
PROBES = 4, 16
"""Inputs on which single groups are tried, at least and at most."""
TRIED = 8
"""Groups that are tried: those that are expected to do most harm."""
WORK = 2**36
"""Multiply-accumulates that all those trials may take: some seconds; if need be fewer are tried."""
WORST = 1e30
"""What a divergence without bounds counts."""
REMEDY = "Cut less, let a budget share the cut out (budget=, --budget), or give some data (calibration=, --calibrate)."


@dataclass(frozen=True)
class Culprit:
    """A group of channels, and its share of what the suspected groups, each cut alone, do to the answers."""

    group: str
    share: float

    def __str__(self) -> str:
        return f"{self.group} ({self.share:.0%})"


@dataclass(frozen=True)
class Verdict:
    """How well a smaller network answers like the original. Printed, a sentence.

    Attributes
    ----------
    fidelity
        One minus the squared error of the outputs relative to their variance, at least 0; None: not known.
    inputs
        What it was measured on.
    data
        Whether those were data; else they were made up.
    accuracy
        Before and after in percent, where there are labels.
    score
        The user's own score before and after, where there is one.
    culprits
        Below 0.6: the groups that cause most of it.
    why
        Why the fidelity is not known.
    guessed
        Whether the inputs were made up without anything that the network knows of its data.
    level
        "good", "caution" below 0.9, "warning" below 0.6, or "unknown".

    Examples
    --------
    >>> print(Verdict(0.973, "256 synthetic images", data=False))
    answers like the original: fidelity 0.973 on 256 synthetic images (no data was given)
    """

    fidelity: float | None
    inputs: str
    data: bool
    accuracy: tuple[float, float] | None = None
    score: tuple[float, float] | None = None
    culprits: tuple[Culprit, ...] = ()
    why: str = ""
    guessed: bool = False
    level: Level = field(init=False, default="unknown")

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", _level(self.fidelity))

    @property
    def measured(self) -> str:
        """The figures, and what they were measured on."""
        known = f"fidelity {self.fidelity:.3f}" if self.fidelity is not None else "fidelity not known"
        found = f"{known} on {self.inputs}" + ("" if self.data else " (no data was given)")
        if self.accuracy is not None:
            found += ", accuracy {:.2f} % → {:.2f} %".format(*self.accuracy)
        return found + (", score {:.6g} → {:.6g}".format(*self.score) if self.score is not None else "")

    @property
    def advice(self) -> str:
        """What to do about it; nothing where all is well."""
        if self.level == "caution":
            return "Look at its answers before you rely on it." if self.data else "Try it on data of yours."
        if self.level == "good" and self.guessed:
            return "Such inputs are not what it was trained on: try it on data of yours."
        if self.level != "warning":
            return ""
        blamed = ", ".join(map(str, self.culprits))
        return (f"Most of it comes from {blamed}. " if blamed else "") + REMEDY

    def __str__(self) -> str:
        opening = {
            "good": "answers like the original: ",
            "caution": "caution, it answers only roughly like the original: ",
            "warning": "WARNING: it no longer answers like the original: ",
            "unknown": "whether it answers like the original is not known: ",
        }[self.level]
        reason = f" ({self.why})" if self.why else ""
        return f"{opening}{self.measured}{reason}" + (f". {self.advice}" if self.advice else "")


def _level(fidelity: float | None) -> Level:
    if fidelity is None:
        return "unknown"
    return "good" if fidelity >= CAUTION else "caution" if fidelity >= WARNING else "warning"


def verdict_of(
    compared: Fidelity, *, data: bool, guessed: bool = False, score: tuple[float, float] | None = None
) -> Verdict:
    """What a comparison, whose last network is the smaller one, comes to."""
    first, last = compared.scores[0], compared.scores[-1]
    accuracy = None if first.accuracy is None or last.accuracy is None else (first.accuracy, last.accuracy)
    return Verdict(last.fidelity, compared.inputs, data, accuracy, score, why=compared.why, guessed=guessed)


def blamed(verdict: Verdict, analysis: Analysis, plan: Plan, batches: Iterable[Batch]) -> Verdict:
    """The same verdict; of a warning, with the groups that cause most of it."""
    first = next(iter(batches), None)
    if verdict.level != "warning" or first is None:
        return verdict
    suspects = _suspects(plan)
    return replace(verdict, culprits=culprits(analysis, suspects, some(first, _probe_count(analysis, len(suspects)))))


def _suspects(plan: Plan) -> list[Choice]:
    """The groups whose readers are expected to lose most; where nothing is known of that, the largest cuts."""
    lost = {own.name: 1 - len(own.kept) / own.size if own.error is None else own.error for own in plan.groups}
    return sorted(plan.groups, key=lambda own: -lost[own.name])[:TRIED]


def _probe_count(analysis: Analysis, groups: int) -> int:
    batch = batch_size(analysis.inputs)
    if analysis.fixes_batch:
        return batch  # the graph as it is takes no other
    least, most = PROBES
    return max(least, min(most, WORK * batch // max(1, groups * total_macs(analysis.graph))))


def culprits(analysis: Analysis, suspects: Sequence[Choice], probes: Batch) -> tuple[Culprit, ...]:
    """Each group cut alone and merged: those after which the answers are furthest off."""
    if analysis.fixes_batch and batch_size(probes) != batch_size(analysis.inputs):
        return ()
    passes = max(1, WORK // max(1, total_macs(analysis.graph) * batch_size(probes) // batch_size(analysis.inputs)))
    tried = suspects[:passes]
    scores = {own.name: np.isin(np.arange(own.size), own.kept).astype(float) for own in tried}
    found = WhatIf(analysis, [probes], scores).around(
        {own.name: own.size for own in tried}, {own.name: [len(own.kept)] for own in tried}
    )
    losses = {name: min(loss, WORST) for (name, _), loss in found.items() if loss > 0}
    total = sum(losses.values())
    worst = sorted(losses, key=lambda name: -losses[name])[:SHOWN]
    return tuple(Culprit(name, losses[name] / total) for name in worst)


def check_required(verdict: Verdict, require: float | None) -> None:
    """Refuse a network that answers less like the original than was asked for."""
    if require is None or (verdict.fidelity is not None and verdict.fidelity >= require):
        return
    blame = ", ".join(map(str, verdict.culprits))
    what = f"{verdict.measured}, {require:g} is required" + (f" ({verdict.why})" if verdict.why else "")
    raise FidelityError(what + (f". Most of it comes from {blame}" if blame else ""), where="require=", fix=REMEDY)
