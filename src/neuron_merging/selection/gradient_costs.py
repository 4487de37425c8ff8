"""Estimate what cuts cost from one backward pass, in place of trial runs.

Let a cut change the output of a consumer layer by δ. Near the original, the divergence of the network's outputs is the
quadratic form ½ δᵀ H δ, and H = E[g gᵀ] for the gradients g that a random vector v at the outputs sends back, if
E[v vᵀ] is the Hessian of the divergence there. For class scores v is softmax − one-hot of a class drawn from the
softmax (the Fisher information). With H ≈ E|g|²/D · I over the D outputs of the layer, the cost of a cut is

    ½ · E|g|² / D · tr(ΔW C ΔWᵀ),

and the trace is the error that elimination accumulates unit by unit. One backward pass serves all layers and all cuts;
trial runs need passes for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.calibration.consumer_weights import ConsumerWeight
from neuron_merging.calibration.output_divergence import find_logits_outputs, strip_output_activations
from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Axis
from neuron_merging.graph.example_inputs import flatten_inputs, flatten_outputs, infer_batch_size, slice_samples
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.interpreter import Interpreter, run_graph
from neuron_merging.selection.budget import LossCurve
from neuron_merging.selection.elimination import EliminationOrder

GRADIENT_BATCH_SIZE = 16
"""Samples of one backward pass: it holds the activations of all layers."""
MAX_CURVE_POINTS = 64
"""Points of a loss curve."""


@dataclass(frozen=True)
class OutputScale:
    """How one output enters the divergence: as class scores, or by the squared error relative to its variance."""

    is_logits: bool
    rows: int
    """Rows of class scores, or samples."""
    variance: float = 1.0
    """Mean over samples of the summed variance."""

    def draw_score(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a vector v with E[v vᵀ] = Hessian of the divergence, per row."""
        if not self.is_logits:
            # The relative squared error |δ|² / variance has the Hessian 2 / variance.
            deviation = math.sqrt(2 / (self.variance * self.rows))
            return torch.randn(output.shape, generator=generator, device="cpu").mul_(deviation).to(output)
        probabilities = output.float().softmax(-1)
        flat = torch.nan_to_num(probabilities.reshape(-1, output.shape[-1])).cpu()
        drawn = torch.multinomial(flat, 1, generator=generator)
        score = flat.scatter_add(1, drawn, -torch.ones_like(drawn, dtype=torch.float32))
        return score.div_(math.sqrt(self.rows)).view_as(output).to(output)


