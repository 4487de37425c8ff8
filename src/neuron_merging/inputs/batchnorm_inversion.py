"""Synthesise inputs from batch-norm statistics, as in ZeroQ (Cai et al. 2020) and DeepInversion (Yin et al. 2020).

A batch norm stores the mean and the variance of its training inputs. Synthetic inputs are optimised by gradient
steps until every batch norm sees the statistics that it stored. They then run through the network as real ones do:
the error of a merged network on them follows the error on real data over two orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging import progress
from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.example_inputs import flatten_inputs, infer_batch_size
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.interpreter import Interpreter, list_needed_nodes
from neuron_merging.inputs import disk_cache
from neuron_merging.inputs.disk_cache import InputCacheEntry
from neuron_merging.inputs.input_scale import InputScale, is_picture
from neuron_merging.inputs.scale_from_norms import draw_batches, find_input_scales, find_stored_norms

INVERSION_LEARNING_RATE = 0.2
"""Learning rate of Adam at the first step; it falls as a cosine. Entries are standardised, so it is a share of their
deviation. It falls so that the last steps settle."""
FINAL_RATE_SHARE = 0.05
"""The last step's learning rate, as a share of the first one's."""
PICTURE_REACH = 2.5
"""Largest distance of a pixel from the mean, in deviations. Pixels are bounded, and their range is about 4 to 5
deviations wide: 4.3 for photographs. Unbounded, the descent exaggerates single pixels."""
MAX_MISMATCH = 0.5
"""Mean squared distance from the stored statistics, in units of their variance, above which inputs do not resemble
what the network was trained on."""
INVERSION_BATCH_SIZE = 64
"""Inputs whose joint statistics are matched. Where a norm sees one position per input, the mean of 64 is accurate to
an eighth of a deviation."""
MAX_ACTIVATION_BYTES = 2**32
"""Bytes of activations that one batch may hold for the backward pass."""
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
    refusal: str = ""
    source: str = INVERTED_INPUTS

    @property
    def resembles_training(self) -> bool:
        """Whether the network sees about the statistics of its training on these inputs."""
        return bool(self.batches) and not self.after > MAX_MISMATCH


def invert_batch_norms(analysis: Analysis, count: int, *, steps: int, seed: int = 0) -> GeneratedInputs:
    """Synthesise `count` inputs whose statistics, batch by batch, approach those that the batch norms store.

    Offset and scale of the inputs are found first (`inputs.scale_from_norms`), so that the descent starts close. Only
    inputs that have a scale are optimised; others keep the values of `synthetic.synthesize_batches`.
    """
    norms = find_stored_norms(analysis.graph)
    if isinstance(norms, str):
        return GeneratedInputs(refusal=norms)
    scales = find_input_scales(analysis)
    options = ("remembered", count, steps, seed, [scale and scale.fingerprint() for scale in scales])
    entry = disk_cache.open_cache_entry(analysis.graph, analysis.inputs, options)
    found = []
    batches = make_starting_batches(analysis, count, seed)
    for i, batch in enumerate(batches):
        descent = _BatchInversion(analysis, norms, batch, scales)
        part = descent.load(entry, i) or descent.run(steps, i, len(batches))
        if part.refusal:
            return part
        descent.store(entry, i, part)
        found.append(part)
    before, after = (sum(getattr(part, name) for part in found) / len(found) for name in ("before", "after"))
    batches_found = tuple(own for part in found for batch in part.batches for own in analysis.split_batch(batch))
    return GeneratedInputs(batches_found, before, after, max(part.steps for part in found))


def make_starting_batches(analysis: Analysis, count: int, seed: int) -> list[InputBatch]:
    """Return the synthetic inputs to start from, in batches of nearly equal size that fit into memory."""
    have = infer_batch_size(analysis.inputs)
    held = 4 * sum(math.prod(node.shape) for node in analysis.graph.nodes if node.shape) // max(1, have)
    count = analysis.round_up_samples(count)
    most = max(8, min(count, INVERSION_BATCH_SIZE, MAX_ACTIVATION_BYTES // max(1, held)))
    # As few batches as possible, of equal size: small ones have noisy statistics.
    size = analysis.round_up_samples(-(-count // -(-count // most)))
    return list(draw_batches(analysis, count, seed, size))


class _BatchInversion:
    """Gradient descent on the standardised entries of one batch."""

    def __init__(
        self,
        analysis: Analysis,
        norms: Mapping[str, tuple[str, str]],
        batch: InputBatch,
        scales: Sequence[InputScale | None],
    ) -> None:
        self.batch, self.values, self.split = batch, flatten_inputs(batch), analysis.split_batch
        self.scales = {i: scale for i, scale in enumerate(scales) if scale is not None}
        self.free = [self._standardize(i).requires_grad_() for i in self.scales]
        self.matcher = _StatisticsMatcher(analysis.graph_for(self.split(batch)[0]), norms)

    def _standardize(self, position: int) -> Tensor:
        """Return the starting point: floats, in the memory layout in which convolutions are fastest on a CPU."""
        value, scale = self.values[position], self.scales[position]
        floats = value if value.is_floating_point() else value.float()
        standard = (floats.detach() - scale.mean.to(floats)) / scale.deviation.to(floats)
        return to_channels_last(standard).clone()

    def run(self, steps: int, number: int, total: int) -> GeneratedInputs:
        """Take gradient steps; return the inputs with the smallest loss, not the last ones."""
        if not self.free:
            return GeneratedInputs(refusal="no input is a floating-point tensor")
        losses: list[float] = []
        best = [value.detach().clone() for value in self.free]
        optimiser = torch.optim.Adam(self.free, lr=INVERSION_LEARNING_RATE)
        for step in range(steps + 1):
            progress.report_progress("synthesising inputs", number * steps + step, total * steps)
            optimiser.param_groups[0]["lr"] = _compute_learning_rate(step, steps)
            loss, refusal = self._compute_loss(with_gradients=step < steps)
            if refusal:
                return GeneratedInputs(refusal=refusal)
            losses.append(loss)
            # Adam is not monotonic: keep the inputs of the smallest loss.
            if losses[-1] <= min(losses):
                best = [value.detach().clone() for value in self.free]
            if step < steps:
                optimiser.step()
                self._stay_in_range()
        if not math.isfinite(min(losses)):
            return GeneratedInputs(refusal="the outputs on synthetic inputs are not finite")
        return GeneratedInputs((self._build_batch(best),), losses[0], min(losses), steps)

    def _compute_loss(self, with_gradients: bool) -> tuple[float, str]:
        """Compute the loss and the gradients of the free entries; return why that is impossible, or an empty text."""
        with torch.set_grad_enabled(with_gradients):
            whole = self._unflatten([self._to_values(i, z) for i, z in self._free_by_position()])
            loss = self.matcher.loss([flatten_inputs(part) for part in self.split(whole)])
        return float(loss.detach()), self._assign_gradients(loss) if with_gradients else ""

    def _free_by_position(self) -> list[tuple[int, Tensor]]:
        return list(zip(self.scales, self.free, strict=True))

    def _to_values(self, position: int, standard: Tensor) -> Tensor:
        scale = self.scales[position]
        return scale.mean.to(standard) + scale.deviation.to(standard) * standard

    @torch.no_grad()
    def _stay_in_range(self) -> None:
        """Project the entries onto the range of their input: a known one, or that of pixels."""
        for i, standard in self._free_by_position():
            scale = self.scales[i]
            if is_picture(self.values[i]):
                standard.clamp_(-PICTURE_REACH, PICTURE_REACH)
            if scale.low > -math.inf or scale.high < math.inf:
                values = self._to_values(i, standard).clamp(scale.low, scale.high)
                standard.copy_((values - scale.mean.to(values)) / scale.deviation.to(values))

    def store(self, entry: InputCacheEntry, number: int, part: GeneratedInputs) -> None:
        """Write the batch to the cache."""
        values = flatten_inputs(part.batches[0])
        figures = {"before": part.before, "after": part.after, "steps": part.steps}
        entry.put(number, {str(i): values[i] for i in self.scales}, figures)

    def load(self, entry: InputCacheEntry, number: int) -> GeneratedInputs | None:
        """Read the batch of an earlier run from the cache; None if there is none."""
        like = {str(i): self.values[i] for i in self.scales}
        found = entry.get(number, like, ("before", "after", "steps"))
        if found is None:
            return None
        tensors, figures = found
        values = [tensors[str(i)].to(self.values[i]) for i in self.scales]
        return GeneratedInputs((self._unflatten(values),), figures["before"], figures["after"], int(figures["steps"]))

    def _unflatten(self, values: Sequence[Tensor]) -> InputBatch:
        """Return the batch with these values of the inputs that have a scale."""
        given = list(self.values)
        for i, value in zip(self.scales, values, strict=True):
            given[i] = value
        return tuple(tree_unflatten(given, tree_structure(list(self.batch))))

    def _build_batch(self, standard: Sequence[Tensor]) -> InputBatch:
        """Return the batch in the input's own dtype and layout: whole numbers are rounded, ranges hold."""
        values = [
            self.scales[i].clip(self._to_values(i, z)).to(self.values[i]).contiguous()
            for i, z in zip(self.scales, standard, strict=True)
        ]
        return self._unflatten(values)

    def _assign_gradients(self, loss: Tensor) -> str:
        """Compute the gradients of the inputs; return why that is impossible, or an empty text."""
        if not loss.requires_grad:
            return "no batch norm depends on a floating-point input"
        found = torch.autograd.grad(loss, self.free, allow_unused=True)
        for value, gradient in zip(self.free, found, strict=True):
            value.grad = gradient
        return "" if any(g is not None and bool(g.any()) for g in found) else "no gradient reaches the inputs"


