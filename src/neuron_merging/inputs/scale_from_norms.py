"""Solve for the offset, the deviation and the share of noise of inputs, such that the first batch norms see what they
saw in training. A few parameters, solved by the Levenberg-Marquardt method before any single entry moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.example_inputs import flatten_inputs, has_batch_axis, infer_batch_size
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import Interpreter, list_needed_nodes
from neuron_merging.graph.macs import estimate_work
from neuron_merging.inputs import synthetic
from neuron_merging.inputs.input_scale import (
    FROM_BATCH_NORMS,
    FROM_EXAMPLE,
    MIN_REAL_SAMPLES,
    InputScale,
    add_channel_dim,
    get_channel_dim,
    guess_input_scale,
    holds_real_values,
    is_channels_last,
    is_signal,
    is_synthesizable,
    is_waveform,
    measure_neighbour_correlation,
    spread_unknown_scale,
)

NO_BATCH_NORMS = "the network has no batch norm that stores statistics"
FIRST_NORMS = 3
"""Batch norms behind each input that its scale is solved for: the first ones in the order of execution. Deeper ones say
little about it and cost more."""
MIN_SOLVED_CHANNELS, MAX_SOLVED_CHANNELS = 4, 128
"""Channels of a signal, or columns of a table, up to which each has an offset and a deviation of its own; more of them
share theirs. Which of the two it is depends on the work: each has a derivative of its own."""
DERIVATIVE_WORK = 2 * 10**10
"""Work of all derivatives of one step: a second or so on one core."""
SOLVER_STEPS = 12
"""Steps of the solver at most; a linear network in front of the first norm needs two or three."""
SOLVER_WORK = 5 * 10**8
"""Work of one evaluation: the solver runs on as many inputs as that allows, within these limits."""
MIN_SOLVER_INPUTS, MAX_SOLVER_INPUTS = 4, 32
NOISE_SAMPLES, MAX_NOISE = 16, 0.95
"""Dead-leaves images that an example is compared with, and the largest share of noise."""
MIN_NOISE = 0.02
"""Share of noise that the solver starts from at least: the derivative of its logit is zero at 0."""
DEAD_VARIANCE = 1e-12
"""Stored variance up to which a channel was constant in training."""
MAX_COLORS = 3
"""Channels up to which a signal is taken for a picture, whose channels are alike."""
COLOR_PRIOR = 0.3
"""Weight of the prior that the channels of a signal are alike. They are correlated, so the norms determine their sum
far better than their differences. More channels than a picture has may be different quantities: where they are apart by
more than a deviation, the prior hardly grows any more."""
MAX_LOG_STEP = 4.0
"""Largest change of a logarithm in one step: a factor of 55."""
MIN_GAIN = 0.02
"""Relative improvement of a step below which the solver stops."""
AGREEMENT_LOSS = 0.2
"""The same distance up to which a guess agrees with the norms: means within half a deviation, deviations within a
factor of 1.5. Dead leaves are rougher or smoother than real data, which alone accounts for that much."""
MAX_SCALE_LOSS = 1.0
"""Mean squared distance from the stored statistics, in units of their variance, up to which a solution is accepted."""


def find_input_scales(analysis: Analysis) -> tuple[InputScale | None, ...]:
    """Return the scale of each flat input; None for inputs that are not synthesised, such as tokens and masks."""
    key = "input scales"
    if key not in analysis.input_cache:
        analysis.input_cache[key] = _find_scales(analysis)
    found: tuple[InputScale | None, ...] = analysis.input_cache[key]
    return found


def draw_batches(analysis: Analysis, samples: int, seed: int, size: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Yield synthetic batches for an analysed network: its tokens, and floats at the scale that is known of them."""
    return synthetic.synthesize_batches(
        analysis.inputs,
        samples,
        seed,
        synthetic.find_token_inputs(analysis.graph),
        size,
        find_input_scales(analysis),
    )


def count_real_samples(analysis: Analysis) -> int:
    """Return the number of samples in the example inputs if they are real data, as far as one can tell; else 0."""
    values, batch = flatten_inputs(analysis.inputs), infer_batch_size(analysis.inputs)
    judged = [
        add_channel_dim(value, is_waveform(analysis.graph, name, value))
        for name, value in zip(analysis.graph.inputs, values, strict=True)
        if has_batch_axis(value, batch) and is_synthesizable(value)
    ]
    return batch if judged and all(holds_real_values(value) for value in judged) else 0


