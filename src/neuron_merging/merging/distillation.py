"""Distill: train a smaller network, a little, until its outputs are closer to the original's.

A fit by least squares makes the output of each layer right and does not know what the layers behind it make of an
error. Knowledge distillation (Hinton, Vinyals and Dean 2015) does: its loss is the divergence of the network's outputs
from the original's. In a language model, vectors are trained (the scales of norms and all biases), and an update of low
rank for each linear layer (LoRA, Hu et al. 2021). These are few numbers, so that few inputs determine them, and the
optimiser needs hardly any memory. The updates become part of the weights, so that the network keeps its size. In a
network that reads pictures, all weights are trained: a few pictures make as many different ones as needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from neuron_merging import progress
from neuron_merging.calibration.output_divergence import (
    Divergence,
    OutputPart,
    differentiate_divergence,
    split_outputs,
)
from neuron_merging.errors import raise_if_out_of_memory
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.example_inputs import call_model, clone_inputs, flatten_outputs
from neuron_merging.graph.process_state import disable_fused_attention, reuse_freed_memory
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.inputs.input_sets import OriginalOutputs
from neuron_merging.merging.soap import Soap

VECTOR_RATE = 1e-2
"""Change of a vector by one step of Adam at most, relative to the root mean square of its entries."""
WEIGHT_RATE = 3e-3
"""The same where all weights are trained, of weights and vectors alike."""
MIN_SCALE = 1e-3
"""Least root mean square that a vector's steps are relative to: biases may start at zero."""
RANK = 16
"""Rank of the update of a linear layer's weight."""
INPUT_RATE = 0.07
"""Change by one step of the matrix of an update that reads the layer's inputs, relative to its entries."""
OUTPUT_RATE = 0.002
"""Change of a layer's outputs by one step of the other matrix, relative to what the layer returns for such inputs."""
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises; after that it falls along a cosine."""
BETAS = 0.9, 0.99
"""Adam's decay rates. The steps are too few for the usual 0.999."""
GRADIENT_SCALE = 2.0**8
"""Factor of all gradients, which Adam's steps do not depend on. Without it many would be zero in float16."""


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
        """Whether training lowered the divergence, so that its result was kept."""
        return self.after < self.before


def distill(
    small: nn.Module,
    original: OriginalOutputs,
    batches: Sequence[InputBatch] | Iterator[InputBatch],
    heldout: Sequence[InputBatch],
    classes: frozenset[int],
    steps: int,
    seed: int = 0,
    bfloat16: bool = False,
    parts: Sequence[OutputPart] = (),
    all_weights: bool = False,
) -> Distillation:
    """Train `small` in place; if that does not lower the divergence on `heldout`, leave it as it was.

    Parameters
    ----------
    small
        The smaller network, which shares no tensor with the original.
    original
        Computes the outputs that the smaller network should have.
    batches
        Inputs to train on, one batch per step: a sequence, which is repeated, or an iterator over new ones.
    heldout
        Inputs that decide whether the result is kept.
    classes
        Positions of the outputs, or of their parts, that are class scores, as in `Divergence`.
    steps
        Gradient steps.
    seed
        Seeds the order of the batches and the starting points of the updates.
    bfloat16
        Let a CPU that multiplies bfloat16 numbers by itself train in them.
    parts
        Parts of the outputs that are compared one by one, each relative to its own variance.
    all_weights
        Train all weights, in place of vectors and updates of low rank.
    """
    # The user's hooks must not run. The copy shares its parameters with the network.
    network = copy_without_hooks(small).eval()
    vectors = [p for p in network.parameters() if p.is_floating_point() and (all_weights or p.ndim == 1)]
    counts = _find_class_counts(original, heldout, classes)
    updates = [] if all_weights else make_low_rank_updates(network, counts, seed)
    before = measure_divergence(network, original, heldout, classes, parts)
    if not (vectors or updates) or not steps or (not isinstance(batches, Iterator) and not batches):
        return Distillation(before, before, 0)
    start = [vector.detach().clone() for vector in vectors]
    with ExitStack() as hooks:
        for update in updates:
            hooks.callback(update.attach().remove)
        try:
            with _require_gradients(network, vectors), disable_fused_attention():
                values = _Trained(vectors, updates, all_weights)
                teacher = _Teacher(original, classes, parts, repeats=not isinstance(batches, Iterator))
                order = batches if isinstance(batches, Iterator) else _repeat_shuffled(batches, seed)
                _train(network, values, teacher, order, steps, bfloat16)
            after = measure_divergence(network, original, heldout, classes, parts)
        except RuntimeError as error:  # the network's code writes in place into a value that a gradient needs
            raise_if_out_of_memory(error)
            after = math.inf
    if after < before:
        for update in updates:
            update.fold()
    else:
        _write_values(vectors, start)
    return Distillation(before, after, steps)


