"""One case from the recipe to an outcome."""

from __future__ import annotations

import signal
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import nn

import neuron_merging as nm

from . import oracle
from .network import EXTENT, Built, Recipe, build, cast

FINE, REFUSED, FAILED, TRACEBACK, WRONG, WORSE, INVALID = (
    "fine", "refused", "whole-network failure", "traceback", "WRONG", "worse than pruned", "not a network",
)  # fmt: skip
NO_EFFECT = "what was cut does not move the outputs"
BAD = (FAILED, TRACEBACK, WRONG, WORSE)
CLOSE = {True: 1e-8, False: 1e-4}
"""The largest difference, in float64 and for networks that were cut in float32."""
FACTOR, FLOOR = 2.0, 0.1
"""A merged network may have this many times the error of the pruned one, and this share of the variance on top."""
SIZES = ((2, 0), (5, 0), (1, 0), (3, 2), (2, 4))
"""Batches, and how much larger than the example the inputs are."""
SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """What became of a case with one merger."""

    kind: str
    recipe: Recipe
    merger: str
    detail: str = ""
    applied: tuple[str, ...] = ()
    cut: tuple[str, ...] = field(default=())
    """The kinds of blocks in which something was cut."""


class TooLong(Exception):
    """The case takes minutes."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(recipe: Recipe, merger: str = "none") -> Outcome:
    """Compress the recipe's network and judge the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with limited(SECONDS):
                return _attempt(recipe, merger)
        except TooLong as error:
            return Outcome(TRACEBACK, recipe, merger, str(error))


def _attempt(recipe: Recipe, merger: str) -> Outcome:
    try:
        built = build(recipe)
        example = sample(built, recipe, 2, 0)
        if not all(out.isfinite().all() for out in oracle.run(build(recipe).model, example)):
            return Outcome(INVALID, recipe, merger, "not finite")
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        return Outcome(INVALID, recipe, merger, brief(error))
    try:
        small = compressed(recipe, built.model, example, merger)
    except (nm.NothingToPrune, nm.ModelError) as error:
        return Outcome(REFUSED, recipe, merger, brief(error), built.applied)
    except nm.VerificationError as error:
        return Outcome(FAILED, recipe, merger, brief(error), built.applied)
    except TooLong:
        raise
    except Exception as error:  # noqa: BLE001  (whatever else comes out of the library is what we look for)
        return Outcome(TRACEBACK, recipe, merger, f"{brief(error)} {place(error)}", built.applied)
    kind, detail = judge(recipe, built, small, merger)
    blocks = {cut.tensor.split(".")[1] for cut in small.plan.cuts if cut.tensor.startswith("blocks.")}
    return Outcome(kind, recipe, merger, detail, built.applied, tuple(built.applied[int(i)] for i in sorted(blocks)))


def compressed(recipe: Recipe, model: nn.Module, example: object, merger: str) -> nm.Compressed:
    options = {"ratio": recipe.ratio, "scope": recipe.scope, "criterion": recipe.criterion}
    effort = None if merger == "default" else "fast"
    return nm.compress(model, example, merger=None if merger == "default" else merger, effort=effort, **options)


def sample(built: Built, recipe: Recipe, batch: int, more: int, dtype: torch.dtype | None = None) -> tuple[object, ...]:
    """Inputs of a batch size, `more` than the example's extent."""
    torch.manual_seed(1000 * batch + more)
    inputs = built.inputs(batch, EXTENT[recipe.domain] + more)
    result: tuple[object, ...] = cast(inputs, dtype or (torch.float64 if recipe.double else torch.float32))
    return result


def judge(recipe: Recipe, built: Built, small: nm.Compressed, merger: str) -> tuple[str, str]:
    """Compare with the oracle's network on other inputs, of other sizes."""
    if not untouched(recipe, built):
        return WRONG, "the original was changed"
    own = small.model.double().eval()
    try:
        reference = expected(recipe, built, small, merger)
        gap, where = apart(recipe, built, own, reference)
    except oracle.Mismatch as error:
        return WRONG, str(error)
    if not gap <= CLOSE[recipe.double]:
        return WRONG, f"{gap:.1e} apart {where}"
    if merger == "none":
        return FINE, "" if moved(recipe, built, reference) else NO_EFFECT
    return weighed(recipe, built, small)


