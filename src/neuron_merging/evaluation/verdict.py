"""The verdict on a smaller network: its fidelity, a level (good, caution, warning, unknown), and the groups that
cause most of the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from neuron_merging.errors import FidelityError
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.inputs.text import SELF_GENERATED_TEXT

VerdictLevel = Literal["good", "caution", "warning", "unknown"]
CAUTION_BELOW, WARNING_BELOW = 0.9, 0.6
"""Fidelities below which a verdict is a caution, and below which it is a warning."""
LOWER_LEVELS: Mapping[VerdictLevel, VerdictLevel] = {"good": "caution", "caution": "warning"}
"""The next level below."""
DISAGREEMENT_ADVICE = "These figures disagree: give some data (calibration=, --calibrate), and test it on your own."
DOMINANT_SHARE = 0.66
"""Share of the error from which one group dominates it; the advice is then to prune that group less."""
INCOMPARABLE_FIX = "Leave require= out: such outputs have no fidelity. A score of your own (evaluate=) can judge them."
Target = Literal["ratio", "budget", "max_loss", "plan"]


@dataclass(frozen=True)
class CompressionRequest:
    """The settings of a compression that the advice in a verdict depends on.

    Attributes
    ----------
    target
        The option that determined how much to remove.
    calibrated
        Whether the merges were fitted to data.
    merged
        Whether removed channels were merged at all.
    effort
        The effort for synthesised inputs.
    by_weights
        Whether the merges were computed from the weights alone, as by `Cosine`: data and effort change nothing.
    spares_streams
        Whether the network has residual streams that the scope spared, so that the other layers lost more.
    """

    target: Target = "ratio"
    calibrated: bool = False
    merged: bool = True
    effort: str = "normal"
    by_weights: bool = False
    spares_streams: bool = False


DEFAULT_REQUEST = CompressionRequest()


@dataclass(frozen=True)
class Culprit:
    """A group that causes much of the error, and its share of the errors that suspected groups cause when cut alone."""

    group: str
    share: float

    def __str__(self) -> str:
        return f"{self.group} ({self.share:.0%})"


@dataclass(frozen=True)
class TextScore:
    """How a smaller language model differs from the original on some texts.

    Attributes
    ----------
    kl
        Kullback-Leibler divergence of its predictions from the original's, in nats per token.
    perplexity
        Perplexity before and after.

    Examples
    --------
    >>> print(TextScore(0.123, (30.0, 34.5)))
    KL 0.123 nats per token, perplexity 30.0 → 34.5, 1.15 times
    """

    kl: float
    perplexity: tuple[float, float]

    def __str__(self) -> str:
        before, after = self.perplexity
        return f"KL {self.kl:.3f} nats per token, perplexity {before:.1f} → {after:.1f}, {after / before:.2f} times"


def make_text_score(compared: Fidelity) -> TextScore | None:
    """Return the score on texts from a comparison whose first network is the original and whose last is the smaller."""
    first, last = compared.scores[0], compared.scores[-1]
    if last.kl is None or first.perplexity is None or last.perplexity is None:
        return None
    return TextScore(last.kl, (first.perplexity, last.perplexity))


@dataclass(frozen=True)
class Verdict:
    """How close the outputs of a smaller network are to the original's. `str` returns it as a sentence.

    Attributes
    ----------
    fidelity
        1 − squared error / variance of the outputs, at least 0; for a causal language model exp(−KL per token); None
        if unknown.
    inputs
        Description of the inputs that it was measured on.
    data
        Whether those are real data; otherwise they were synthesised.
    accuracy
        Accuracy before and after in percent, if there are labels.
    score
        The user's metric before and after, if there is one.
    culprits
        Below a fidelity of 0.6: the groups that cause most of the error.
    why
        Why the fidelity is unknown.
    text
        For a causal language model: divergence and perplexity on these inputs.
    other_text
        The same on text that was not given by the user, and what it is, if `inputs` is text of the user.
    guessed
        Whether the inputs are a guess: nothing tells what the network was trained on.
    other
        A second, better fidelity and what it was measured on, if there are two.
    mixed
        The fidelity on mixtures of pairs of these inputs, if they were synthesised.
    on_plain_images
        The fidelity on synthetic images that match no statistics, if the inputs are images that were synthesised.
    request
        The settings of the compression that the advice depends on.
    fitted
        Whether the inputs are those of the fit, on which a merge looks better than on others.
    unfitted
        Layers that were pruned without a fit, because no inputs run there and so they have no statistics.
    level
        "good", "caution" below 0.9, "warning" below 0.6, or "unknown". A guess is at best "unknown". A network
        that was judged only on the inputs of the fit, or a language model on its own text, is at best
        "caution". It is one level lower if the level on mixtures or on plain synthetic images is lower: the network is
        then right only near inputs like those of the fit.

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
    text: TextScore | None = None
    other_text: tuple[TextScore, str] | None = None
    request: CompressionRequest = DEFAULT_REQUEST
    other: tuple[float, str] | None = None
    unfitted: tuple[str, ...] = ()
    fitted: bool = False
    mixed: float | None = None
    on_plain_images: float | None = None
    level: VerdictLevel = field(init=False, default="unknown")

    def __post_init__(self) -> None:
        level = choose_level(self.fidelity, self.is_guess)
        if (level == "good" and self.is_flattering) or (level in LOWER_LEVELS and self.lower_elsewhere):
            level = LOWER_LEVELS[level]
        object.__setattr__(self, "level", level)

    @property
    def is_guess(self) -> bool:
        """Whether nothing but guessed inputs was measured on: the user's data or metric make it a measurement."""
        return self.guessed and not self.data and self.score is None

    @property
    def is_own_text(self) -> bool:
        """Whether a language model was judged only on text that it wrote itself, as it was fitted to."""
        return self.text is not None and not self.data and SELF_GENERATED_TEXT in self.inputs

    @property
    def is_flattering(self) -> bool:
        """Whether the inputs are those of the fit, or as like them as text of one's own."""
        return self.is_own_text or (self.fitted and self.score is None)

    @property
    def lower_elsewhere(self) -> tuple[tuple[float, str], ...]:
        """Fidelities on synthetic inputs of other kinds that would give a lower level, and what these inputs are."""
        if self.fidelity is None or self.data or self.score is not None:
            return ()
        found = (self.mixed, "mixtures of them"), (self.on_plain_images, "synthetic images of the same scale")
        return tuple(
            (value, kind)
            for value, kind in found
            if value is not None and value < self.fidelity and choose_level(value) != choose_level(self.fidelity)
        )

    @property
    def measured(self) -> str:
        """The figures, and what they were measured on."""
        value = f"fidelity {self.fidelity:.3f}" if self.fidelity is not None else "fidelity not known"
        value += f" ({self.text})" if self.text is not None else ""
        text = f"{value} on {self.inputs}" + ("" if self.data else " (no data was given)")
        if self.other is not None:
            text += ", {:.3f} on {}".format(*self.other)
        text += "".join(f", {value:.3f} on {kind}" for value, kind in self.lower_elsewhere)
        text += "; {} on {}".format(*self.other_text) if self.other_text is not None else ""
        if self.accuracy is not None:
            text += ", accuracy {:.2f} % → {:.2f} %".format(*self.accuracy)
        return text + (", score {:.6g} → {:.6g}".format(*self.score) if self.score is not None else "")

    @property
    def advice(self) -> str:
        """What to do next; an empty text for a good verdict, unless text of other kinds may lose more."""
        uses_data = self.data or self.score is not None  # the user's metric uses the user's data
        if self._disagrees and self.level != "warning":
            return DISAGREEMENT_ADVICE
        if self.level in ("good", "caution") and self.text is not None and not self.data:
            loses = "Text that people write loses more" if self.is_own_text else "Text of other kinds can lose more"
            return f"{loses}: judge it on yours (evaluate=, --eval)."
        if self.level == "caution" and self.lower_elsewhere:
            return DISAGREEMENT_ADVICE
        if self.level == "caution" and self.is_flattering and choose_level(self.fidelity) == "good":
            return "Judge it on samples that it was not fitted to (evaluate=, --eval)."
        if self.level == "caution":
            return "Check its outputs before you rely on it." if uses_data else "Test it on your own data."
        if self.level == "unknown" and self.guessed and not uses_data:
            return "Give real inputs as the example (a batch of 16 will do) or data, or test it on your own data."
        if self.level != "warning":
            return ""
        blamed = ", ".join(map(str, self.culprits))
        wider = "Text of other kinds can lose even more. " if self.text is not None and not self.data else ""
        return wider + (f"Most of the error comes from {blamed}. " if blamed else "") + self.suggest_fix()

    @property
    def _disagrees(self) -> bool:
        """Whether two kinds of inputs lead to different levels."""
        return self.other is not None and choose_level(self.fidelity) != choose_level(self.other[0])

    def suggest_fix(self) -> str:
        """Suggest settings that raise the fidelity and were not used yet."""
        options = list(_SMALLER_CUTS[self.request.target])
        if self.culprits and self.culprits[0].share >= DOMINANT_SHARE and self.request.target != "plan":
            options.append(_SPARING_ONE_GROUP[self.request.target].format(self.culprits[0].group))
        if self.request.spares_streams and self.request.target == "budget":
            options.append('let the residual streams take part (scope="all", --scope all)')
        if not self.request.merged:
            options.append("merge the removed channels (leave out merger=)")
        elif self.request.by_weights:
            options.append("merge by the default method (leave out merger=)")
        elif not self.request.calibrated and self.request.target != "plan":
            options.append("give some data (calibration=, --calibrate)")
            if self.request.effort == "fast":
                options.append('spend more on synthetic inputs (effort="normal")')
        text = options[0] if len(options) == 1 else f"{', '.join(options[:-1])}, or {options[-1]}"
        return f"{text[0].upper()}{text[1:]}."

    def __str__(self) -> str:
        opening = {
            "good": "its outputs are close to the original's: ",
            "caution": "caution, its outputs are only roughly those of the original: ",
            "warning": "WARNING: its outputs are far from the original's: ",
            "unknown": "no verdict, only a guess: " if self.guessed and self.fidelity is not None else "no verdict: ",
        }[self.level]
        if self.level == "caution" and choose_level(self.fidelity) == "good":
            where = "its own text" if self.is_own_text else "the samples of the fit"
            where = "inputs like those of the fit" if self.lower_elsewhere else where
            opening = f"caution, its outputs are close to the original's on {where} only: "
        reason = f" ({self.why})" if self.why else ""
        text = f"{opening}{self.measured}{reason}" + (f". {self.advice}" if self.advice else "")
        return f"{self._describe_unfitted()}; {text}" if self.unfitted else text

    def _describe_unfitted(self) -> str:
        """Say first which layers were cut blindly."""
        shown = ", ".join(self.unfitted[:3]) + (f" and {len(self.unfitted) - 3} more" if self.unfitted[3:] else "")
        return f"WARNING: no inputs run at {shown}, so what was removed there is not compensated (give calibration=)"