@dataclass(frozen=True)
class LowRankUpdate:
    """A change of a linear layer: the product of two narrow matrices, added to its weight.

    Attributes
    ----------
    layer
        The layer.
    transposed
        Whether its weight is outputs × inputs, as that of `nn.Linear`.
    down
        Inputs × rank.
    up
        Rank × outputs, zero at the start.
    """

    layer: nn.Module
    transposed: bool
    down: nn.Parameter
    up: nn.Parameter

    def attach(self) -> RemovableHandle:
        """Let the layer add the update to its outputs, until the returned handle is removed."""

        def add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            if not inputs:  # given by name
                return output
            down, up = (matrix.to(inputs[0].dtype) for matrix in (self.down, self.up))
            changed: Tensor = output + inputs[0] @ down @ up
            return changed

        return self.layer.register_forward_hook(add)

    @torch.no_grad()
    def fold(self) -> None:
        """Add the update to the layer's weight."""
        change = self.down @ self.up
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        weight.copy_(weight.float() + (change.T if self.transposed else change))


def make_low_rank_updates(network: nn.Module, class_counts: frozenset[int], seed: int) -> list[LowRankUpdate]:
    """Make an update for each linear layer, but those that return class scores: these are large, and the last.

    Layers that share a weight get none.
    """
    uses = Counter(id(own.weight) for own in network.modules() if isinstance(getattr(own, "weight", None), Tensor))
    generator = torch.Generator("cpu").manual_seed(seed)
    found = []
    for layer in network.modules():
        transposed = type(layer) is nn.Linear  # classes made from it may compute something else
        # GPT-2's layers, inputs × outputs; their class is in the transformers library.
        if not transposed and type(layer).__name__ != "Conv1D":
            continue
        weight: Any = layer.weight
        if weight.ndim != 2 or not weight.is_floating_point() or uses[id(weight)] > 1:
            continue
        outputs, inputs = weight.shape if transposed else weight.shape[::-1]
        if outputs in class_counts:
            continue
        rank = min(RANK, inputs, outputs)
        down = torch.randn(inputs, rank, generator=generator, device="cpu").to(weight.device) / math.sqrt(inputs)
        up = torch.zeros(rank, outputs, dtype=torch.float32, device=weight.device)
        found.append(LowRankUpdate(layer, transposed, nn.Parameter(down), nn.Parameter(up)))
    return found


@torch.no_grad()
def measure_divergence(
    network: nn.Module,
    original: OriginalOutputs,
    batches: Iterable[InputBatch],
    classes: frozenset[int],
    parts: Sequence[OutputPart] = (),
) -> float:
    """Measure the divergence of a network's outputs from the original's; infinite without batches."""
    divergence, seen = Divergence(classes), False
    with disable_fused_attention():
        for batch in batches:
            outputs = (original.compute(batch), flatten_outputs(call_model(network, clone_inputs(batch))))
            divergence.add(*(split_outputs(own, parts) if parts else own for own in outputs))
            seen = True
    return divergence.value if seen else math.inf


