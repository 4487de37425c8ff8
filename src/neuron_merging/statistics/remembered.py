"""remembered: inputs that a network remembers, by what its batch norms hold.

A batch norm stores the mean and the variance of what it saw in training. Synthetic inputs (`synthetic`) that are
moved, by gradient steps on the inputs alone, until every batch norm sees what it stored, run through the network as
real ones do. The idea is known from quantisation without data (ZeroQ, Cai et al. 2020) and from distillation without
data (DeepInversion, Yin et al. 2020).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging import progress
from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.operators.table import row_of
from neuron_merging.graph.execution import Execution
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Graph, Ref
from neuron_merging.statistics import keeping, synthetic
from neuron_merging.statistics.keeping import Shelf

RATE = 0.1
"""Of Adam. Inputs start with unit variance, so it is a share of their deviation."""
WINDOW = 20
"""Steps over which progress is judged."""
GAIN = 0.05
"""Relative improvement over the window below which another step does not pay."""
BATCH = 64
"""Inputs that share their statistics: at a single position, the mean of 64 is within an eighth of a deviation."""
MEMORY = 2**32
"""Bytes of activations that one batch may hold."""
NO_NORMS = "the network has no batch norm that stores statistics"
Batch = tuple[Any, ...]
REMEMBERED = "inputs that the network remembers"


@dataclass(frozen=True)
class Remembered:
    """Inputs that a network remembers, and how well they match.

    Attributes
    ----------
    batches
        Batches like the example inputs.
    before
        Distance of the statistics from the stored ones at the start: mean square, in units of the stored variance.
    after
        The same at the end.
    steps
        That were taken.
    whole
        Whether it ended because more steps would not pay, or all were taken: not for want of time.
    refusal
        Why nothing could be remembered.
    source
        What the inputs are, for people.

    Examples
    --------
    >>> Remembered(refusal="its statistics were never trained").batches
    ()
    """

    batches: tuple[Batch, ...] = ()
    before: float = math.nan
    after: float = math.nan
    steps: int = 0
    whole: bool = True
    refusal: str = ""
    source: str = REMEMBERED


def remember(analysis: Analysis, count: int, *, steps: int, seed: int = 0, seconds: float = math.inf) -> Remembered:
    """`count` inputs whose statistics, batch by batch, approach those that the batch norms hold.

    Only float inputs that have the batch dimension move; others stay as `synthetic.probes` makes them. `seconds` is
    shared fairly by the batches; a limit that was felt makes the result depend on the machine, so it is not kept.
    """
    norms = stored_norms(analysis.graph)
    if isinstance(norms, str):
        return Remembered(refusal=norms)
    if analysis.one_size_only:
        return Remembered(refusal="the network takes no other number of samples than the example has")
    shelf = keeping.shelf(analysis.graph, analysis.inputs, ("remembered", count, steps, seed))
    start, found = time.monotonic(), []
    batches = started(analysis, count, seed)
    for i, batch in enumerate(batches):
        left = (seconds - (time.monotonic() - start)) / (len(batches) - i)
        descent = _Descent(analysis.graph_for(batch), norms, batch)
        part = descent.kept(shelf, i) or descent.run(steps, left, i, len(batches))
        if part.refusal:
            return part
        if part.whole:
            descent.keep(shelf, i, part)
        found.append(part)
    before, after = (sum(getattr(part, name) for part in found) / len(found) for name in ("before", "after"))
    made = tuple(batch for part in found for batch in part.batches)
    return Remembered(made, before, after, max(part.steps for part in found), all(part.whole for part in found))


def started(analysis: Analysis, count: int, seed: int) -> list[Batch]:
    """The synthetic inputs that they start as, in batches of nearly equal size that fit into memory."""
    example = analysis.inputs
    have = synthetic.batch_size(example)
    held = 4 * sum(math.prod(node.shape) for node in analysis.graph.nodes if node.shape) // max(1, have)
    most = have if analysis.channels_along_batch else max(8, min(count, BATCH, MEMORY // max(1, held)))
    size = -(-count // -(-count // most))
    return list(synthetic.probes(example, count, seed, synthetic.tokens_of(analysis.graph), size=size))


def stored_norms(graph: Graph) -> dict[str, tuple[str, str]] | str:
    """Batch norms with statistics worth matching: node → names of mean and variance; or why there is none."""
    found: dict[str, tuple[str, str]] = {}
    why = NO_NORMS
    for node in graph.nodes:
        names = _stored(graph, node.args) if row_of(node).norm == "batch" else None
        if names is None:
            continue
        fault = _fault(*(graph.tensors[name].detach().double() for name in names))
        if fault:
            why = f"{node.module}: {fault}"
        else:
            found[node.name] = names
    return found or why


def _stored(graph: Graph, args: Mapping[str, Any]) -> tuple[str, str] | None:
    refs = [args.get(key) for key in ("running_mean", "running_var")]
    mean, var = (graph.parameters.get(ref.name) if isinstance(ref, Ref) else None for ref in refs)
    return (mean, var) if mean is not None and var is not None else None


def _fault(mean: Tensor, var: Tensor) -> str:
    """What makes stored statistics useless."""
    if not bool(mean.isfinite().all() and var.isfinite().all() and (var >= 0).all()):
        return "its statistics are no numbers"
    if not bool(mean.any()) and bool((var == 1).all()):
        return "its statistics were never trained"
    return "" if bool((var > 0).any()) else "its statistics have no variance"


class _Descent:
    """One batch on its way."""

    def __init__(self, graph: Graph, norms: Mapping[str, tuple[str, str]], batch: Batch) -> None:
        self.batch, self.values = batch, flat(batch)
        length = synthetic.batch_size(batch)
        self.moving = [i for i, v in enumerate(self.values) if synthetic.is_numeric(v) and v.ndim and len(v) == length]
        self.free = [self.values[i].detach().clone().requires_grad_() for i in self.moving]
        self.matcher = _Matcher(graph, norms)

    def run(self, steps: int, seconds: float, number: int, of: int) -> Remembered:
        """Steps down, as long as they pay; the best that was met."""
        if not self.free:
            return Remembered(refusal="no input is a tensor of numbers")
        start = time.monotonic()
        losses: list[float] = []
        best = [value.detach().clone() for value in self.free]
        optimiser = torch.optim.Adam(self.free, lr=RATE)
        while len(losses) <= steps and not _settled(losses) and time.monotonic() - start < seconds:
            progress.tell("remembering inputs", number * steps + len(losses), of * steps)
            with torch.enable_grad():
                loss = self.matcher.loss(self._with(self.free))
                refusal = self._slope(loss)
            if refusal:
                return Remembered(refusal=refusal)
            losses.append(float(loss.detach()))
            if losses[-1] <= min(losses):
                best = [value.detach().clone() for value in self.free]
            optimiser.step()
        if not losses or not math.isfinite(min(losses)):
            return Remembered(refusal="the synthetic inputs give no numbers" if losses else "no time was left")
        whole = len(losses) > steps or _settled(losses)
        return Remembered((self._batch(best),), losses[0], min(losses), len(losses) - 1, whole)

    def keep(self, shelf: Shelf, number: int, part: Remembered) -> None:
        values = flat(part.batches[0])
        notes = {"before": str(part.before), "after": str(part.after), "steps": str(part.steps)}
        shelf.put(str(number), {str(i): values[i] for i in self.moving}, notes)

    def kept(self, shelf: Shelf, number: int) -> Remembered | None:
        """The same from an earlier run."""
        found = shelf.get(str(number))
        if found is None or set(found[0]) != {str(i) for i in self.moving} or not {"before", "after"} <= set(found[1]):
            return None
        tensors, notes = found
        values = [tensors[str(i)].to(self.values[i]) for i in self.moving]
        return Remembered((self._batch(values),), float(notes["before"]), float(notes["after"]), int(notes["steps"]))

    def _with(self, moved: Sequence[Tensor]) -> list[Any]:
        given = list(self.values)
        for i, value in zip(self.moving, moved, strict=True):
            given[i] = value
        return given

    def _batch(self, moved: Sequence[Tensor]) -> Batch:
        return tuple(tree_unflatten(self._with(moved), tree_structure(list(self.batch))))

    def _slope(self, loss: Tensor) -> str:
        """Gradients, put into the inputs; what stands in the way, if anything does."""
        if not loss.requires_grad:
            return "no batch norm depends on an input of numbers"
        found = torch.autograd.grad(loss, self.free, allow_unused=True)
        for value, gradient in zip(self.free, found, strict=True):
            value.grad = gradient
        return "" if any(g is not None and bool(g.any()) for g in found) else "no gradient reaches the inputs"


def _settled(losses: Sequence[float]) -> bool:
    """Whether the last steps brought too little for more of them."""
    return len(losses) > WINDOW and min(losses[-WINDOW:]) > (1 - GAIN) * min(losses[:-WINDOW])


class _Matcher:
    """How far a batch is from what the network remembers."""

    def __init__(self, graph: Graph, norms: Mapping[str, tuple[str, str]]) -> None:
        self.graph = graph
        self.tensors = {name: tensor.detach() for name, tensor in graph.tensors.items()}
        self.norms = {
            name: (self.tensors[mean].float(), self.tensors[var].float()) for name, (mean, var) in norms.items()
        }
        last = max(i for i, node in enumerate(graph.nodes) if node.name in norms)
        self.nodes = graph.nodes[: last + 1]

    def loss(self, inputs: Sequence[Any]) -> Tensor:
        """Mean over batch norms of the squared error of means and deviations, in units of the stored variance."""
        run = Execution(self.graph, inputs, self.tensors)
        terms = []
        for node in self.nodes:
            args = run.arguments(node)
            if node.name in self.norms and not args.get("training"):
                value, mean, var = _Norm.apply(args["input"], *_gain_and_shift(args))  # type: ignore[no-untyped-call]
                terms.append(_distance(mean, var, *self.norms[node.name], args["eps"]))
            else:
                value = node.compute(args)
            run.step(node, value)
        return torch.stack(terms).mean()


class _Norm(torch.autograd.Function):
    """A batch norm in evaluation, and the mean and variance of what it reads; keeps no more than its input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = torch.batch_norm_update_stats(value, None, None, 0.1)
        ctx.save_for_backward(value, gain, mean)
        return _affine(value, gain, shift), mean, var

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        value, gain, mean = ctx.saved_tensors
        output, by_mean, by_var = gradients
        count = value.numel() / value.shape[1]
        slope = 2 * by_var / count
        return _affine(value, slope, by_mean / count - slope * mean).addcmul_(output, _wide(gain, value)), None, None


def _distance(seen: Tensor, spread: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    off = (seen - mean).square() + ((spread + eps).sqrt() - (var + eps).sqrt()).square()
    return (off / (var + eps)).mean()


def _gain_and_shift(args: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    gain = (args["running_var"] + args["eps"]).rsqrt()
    gain = gain if args.get("weight") is None else gain * args["weight"]
    shift = -args["running_mean"] * gain
    return gain, shift if args.get("bias") is None else shift + args["bias"]


def _affine(value: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(_wide(shift, value), value, _wide(gain, value))


def _wide(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(-1, *(1 for _ in like.shape[2:])).to(like)
