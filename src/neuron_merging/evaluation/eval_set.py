"""Batches on which networks are compared, and checks that the data fits the network: input shape, number of classes,
and input range against the first batch norm's training statistics.
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
from neuron_merging.graph.example_inputs import call_model, clone_inputs, flatten_inputs, flatten_outputs
from neuron_merging.graph.process_state import disable_fused_attention
from neuron_merging.graph.user_code import find_user_line
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs, InputBatch
from neuron_merging.inputs.input_sets import OriginalOutputs
from neuron_merging.inputs.scale_from_norms import count_real_samples
from neuron_merging.inputs.text import find_text_input

ODD_VARIANCE_RATIO, WRONG_VARIANCE_RATIO = 4.0, 100.0
"""Ratios of the variance at the first batch norm to its training statistics beyond which there is a note, and an
error. Pixels in 0..255 in place of 0..1 give 65,025. Pixels that were not divided by a deviation of 0.225 give 1/20.
"""
WRONG_DATA_FIX = "Give the data that it was trained on."
WRONG_RANGE_FIX = "Normalise them as in training: --mean and --std, or mean= and std=."


@torch.no_grad()
def check_eval_data(
    model: nn.Module, batch: tuple[Any, ...], labels: Tensor | None = None, classes: int = 0, *, where: str
) -> list[str]:
    """Refuse data that does not fit the network, and return notes on data that looks unusual."""
    for value in flatten_inputs(batch):
        # Minus infinity is allowed, since attention masks hold it.
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
    """Record, for the first trained batch norm that runs: its name, and the shift and spread of its input
    relative to its training statistics.
    """
    seen: list[tuple[str, float, float]] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and _has_trained_stats(module):
            # The default binds the name of this round; a closure would see that of the last one.
            def record_input(norm: _BatchNorm, args: tuple[Any, ...], name: str = name) -> None:
                if not seen and args and args[0].ndim > 1:
                    seen.append((name, *_compare_with_training(norm, args[0])))

            handles.append(module.register_forward_pre_hook(record_input))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _has_trained_stats(norm: _BatchNorm) -> bool:
    """Whether running statistics exist and differ from their initial values, mean 0 and variance 1."""
    mean, var = norm.running_mean, norm.running_var
    if mean is None or var is None or mean.is_meta:
        return False
    return bool(mean.isfinite().all() and var.isfinite().all()) and bool(mean.any() or (var != 1).any())


def _compare_with_training(norm: _BatchNorm, value: Tensor) -> tuple[float, float]:
    """Return the mean over channels of |mean - μ| / σ and of variance / σ², for the stored μ and σ²."""
    assert norm.running_mean is not None and norm.running_var is not None
    rows = value.transpose(0, 1).flatten(1).double()
    # The clamp is for dead channels, whose variance is zero.
    mean, var = norm.running_mean.double(), norm.running_var.double().clamp(min=1e-12)
    shift = (rows.mean(1) - mean).abs() / var.sqrt()
    return float(shift.mean()), float((rows.var(1, unbiased=False) / var).mean())


def _check_range(seen: list[tuple[str, float, float]], where: str) -> list[str]:
    for name, shift, spread in seen:
        finding = f"{name} sees {spread:.2g} times the variance of its training, and a mean {shift:.2g} deviations off"
        if not 1 / WRONG_VARIANCE_RATIO < spread < WRONG_VARIANCE_RATIO:
            raise MergingError(
                f"the range of the data differs from the training data's: {finding}", where=where, fix=WRONG_RANGE_FIX
            )
        if not 1 / ODD_VARIANCE_RATIO < spread < ODD_VARIANCE_RATIO or shift > 1:
            return [f"the data of {where} may not be normalised as in training: {finding}"]
    return []


def _check_classes(outputs: Any, labels: Tensor, classes: int, where: str) -> list[str]:
    """Refuse labels that the network's outputs cannot be scored with, and note unused classes."""
    tensors = flatten_outputs(outputs)
    if not tensors or tensors[0].ndim != 2 or len(tensors[0]) != len(labels) or labels.ndim != 1:
        shape = tuple(tensors[0].shape) if tensors else "nothing"
        what = f"accuracy needs one row of class scores for each label; the network returns {shape}"
        raise MergingError(what, where=where, fix="Leave the labels out, or give a metric of your own.")
    width, needed = tensors[0].shape[1], max(classes, int(labels.max()) + 1)
    what = f"the images have {needed} classes, the network has {width} outputs"
    if needed > width or int(labels.min()) < 0:
        raise MergingError(what if needed > width else "a label is negative", where=where, fix=WRONG_DATA_FIX)
    if 0 < classes < width:
        return [f"{what}: the accuracy is right only if the first {classes} outputs mean these classes"]
    return []


