"""Run one case: build the network, compress it, compare it with the oracle, and classify the outcome."""

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
from .network import EXTENT, BuiltNetwork, Recipe, build_network, cast_tensors

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
    """The outcome of a case with one merger."""

    kind: str
    recipe: Recipe
    merger: str
    detail: str = ""
    applied: tuple[str, ...] = ()
    cut: tuple[str, ...] = field(default=())
    """The kinds of blocks in which something was cut."""


class TooLong(Exception):
    """The case took longer than its time limit."""


@contextmanager
def limit_time(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(recipe: Recipe, merger: str = "none") -> Outcome:
    """Compress the recipe's network and judge the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with limit_time(SECONDS):
                return _run_case(recipe, merger)
        except TooLong as error:
            return Outcome(TRACEBACK, recipe, merger, str(error))


def _run_case(recipe: Recipe, merger: str) -> Outcome:
    try:
        built = build_network(recipe)
        example = make_inputs(built, recipe, 2, 0)
        if not all(out.isfinite().all() for out in oracle.run_network(build_network(recipe).model, example)):
            return Outcome(INVALID, recipe, merger, "not finite")
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        return Outcome(INVALID, recipe, merger, describe_briefly(error))
    try:
        small = compress_network(recipe, built.model, example, merger)
    except (nm.NothingToPrune, nm.ModelError) as error:
        return Outcome(REFUSED, recipe, merger, describe_briefly(error), built.applied)
    except nm.VerificationError as error:
        return Outcome(FAILED, recipe, merger, describe_briefly(error), built.applied)
    except TooLong:
        raise
    except Exception as error:  # noqa: BLE001  (whatever else comes out of the library is what we look for)
        return Outcome(
            TRACEBACK, recipe, merger, f"{describe_briefly(error)} {find_library_line(error)}", built.applied
        )
    kind, detail = judge_result(recipe, built, small, merger)
    blocks = {cut.tensor.split(".")[1] for cut in small.plan.cuts if cut.tensor.startswith("blocks.")}
    return Outcome(kind, recipe, merger, detail, built.applied, tuple(built.applied[int(i)] for i in sorted(blocks)))


def compress_network(recipe: Recipe, model: nn.Module, example: object, merger: str) -> nm.Compressed:
    options = {"ratio": recipe.ratio, "scope": recipe.scope, "criterion": recipe.criterion}
    effort = None if merger == "default" else "fast"
    return nm.compress(model, example, merger=None if merger == "default" else merger, effort=effort, **options)


def make_inputs(
    built: BuiltNetwork, recipe: Recipe, batch: int, more: int, dtype: torch.dtype | None = None
) -> tuple[object, ...]:
    """Make inputs of a batch size; `more` is added to the example's spatial size or length."""
    torch.manual_seed(1000 * batch + more)
    inputs = built.inputs(batch, EXTENT[recipe.domain] + more)
    result: tuple[object, ...] = cast_tensors(inputs, dtype or (torch.float64 if recipe.double else torch.float32))
    return result


def judge_result(recipe: Recipe, built: BuiltNetwork, small: nm.Compressed, merger: str) -> tuple[str, str]:
    """Compare with the oracle's network on fresh inputs of several sizes."""
    if not is_original_unchanged(recipe, built):
        return WRONG, "the original was changed"
    own = small.model.double().eval()
    try:
        reference = build_reference(recipe, built, small, merger)
        gap, where = find_largest_difference(recipe, built, own, reference)
    except oracle.Mismatch as error:
        return WRONG, str(error)
    if not gap <= CLOSE[recipe.double]:
        return WRONG, f"{gap:.1e} apart {where}"
    if merger == "none":
        return FINE, "" if cut_changes_outputs(recipe, built, reference) else NO_EFFECT
    return compare_with_pruning(recipe, built, small)


def is_original_unchanged(recipe: Recipe, built: BuiltNetwork) -> bool:
    """Whether compressing left the original's tensors and outputs unchanged."""
    fresh, inputs = build_network(recipe).model, make_inputs(built, recipe, 2, 0)
    now, then = oracle.collect_tensors(built.model), oracle.collect_tensors(fresh)
    if any(name not in now or not torch.equal(now[name], tensor) for name, tensor in then.items()):
        return False
    try:
        return (
            oracle.measure_difference(oracle.run_network(built.model, inputs), oracle.run_network(fresh, inputs)) == 0
        )
    except (AttributeError, RuntimeError):
        return False


def build_reference(recipe: Recipe, built: BuiltNetwork, small: nm.Compressed, merger: str) -> nn.Module:
    """Build the oracle's network. The smaller one is run first, since hooks may compute its weights at a call."""
    if merger == "none":
        return oracle.build_pruned_reference(build_network(recipe).model, small.plan)
    try:
        oracle.run_network(small.model, make_inputs(built, recipe, 2, 0, torch.float64))
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError) as error:
        raise oracle.Mismatch(f"the smaller network does not run: {describe_briefly(error)}") from error
    return oracle.build_merged_reference(build_network(recipe).model, small.plan, small.model)


