"""The batches that networks are compared on, and a check that they suit the network: input shape, number of
classes, and input range against the first batch norm's training statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuron_merging import progress
from neuron_merging.calibration.output_divergence import OutputPart, find_output_parts
from neuron_merging.channels.analysis import Analysis
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.evaluation.fidelity import Fidelity, LabelledBatches, compare_networks, take_eval_inputs
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.process_state import disable_fused_attention
from neuron_merging.graph.pytree import call_model, clone_inputs, flatten_inputs, flatten_outputs
from neuron_merging.graph.user_code import find_user_line
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs, InputBatch

ODD_VARIANCE_RATIO, WRONG_VARIANCE_RATIO = 4.0, 100.0
"""How many times more or less variance than in training the first batch norm may see before a word, and an error."""
WRONG_DATA_FIX = "Give the data that it was trained on."
WRONG_RANGE_FIX = "Normalise them as in training: --mean and --std, or mean= and std=."


@torch.no_grad()
def check_eval_data(
    model: nn.Module, batch: tuple[Any, ...], labels: Tensor | None = None, classes: int = 0, *, where: str
) -> list[str]:
    """Refuse data that the network cannot be meant for; what is merely odd is returned as notes."""
    for value in flatten_inputs(batch):
        if isinstance(value, Tensor) and (not value.numel() or bool((value.isnan() | value.isposinf()).any())):
            what = "a batch has entries that are not finite" if value.numel() else "a batch is empty"
            raise MergingError(what, where=where, fix="Leave it out.")
    copy = copy_without_hooks(model).eval()
    with _watch_first_norm(copy) as seen:
        outputs = _run_batch(copy, batch, where)
    notes = _check_range(seen, where)
    if labels is not None:
        notes += _check_classes(outputs, labels, classes, where)
    return notes


def _run_batch(model: nn.Module, batch: tuple[Any, ...], where: str) -> Any:
    try:
        with disable_fused_attention():
            return call_model(model, clone_inputs(batch))
    except Exception as error:
        shapes = ", ".join(str(tuple(v.shape)) for v in flatten_inputs(batch) if isinstance(v, Tensor))
        what = f"the network does not take a batch of {shapes or 'these'}: {describe_error(error)}"
        raise MergingError(what, where=where, fix=WRONG_DATA_FIX) from error


@contextmanager
def _watch_first_norm(model: nn.Module) -> Iterator[list[tuple[str, float, float]]]:
    """Name, shift and spread of what the first trained batch norm sees, against what it saw in training."""
    seen: list[tuple[str, float, float]] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and _has_trained_stats(module):

            def look(norm: _BatchNorm, args: tuple[Any, ...], name: str = name) -> None:
                if not seen and args and args[0].ndim > 1:
                    seen.append((name, *_compare_with_training(norm, args[0])))

            handles.append(module.register_forward_pre_hook(look))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _has_trained_stats(norm: _BatchNorm) -> bool:
    mean, var = norm.running_mean, norm.running_var
    if mean is None or var is None or mean.is_meta:
        return False
    return bool(mean.isfinite().all() and var.isfinite().all()) and bool(mean.any() or (var != 1).any())


def _compare_with_training(norm: _BatchNorm, value: Tensor) -> tuple[float, float]:
    """In units of the stored deviation and variance, the mean over channels."""
    assert norm.running_mean is not None and norm.running_var is not None
    rows = value.transpose(0, 1).flatten(1).double()
    mean, var = norm.running_mean.double(), norm.running_var.double().clamp(min=1e-12)
    shift = (rows.mean(1) - mean).abs() / var.sqrt()
    return float(shift.mean()), float((rows.var(1, unbiased=False) / var).mean())


def _check_range(seen: list[tuple[str, float, float]], where: str) -> list[str]:
    for name, shift, spread in seen:
        said = f"{name} sees {spread:.2g} times the variance of its training, and a mean {shift:.2g} deviations off"
        if not 1 / WRONG_VARIANCE_RATIO < spread < WRONG_VARIANCE_RATIO:
            raise MergingError(
                f"the range of the data differs from the training data's: {said}", where=where, fix=WRONG_RANGE_FIX
            )
        if not 1 / ODD_VARIANCE_RATIO < spread < ODD_VARIANCE_RATIO or shift > 1:
            return [f"the data of {where} may not be normalised as in training: {said}"]
    return []


def _check_classes(outputs: Any, labels: Tensor, classes: int, where: str) -> list[str]:
    """Labels only mean something to a network that has as many answers."""
    found = flatten_outputs(outputs)
    if not found or found[0].ndim != 2 or len(found[0]) != len(labels) or labels.ndim != 1:
        shape = tuple(found[0].shape) if found else "nothing"
        what = f"accuracy needs one row of class scores for each label; the network returns {shape}"
        raise MergingError(what, where=where, fix="Leave the labels out, or give a metric of your own.")
    answers, seen = found[0].shape[1], max(classes, int(labels.max()) + 1)
    what = f"the images have {seen} classes, the network has {answers} answers"
    if seen > answers or int(labels.min()) < 0:
        raise MergingError(what if seen > answers else "a label is negative", where=where, fix=WRONG_DATA_FIX)
    if 0 < classes < answers:
        return [f"{what}: the accuracy is right only if the first {classes} answers mean these classes"]
    return []


Metric = Callable[[nn.Module], Any]
"""The user's own score of a network: the higher, the better."""