_SMALLER_CUTS: Mapping[Target, tuple[str, ...]] = {
    "ratio": ("cut less", "let a budget share the cut out (budget=, --budget)"),
    "budget": ("allow a larger budget",),
    "max_loss": ("allow a smaller loss (max_loss=, --max-loss)",),
    "plan": ("make a plan for these weights (compress)",),
}
_SPARING_ONE_GROUP: Mapping[Target, str] = {
    "ratio": "do not prune {} (ignore=, --ignore)",
    "budget": "limit what {} loses (limits=, --limits)",
    "max_loss": "limit what {} loses (limits=, --limits)",
}


def choose_level(fidelity: float | None, is_guess: bool = False) -> VerdictLevel:
    """Return the level of a fidelity."""
    # On guessed inputs a good fidelity proves nothing, while a bad one still deserves its warning.
    if fidelity is None or (is_guess and fidelity >= WARNING_BELOW):
        return "unknown"
    return "good" if fidelity >= CAUTION_BELOW else "caution" if fidelity >= WARNING_BELOW else "warning"


def make_verdict(
    compared: Fidelity,
    *,
    data: bool,
    guessed: bool = False,
    fitted: bool = False,
    score: tuple[float, float] | None = None,
    request: CompressionRequest = DEFAULT_REQUEST,
    example: Fidelity | None = None,
    mixed: float | None = None,
    on_plain_images: float | None = None,
) -> Verdict:
    """Make the verdict from a comparison whose first network is the original and whose last is the smaller one.

    `example` is a second comparison, on real example inputs. The worse of the two counts.
    """
    first, last = compared.scores[0], compared.scores[-1]
    accuracy = None if first.accuracy is None or last.accuracy is None else (first.accuracy, last.accuracy)
    verdict = Verdict(
        last.fidelity,
        compared.inputs,
        data,
        accuracy,
        score,
        why=compared.why,
        guessed=guessed,
        fitted=fitted,
        text=make_text_score(compared),
        request=request,
        mixed=mixed,
        on_plain_images=on_plain_images,
    )
    return verdict if example is None else _add_example(verdict, example)


