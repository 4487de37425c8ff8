"""Find what the values of a network's inputs look like: offset, deviation, share of noise, and range.

Synthetic inputs that are off by a factor or by an offset drive a network into states that it never sees. What is known
comes from, in order of trust: example inputs that hold real values; the first batch norms, which state the mean and the
deviation that they saw in training; a normalisation at the beginning of the graph; the dtype. Where none of these says
anything, inputs are standardised and every figure on them is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import bind_arguments

FROM_EXAMPLE = "the example inputs"
FROM_BATCH_NORMS = "the first batch norms"
FROM_GRAPH = "the normalisation in the network's code"
FROM_DTYPE = "the dtype"
UNKNOWN = ""
MIN_VALUES_PER_CHANNEL = 16
"""Values of a channel from which its own mean and deviation are measured; with fewer, all channels share theirs."""
MIN_REAL_SAMPLES = 4
"""Real samples from which their mean and deviation are trusted more than the first batch norms."""
MIN_SIGNAL_CORRELATION = 0.1
"""Correlation of neighbouring entries above which a signal is real: that of white noise is 0."""
MAX_NORMAL_VALUE = 6.0
"""Largest absolute value that standard normal noise may have."""
MIN_RELATIVE_DEVIATION = 1e-3
"""Deviation, relative to the largest value, below which an example is a constant with rounding, not data."""
MAX_RAMP_CURVATURE = 1e-5
"""Largest second difference of a ramp, in deviations: rounding of float32. A sine of 2,000 entries has as much."""
COLOR_COUNTS = (1, 3)
"""Numbers of channels by which pictures are recognised."""


@dataclass(frozen=True)
class InputScale:
    """What one input's values look like.

    Attributes
    ----------
    mean, deviation
        They broadcast against a batch of the input.
    noise
        The share of the variance that is white noise, as in the inputs of a denoiser.
    low, high
        The range of the values.
    whole
        Whether the values are whole numbers.
    source
        Where this is known from; empty if it is a guess.
    guesses
        Scales that are equally likely, if nothing is known; samples take them in turn.
    waveform
        Whether the input is a batch of signals without a dimension of channels: (batch, time).
    """

    mean: Tensor
    deviation: Tensor
    noise: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    source: str = UNKNOWN
    guesses: tuple[InputScale, ...] = ()
    waveform: bool = False

    def fingerprint(self) -> tuple[object, ...]:
        """Return what identifies this scale, as plain values."""
        own = self.mean.flatten().tolist(), self.deviation.flatten().tolist(), self.noise, self.low, self.high
        return *own, *(guess.fingerprint() for guess in self.guesses), *(["waveform"] if self.waveform else [])

    def round_digits(self) -> InputScale:
        """Return the scale with three significant digits. Less depends on the order of sums, and so on the machine."""
        return replace(
            self,
            mean=_round_relative(self.mean, self.deviation),
            deviation=_round_relative(self.deviation, self.deviation),
            noise=round(self.noise, 2),
        )

    def to_values(self, standard: Tensor) -> Tensor:
        """Turn standardised entries into values of the input, within its range."""
        if self.guesses:
            turns = [self.guesses[i % len(self.guesses)] for i in range(len(standard))]
            return torch.cat([own.to_values(standard[i : i + 1]) for i, own in enumerate(turns)])
        return self.clip(self.mean.to(standard) + self.deviation.to(standard) * standard)

    def clip(self, values: Tensor) -> Tensor:
        """Clip values to the range; round them if the input holds whole numbers."""
        if self.low > -math.inf or self.high < math.inf:
            values = values.clamp(self.low, self.high)
        return values.round() if self.whole else values

    def add_noise(self, standard: Tensor, generator: torch.Generator) -> Tensor:
        """Mix white noise into standardised entries; their variance stays 1."""
        if self.noise <= 0:
            return standard
        white = torch.randn(standard.shape, generator=generator, dtype=torch.float32, device="cpu").to(standard)
        mixed: Tensor = (1 - self.noise) ** 0.5 * standard + self.noise**0.5 * white
        return mixed


def _round_relative(values: Tensor, unit: Tensor) -> Tensor:
    """Round values to a hundredth of the decade of their unit."""
    grain = 10.0 ** (unit.double().clamp(min=1e-300).log10().floor() - 2)
    rounded: Tensor = (values / grain).round() * grain
    return rounded


# Kinds of inputs


def is_signal(value: Any) -> bool:
    """Return whether a value is a batch of signals over space or time: (batch, channels, …), of floats or integers."""
    return _is_numeric(value) and value.ndim >= 3 and bool(min(value.shape[2:]) >= 4)


def is_channels_last(value: Any) -> bool:
    """Return whether a value is a batch of channels-last images: (batch, height, width, colours)."""
    return _is_numeric(value) and bool(
        value.ndim == 4 and value.shape[3] in COLOR_COUNTS and min(value.shape[1:3]) >= 8
    )


def is_picture(value: Any) -> bool:
    """Return whether a value is a batch of grey or colour images."""
    return is_channels_last(value) or (is_signal(value) and bool(value.ndim == 4 and value.shape[1] in COLOR_COUNTS))


def is_waveform(graph: Graph, name: str | None, value: Any) -> bool:
    """Return whether a (batch, time) input is a signal: through views and arithmetic, a convolution runs along it.

    Its shape is that of a table, whose columns have nothing to do with each other.
    """
    if name is None or not _is_numeric(value) or value.ndim != 2 or not value.is_floating_point():
        return False
    reached = {name}
    for node in graph.nodes:
        row, read = lookup_operator(node), next(node.refs(), None)
        if read is None or read.name not in reached:
            continue
        if row.layer == "convolution" and max(graph.shapes[read.name][2:], default=0) >= value.shape[1]:
            return True
        if row.moves or row.arithmetic or row.layout == "same":
            reached.add(node.name)
    return False


def add_channel_dim(value: Tensor, waveform: bool) -> Tensor:
    """Return waveforms as (batch, 1, time), in the layout of other signals; other values as they are."""
    return value[:, None] if waveform else value


def is_synthesizable(value: Any) -> bool:
    """Return whether entries for an input can be made up: any floats, and integers that form a signal."""
    return isinstance(value, Tensor) and (value.is_floating_point() or is_signal(value) or is_channels_last(value))


def _is_numeric(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_complex() and value.dtype != torch.bool


def get_channel_dim(value: Tensor) -> int:
    return 3 if is_channels_last(value) and not is_signal(value) else min(1, value.ndim - 1)


# Real values and noise


def holds_real_values(value: Tensor) -> bool:
    """Return whether an example holds real data, as far as one can tell: neither constant, nor a ramp, nor white noise.

    >>> pick = torch.Generator().manual_seed(0)
    >>> ramp = torch.linspace(0, 1, 64).expand(2, 1, 16, 64)
    >>> [holds_real_values(v) for v in (ramp.mul(9).sin(), ramp)]
    [True, False]
    >>> holds_real_values(torch.randn(2, 1, 16, 64, generator=pick))
    False
    """
    if value.numel() < 2 or not bool(value.double().isfinite().all()) or _is_nearly_constant(value) or _is_ramp(value):
        return False
    if is_signal(value) or is_channels_last(value):
        correlation = measure_neighbour_correlation(value)
        return bool(correlation > max(MIN_SIGNAL_CORRELATION, 3 / value.numel() ** 0.5))
    if len(value) < MIN_REAL_SAMPLES:  # too few values for a test: only sizes that torch.randn never has are real
        return bool(value.double().abs().max() > MAX_NORMAL_VALUE)
    return not (_is_standard_normal(value) or _is_standard_uniform(value))


def _is_nearly_constant(value: Tensor) -> bool:
    return _is_constant(value) or float(value.double().std()) < MIN_RELATIVE_DEVIATION * float(
        value.double().abs().max()
    )


def _is_ramp(value: Tensor) -> bool:
    """Return whether the entries rise in equal steps, as those of `torch.arange` and `torch.linspace` do."""
    steps = value.double().diff(dim=-1)
    if steps.shape[-1] < 2:
        return False
    return float(steps.diff(dim=-1).abs().max()) <= MAX_RAMP_CURVATURE * float(value.double().std())


def _is_constant(value: Tensor) -> bool:
    return not bool((value != value.flatten()[0]).any())


def _is_standard_normal(value: Tensor) -> bool:
    """Return whether mean, deviation and kurtosis are those of `torch.randn`, within three standard errors."""
    entries, count = value.double().flatten(), value.numel()
    standard = (entries - entries.mean()) / entries.std().clamp(min=1e-30)
    kurtosis = float(standard.pow(4).mean())
    return bool(
        abs(float(entries.mean())) < 3 / count**0.5
        and abs(float(entries.std()) - 1) < 3 / (2 * count) ** 0.5
        and abs(kurtosis - 3) < 3 * (24 / count) ** 0.5 + 0.1
    )


def _is_standard_uniform(value: Tensor) -> bool:
    """Return whether mean and deviation are those of `torch.rand`, within three standard errors."""
    entries, count = value.double().flatten(), value.numel()
    error = float(3 * (1 / 12 / count) ** 0.5)
    inside = bool((entries >= 0).all() and (entries < 1).all())
    return inside and abs(float(entries.mean()) - 0.5) < error and abs(float(entries.std()) - 12**-0.5) < error


def measure_neighbour_correlation(value: Tensor, distance: int = 1) -> float:
    """Return the mean correlation of entries at a distance along the dimensions of space or time."""
    own = value.double()
    dims = (1, 2) if is_channels_last(value) and not is_signal(value) else tuple(range(2, value.ndim))
    centred = own - own.mean(dims, keepdim=True)
    variance = float(centred.square().mean())
    if variance <= 0:
        return 0.0
    found = []
    for dim in dims:
        length = own.shape[dim] - distance
        if length > 0:
            products = centred.narrow(dim, 0, length) * centred.narrow(dim, distance, length)
            found.append(float(products.mean()) / variance)
    return sum(found) / len(found) if found else 0.0


# Scales


def describe_input_scales(scales: Sequence[InputScale | None]) -> str:
    """Say for the summary where offset and scale of the synthetic inputs come from; empty if there are none."""
    sources = list(dict.fromkeys(scale.source for scale in scales if scale is not None))
    if not sources:
        return ""
    known = ", ".join(source for source in sources if source)
    spread = any(scale.guesses for scale in scales if scale is not None)
    usual = "0…1, −1…1 and standardised values in turn" if spread else "standardised values"
    guess = f"a guess: {usual}" if UNKNOWN in sources else ""
    return "offset and scale of synthetic inputs: " + " and ".join(text for text in (known, guess) if text)


def guess_input_scale(graph: Graph, name: str | None, value: Tensor) -> InputScale:
    """Return the scale of one input from its example, the graph or its dtype."""
    if is_waveform(graph, name, value):
        found = _guess_scale(graph, name, value, add_channel_dim(value, True))
        mean, deviation = (own.mean() for own in (found.mean, found.deviation))  # one channel: a number each
        return replace(found, mean=mean, deviation=deviation, waveform=True)
    return _guess_scale(graph, name, value, value)


def _guess_scale(graph: Graph, name: str | None, given: Tensor, value: Tensor) -> InputScale:
    """Return the scale of an input. `value` is the example as a signal or table, `given` is what the graph takes."""
    scale = _make_scale(0.0, 1.0)
    if not value.is_floating_point():
        scale = _make_integer_scale(value)
    normalisation = None if name is None else _find_normalisation(graph, name, given)
    if normalisation is not None:
        scale = _make_normalised_scale(value, scale, *normalisation)
    if holds_real_values(value):
        return _measure_scale(value)
    few = len(value) < MIN_REAL_SAMPLES and not (is_signal(value) or is_channels_last(value))
    if not few and not _is_constant(value) and not _is_standard_normal(value) and scale.source == UNKNOWN:
        return _measure_scale(value)  # noise of another scale than torch.randn's: its user chose that scale
    return scale


def spread_unknown_scale(scale: InputScale, value: Tensor) -> InputScale:
    """Return the scale of a picture of which nothing is known with the usual scales of pixels as guesses.

    A fit to one scale is good at that scale alone; a fit to all of them is nearly as good at each.
    """
    unknown = scale.source == UNKNOWN and is_picture(value) and value.is_floating_point()
    return replace(scale, guesses=PICTURE_SCALES) if unknown else scale


def _make_scale(mean: float, deviation: float, **more: Any) -> InputScale:
    of_mean, of_deviation = (torch.tensor(entry, dtype=torch.float64, device="cpu") for entry in (mean, deviation))
    return InputScale(of_mean, of_deviation, **more)


def _make_integer_scale(value: Tensor) -> InputScale:
    """Return the scale of integers: half of the range of 8 bits, else what the example shows."""
    bounds = torch.iinfo(value.dtype)
    low, high = max(bounds.min, -(2**15)), min(bounds.max, 2**15 - 1)
    middle, quarter = ((low + high + 1) / 2, (high - low + 1) / 4) if value.element_size() == 1 else (0.0, 64.0)
    source = FROM_DTYPE if value.element_size() == 1 else UNKNOWN
    return _make_scale(middle, quarter, low=float(low), high=float(high), whole=True, source=source)


def _measure_scale(value: Tensor) -> InputScale:
    """Measure mean, deviation and range of an example."""
    dim = get_channel_dim(value)
    rows = value.double().cpu().movedim(dim, 0).flatten(1)
    shape = [-1 if d == dim else 1 for d in range(value.ndim)]
    mean, deviation = rows.mean(1), rows.std(1, unbiased=False)
    pooled = rows.std(unbiased=False)
    if rows.shape[1] < MIN_VALUES_PER_CHANNEL and (is_signal(value) or is_channels_last(value)):
        mean, deviation = rows.mean().expand(len(rows)), pooled.expand(len(rows))
    elif rows.shape[1] < MIN_VALUES_PER_CHANNEL:
        # Few rows of a table tell the size of each column, but hardly its spread.
        deviation = torch.maximum(deviation, mean.abs() / 2)
    deviation = torch.maximum(deviation, 0.01 * pooled)  # a channel that is constant in the example need not always be
    low, high = _find_range(value)
    whole = not value.is_floating_point() or bool((value == value.round()).all())
    return InputScale(mean.view(shape), deviation.view(shape), 0.0, low, high, whole, FROM_EXAMPLE)


def _find_range(value: Tensor) -> tuple[float, float]:
    """Return the range that an example suggests: the usual ones of pixels and probabilities, else none."""
    low, high = float(value.min()), float(value.max())
    if not value.is_floating_point():
        bounds = torch.iinfo(value.dtype)
        return (0.0, 255.0) if low >= 0 and high <= 255 else (float(bounds.min), float(bounds.max))
    if not (is_signal(value) or is_channels_last(value)):  # columns of a table have ranges of their own
        return -math.inf, math.inf
    for least, most in ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)):
        if least <= low and high <= most:
            return least, most
    return (0.0, math.inf) if low >= 0 else (-math.inf, math.inf)


PICTURE_SCALES = (
    _make_scale(0.45, 0.25, low=0.0, high=1.0),
    _make_scale(-0.1, 0.5, low=-1.0, high=1.0),
    _make_scale(0.0, 1.0),
)
"""Usual scales of pixels: 0…1 with mean and deviation of photographs, −1…1, and standardised."""


# A normalisation at the beginning of the graph


def _find_normalisation(graph: Graph, name: str, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the factor and the offset that the graph applies to an input before anything else; None if it does not."""
    stored = {key: graph.tensors[own] for key, own in graph.parameters.items()} | dict(graph.constants)
    runs: list[dict[str, Any]] = [
        {name: torch.full((1, *value.shape[1:]), float(k), device=value.device)} for k in range(3)
    ]
    last = name
    while (node := _find_only_user(graph, last)) is not None:
        row = lookup_operator(node)
        reads_other = not {ref.name for ref in node.refs()} <= {*stored, last}
        if reads_other or not (row.arithmetic or row.layout == "same"):
            break
        for run in runs:
            run[node.name] = _compute_in_float(node, {**stored, **run})
        last = node.name
    zero, one, two = (run[last].double() for run in runs)
    factor, offset = one - zero, zero
    linear = torch.allclose(two - one, factor, rtol=1e-4, atol=1e-6) and zero.shape == runs[0][name].shape
    changed = linear and not (bool((factor == 1).all()) and bool((offset == 0).all()))
    return (factor, offset) if changed and bool((factor != 0).all()) else None


