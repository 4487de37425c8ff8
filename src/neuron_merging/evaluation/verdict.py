"""The verdict on a smaller network: its fidelity, a level (good, caution, warning, unknown), and the groups that
cause most of the error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from neuron_merging.errors import FidelityError
from neuron_merging.evaluation.fidelity import Fidelity

VerdictLevel = Literal["good", "caution", "warning", "unknown"]
CAUTION_BELOW, WARNING_BELOW = 0.9, 0.6
"""Fidelities below which a verdict is no longer good, and below which it is a warning."""
FIDELITY_FIX = "Cut less, use a budget (budget=, --budget), or give some data (calibration=, --calibrate)."


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
    its outputs are close to the original's: fidelity 0.973 on 256 synthetic images (no data was given)
    """

    fidelity: float | None
    inputs: str
    data: bool
    accuracy: tuple[float, float] | None = None
    score: tuple[float, float] | None = None
    culprits: tuple[Culprit, ...] = ()
    why: str = ""
    guessed: bool = False
    level: VerdictLevel = field(init=False, default="unknown")

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", _choose_level(self.fidelity))

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
            return "Check its outputs before you rely on it." if self.data else "Test it on your own data."
        if self.level == "good" and self.guessed:
            return "These inputs differ from the training data: test it on your own data."
        if self.level != "warning":
            return ""
        blamed = ", ".join(map(str, self.culprits))
        return (f"Most of the error comes from {blamed}. " if blamed else "") + FIDELITY_FIX

    def __str__(self) -> str:
        opening = {
            "good": "its outputs are close to the original's: ",
            "caution": "caution, its outputs are only roughly those of the original: ",
            "warning": "WARNING: its outputs are far from the original's: ",
            "unknown": "no verdict: ",
        }[self.level]
        reason = f" ({self.why})" if self.why else ""
        return f"{opening}{self.measured}{reason}" + (f". {self.advice}" if self.advice else "")


def _choose_level(fidelity: float | None) -> VerdictLevel:
    if fidelity is None:
        return "unknown"
    return "good" if fidelity >= CAUTION_BELOW else "caution" if fidelity >= WARNING_BELOW else "warning"


def make_verdict(
    compared: Fidelity, *, data: bool, guessed: bool = False, score: tuple[float, float] | None = None
) -> Verdict:
    """What a comparison, whose last network is the smaller one, comes to."""
    first, last = compared.scores[0], compared.scores[-1]
    accuracy = None if first.accuracy is None or last.accuracy is None else (first.accuracy, last.accuracy)
    return Verdict(last.fidelity, compared.inputs, data, accuracy, score, why=compared.why, guessed=guessed)


def check_required_fidelity(verdict: Verdict, require: float | None) -> None:
    """Refuse a network that answers less like the original than was asked for."""
    if require is None or (verdict.fidelity is not None and verdict.fidelity >= require):
        return
    blame = ", ".join(map(str, verdict.culprits))
    what = f"{verdict.measured}, {require:g} is required" + (f" ({verdict.why})" if verdict.why else "")
    raise FidelityError(
        what + (f". Most of the error comes from {blame}" if blame else ""), where="require=", fix=FIDELITY_FIX
    )