def _add_example(verdict: Verdict, example: Fidelity) -> Verdict:
    """Return the worse of a verdict and the comparison on real example inputs, with the other figure beside it."""
    fidelity = example.scores[-1].fidelity
    if fidelity is None:
        return verdict
    # Not a guess any more: one of the two figures comes from real inputs.
    if verdict.fidelity is not None and verdict.fidelity <= fidelity:
        return replace(verdict, other=(fidelity, example.inputs), guessed=False)
    other = None if verdict.fidelity is None else (verdict.fidelity, verdict.inputs)
    return replace(verdict, fidelity=fidelity, inputs=example.inputs, data=True, guessed=False, why="", other=other)


def check_required_fidelity(verdict: Verdict, require: float | None) -> None:
    """Raise FidelityError if the fidelity is unknown or below `require`."""
    if require is None or (verdict.fidelity is not None and verdict.fidelity >= require):
        return
    blame = ", ".join(map(str, verdict.culprits))
    what = f"{verdict.measured}, {require:g} is required" + (f" ({verdict.why})" if verdict.why else "")
    raise FidelityError(
        what + (f". Most of the error comes from {blame}" if blame else ""),
        where="require=",
        fix=INCOMPARABLE_FIX if verdict.fidelity is None else verdict.suggest_fix(),
    )