def cut_changes_outputs(recipe: Recipe, built: BuiltNetwork, reference: nn.Module) -> bool:
    """Whether the outputs depend on what was cut. Otherwise the comparison has no power."""
    inputs = make_inputs(built, recipe, 5, 0, torch.float64)
    return (
        oracle.measure_difference(
            oracle.run_network(build_network(recipe).model.double(), inputs), oracle.run_network(reference, inputs)
        )
        > 1e-9
    )


def find_largest_difference(
    recipe: Recipe, built: BuiltNetwork, small: nn.Module, reference: nn.Module
) -> tuple[float, str]:
    """Return the largest difference over inputs of several sizes, and the size at which it occurs."""
    worst, where = 0.0, ""
    for batch, more in SIZES:
        inputs = make_inputs(built, recipe, batch, more, torch.float64)
        if (batch, more) != SIZES[0] and not accepts_inputs(recipe, inputs):
            continue
        want = oracle.run_network(reference, inputs)
        try:
            gap = oracle.measure_difference(oracle.run_network(small, inputs), want)
        except (RuntimeError, ValueError, IndexError, AssertionError, TypeError) as error:
            what = f"the smaller network fails on batch {batch}, extent +{more}: {describe_briefly(error)}"
            raise oracle.Mismatch(what) from error
        if gap > worst:
            worst, where = gap, f"on batch {batch}, extent +{more}"
    return worst, where


def accepts_inputs(recipe: Recipe, inputs: tuple[object, ...]) -> bool:
    """Whether the original accepts inputs of this size."""
    try:
        oracle.run_network(build_network(recipe).model.double(), inputs)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return False
    return True


def compare_with_pruning(recipe: Recipe, built: BuiltNetwork, merged: nm.Compressed) -> tuple[str, str]:
    """Check that the merged network is about as good as the pruned one, or better."""
    model = build_network(recipe).model.double()
    plain = compress_network(recipe, built.model, make_inputs(built, recipe, 2, 0), "none").model.double()
    inputs = make_inputs(built, recipe, 64, 0, torch.float64)
    try:
        want, ours, theirs = (oracle.run_network(net, inputs) for net in (model, merged.model.double(), plain))
    except (RuntimeError, ValueError, IndexError):
        return FINE, "not weighed"
    if not all(t.isfinite().all() for t in ours):
        return WRONG, "not finite"
    mine, other = compute_lost_variance(ours, want), compute_lost_variance(theirs, want)
    if mine > FACTOR * other + FLOOR:
        return WORSE, f"{mine:.2g} of the variance lost, {other:.2g} by pruning"
    return FINE, f"{mine:.2g} lost, {other:.2g} by pruning"


def compute_lost_variance(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The share of the first output's variance over the batch that is lost."""
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if b.is_floating_point() and b.dim() > 1]
    if not pairs:
        return 0.0
    a, b = pairs[0]
    return float((a - b).square().mean() / b.var(0).mean().clamp(min=1e-12))


def describe_briefly(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def find_library_line(error: BaseException) -> str:
    """The library's own innermost line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "neuron_merging" in f.filename]
    return f"({frames[-1].filename.rsplit('neuron_merging/')[-1]}:{frames[-1].lineno})" if frames else ""
