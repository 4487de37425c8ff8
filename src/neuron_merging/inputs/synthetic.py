"""Synthetic inputs that look like data: dead-leaves images, white noise, random tokens.

The dead-leaves model paints random balls of random colour over each other. With sizes drawn from a power law it has
the edges, the flat regions and the 1/f² spectrum of natural images; with a shared brightness, the strong
correlation between their colours; with a little smooth noise, their texture. It works in one, two and three
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.example_inputs import (
    draw_tokens,
    flatten_inputs,
    has_batch_axis,
    infer_batch_size,
    repeat_entries,
)
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.inputs.input_scale import InputScale, is_channels_last, is_signal, is_synthesizable

LEAF_COUNT = 60
"""Balls per image; they cover it several times."""
TEXTURE_SHARE = 0.25
"""Share of the variance that is smooth noise."""
BRIGHTNESS_SCALE, TINT_SCALE = 0.85, 0.35
"""Deviations of the brightness that all colour channels share, and of each channel's own tint."""
COLOR_CORRELATION = BRIGHTNESS_SCALE**2 / (BRIGHTNESS_SCALE**2 + TINT_SCALE**2)
"""Correlation of two colour channels at one pixel."""
IMAGE_VARIANCE = 0.5
"""Variance of the prior on images: about 1/3 for images scaled to [-1, 1], 1 for standardised ones, so in between."""
MAX_BATCH_PIXELS = 128 * 3 * 64 * 64
"""Values of one input in a batch: 128 colour images of 64 × 64 pixels."""
CPU_FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""Random values are drawn like this, so that torch's default dtype and device do not change them."""


def compute_signal_correlation(distance: Tensor, smoothness: float) -> Tensor:
    """Return exp(-√(distance / smoothness)): steep nearby and long-tailed, without a typical scale, as in natural
    signals.
    """
    return torch.exp(-(distance / smoothness).sqrt())