def untouched(recipe: Recipe, built: Built) -> bool:
    """Does the original hold what it held, and compute what it computed?"""
    fresh, inputs = build(recipe).model, sample(built, recipe, 2, 0)
    now, then = oracle.tensors(built.model), oracle.tensors(fresh)
    if any(name not in now or not torch.equal(now[name], tensor) for name, tensor in then.items()):
        return False
    try:
        return oracle.difference(oracle.run(built.model, inputs), oracle.run(fresh, inputs)) == 0
    except (AttributeError, RuntimeError):
        return False


def expected(recipe: Recipe, built: Built, small: nm.Compressed, merger: str) -> nn.Module:
    """The oracle's network; the smaller one has to have run where its weights are computed."""
    if merger == "none":
        return oracle.pruned(build(recipe).model, small.plan)
    try:
        oracle.run(small.model, sample(built, recipe, 2, 0, torch.float64))
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError) as error:
        raise oracle.Mismatch(f"the smaller network does not run: {brief(error)}") from error
    return oracle.scattered(build(recipe).model, small.plan, small.model)


def moved(recipe: Recipe, built: Built, reference: nn.Module) -> bool:
    """Do the outputs depend on what was cut? Where not, the comparison says little."""
    inputs = sample(built, recipe, 5, 0, torch.float64)
    return oracle.difference(oracle.run(build(recipe).model.double(), inputs), oracle.run(reference, inputs)) > 1e-9


def apart(recipe: Recipe, built: Built, small: nn.Module, reference: nn.Module) -> tuple[float, str]:
    """The largest difference over several inputs, and on which."""
    worst, where = 0.0, ""
    for batch, more in SIZES:
        inputs = sample(built, recipe, batch, more, torch.float64)
        if (batch, more) != SIZES[0] and not takes(recipe, inputs):
            continue
        want = oracle.run(reference, inputs)
        try:
            gap = oracle.difference(oracle.run(small, inputs), want)
        except (RuntimeError, ValueError, IndexError, AssertionError, TypeError) as error:
            what = f"the smaller network fails on batch {batch}, extent +{more}: {brief(error)}"
            raise oracle.Mismatch(what) from error
        if gap > worst:
            worst, where = gap, f"on batch {batch}, extent +{more}"
    return worst, where


def takes(recipe: Recipe, inputs: tuple[object, ...]) -> bool:
    """Does the original take inputs of this size?"""
    try:
        oracle.run(build(recipe).model.double(), inputs)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return False
    return True


def weighed(recipe: Recipe, built: Built, merged: nm.Compressed) -> tuple[str, str]:
    """Is the merged network about as good as the pruned one?"""
    model = build(recipe).model.double()
    plain = compressed(recipe, built.model, sample(built, recipe, 2, 0), "none").model.double()
    inputs = sample(built, recipe, 64, 0, torch.float64)
    try:
        want, ours, theirs = (oracle.run(net, inputs) for net in (model, merged.model.double(), plain))
    except (RuntimeError, ValueError, IndexError):
        return FINE, "not weighed"
    if not all(t.isfinite().all() for t in ours):
        return WRONG, "not finite"
    mine, other = lost(ours, want), lost(theirs, want)
    if mine > FACTOR * other + FLOOR:
        return WORSE, f"{mine:.2g} of the variance lost, {other:.2g} by pruning"
    return FINE, f"{mine:.2g} lost, {other:.2g} by pruning"


def lost(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The share of the first output's variance over the batch that is lost."""
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if b.is_floating_point() and b.dim() > 1]
    if not pairs:
        return 0.0
    a, b = pairs[0]
    return float((a - b).square().mean() / b.var(0).mean().clamp(min=1e-12))


def brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def place(error: BaseException) -> str:
    """The library's own innermost line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "neuron_merging" in f.filename]
    return f"({frames[-1].filename.rsplit('neuron_merging/')[-1]}:{frames[-1].lineno})" if frames else ""
