"""Synthesise inputs from batch-norm statistics, as in ZeroQ (Cai et al. 2020) and DeepInversion (Yin et al. 2020).

A batch norm stores the mean and the variance of its training inputs. Synthetic inputs are optimised by gradient
steps until every batch norm sees the statistics that it stored. They then run through the network as real ones do:
the error of a merged network on them follows the error on real data over two orders of magnitude.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging import progress
from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.example_inputs import has_batch_axis, infer_batch_size
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import Interpreter
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs import disk_cache, synthetic
from neuron_merging.inputs.disk_cache import InputCacheEntry

INVERSION_LEARNING_RATE = 0.1
"""Learning rate of Adam. Inputs start with unit variance, so it is a share of their deviation."""
PROGRESS_WINDOW = 20
"""Number of steps over which convergence is judged."""
MIN_PROGRESS = 0.05
"""Relative improvement over the window below which the descent stops."""
INVERSION_BATCH_SIZE = 64
"""Inputs whose joint statistics are matched. Where a norm sees one position per input, the mean of 64 is accurate to
an eighth of a deviation."""
MAX_ACTIVATION_BYTES = 2**32
"""Bytes of activations that one batch may hold for the backward pass."""
NO_BATCH_NORMS = "the network has no batch norm that stores statistics"
InputBatch = tuple[Any, ...]
INVERTED_INPUTS = "inputs synthesised from batch-norm statistics"


@dataclass(frozen=True)
class GeneratedInputs:
    """Inputs generated for a network, and how well they match its batch norms.

    Attributes
    ----------
    batches
        Batches like the example inputs.
    before
        The loss at the start: mean squared distance from the stored statistics, in units of the stored variance.
    after
        The loss at the end.
    steps
        The number of gradient steps.
    whole
        Whether the descent converged or took all steps, and was not stopped by a time limit.
    refusal
        Why no inputs could be generated.
    source
        What the inputs are, for the summary.

    Examples
    --------
    >>> GeneratedInputs(refusal="its statistics were never trained").batches
    ()
    """

    batches: tuple[InputBatch, ...] = ()
    before: float = math.nan
    after: float = math.nan
    steps: int = 0
    whole: bool = True
    refusal: str = ""
    source: str = INVERTED_INPUTS


def invert_batch_norms(
    analysis: Analysis, count: int, *, steps: int, seed: int = 0, seconds: float = math.inf
) -> GeneratedInputs:
    """Synthesise `count` inputs whose statistics, batch by batch, approach those that the batch norms store.

    Only float inputs with a batch dimension are optimised; others keep the values of `synthetic.synthesize_batches`.
    `seconds` is shared evenly by the batches. A batch that hits this limit depends on the machine and is not cached.
    """
    norms = find_stored_norms(analysis.graph)
    if isinstance(norms, str):
        return GeneratedInputs(refusal=norms)
    entry = disk_cache.open_cache_entry(analysis.graph, analysis.inputs, ("remembered", count, steps, seed))
    start, found = time.monotonic(), []
    batches = make_starting_batches(analysis, count, seed)
    for i, batch in enumerate(batches):
        left = (seconds - (time.monotonic() - start)) / (len(batches) - i)
        descent = _BatchInversion(analysis, norms, batch)
        part = descent.load(entry, i) or descent.run(steps, left, i, len(batches))
        if part.refusal:
            return part
        if part.whole:  # a batch that a time limit stopped is not reproducible
            descent.store(entry, i, part)
        found.append(part)
    before, after = (sum(getattr(part, name) for part in found) / len(found) for name in ("before", "after"))
    batches_found = tuple(own for part in found for batch in part.batches for own in analysis.split_batch(batch))
    return GeneratedInputs(
        batches_found, before, after, max(part.steps for part in found), all(part.whole for part in found)
    )


def make_starting_batches(analysis: Analysis, count: int, seed: int) -> list[InputBatch]:
    """Return the synthetic inputs to start from, in batches of nearly equal size that fit into memory."""
    example = analysis.inputs
    have = infer_batch_size(example)
    held = 4 * sum(math.prod(node.shape) for node in analysis.graph.nodes if node.shape) // max(1, have)
    count = analysis.round_up_samples(count)
    most = max(8, min(count, INVERSION_BATCH_SIZE, MAX_ACTIVATION_BYTES // max(1, held)))
    # As few batches as possible, of equal size: small ones have noisy statistics.
    size = analysis.round_up_samples(-(-count // -(-count // most)))
    return list(
        synthetic.synthesize_batches(example, count, seed, synthetic.find_token_inputs(analysis.graph), size=size)
    )


def find_stored_norms(graph: Graph) -> dict[str, tuple[str, str]] | str:
    """Return the batch norms with usable statistics, node → names of mean and variance; or the reason why there is
    none.
    """
    found: dict[str, tuple[str, str]] = {}
    why = NO_BATCH_NORMS
    for node in graph.nodes:
        names = _find_statistic_names(graph, node.args) if lookup_operator(node).norm == "batch" else None
        if names is None:
            continue
        fault = _explain_useless_statistics(*(graph.tensors[name].detach().double() for name in names))
        if fault:
            why = f"{node.module}: {fault}"
        else:
            found[node.name] = names
    return found or why


def _find_statistic_names(graph: Graph, args: Mapping[str, Any]) -> tuple[str, str] | None:
    refs = [args.get(key) for key in ("running_mean", "running_var")]
    mean, var = (graph.parameters.get(ref.name) if isinstance(ref, Ref) else None for ref in refs)
    return (mean, var) if mean is not None and var is not None else None


def _explain_useless_statistics(mean: Tensor, var: Tensor) -> str:
    """Return why stored statistics are useless; an empty text if they are not."""
    if not bool(mean.isfinite().all() and var.isfinite().all() and (var >= 0).all()):
        return "its statistics are not finite"
    if not bool(mean.any()) and bool((var == 1).all()):  # the initial values of nn.BatchNorm
        return "its statistics were never trained"
    return "" if bool((var > 0).any()) else "its statistics have no variance"


class _BatchInversion:
    """Gradient descent on the float inputs of one batch."""

    def __init__(self, analysis: Analysis, norms: Mapping[str, tuple[str, str]], batch: InputBatch) -> None:
        self.batch, self.values, self.split = batch, flatten_inputs(batch), analysis.split_batch
        length = infer_batch_size(batch)
        self.float_positions = [
            i for i, v in enumerate(self.values) if has_batch_axis(v, length) and v.is_floating_point()
        ]
        self.free = [self.values[i].detach().clone().requires_grad_() for i in self.float_positions]
        self.matcher = _StatisticsMatcher(analysis.graph_for(self.split(batch)[0]), norms)

    def run(self, steps: int, seconds: float, number: int, total: int) -> GeneratedInputs:
        """Take gradient steps until convergence; return the inputs with the smallest loss, not the last ones."""
        if not self.free:
            return GeneratedInputs(refusal="no input is a floating-point tensor")
        start = time.monotonic()
        losses: list[float] = []
        best = [value.detach().clone() for value in self.free]
        optimiser = torch.optim.Adam(self.free, lr=INVERSION_LEARNING_RATE)
        while len(losses) <= steps and not _has_converged(losses) and time.monotonic() - start < seconds:
            progress.report_progress("synthesising inputs", number * steps + len(losses), total * steps)
            with torch.enable_grad():
                loss = self.matcher.loss([flatten_inputs(part) for part in self.split(self._build_batch(self.free))])
                refusal = self._assign_gradients(loss)
            if refusal:
                return GeneratedInputs(refusal=refusal)
            losses.append(float(loss.detach()))
            # Adam is not monotonic: keep the inputs of the smallest loss.
            if losses[-1] <= min(losses):
                best = [value.detach().clone() for value in self.free]
            optimiser.step()
        if not losses or not math.isfinite(min(losses)):
            return GeneratedInputs(
                refusal="the outputs on synthetic inputs are not finite" if losses else "no time was left"
            )
        whole = len(losses) > steps or _has_converged(losses)
        return GeneratedInputs((self._build_batch(best),), losses[0], min(losses), len(losses) - 1, whole)

    def store(self, entry: InputCacheEntry, number: int, part: GeneratedInputs) -> None:
        """Write the batch to the cache."""
        values = flatten_inputs(part.batches[0])
        figures = {"before": part.before, "after": part.after, "steps": part.steps}
        entry.put(number, {str(i): values[i] for i in self.float_positions}, figures)

    def load(self, entry: InputCacheEntry, number: int) -> GeneratedInputs | None:
        """Read the batch of an earlier run from the cache; None if there is none."""
        like = {str(i): self.values[i] for i in self.float_positions}
        found = entry.get(number, like, ("before", "after", "steps"))
        if found is None:
            return None
        tensors, figures = found
        values = [tensors[str(i)].to(self.values[i]) for i in self.float_positions]
        return GeneratedInputs((self._build_batch(values),), figures["before"], figures["after"], int(figures["steps"]))

    def _fill_in(self, floats: Sequence[Tensor]) -> list[Any]:
        given = list(self.values)
        for i, value in zip(self.float_positions, floats, strict=True):
            given[i] = value
        return given

    def _build_batch(self, floats: Sequence[Tensor]) -> InputBatch:
        return tuple(tree_unflatten(self._fill_in(floats), tree_structure(list(self.batch))))

    def _assign_gradients(self, loss: Tensor) -> str:
        """Compute the gradients of the inputs; return why that is impossible, or an empty text."""
        if not loss.requires_grad:
            return "no batch norm depends on a floating-point input"
        found = torch.autograd.grad(loss, self.free, allow_unused=True)
        for value, gradient in zip(self.free, found, strict=True):
            value.grad = gradient
        return "" if any(g is not None and bool(g.any()) for g in found) else "no gradient reaches the inputs"


def _has_converged(losses: Sequence[float]) -> bool:
    """Return whether the last `PROGRESS_WINDOW` steps improved the loss by less than `MIN_PROGRESS`."""
    return len(losses) > PROGRESS_WINDOW and min(losses[-PROGRESS_WINDOW:]) > (1 - MIN_PROGRESS) * min(
        losses[:-PROGRESS_WINDOW]
    )


class _StatisticsMatcher:
    """Computes how far the statistics of a batch are from those that the batch norms store."""

    def __init__(self, graph: Graph, norms: Mapping[str, tuple[str, str]]) -> None:
        self.graph = graph
        self.tensors = {name: tensor.detach() for name, tensor in graph.tensors.items()}
        self.norms = {
            name: (self.tensors[mean].float(), self.tensors[var].float()) for name, (mean, var) in norms.items()
        }
        last = max(i for i, node in enumerate(graph.nodes) if node.name in norms)
        self.nodes = graph.nodes[: last + 1]  # nothing behind the last batch norm contributes to the loss

    def loss(self, parts: Sequence[Sequence[Any]]) -> Tensor:
        """Return L(x): the mean over batch norms and channels of ((m − μ)² + (s − σ)²) / (σ² + ε).

        m and s are the mean and deviation of a norm's input over the batch and all positions, μ and σ the stored ones.
        `parts` are the flat inputs of the batch; several run side by side if the network's batch size is fixed.
        """
        terms: list[Tensor] = []
        normalized: Iterator[Tensor] = iter(())

        def compute_node(node: Node, args: dict[str, Any]) -> Any:
            return next(normalized) if self._is_matched(node, args) else node.compute(args)

        runs = [Interpreter(self.graph, inputs, self.tensors, compute_node) for inputs in parts]
        for node in self.nodes:
            if node.name in self.norms:
                found = [run.arguments(node) for run in runs]
                if self._is_matched(node, found[0]):
                    values, term = self._normalize_parts(node, found)
                    normalized = iter(values)
                    terms.append(term)
            for run in runs:
                run.run_node(node)
        return torch.stack(terms).mean()

    def _is_matched(self, node: Node, args: Mapping[str, Any]) -> bool:
        return node.name in self.norms and not args.get("training")

    def _normalize_parts(self, node: Node, found: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Tensor], Tensor]:
        """Return the normalised values of all parts, and the loss of their joint statistics."""
        inputs = [args["input"] for args in found]
        whole = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        value, mean, var = _BatchNormWithStats.apply(whole, *_compute_gain_and_shift(found[0]))  # type: ignore[no-untyped-call]
        term = _measure_distance(mean, var, *self.norms[node.name], found[0]["eps"])
        return (value,) if len(inputs) == 1 else value.split([len(own) for own in inputs]), term


class _BatchNormWithStats(torch.autograd.Function):
    """A batch norm in evaluation mode that also returns the mean and variance of its input.

    A custom backward pass stores only the input, where autograd would store several tensors of its size per norm.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = torch.batch_norm_update_stats(value, None, None, 0.1)
        ctx.save_for_backward(value, gain, mean)
        return _apply_affine(value, gain, shift), mean, var

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        value, gain, mean = ctx.saved_tensors
        output, by_mean, by_var = gradients
        count = value.numel() / value.shape[1]
        # dL/dx = gain · dL/dy + (dL/dm)/n + 2(x − m)(dL/dvar)/n, written as one affine map of x.
        slope = 2 * by_var / count
        return (
            _apply_affine(value, slope, by_mean / count - slope * mean).addcmul_(
                output, _view_per_channel(gain, value)
            ),
            None,
            None,
        )


def _measure_distance(seen: Tensor, spread: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return the loss of one batch norm; `seen` and `spread` are the mean and variance of the batch."""
    off = (seen - mean).square() + ((spread + eps).sqrt() - (var + eps).sqrt()).square()
    return (off / (var + eps)).mean()


def _compute_gain_and_shift(args: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    gain = (args["running_var"] + args["eps"]).rsqrt()
    gain = gain if args.get("weight") is None else gain * args["weight"]
    shift = -args["running_mean"] * gain
    return gain, shift if args.get("bias") is None else shift + args["bias"]


def _apply_affine(value: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(_view_per_channel(shift, value), value, _view_per_channel(gain, value))


def _view_per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(-1, *(1 for _ in like.shape[2:])).to(like)