Metric = Callable[[nn.Module], Any]
"""A user-defined score of a network; higher is better."""


@dataclass(frozen=True)
class EvalSet:
    """Batches of inputs, with labels if there are any. `data` is whether they are real data, not synthesised."""

    open: Callable[[], LabelledBatches]
    inputs: str
    data: bool
    labelled: bool = False
    length: int | None = None
    """The number of batches, if known."""
    parts: tuple[OutputPart, ...] = ()
    """Parts of the original's outputs that are compared separately, if known."""
    guessed: bool = False
    """Whether the inputs are fallback inputs, which use no statistics of the training data."""
    original: OriginalOutputs | None = None
    """The original's outputs, if earlier stages share them."""
    text_input: int | None = None
    """The position of the tokens that a causal language model reads."""

    def compare(self, networks: Mapping[str, nn.Module]) -> Fidelity:
        """Compare all networks with the first one."""
        known = self.original is not None and self.original.model is next(iter(networks.values()))
        return compare_networks(
            networks,
            self._iterate_with_progress(),
            self.inputs,
            synthetic=not self.data,
            parts=self.parts,
            original=self.original if known else None,
            text_input=self.text_input,
        )

    def accuracy(self, network: nn.Module) -> float:
        """Return the accuracy of a network, in 0..1."""
        percent = self.compare({"it": network}).scores[0].accuracy
        assert percent is not None
        return percent / 100

    def fidelity(self, original: nn.Module, network: nn.Module) -> float:
        """Return the fidelity of a network to the original; raise an error if the outputs have none."""
        comparison = self.compare({"original": original, "it": network})
        if (value := comparison.scores[1].fidelity) is None:
            fix = "Give evaluate= a function that returns a score."
            raise MergingError(f"the outputs cannot be compared: {comparison.why}", where="max_loss=", fix=fix)
        return value

    def iterate_inputs(self) -> Iterator[InputBatch]:
        return (batch for batch, _ in self.open())

    def _iterate_with_progress(self) -> LabelledBatches:
        for done, pair in enumerate(self.open()):
            progress.report_progress(f"comparing on {self.inputs}", done, self.length or 0)
            yield pair


def make_synthetic_eval_set(
    analysis: Analysis, heldout: GeneratedInputs, seed: int = 0, original: OriginalOutputs | None = None
) -> EvalSet:
    """Make an evaluation set of held-out synthesised inputs, or of fallback inputs if none could be synthesised."""
    inputs = take_eval_inputs(analysis, heldout, seed)
    pairs = [(batch, None) for batch in inputs.batches]
    parts = find_output_parts(analysis.graph)
    return EvalSet(
        lambda: pairs,
        str(inputs),
        data=False,
        length=len(pairs),
        text_input=find_text_input(analysis),
        parts=parts,
        guessed=inputs.guessed,
        original=original,
    )


def make_example_eval_set(analysis: Analysis) -> EvalSet | None:
    """Make an evaluation set of the example inputs; None unless they hold real values, as far as one can tell."""
    count = count_real_samples(analysis)
    if not count:
        return None
    source = f"the {count} example inputs" if count > 1 else "the example input"
    pairs = [(analysis.inputs, None)]
    return EvalSet(lambda: pairs, source, data=True, length=1, parts=find_output_parts(analysis.graph))


@torch.no_grad()
def compute_metric(metric: Metric, model: nn.Module) -> float:
    """Score a network with the user's function; any failure there becomes one MergingError."""
    try:
        score = metric(copy_without_hooks(model).eval())
    except MergingError:
        raise
    except Exception as error:  # any exception of the user's code
        what = f"the metric raised {describe_error(error)}"
        raise MergingError(
            what, where=find_user_line(error) or "evaluate=", fix="Fix the function; its argument is the network."
        ) from error
    value = score.item() if isinstance(score, Tensor) and score.numel() == 1 else score
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        what = f"the metric returned {_describe_value(score)}, not a number"
        raise MergingError(what, where="evaluate=", fix="Return one number, the higher the better.")
    return float(value) + 0.0  # turns -0.0 into 0.0


def _describe_value(value: object) -> str:
    return repr(value) if isinstance(value, Real | str | None) else f"a {type(value).__name__}"