def _compute_learning_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: half a cosine, from the first rate to a small share of it."""
    falling = (1 + math.cos(math.pi * step / max(1, steps))) / 2
    return INVERSION_LEARNING_RATE * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * falling)


def to_channels_last(value: Tensor) -> Tensor:
    """Return a batch of images, or a convolution's weight, in channels-last memory; other tensors as they are."""
    return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value


class _StatisticsMatcher:
    """Computes how far the statistics of a batch are from those that the batch norms store."""

    def __init__(self, graph: Graph, norms: Mapping[str, tuple[str, str]]) -> None:
        self.graph = graph
        self.tensors = {name: to_channels_last(tensor.detach()) for name, tensor in graph.tensors.items()}
        self.norms = {
            name: (self.tensors[mean].float(), self.tensors[var].float()) for name, (mean, var) in norms.items()
        }
        self.nodes = list_needed_nodes(graph, norms)  # nothing else contributes to the loss

    def loss(self, parts: Sequence[Sequence[Any]]) -> Tensor:
        """Return L(x): the mean over batch norms and channels of ((m − μ)² + (s − σ)²) / (σ² + ε).

        m and s are the mean and deviation of a norm's input over the batch and all positions, μ and σ the stored ones.
        `parts` are the flat inputs of the batch; several run side by side if the network's batch size is fixed.
        """
        terms: list[Tensor] = []
        normalized: Iterator[Tensor] = iter(())

        def compute_node(node: Node, args: dict[str, Any]) -> Any:
            if self._is_matched(node, args):
                return next(normalized)
            return node.compute(_make_viewable(node, args))

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


def _make_viewable(node: Node, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a reshaping operator in contiguous memory, which a view may need."""
    if lookup_operator(node).moments != "reshape":
        return args
    return {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in args.items()}


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