def _find_class_counts(
    original: OriginalOutputs, batches: Sequence[InputBatch], classes: frozenset[int]
) -> frozenset[int]:
    outputs = original.compute(batches[0]) if batches and classes else []
    return frozenset(int(outputs[i].shape[-1]) for i in classes if outputs)


@dataclass(frozen=True)
class _Teacher:
    """The original, with how its outputs are compared; it keeps the outputs for batches that come again."""

    original: OriginalOutputs
    classes: frozenset[int]
    parts: Sequence[OutputPart]
    repeats: bool

    def compute(self, batch: InputBatch) -> list[Tensor]:
        return self.split(self.original.compute(batch) if self.repeats else self.original.run(batch))

    def split(self, outputs: list[Tensor]) -> list[Tensor]:
        return split_outputs(outputs, self.parts) if self.parts else outputs


class _Trained:
    """What is trained: float32 values of parameters, which may be in half precision, and low-rank updates."""

    def __init__(self, vectors: Sequence[nn.Parameter], updates: Sequence[LowRankUpdate], all_weights: bool) -> None:
        rate = WEIGHT_RATE if all_weights else VECTOR_RATE
        self.vectors = vectors
        self.values = [vector.detach().to(torch.float32, copy=True) for vector in vectors]
        groups: list[dict[str, Any]] = [
            {"params": [value], "lr": rate * max(_root_mean_square(value), MIN_SCALE)} for value in self.values
        ]
        for update in updates:
            inputs, rank = update.down.shape
            weight: Any = update.layer.weight
            # The length of a row of the weight: what the layer returns for inputs of size one.
            length = _root_mean_square(weight.detach()) * math.sqrt(inputs)
            groups.append({"params": [update.down], "lr": INPUT_RATE / math.sqrt(inputs)})
            groups.append({"params": [update.up], "lr": OUTPUT_RATE * length / math.sqrt(rank)})
        self.optimizer: torch.optim.Optimizer = Soap(groups) if all_weights else torch.optim.Adam(groups, betas=BETAS)

    def step(self) -> None:
        """Take one step with the gradients at hand."""
        for value, vector in zip(self.values, self.vectors, strict=True):
            value.grad = None if vector.grad is None else vector.grad.float()
            vector.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        _write_values(self.vectors, self.values)


def _root_mean_square(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


@reuse_freed_memory()
def _train(
    network: nn.Module,
    trained: _Trained,
    teacher: _Teacher,
    batches: Iterator[InputBatch],
    steps: int,
    bfloat16: bool,
) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(trained.optimizer, lambda step: compute_rate_factor(step, steps))
    for _ in progress.track_progress(range(steps), "distilling"):
        _add_gradients(network, teacher, next(batches), bfloat16)
        trained.step()
        schedule.step()


def compute_rate_factor(step: int, steps: int) -> float:
    """Return the learning rate at a step, as a share of the highest.

    >>> [round(compute_rate_factor(step, 20), 2) for step in (0, 1, 10, 19)]
    [0.5, 0.99, 0.5, 0.01]
    """
    warm = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _add_gradients(network: nn.Module, teacher: _Teacher, batch: InputBatch, bfloat16: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        target = teacher.compute(batch)
        with torch.enable_grad():
            outputs = teacher.split(flatten_outputs(call_model(network, clone_inputs(batch))))
    found = differentiate_divergence(target, [output.detach() for output in outputs], teacher.classes)
    del target  # the scores of a language model are large
    pairs = [(o, g) for o, g in zip(outputs, found, strict=True) if g is not None and o.requires_grad]
    gradients = [gradient.mul_(GRADIENT_SCALE).to(output) for output, gradient in pairs]
    torch.autograd.backward([output for output, _ in pairs], gradients)


def _repeat_shuffled(batches: Sequence[InputBatch], seed: int) -> Iterator[InputBatch]:
    """Yield batches without end, each as often as the others, in a new order each time."""
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