def synthesize_batches(
    example: Sequence[Any],
    samples: int,
    seed: int,
    tokens: Mapping[int, int] | None = None,
    size: int | None = None,
    scales: Sequence[InputScale | None] = (),
) -> Iterator[tuple[Any, ...]]:
    """Yield batches of inputs like the example: signals are dead-leaves images, other floats white noise.

    `tokens` maps the positions of token inputs to their vocabulary sizes; these are drawn uniformly. Other inputs that
    are neither floats nor signals (masks, indices of unknown meaning) are repeated from the example. An input of a
    different length has no batch dimension and is not changed. `size` is the batch size, by default bounded by its
    memory. `scales` holds the scale of each input; without one, values are standardised.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    size = size or choose_batch_size(example, samples)
    for start in range(0, samples, size):
        count = min(size, samples - start)
        values = flatten_inputs(example)
        for i, value in enumerate(values):
            if has_batch_axis(value, infer_batch_size(example)):
                scale = scales[i] if scales else None
                values[i] = _make_synthetic_input(value, count, generator, (tokens or {}).get(i), scale)
        yield tuple(tree_unflatten(values, tree_structure(list(example))))


def choose_batch_size(example: Sequence[Any], samples: int) -> int:
    """Return the batch size for so many inputs: smaller for large inputs, at least 8."""
    return min(samples, max(8, MAX_BATCH_PIXELS // max(_count_pixels(value) for value in flatten_inputs(example))))


def find_token_inputs(graph: Graph) -> dict[int, int]:
    """Return the inputs that are only used as indices into embedding tables: position → vocabulary size."""
    found = {}
    for i, name in enumerate(graph.inputs):
        readers = _find_consumer_nodes(graph, name) if name is not None else []
        tables = [node.args.get("weight") for node in readers if lookup_operator(node).layer == "table"]
        if readers and len(tables) == len(readers):
            found[i] = min(graph.shapes[table.name][0] for table in tables if isinstance(table, Ref))
    return found


def _find_consumer_nodes(graph: Graph, name: str) -> list[Node]:
    """Return the nodes that read a value, directly or through views of it."""
    found = (
        (_find_consumer_nodes(graph, node.name) if lookup_operator(node).view else [node]) for node in graph.users(name)
    )
    return [node for nodes in found for node in nodes]


def _count_pixels(value: Any) -> int:
    return value[0].numel() if isinstance(value, Tensor) and value.ndim > 1 else 1


def _make_synthetic_input(
    value: Tensor, count: int, generator: torch.Generator, tokens: int | None, scale: InputScale | None
) -> Tensor:
    if tokens is not None:
        return draw_tokens(value, (count, *value.shape[1:]), generator, tokens)
    waveform = scale is not None and scale.waveform
    standard = draw_standard_input(value, count, generator, waveform) if is_synthesizable(value) else None
    if standard is None or (scale is None and not value.is_floating_point()):
        return repeat_entries(value, (count, *value.shape[1:]))
    return standard.to(value) if scale is None else scale.to_values(scale.add_noise(standard, generator)).to(value)


def draw_standard_input(value: Tensor, count: int, generator: torch.Generator, waveform: bool = False) -> Tensor:
    """Draw standardised entries for an input: dead-leaves images for signals, else white noise."""
    if waveform:
        return draw_dead_leaves(count, (1, *value.shape[1:]), generator)[:, 0]
    if is_signal(value):
        return draw_dead_leaves(count, value.shape[1:], generator)
    if is_channels_last(value):
        return draw_dead_leaves(count, (value.shape[3], *value.shape[1:3]), generator).movedim(1, 3)
    return _draw_normal(count, *value.shape[1:], generator=generator)


def draw_dead_leaves(count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw `count` signals of shape (channels, …), with zero mean and unit variance over all of them.

    >>> draw_dead_leaves(2, (3, 16, 16), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 16, 16])
    """
    channels, *space = shape
    lines = [
        torch.arange(size, **CPU_FLOAT32).view([-1 if d == i else 1 for d in range(len(space))])
        for i, size in enumerate(space)
    ]
    top = torch.zeros(count, *space, dtype=torch.int64, device="cpu")
    palette = [torch.zeros(count, channels, **CPU_FLOAT32)]
    size = max(space)
    for leaf in range(LEAF_COUNT):
        # The first tenth is larger by half an image and forms the background.
        radius = _draw_radii(count, size, generator) + (size / 2 if leaf < LEAF_COUNT // 10 else 0)
        centre = torch.rand(count, len(space), generator=generator, **CPU_FLOAT32) * torch.tensor(space, device="cpu")
        distance = sum((line - _view_per_sample(centre[:, i], line)) ** 2 for i, line in enumerate(lines))
        palette.append(_mix_colors(_draw_normal(count, channels + 1, generator=generator)))
        top.masked_fill_(distance < _view_per_sample(radius, lines[0]) ** 2, leaf + 1)  # type: ignore[operator]
    places = top.view(count, 1, -1).expand(-1, channels, -1)
    canvas = torch.stack(palette, 2).gather(2, places).view(count, channels, *space)
    mixed = (1 - TEXTURE_SHARE) ** 0.5 * _standardize(canvas) + TEXTURE_SHARE**0.5 * _standardize(
        _draw_texture(count, channels, space, generator)
    )
    return _standardize(mixed)


CLIP_DEVIATIONS = 2.5
"""Pixels of pictures lie within about so many deviations of their mean."""


ZOOM_RANGE = (0.6, 1.6)
"""Factors by which pictures are zoomed: what they show is as large as in other pictures of its kind."""


def zoom_pictures(pictures: Tensor, seed: int) -> Tensor:
    """Zoom each picture by a random factor, at a random place; a smaller one is continued by its mirror images."""
    generator = torch.Generator("cpu").manual_seed(seed)
    last = is_channels_last(pictures) and not is_signal(pictures)
    planes = (pictures.movedim(3, 1) if last else pictures).float()
    low, high = (math.log(factor) for factor in ZOOM_RANGE)
    factors = (low + (high - low) * torch.rand(len(planes), generator=generator, device="cpu")).exp()
    made = torch.cat(
        [_zoom_picture(planes[i : i + 1], float(factor), generator) for i, factor in enumerate(factors)]
    ).to(pictures.dtype if pictures.is_floating_point() else torch.float32)
    made = made.movedim(1, 3).contiguous() if last else made
    return made if pictures.is_floating_point() else made.round().to(pictures.dtype)


def _zoom_picture(picture: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    sizes = [max(1, size // 2 + 1, round(size * factor)) for size in picture.shape[2:]]
    zoomed = interpolate(picture, size=sizes, mode="bilinear", align_corners=False, antialias=True)
    for dim, size in zip((2, 3), picture.shape[2:], strict=True):
        zoomed = zoomed if zoomed.shape[dim] >= size else torch.cat([zoomed, zoomed.flip(dim)], dim)
        start = int(torch.randint(zoomed.shape[dim] - size + 1, (), generator=generator, device="cpu"))
        zoomed = zoomed.narrow(dim, start, size)
    return zoomed


def clip_to_deviations(batch: Sequence[Any]) -> tuple[Any, ...]:
    """Clip synthesised signals to the range that real ones have: a few extreme pixels would widen all int8 ranges."""

    def clip(value: Any) -> Any:
        is_map = is_signal(value) or is_channels_last(value)
        if not is_map or not value.is_floating_point():  # integers are within their range already
            return value
        mean, reach = value.mean(), CLIP_DEVIATIONS * value.std()
        return value.clamp(mean - reach, mean + reach)

    return tuple(tree_unflatten([clip(v) for v in flatten_inputs(batch)], tree_structure(list(batch))))


def _draw_normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, **CPU_FLOAT32)


def _standardize(values: Tensor) -> Tensor:
    return (values - values.mean()) / values.std()


def _draw_texture(count: int, channels: int, space: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw Gaussian noise that is smooth over about two pixels: correlation exp(-distance / 2)."""
    # Filter white noise by the square root of the spectrum (circulant embedding): a torus of twice the size, cropped,
    # so that opposite borders are not correlated.
    places = [torch.arange(2 * s, **CPU_FLOAT32) for s in space]
    wrapped = [torch.minimum(place, len(place) - place) for place in places]
    distance = torch.stack(torch.meshgrid(*wrapped, indexing="ij")).square().sum(0).sqrt()
    dims = tuple(range(-len(space), 0))
    spectrum = torch.fft.rfftn(torch.exp(-distance / 2), dim=dims).real.clamp(min=0).sqrt()
    noise = _mix_colors(_draw_normal(count, channels + 1, *distance.shape, generator=generator))
    smooth: Tensor = torch.fft.irfftn(torch.fft.rfftn(noise, dim=dims).mul_(spectrum), s=distance.shape, dim=dims)
    crop: list[Any] = [slice(s) for s in space]
    return smooth[(..., *crop)]


def _mix_colors(noise: Tensor) -> Tensor:
    """Add the brightness, which all channels share, to the tint of each channel."""
    return BRIGHTNESS_SCALE * noise[:, :1] + TINT_SCALE * noise[:, 1:]


def _draw_radii(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw radii with density r⁻³ between size/24 and size/2.5, by inverting the distribution function.

    This power law makes the image scale-invariant, as natural images are.
    """
    small, large = size / 24, size / 2.5
    uniform = torch.rand(count, generator=generator, **CPU_FLOAT32)
    return (uniform * (small**-2 - large**-2) + large**-2).rsqrt()


def _view_per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *(1 for _ in like.shape))
