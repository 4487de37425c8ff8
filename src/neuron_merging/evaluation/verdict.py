"""The verdict on a smaller network: its fidelity, a level (good, caution, warning, unknown), and the groups that
cause most of the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from neuron_merging.errors import FidelityError
from neuron_merging.evaluation.fidelity import Fidelity

VerdictLevel = Literal["good", "caution", "warning", "unknown"]
CAUTION_BELOW, WARNING_BELOW = 0.9, 0.6
"""Fidelities below which a verdict is no longer good, and below which it is a warning."""
DOMINANT_SHARE = 0.66
"""From this share of the error on, one group is a cause of its own: the advice is to spare it."""
INCOMPARABLE_FIX = "Leave require= out: such outputs have no fidelity. A score of your own (evaluate=) can judge them."
Target = Literal["ratio", "budget", "max_loss", "plan"]


@dataclass(frozen=True)
class CompressionRequest:
    """What a compression was asked for, as far as advice depends on it.

    Attributes
    ----------
    target
        What said how much to remove.
    calibrated
        Whether the merges were fitted to data.
    merged
        Whether removed channels were merged at all.
    effort
        What was spent on synthetic inputs.
    """

    target: Target = "ratio"
    calibrated: bool = False
    merged: bool = True
    effort: str = "normal"


DEFAULT_REQUEST = CompressionRequest()


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
    request
        What the compression was asked for; the advice follows from it.
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
    request: CompressionRequest = DEFAULT_REQUEST
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
        tried = self.data or self.score is not None  # the user's own score looks at the user's own data
        if self.level == "caution":
            return "Check its outputs before you rely on it." if tried else "Test it on your own data."
        if self.level == "good" and self.guessed and not tried:
            return "These inputs differ from the training data: test it on your own data."
        if self.level != "warning":
            return ""
        blamed = ", ".join(map(str, self.culprits))
        return (f"Most of the error comes from {blamed}. " if blamed else "") + self.suggest_fix()

    def suggest_fix(self) -> str:
        """What raises the fidelity and was not asked for yet."""
        ways = list(_SMALLER_CUTS[self.request.target])
        if self.culprits and self.culprits[0].share >= DOMINANT_SHARE and self.request.target != "plan":
            ways.append(_SPARING_ONE_GROUP[self.request.target].format(self.culprits[0].group))
        if not self.request.merged:
            ways.append("merge the removed channels (leave out merger=)")
        elif not self.request.calibrated and self.request.target != "plan":
            ways.append("give some data (calibration=, --calibrate)")
            if self.request.effort == "fast":
                ways.append('spend more on synthetic inputs (effort="normal")')
        text = ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])}, or {ways[-1]}"
        return f"{text[0].upper()}{text[1:]}."

    def __str__(self) -> str:
        opening = {
            "good": "its outputs are close to the original's: ",
            "caution": "caution, its outputs are only roughly those of the original: ",
            "warning": "WARNING: its outputs are far from the original's: ",
            "unknown": "no verdict: ",
        }[self.level]
        reason = f" ({self.why})" if self.why else ""
        return f"{opening}{self.measured}{reason}" + (f". {self.advice}" if self.advice else "")


_SMALLER_CUTS: Mapping[Target, tuple[str, ...]] = {
    "ratio": ("cut less", "let a budget share the cut out (budget=, --budget)"),
    "budget": ("allow a larger budget",),
    "max_loss": ("allow a smaller loss (max_loss=, --max-loss)",),
    "plan": ("make a plan for these weights (compress)",),
}
_SPARING_ONE_GROUP: Mapping[Target, str] = {
    "ratio": "leave {} whole (ignore=, --ignore)",
    "budget": "limit what {} loses (limits=, --limits)",
    "max_loss": "limit what {} loses (limits=, --limits)",
}


def _choose_level(fidelity: float | None) -> VerdictLevel:
    if fidelity is None:
        return "unknown"
    return "good" if fidelity >= CAUTION_BELOW else "caution" if fidelity >= WARNING_BELOW else "warning"


def make_verdict(
    compared: Fidelity,
    *,
    data: bool,
    guessed: bool = False,
    score: tuple[float, float] | None = None,
    request: CompressionRequest = DEFAULT_REQUEST,
) -> Verdict:
    """The verdict that follows from a comparison whose last network is the smaller one."""
    first, last = compared.scores[0], compared.scores[-1]
    accuracy = None if first.accuracy is None or last.accuracy is None else (first.accuracy, last.accuracy)
    return Verdict(
        last.fidelity, compared.inputs, data, accuracy, score, why=compared.why, guessed=guessed, request=request
    )


def check_required_fidelity(verdict: Verdict, require: float | None) -> None:
    """Refuse a network that answers less like the original than was asked for."""
    if require is None or (verdict.fidelity is not None and verdict.fidelity >= require):
        return
    blame = ", ".join(map(str, verdict.culprits))
    what = f"{verdict.measured}, {require:g} is required" + (f" ({verdict.why})" if verdict.why else "")
    raise FidelityError(
        what + (f". Most of the error comes from {blame}" if blame else ""),
        where="require=",
        fix=INCOMPARABLE_FIX if verdict.fidelity is None else verdict.suggest_fix(),
    )