def measure_sensitivities(
    analysis: Analysis,
    consumer_weights: Sequence[ConsumerWeight],
    batches: Sequence[Sequence[Any]],
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[Axis, float]:
    """Return, for each consumer weight, the divergence per squared error at one position of its output.

    Parameters
    ----------
    analysis
        The network.
    consumer_weights
        Weights of consumer layers.
    batches
        Inputs, in any number of batches.
    temperature
        Temperature of the divergence of class scores, as in `Divergence`.
    seed
        Seeds the random vectors at the outputs.
    """
    parts = list(_split_batches(analysis, batches))
    scales = _measure_output_scales(analysis, parts)
    by_node = {name: weight for weight in consumer_weights for name in weight.inputs}
    squares = {weight.axis: 0.0 for weight in consumer_weights}
    generator = torch.Generator("cpu").manual_seed(seed)
    for batch in progress.track_progress(parts, "measuring gradients"):
        _add_squared_gradients(analysis, batch, by_node, squares, scales, temperature, generator)
    outputs = {weight.axis: _count_outputs(analysis.graph, weight) for weight in consumer_weights}
    return {axis: 0.5 * squares[axis] / outputs[axis] for axis in squares}


def _split_batches(analysis: Analysis, batches: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield smaller batches where the network takes any batch size."""
    for batch in batches:
        if analysis.fixed_batch_size is not None:
            yield from analysis.split_batch(batch)
            continue
        for start in range(0, infer_batch_size(batch), GRADIENT_BATCH_SIZE):
            yield slice_samples(batch, slice(start, start + GRADIENT_BATCH_SIZE))


def _count_outputs(graph: Graph, weight: ConsumerWeight) -> int:
    """Count the outputs of a layer at one position."""
    return max(1, sum(len(matrix) for matrix in weight.to_matrices(graph.tensors[weight.axis.tensor])))


@torch.no_grad()
def _measure_output_scales(analysis: Analysis, parts: Sequence[Sequence[Any]]) -> list[OutputScale]:
    """Return how each output enters the divergence. Variances need a pass; class scores do not."""
    graph = strip_output_activations(analysis.graph_for(parts[0]))
    shapes = [tuple(graph.shapes.get(ref.name, ())) for ref in graph.outputs]
    logits = find_logits_outputs(graph, shapes)
    samples = sum(map(infer_batch_size, parts))
    per_sample = [_count_rows(shape) // max(1, shape[0]) if shape else 1 for shape in shapes]
    if len(logits) == len(shapes):
        return [OutputScale(True, samples * rows) for rows in per_sample]
    found = [[value.flatten(1).double() for value in _run_outputs(analysis, batch)] for batch in parts]
    scales = []
    for i, values in enumerate(zip(*found, strict=True)):
        whole = torch.cat(values)
        variance = float((whole - whole.mean(0)).square().sum(1).mean().clamp(min=1e-30))
        scales.append(OutputScale(i in logits, samples * (per_sample[i] if i in logits else 1), variance))
    return scales


def _count_rows(shape: tuple[int, ...]) -> int:
    """Count the rows of class scores of a captured output."""
    return shape[0] * (shape[1] if len(shape) == 3 else 1)


def _run_outputs(analysis: Analysis, batch: Sequence[Any]) -> list[Tensor]:
    graph = strip_output_activations(analysis.graph_for(batch))
    return flatten_outputs(run_graph(graph, flatten_inputs(batch), graph.tensors))


def _add_squared_gradients(
    analysis: Analysis,
    batch: Sequence[Any],
    by_node: Mapping[str, ConsumerWeight],
    squares: dict[Axis, float],
    scales: Sequence[OutputScale],
    temperature: float,
    generator: torch.Generator,
) -> None:
    """Run one batch forwards and backwards; add the squared gradients at the outputs of consumer layers."""

    def compute_node(node: Node, args: dict[str, Any]) -> Any:
        value = node.compute(args)
        if node.name not in by_node:
            return value
        axis = by_node[node.name].axis
        # A copy, because operators behind it may write into it; its gradient is that of the layer's output.
        value = (value if value.requires_grad else value.detach().requires_grad_(True)).clone()

        def add(gradient: Tensor) -> None:
            squares[axis] += float(gradient.double().square().sum())

        value.register_hook(add)
        return value

    graph = strip_output_activations(analysis.graph_for(batch))
    tensors = {name: tensor.detach() for name, tensor in graph.tensors.items()}
    with torch.enable_grad():
        outputs = flatten_outputs(Interpreter(graph, flatten_inputs(batch), tensors, compute_node).run())
        pairs = [(y, scale) for y, scale in zip(outputs, scales, strict=True) if y.requires_grad]
        scores = [
            scale.draw_score(y.detach() / (temperature if scale.is_logits else 1.0), generator) for y, scale in pairs
        ]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], scores)


def build_loss_curve(order: EliminationOrder, least: int, step: int) -> LossCurve:
    """Turn the accumulated costs of an elimination order into a loss curve, down to `least` kept units.

    >>> import numpy as np
    >>> build_loss_curve(EliminationOrder(np.array([2, 0, 1]), np.array([0.1, 0.3, 0.9])), 1, 1)
    LossCurve(counts=(3, 2, 1), losses=(0.0, 0.1, 0.3), measured=())
    """
    size = len(order.units)
    apart = max(step, (size - least) // MAX_CURVE_POINTS // step * step)
    counts = sorted({size, least, *range(least, size, apart)}, reverse=True)
    losses = [0.0, *(float(order.errors[size - count - 1]) for count in counts[1:])]
    return LossCurve(tuple(counts), tuple(losses))