def _find_scales(analysis: Analysis) -> tuple[InputScale | None, ...]:
    values, batch = flatten_inputs(analysis.inputs), infer_batch_size(analysis.inputs)
    scales = tuple(
        _match_noise(guess_input_scale(analysis.graph, name, value), value)
        if has_batch_axis(value, batch) and is_synthesizable(value)
        else None
        for name, value in zip(analysis.graph.inputs, values, strict=True)
    )
    norms = find_stored_norms(analysis.graph)
    known = all(scale is None or scale.source == FROM_EXAMPLE for scale in scales)
    if isinstance(norms, str):
        return tuple(scale and spread_unknown_scale(scale, value) for scale, value in zip(scales, values, strict=True))
    if not any(scales) or (known and count_real_samples(analysis) >= MIN_REAL_SAMPLES):
        return scales
    return _ScaleSolver(analysis, _select_first_norms(analysis.graph, list(norms), scales), scales).solve() or scales


def _select_first_norms(graph: Graph, norms: Sequence[str], scales: Sequence[InputScale | None]) -> list[str]:
    """Return the first norms that depend on each input with a scale, in the order of execution."""
    chosen: set[str] = set()
    for name, scale in zip(graph.inputs, scales, strict=True):
        reached = {name}
        for node in graph.nodes if name is not None and scale is not None else ():
            if any(ref.name in reached for ref in node.refs()):
                reached.add(node.name)
        chosen |= set([norm for norm in norms if norm in reached][:FIRST_NORMS])
    return [norm for norm in norms if norm in chosen]


def _match_noise(scale: InputScale, value: Tensor) -> InputScale:
    """Return the scale of a real example with the share of noise that makes synthetic inputs as rough as it is.

    White noise of the share ν turns the correlation r of neighbours into (1 − ν) r.
    """
    value = add_channel_dim(value, scale.waveform)
    is_map = is_signal(value) or is_channels_last(value)
    if scale.source != FROM_EXAMPLE or not is_map or not holds_real_values(value):
        return scale
    leaves = synthetic.draw_standard_input(value, NOISE_SAMPLES, torch.Generator("cpu").manual_seed(0))
    smooth, seen = measure_neighbour_correlation(leaves), measure_neighbour_correlation(value)
    return replace(scale, noise=min(MAX_NOISE, max(0.0, 1 - seen / max(smooth, 1e-6))))


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


@dataclass(frozen=True)
class _Parameters:
    """The unknowns of one input: offsets in units of the starting deviation, log deviations, the logit of the noise."""

    position: int
    start: InputScale
    channels: int
    shape: tuple[int, ...]
    """The shape in which values per channel broadcast against the input."""
    has_noise: bool

    @property
    def count(self) -> int:
        return 2 * self.channels + self.has_noise

    def start_values(self) -> Tensor:
        theta = torch.zeros(self.count, dtype=torch.float64, device="cpu")
        if self.has_noise:
            theta[-1] = torch.logit(theta.new_tensor(max(self.start.noise, MIN_NOISE)))
        return theta

    def to_scale(self, theta: Tensor) -> InputScale:
        offset, log_factor = (part.reshape(self.shape) for part in theta[: 2 * self.channels].chunk(2))
        deviation = self.start.deviation * log_factor.clamp(-40, 40).exp()
        mean = self.start.mean + self.start.deviation * offset
        noise = float(theta[-1].sigmoid()) if self.has_noise else self.start.noise
        return replace(self.start, mean=mean, deviation=deviation, noise=noise, source=FROM_BATCH_NORMS)