@dataclass(frozen=True)
class EvalSet:
    """Batches of inputs, with labels where there are any; `data` says that they were not made up."""

    open: Callable[[], LabelledBatches]
    inputs: str
    data: bool
    labelled: bool = False
    length: int | None = None
    """How many batches there are, if that is known."""
    parts: tuple[OutputPart, ...] = ()
    """Of the original's outputs, if those are known."""
    guessed: bool = False
    """Whether inputs were made up without anything that the network knows of its data."""

    def compare(self, networks: Mapping[str, nn.Module]) -> Fidelity:
        """Of the first network with the others."""
        return compare_networks(
            networks, self._iterate_with_progress(), self.inputs, made_up=not self.data, parts=self.parts
        )

    def accuracy(self, network: nn.Module) -> float:
        """As a share."""
        found = self.compare({"it": network}).scores[0].accuracy
        assert found is not None
        return found / 100

    def fidelity(self, original: nn.Module, network: nn.Module) -> float:
        """Of one network to the other; an error where there is none."""
        found = self.compare({"original": original, "it": network})
        if (value := found.scores[1].fidelity) is None:
            fix = "Give evaluate= a function that returns a score."
            raise MergingError(f"the outputs cannot be compared: {found.why}", where="max_loss=", fix=fix)
        return value

    def iterate_inputs(self) -> Iterator[InputBatch]:
        return (batch for batch, _ in self.open())

    def _iterate_with_progress(self) -> LabelledBatches:
        for done, pair in enumerate(self.open()):
            progress.report_progress(f"comparing on {self.inputs}", done, self.length or 0)
            yield pair


def make_synthetic_eval_set(analysis: Analysis, heldout: GeneratedInputs, seed: int = 0) -> EvalSet:
    """Held-out inputs, as many as are cheap; where none could be synthesised, fallback inputs."""
    made = take_eval_inputs(analysis, heldout, seed)
    pairs = [(batch, None) for batch in made.batches]
    parts = find_output_parts(analysis.graph)
    return EvalSet(lambda: pairs, str(made), data=False, length=len(pairs), parts=parts, guessed=made.guessed)


@torch.no_grad()
def compute_metric(metric: Metric, model: nn.Module) -> float:
    """What the user's function says of a network; one error for whatever goes wrong there."""
    try:
        found = metric(copy_without_hooks(model).eval())
    except MergingError:
        raise
    except Exception as error:  # whatever the user's code raises is told as its own
        what = f"the metric raised {describe_error(error)}"
        raise MergingError(
            what, where=find_user_line(error) or "evaluate=", fix="Fix the function; its argument is the network."
        ) from error
    value = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        what = f"the metric returned {_describe_value(found)}, not a number"
        raise MergingError(what, where="evaluate=", fix="Return one number, the higher the better.")
    return float(value) + 0.0  # no minus zero


def _describe_value(value: object) -> str:
    return repr(value) if isinstance(value, Real | str | None) else f"a {type(value).__name__}"
