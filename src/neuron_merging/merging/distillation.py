"""Distill: train the scales and biases of a smaller network until its outputs are closer to the original's.

A fit by least squares makes the output of each layer right and does not know what the layers behind it make of an
error. Knowledge distillation (Hinton, Vinyals and Dean 2015) does: its loss is the divergence of the network's outputs
from the original's. Only vectors are trained, which are the scales of norms and all biases. They are few numbers, so
that few inputs determine them, and the optimiser needs hardly any memory; the weights keep their fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuron_merging import progress
from neuron_merging.calibration.output_divergence import Divergence, differentiate_divergence
from neuron_merging.errors import raise_if_out_of_memory
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.example_inputs import call_model, clone_inputs, flatten_outputs
from neuron_merging.graph.process_state import disable_fused_attention
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.inputs.input_sets import OriginalOutputs

LEARNING_RATE = 1e-2
"""Change of a vector by one step of Adam at most, relative to the root mean square of its entries."""
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises; after that it falls along a cosine."""
BETAS = 0.9, 0.99
"""Adam's decay rates. The steps are too few for the usual 0.999."""
GRADIENT_SCALE = 2.0**8
"""Factor of all gradients, which Adam's steps do not depend on. Without it many would be zero in float16."""
MIN_SCALE = 1e-3
"""Least root mean square that a vector's steps are relative to: biases may start at zero."""


@dataclass(frozen=True)
class Distillation:
    """The divergence of a smaller network's outputs on held-out inputs, before and after training.

    Attributes
    ----------
    before
        The divergence of the network as it was.
    after
        The divergence after training; infinite if training failed.
    steps
        Gradient steps.
    """

    before: float
    after: float
    steps: int

    @property
    def is_better(self) -> bool:
        """Whether training lowered the divergence, so that the trained values were kept."""
        return self.after < self.before


def distill_vectors(
    small: nn.Module,
    original: OriginalOutputs,
    batches: Sequence[InputBatch],
    heldout: Sequence[InputBatch],
    classes: frozenset[int],
    steps: int,
    seed: int = 0,
) -> Distillation:
    """Train all vectors of `small` in place; if that does not lower the divergence on `heldout`, restore them.

    Parameters
    ----------
    small
        The smaller network, which shares no tensor with the original.
    original
        Computes the outputs that the smaller network should have.
    batches
        Inputs to train on, one batch per step.
    heldout
        Inputs that decide whether the trained values stay.
    classes
        Positions of the outputs that are class scores, as in `Divergence`.
    steps
        Gradient steps.
    seed
        Seeds the order of the batches.
    """
    # The user's hooks must not run. The copy shares its parameters with the network.
    network = copy_without_hooks(small).eval()
    vectors = [p for p in network.parameters() if p.ndim == 1 and p.is_floating_point()]
    before = measure_divergence(network, original, heldout, classes)
    if not vectors or not batches or not steps:
        return Distillation(before, before, 0)
    start = [vector.detach().clone() for vector in vectors]
    try:
        with _require_gradients(network, vectors), disable_fused_attention():
            _train(network, vectors, original, _repeat_shuffled(batches, steps, seed), steps, classes)
        after = measure_divergence(network, original, heldout, classes)
    except RuntimeError as error:  # the network's code writes in place into a value that a gradient needs
        raise_if_out_of_memory(error)
        after = math.inf
    if not after < before:
        _write_values(vectors, start)
    return Distillation(before, after, steps)


@torch.no_grad()
def measure_divergence(
    network: nn.Module, original: OriginalOutputs, batches: Iterable[InputBatch], classes: frozenset[int]
) -> float:
    """Measure the divergence of a network's outputs from the original's; infinite without batches."""
    divergence, seen = Divergence(classes), False
    with disable_fused_attention():
        for batch in batches:
            divergence.add(original.compute(batch), flatten_outputs(call_model(network, clone_inputs(batch))))
            seen = True
    return divergence.value if seen else math.inf


def _train(
    network: nn.Module,
    vectors: Sequence[nn.Parameter],
    original: OriginalOutputs,
    batches: Iterator[InputBatch],
    steps: int,
    classes: frozenset[int],
) -> None:
    """Train with Adam. Sixteen bits are too coarse for small steps, so the optimiser has its own values."""
    values = [vector.detach().to(torch.float32, copy=True) for vector in vectors]
    rates = [LEARNING_RATE * max(float(value.square().mean().sqrt()), MIN_SCALE) for value in values]
    optimizer = torch.optim.Adam([{"params": [v], "lr": r} for v, r in zip(values, rates, strict=True)], betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: compute_rate_factor(step, steps))
    for _ in progress.track_progress(range(steps), "training scales and biases"):
        _add_gradients(network, original, next(batches), classes)
        for value, vector in zip(values, vectors, strict=True):
            value.grad = None if vector.grad is None else vector.grad.float()
            vector.grad = None
        optimizer.step()
        schedule.step()
        _write_values(vectors, values)


def compute_rate_factor(step: int, steps: int) -> float:
    """Return the learning rate at a step, as a share of the highest.

    >>> [round(compute_rate_factor(step, 20), 2) for step in (0, 1, 10, 19)]
    [0.5, 0.99, 0.5, 0.01]
    """
    warm = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _add_gradients(network: nn.Module, original: OriginalOutputs, batch: InputBatch, classes: frozenset[int]) -> None:
    target = original.compute(batch)
    with torch.enable_grad():
        outputs = flatten_outputs(call_model(network, clone_inputs(batch)))
    found = differentiate_divergence(target, [output.detach() for output in outputs], classes)
    del target  # the scores of a language model are large
    pairs = [(o, g) for o, g in zip(outputs, found, strict=True) if g is not None and o.requires_grad]
    gradients = [gradient.mul_(GRADIENT_SCALE).to(output) for output, gradient in pairs]
    torch.autograd.backward([output for output, _ in pairs], gradients)


def _repeat_shuffled(batches: Sequence[InputBatch], steps: int, seed: int) -> Iterator[InputBatch]:
    """Yield so many batches, each as often as the others, in a new order each time."""
    generator = torch.Generator("cpu").manual_seed(seed)
    while True:
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]


@contextmanager
def _require_gradients(network: nn.Module, vectors: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let only these parameters have gradients; restore the flags on exit."""
    flags = [(parameter, parameter.requires_grad) for parameter in network.parameters()]
    network.requires_grad_(False)
    for vector in vectors:
        vector.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None


@torch.no_grad()
def _write_values(vectors: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for vector, value in zip(vectors, values, strict=True):
        vector.copy_(value)
