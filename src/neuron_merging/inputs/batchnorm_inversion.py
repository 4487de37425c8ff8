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
from neuron_merging.errors import describe_error, raise_if_out_of_memory
from neuron_merging.graph.example_inputs import flatten_inputs, infer_batch_size
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.half_precision import is_bfloat16_fast
from neuron_merging.graph.interpreter import Interpreter, list_needed_nodes
from neuron_merging.graph.macs import estimate_work
from neuron_merging.graph.process_state import reuse_freed_memory
from neuron_merging.inputs import disk_cache
from neuron_merging.inputs.disk_cache import InputCacheEntry
from neuron_merging.inputs.input_scale import InputScale, is_channels_last, is_picture, is_signal
from neuron_merging.inputs.scale_from_norms import draw_batches, find_input_scales, find_stored_norms

INVERSION_LEARNING_RATE = 0.3
"""Learning rate of Adam at the first step; it falls as a cosine, so that the last steps settle. Entries are
standardised, and a step changes each frequency in proportion to its share of the starting points' spectrum."""
INVERSION_BETAS = (0.7, 0.9)
"""Decay of Adam's averages. Gradients shrink by an order of magnitude in some twenty steps, so averages must be short.
"""
FINAL_RATE_SHARE = 0.05
"""The last step's learning rate, as a share of the first one's."""
MIN_SPECTRUM = 0.02
"""Smallest amplitude of a frequency, relative to the root mean square: frequencies that the starting points lack can
still be changed."""
MAX_MIRROR_LOSS = 0.25
"""Mirrored inputs are used, too, if they lose at most this share of what the descent gained: the network then takes
mirrored inputs for what it was trained on."""
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
MIN_BFLOAT16_WORK = 10**11
"""Work of all steps from which convolutions run in bfloat16, in units of `estimate_work`: below, float32 takes seconds.
"""
MAX_BFLOAT16_ERROR = 0.05
"""Largest relative error of the loss in bfloat16. It is larger where means are far larger than deviations: their
difference is lost to rounding."""
InputBatch = tuple[Any, ...]
PASSES_PER_STEP = 3
"""Cost of one gradient step in forward passes: forward, backward, and the statistics."""
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
    mirrored
        Whether the second half of the batches mirrors the first.

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
    mirrored: bool = False

    @property
    def unmirrored(self) -> tuple[InputBatch, ...]:
        """The batches without mirrored ones, which follow the others in the same order."""
        return self.batches[: len(self.batches) // 2] if self.mirrored else self.batches

    @property
    def resembles_training(self) -> bool:
        """Whether the network sees about the statistics of its training on these inputs."""
        return bool(self.batches) and not self.after > MAX_MISMATCH


@reuse_freed_memory()
def invert_batch_norms(
    analysis: Analysis, count: int, *, steps: int, seed: int = 0, mirror: bool = False
) -> GeneratedInputs:
    """Synthesise `count` inputs whose statistics, batch by batch, approach those that the batch norms store.

    Offset and scale of the inputs are found first (`inputs.scale_from_norms`), so that the descent starts close. Only
    inputs that have a scale are optimised; others keep the values of `synthetic.synthesize_batches`. With `mirror`,
    half of the inputs mirror the others if the batch norms see about the same statistics on them.
    """
    norms = find_stored_norms(analysis.graph)
    if isinstance(norms, str):
        return GeneratedInputs(refusal=norms)
    scales = find_input_scales(analysis)
    options = ("remembered", count, steps, seed, [scale and scale.fingerprint() for scale in scales])
    entry = disk_cache.open_cache_entry(analysis.graph, analysis.inputs, options)
    found: list[GeneratedInputs] = []
    mirror_losses: list[float] = []
    batches = make_starting_batches(analysis, count, seed, even=mirror)
    work = count * steps * PASSES_PER_STEP * estimate_work(analysis.graph) // infer_batch_size(analysis.inputs)
    bfloat16 = work >= MIN_BFLOAT16_WORK and is_bfloat16_fast(analysis.graph.tensors.values())
    for i, batch in enumerate(batches):
        if len(found) == len(batches) // 2 and _are_mirrors_alike(found, mirror_losses):
            break  # mirrored copies take the place of the other half
        descent = _BatchInversion(analysis, norms, batch, scales, bfloat16)
        part = descent.load(entry, i) or descent.run(steps, i, len(batches))
        if part.refusal:
            return part
        descent.store(entry, i, part)
        found.append(part)
        if mirror:
            mirror_losses.append(descent.measure_mirrored(part.batches[0]))
    before, after = (sum(getattr(part, name) for part in found) / len(found) for name in ("before", "after"))
    mirrored = len(found) < len(batches)
    whole = [batch for part in found for batch in part.batches]
    whole += [mirror_batch(batch) for batch in whole] if mirrored else []
    batches_found = tuple(own for batch in whole for own in analysis.split_batch(batch))
    return GeneratedInputs(batches_found, before, after, max(part.steps for part in found), mirrored=mirrored)


def _are_mirrors_alike(found: Sequence[GeneratedInputs], mirror_losses: Sequence[float]) -> bool:
    """Return whether mirrored batches lose at most `MAX_MIRROR_LOSS` of what the descent gained."""
    before, after = (sum(getattr(part, name) for part in found) for name in ("before", "after"))
    return bool(mirror_losses) and sum(mirror_losses) - after <= MAX_MIRROR_LOSS * (before - after)


def mirror_batch(batch: InputBatch) -> InputBatch:
    """Mirror images left to right, and other signals along their last dimension; other inputs stay as they are."""
    values = flatten_inputs(batch)
    mirrored = [value.flip(_get_mirror_dim(value)) if _is_map(value) else value for value in values]
    return tuple(tree_unflatten(mirrored, tree_structure(list(batch))))


def _get_mirror_dim(value: Tensor) -> int:
    return 2 if is_channels_last(value) and not is_signal(value) else value.ndim - 1


def _is_map(value: Any) -> bool:
    return is_signal(value) or is_channels_last(value)


def make_starting_batches(analysis: Analysis, count: int, seed: int, even: bool = False) -> list[InputBatch]:
    """Return the synthetic inputs to start from, in batches of nearly equal size that fit into memory.

    `even` makes an even number of batches, of which the second half can be left out.
    """
    have = infer_batch_size(analysis.inputs)
    held = 4 * sum(math.prod(node.shape) for node in analysis.graph.nodes if node.shape) // max(1, have)
    count = analysis.round_up_samples(count)
    most = max(8, min(count, INVERSION_BATCH_SIZE, MAX_ACTIVATION_BYTES // max(1, held)))
    # As few batches as possible, of equal size: small ones have noisy statistics.
    parts = 2 if even else 1
    size = analysis.round_up_samples(-(-count // (parts * -(-count // (parts * most)))))
    return list(draw_batches(analysis, count, seed, size))


class _BatchInversion:
    """Gradient descent on the standardised entries of one batch."""

    def __init__(
        self,
        analysis: Analysis,
        norms: Mapping[str, tuple[str, str]],
        batch: InputBatch,
        scales: Sequence[InputScale | None],
        bfloat16: bool = False,
    ) -> None:
        self.bfloat16 = bfloat16
        self.batch, self.values, self.split = batch, flatten_inputs(batch), analysis.split_batch
        self.scales = {i: scale for i, scale in enumerate(scales) if scale is not None}
        self.starts = [self._standardize(i) for i in self.scales]
        self.free = [start.clone().requires_grad_() for start in self.starts]
        self.inside = [torch.ones_like(start, dtype=torch.bool) for start in self.starts]
        self.spectra = [_Spectrum(start, self._list_signal_dims(i)) for i, start in self._by_position(self.starts)]
        self.matcher = _StatisticsMatcher(analysis.graph_for(self.split(batch)[0]), norms)

    def _list_signal_dims(self, position: int) -> tuple[int, ...]:
        """Return the dimensions of space or time of an input; none if it is a table."""
        value = self.values[position]
        if self.scales[position].waveform:
            return (1,)
        last = is_channels_last(value) and not is_signal(value)
        return ((1, 2) if last else tuple(range(2, value.ndim))) if _is_map(value) else ()

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
        changes = [spectrum.make_zero_change() for spectrum in self.spectra]
        optimiser = torch.optim.Adam(changes, lr=INVERSION_LEARNING_RATE, betas=INVERSION_BETAS)
        for step in range(steps + 1):
            progress.report_progress("synthesising inputs", number * steps + step, total * steps)
            optimiser.param_groups[0]["lr"] = _compute_learning_rate(step, steps)
            loss, refusal = self._compute_step_loss(step, steps)
            if refusal:
                return GeneratedInputs(refusal=refusal)
            losses.append(loss)
            # Adam is not monotonic: keep the inputs of the smallest loss.
            if losses[-1] <= min(losses):
                best = [value.detach().clone() for value in self.free]
            if step < steps:
                for value, inside, change, spectrum in zip(self.free, self.inside, changes, self.spectra, strict=True):
                    change.grad = None if value.grad is None else spectrum.to_gradient(value.grad * inside)
                optimiser.step()
                self._apply_changes(changes)
        if not math.isfinite(min(losses)):
            return GeneratedInputs(refusal="the outputs on synthetic inputs are not finite")
        return GeneratedInputs((self._build_batch(best),), losses[0], min(losses), steps)

    @torch.no_grad()
    def _apply_changes(self, changes: Sequence[Tensor]) -> None:
        """Set the entries to the starting points plus the changes, within the range of their input."""
        for n, (i, value) in enumerate(self._by_position(self.free)):
            changed = self.starts[n] + self.spectra[n].to_entries(changes[n]).to(value)
            value.copy_(self._clip(i, changed))
            self.inside[n] = value == changed

    def measure_mirrored(self, batch: InputBatch) -> float:
        """Return the loss of the mirrored batch; infinite if there is nothing to mirror."""
        if not any(_is_map(self.values[i]) for i in self.scales):
            return math.inf
        with torch.no_grad():
            parts = [flatten_inputs(part) for part in self.split(mirror_batch(batch))]
            return float(self.matcher.loss(parts))

    def _compute_step_loss(self, step: int, steps: int) -> tuple[float, str]:
        """Compute the loss of a step, in bfloat16 where that may be; the first and the last one are exact."""
        bfloat16, last = self.bfloat16 and 0 < step < steps, step == steps
        loss, refusal = self._compute_loss(not last, bfloat16)
        if refusal and bfloat16:
            self.bfloat16 = False
            loss, refusal = self._compute_loss(not last, False)
        if step == 0:
            self.bfloat16 = self.bfloat16 and self._is_bfloat16_exact_enough(loss)
        return loss, refusal

    def _is_bfloat16_exact_enough(self, loss: float) -> bool:
        """Return whether the loss in bfloat16 is about the given one, and the network takes such numbers at all."""
        try:
            rounded, _ = self._compute_loss(with_gradients=False, bfloat16=True)
        except RuntimeError as error:
            raise_if_out_of_memory(error)
            return False
        return abs(rounded - loss) <= MAX_BFLOAT16_ERROR * loss

    def _compute_loss(self, with_gradients: bool, bfloat16: bool) -> tuple[float, str]:
        """Compute the loss and the gradients of the free entries; return why that is impossible, or an empty text."""
        with torch.set_grad_enabled(with_gradients), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            whole = self._unflatten([self._to_values(i, z) for i, z in self._by_position(self.free)])
            loss = self.matcher.loss([flatten_inputs(part) for part in self.split(whole)])
        return float(loss.detach()), self._assign_gradients(loss) if with_gradients else ""

    def _by_position(self, values: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        return list(zip(self.scales, values, strict=True))

    def _to_values(self, position: int, standard: Tensor) -> Tensor:
        scale = self.scales[position]
        return scale.mean.to(standard) + scale.deviation.to(standard) * standard

    def _clip(self, position: int, standard: Tensor) -> Tensor:
        """Clip entries to the range of their input: a known one, or that of pixels."""
        scale = self.scales[position]
        if is_picture(self.values[position]):
            standard = standard.clamp(-PICTURE_REACH, PICTURE_REACH)
        if scale.low > -math.inf or scale.high < math.inf:
            values = self._to_values(position, standard).clamp(scale.low, scale.high)
            standard = (values - scale.mean.to(values)) / scale.deviation.to(values)
        return standard

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
        try:
            found = torch.autograd.grad(loss, self.free, allow_unused=True)
        except RuntimeError as error:  # the network's code writes in place into a value that a gradient needs
            raise_if_out_of_memory(error)
            return f"the network cannot be differentiated: {describe_error(error)}"
        for value, gradient in zip(self.free, found, strict=True):
            value.grad = gradient
        return "" if any(g is not None and bool(g.any()) for g in found) else "no gradient reaches the inputs"


class _Spectrum:
    """Changes of signals in units of their amplitude at each frequency; of other entries as they are.

    Data of space and time has a falling spectrum, and so have the starting points. Steps in proportion to it change
    large structures first and leave the spectrum as it is. Steps of equal size at every pixel would mostly add noise.
    """

    def __init__(self, start: Tensor, dims: tuple[int, ...]) -> None:
        floats = start.to(torch.promote_types(start.dtype, torch.float32))
        self.shape, self.dims = start.shape, dims
        self.zero = torch.zeros_like(floats, memory_format=torch.contiguous_format)
        if self.dims:
            transformed = torch.fft.rfftn(floats, dim=self.dims, norm="ortho")
            amplitude = (
                transformed.abs().square().mean([d for d in range(start.ndim) if d not in self.dims], True).sqrt()
            )
            scale = amplitude.square().mean().sqrt().clamp(min=1e-30)
            self.amplitude = (amplitude / scale).clamp(min=MIN_SPECTRUM)
            self.zero = torch.zeros_like(torch.view_as_real(transformed), memory_format=torch.contiguous_format)

    def make_zero_change(self) -> Tensor:
        return self.zero.clone()

    def to_entries(self, change: Tensor) -> Tensor:
        if not self.dims:
            return change
        sizes = [self.shape[d] for d in self.dims]
        coefficients = torch.view_as_complex(change) * self.amplitude
        entries: Tensor = torch.fft.irfftn(coefficients, s=sizes, dim=self.dims, norm="ortho")
        return entries

    def to_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of a change, up to a factor per frequency, which Adam ignores."""
        floats = gradient.to(self.zero.dtype).contiguous()
        if not self.dims:
            return floats
        return torch.view_as_real(torch.fft.rfftn(floats, dim=self.dims, norm="ortho") * self.amplitude)


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
            if _is_slow_in_bfloat16(node):
                with torch.autocast("cpu", enabled=False):
                    return node.compute({key: _to_float32(value) for key, value in args.items()})
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


def _is_slow_in_bfloat16(node: Node) -> bool:
    """Return whether this is a grouped convolution with a stride, whose gradients are slow in bfloat16."""
    return node.args.get("groups", 1) != 1 and any(stride != 1 for stride in node.args.get("stride") or ())


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


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
        mean, var = _compute_statistics(value)
        ctx.save_for_backward(value, gain, mean)
        return _apply_affine(value, gain, shift), mean, var

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        value, gain, mean = ctx.saved_tensors
        output, by_mean, by_var = gradients
        count = value.numel() / value.shape[1]
        # dL/dx = gain · dL/dy + (dL/dm)/n + 2(x − m)(dL/dvar)/n, written as one affine map of x.
        slope = 2 * by_var / count
        by_statistics = _apply_affine(value, slope, by_mean / count - slope * mean)
        if value.dtype == torch.bfloat16:
            return by_statistics.add_(_apply_affine(output, gain, torch.zeros_like(gain))), None, None
        return by_statistics.addcmul_(output, _view_per_channel(gain, value)), None, None


def _compute_statistics(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of each channel, at least in float32."""
    if value.dtype != torch.bfloat16:
        mean, var = torch.batch_norm_update_stats(value, None, None, 0.1)
        return mean, var
    # Rounded numbers have rounded statistics, but running ones are kept in float32. With momentum 1 they are those of
    # the batch, with the variance divided by n − 1.
    mean, var = (torch.zeros(value.shape[1], device=value.device) for _ in range(2))
    torch.batch_norm_update_stats(value, mean, var, 1.0)
    count = value.numel() // value.shape[1]
    return mean, var * ((count - 1) / count) if count > 1 else torch.zeros_like(var)


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
    if value.dtype == torch.bfloat16 and gain.dtype == torch.float32:
        # A batch norm computes in float32 and rounds only the result.
        unit = torch.zeros_like(gain), torch.ones_like(gain)
        return torch.batch_norm(value, gain, shift, *unit, False, 0.0, 0.0, False)
    return torch.addcmul(_view_per_channel(shift, value), value, _view_per_channel(gain, value))


def _view_per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(-1, *(1 for _ in like.shape[2:])).to(like)