class _ScaleSolver:
    """Levenberg-Marquardt on the scales of all synthesised inputs, with finite differences."""

    def __init__(self, analysis: Analysis, norms: Sequence[str], scales: Sequence[InputScale | None]) -> None:
        self.scales, self.norms = tuple(scales), frozenset(norms)
        values = flatten_inputs(analysis.inputs)
        work = estimate_work(analysis.graph, list_needed_nodes(analysis.graph, self.norms))
        work = max(1, work // infer_batch_size(analysis.inputs))
        affordable = DERIVATIVE_WORK // (2 * MIN_SOLVER_INPUTS * work)
        max_channels = max(MIN_SOLVED_CHANNELS, min(MAX_SOLVED_CHANNELS, affordable))
        self.parameters = [
            _describe_parameters(i, scale, values[i], max_channels)
            for i, scale in enumerate(scales)
            if scale is not None
        ]
        unknowns = sum(own.count for own in self.parameters)
        count = min(SOLVER_WORK // work, DERIVATIVE_WORK // (unknowns * work))
        count = analysis.round_up_samples(max(MIN_SOLVER_INPUTS, min(MAX_SOLVER_INPUTS, count)))
        (batch,) = synthetic.synthesize_batches(
            analysis.inputs, count, 0, synthetic.find_token_inputs(analysis.graph), count
        )
        generator = torch.Generator("cpu").manual_seed(0)
        self.batch, self.split = flatten_inputs(batch), analysis.split_batch
        self.structure = tree_structure(list(batch))
        self.standard = {
            own.position: _draw_standardized(values[own.position], count, generator, own.start.waveform)
            for own in self.parameters
        }
        self.white = {
            i: torch.randn(z.shape, generator=generator, dtype=torch.float32, device="cpu")
            for i, z in self.standard.items()
        }
        self.graph = analysis.graph_for(self.split(batch)[0])
        self.nodes = list_needed_nodes(self.graph, self.norms)

    def solve(self) -> tuple[InputScale | None, ...] | None:
        """Return the scales of the best solution; None if none is close to what the norms store."""
        theta = torch.cat([own.start_values() for own in self.parameters])
        residuals, damping = self._compute_residuals(theta), 1e-2
        if residuals is None:
            return None
        if float(residuals.square().mean()) <= AGREEMENT_LOSS:
            return tuple(scale and replace(scale, source=scale.source or FROM_BATCH_NORMS) for scale in self.scales)
        for _ in range(SOLVER_STEPS):
            before = float(residuals.square().mean())
            jacobian = self._differentiate(theta, residuals)
            if jacobian is None:
                break
            for _ in range(4):  # a step that is too long is repeated with more damping
                system = jacobian.T @ jacobian
                system.diagonal().mul_(1 + damping).add_(1e-9)
                step = self._limit_step(torch.linalg.solve(system, -jacobian.T @ residuals))
                found = self._compute_residuals(theta + step)
                if found is not None and float(found.square().mean()) < before:
                    theta, residuals, damping = theta + step, found, damping / 4
                    break
                damping *= 8
            if not float(residuals.square().mean()) < (1 - MIN_GAIN) * before:
                break
        if not float(residuals.square().mean()) <= MAX_SCALE_LOSS:
            return None
        return tuple(scale and scale.round_digits() for scale in self._to_scales(theta))

    def _limit_step(self, step: Tensor) -> Tensor:
        """Limit the change of log deviations and of the noise's logit; offsets enter linearly and may jump."""
        start = 0
        for own in self.parameters:
            step[start + own.channels : start + own.count].clamp_(-MAX_LOG_STEP, MAX_LOG_STEP)
            start += own.count
        return step

    def _to_scales(self, theta: Tensor) -> tuple[InputScale | None, ...]:
        found = list(self.scales)
        start = 0
        for own in self.parameters:
            found[own.position] = own.to_scale(theta[start : start + own.count])
            start += own.count
        return tuple(found)

    @torch.no_grad()
    def _compute_residuals(self, theta: Tensor) -> Tensor | None:
        """Return the distances of all statistics from the stored ones; None if they are not finite.

        Means are compared in units of the stored deviation, deviations by their logarithm: the first are linear in
        the offsets and the second in the logarithm of the scale, as long as the layers in front are linear.
        """
        values = list(self.batch)
        for own, scale in zip(self.parameters, (s for s in self._to_scales(theta) if s is not None), strict=True):
            i = own.position
            standard = (1 - scale.noise) ** 0.5 * self.standard[i] + scale.noise**0.5 * self.white[i]
            # Rounding and clipping would hide small changes from finite differences.
            values[i] = (scale.mean.to(standard) + scale.deviation.to(standard) * standard).to(
                self.batch[i] if self.batch[i].is_floating_point() else torch.float32
            )
        seen: dict[str, list[dict[str, Any]]] = {name: [] for name in self.norms}

        def compute_node(node: Node, args: dict[str, Any]) -> Any:
            if node.name in self.norms:
                seen[node.name].append(args)
            return node.compute(args)

        try:
            for part in self.split(tuple(tree_unflatten(values, self.structure))):
                run = Interpreter(self.graph, flatten_inputs(part), self.graph.tensors, compute_node)
                for node in self.nodes:
                    run.run_node(node)
        except (RuntimeError, IndexError, ValueError, TypeError):  # integer operators reject the floats in their place
            return None
        terms = [term for parts in seen.values() for term in _compare_statistics(parts)]
        found = torch.cat([*terms, *self._compute_prior(theta, sum(map(len, terms)))])
        return found if bool(found.isfinite().all()) else None

    def _compute_prior(self, theta: Tensor, residuals: int) -> Iterator[Tensor]:
        """Yield how far the channels of each signal are from their mean, in offset and log deviation.

        Offsets of many channels are compared in units of the deviation, so that the prior does not depend on the unit
        of the signal. The weight grows with the number of residuals, so that it does not depend on the norms' width.
        """
        start = 0
        for own in self.parameters:
            if own.has_noise and own.channels > 1:
                weight = COLOR_PRIOR * (residuals / own.channels) ** 0.5
                offset, log_factor = theta[start : start + 2 * own.channels].chunk(2)
                if own.channels <= MAX_COLORS:
                    yield from (weight * (part - part.mean()) for part in (offset, log_factor))
                else:
                    for part in (offset / log_factor.mean().clamp(-40, 40).exp(), log_factor):
                        apart = part - part.mean()
                        yield weight * apart / (1 + apart.square()).sqrt()
            start += own.count

    def _differentiate(self, theta: Tensor, residuals: Tensor) -> Tensor | None:
        columns = []
        for i in range(len(theta)):
            moved = theta.clone()
            moved[i] += 0.05
            found = self._compute_residuals(moved)
            if found is None or len(found) != len(residuals):
                return None
            columns.append((found - residuals) / 0.05)
        return torch.stack(columns, 1)


def _draw_standardized(like: Tensor, count: int, generator: torch.Generator, waveform: bool) -> Tensor:
    """Draw entries with a mean of exactly 0 and a deviation of 1 in each channel: offset and scale then do not disturb
    each other.
    """
    standard = synthetic.draw_standard_input(like, count, generator, waveform)
    if waveform:
        return standard  # one channel, which is standardised already
    rows = standard.movedim(get_channel_dim(like), 0).flatten(1)
    shape = [-1 if d == get_channel_dim(like) else 1 for d in range(standard.ndim)]
    mean, deviation = rows.mean(1).view(shape), rows.std(1, unbiased=False).clamp(min=1e-6).view(shape)
    return (standard - mean) / deviation


def _describe_parameters(position: int, scale: InputScale, value: Tensor, max_channels: int) -> _Parameters:
    dim = get_channel_dim(value)
    is_map = is_signal(value) or is_channels_last(value) or scale.waveform
    has_own_scales = value.ndim > 1 and value.shape[dim] <= max_channels and not scale.waveform
    channels = value.shape[dim] if has_own_scales else 1
    shape = tuple(channels if d == dim else 1 for d in range(value.ndim))
    if scale.source == FROM_EXAMPLE and value.is_floating_point() and not holds_real_values(value):
        scale = replace(scale, low=-math.inf, high=math.inf)  # the range of a dummy, such as torch.rand, binds nobody
    return _Parameters(position, scale, channels, shape, is_map)


def _compare_statistics(parts: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return how far the inputs of a norm, in all parts of a batch, are from what it stores: in mean and deviation."""
    args = parts[0]
    rows = torch.cat([own["input"].double().movedim(1, 0).flatten(1) for own in parts], 1)
    mean, var, eps = args["running_mean"].double(), args["running_var"].double(), float(args["eps"])
    stored = var + eps
    off = (rows.mean(1) - mean) / stored.sqrt()
    seen = rows.var(1, unbiased=False)
    ratio = 0.5 * ((seen + eps) / stored).log()
    # Channels without variance, in training or whatever the input is, say nothing about the scale.
    live = (var > DEAD_VARIANCE) & (seen > DEAD_VARIANCE * stored)
    return off[live].cpu(), ratio[live].cpu()