def _find_only_user(graph: Graph, name: str) -> Node | None:
    """Return the one node that uses a value; None if there are several. Checks of the exporter, whose results nothing
    reads, do not count.
    """
    outputs = {ref.name for ref in graph.outputs}
    users = [node for node in graph.users(name) if node.name in outputs or graph.users(node.name)]
    return users[0] if len(users) == 1 else None


def _compute_in_float(node: Node, values: Mapping[str, Any]) -> Any:
    """Compute a node of the normalisation; a cast to another dtype keeps the probe's floats as they are."""
    arguments = bind_arguments(node, values)
    if lookup_operator(node).layout == "same":
        return next(arguments[key] for key, own in node.args.items() if isinstance(own, Ref))
    return node.compute(arguments)


def _make_normalised_scale(value: Tensor, before: InputScale, factor: Tensor, offset: Tensor) -> InputScale:
    """Return the scale of an input that the graph normalises by factor · x + offset.

    With an offset the result is standardised. A factor alone maps the range of the input to 0…1 (pictures) or −1…1.
    """
    if bool((offset != 0).any()):
        mean, deviation = -offset / factor, 1 / factor.abs()
        return replace(before, mean=_reduce(mean), deviation=_reduce(deviation), source=FROM_GRAPH)
    reach = _reduce(1 / factor.abs())
    if is_picture(value):
        return replace(before, mean=reach / 2, deviation=reach / 4, low=0.0, high=float(reach.max()), source=FROM_GRAPH)
    return replace(before, mean=0 * reach, deviation=reach / 4, source=FROM_GRAPH)


def _reduce(entries: Tensor) -> Tensor:
    """Return the entries of a normalisation, as one number where all are equal."""
    return entries.flatten()[0] if bool((entries == entries.flatten()[0]).all()) else entries
