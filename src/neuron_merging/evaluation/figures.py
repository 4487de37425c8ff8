"""Collect the figures of a smaller network for its HTML report and model card: sizes, layers, similarities, latency,
and pictures as inline images.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.calibration.regression import solve_scaling_matrix
from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Group, Units
from neuron_merging.channels.weight_views import columns_of, filters_of
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.latency import MIN_RUNS, measure_latencies
from neuron_merging.evaluation.summary import GroupSummary, Summary
from neuron_merging.evaluation.verdict import Verdict, choose_level
from neuron_merging.graph.copying import copy_without_hooks, to_working_precision
from neuron_merging.graph.example_inputs import flatten_inputs
from neuron_merging.graph.graph import Graph
from neuron_merging.inputs.input_scale import is_signal
from neuron_merging.merging.protocol import Merge, MergeKind
from neuron_merging.onnx.quantize import Int8Network
from neuron_merging.pruning.plan import GroupDecision, Plan

MAX_IMAGES, MIN_IMAGES = 24, 4
"""Synthesised images on the page, at most and at least."""
MAX_IMAGE_VALUES = 2**20
"""Pixel values of all images together, beyond `MIN_IMAGES`: report.html and figures.json both store them."""
MAX_IMAGE_SIDE = 256
"""Largest side in pixels; of larger images every second, third … pixel is taken."""


def encode_images(images: Tensor, most: int | None = None) -> tuple[str, ...]:
    """Encode images (n, c, h, w) as data URIs of PNG files, each scaled to the full range of brightness.

    `most` is the largest number of images; by default there are fewer if they are large.

    >>> import torch
    >>> [address[:22] for address in encode_images(torch.rand(2, 3, 4, 4))]
    ['data:image/png;base64,', 'data:image/png;base64,']
    """
    # Rounded up, so that the largest side fits.
    step = max(1, -(-max(images.shape[2:]) // MAX_IMAGE_SIDE))
    images = images[..., ::step, ::step]
    if most is None:
        most = min(MAX_IMAGES, max(MIN_IMAGES, MAX_IMAGE_VALUES // max(1, images[:1].numel())))
    return tuple(
        to_data_uri(encode_png(_scale_to_pixels(image.detach().double().cpu().numpy()))) for image in images[:most]
    )


def _scale_to_pixels(image: np.ndarray) -> np.ndarray:
    """Scale an image to bytes (h, w, 1 or 3); with another number of channels, show their mean."""
    shown = image if len(image) in (1, 3) else image.mean(0, keepdims=True)
    shown = np.nan_to_num(shown, posinf=0.0, neginf=0.0)
    low, high = shown.min(), shown.max()
    # A constant image becomes grey instead of 0 / 0.
    scaled = (shown - low) / (high - low) if high > low else np.full_like(shown, 0.5)
    return np.moveaxis(np.round(255 * scaled).astype(np.uint8), 0, 2)


def encode_png(pixels: np.ndarray, palette: dict[bytes, bytes] | None = None) -> bytes:
    """Encode bytes (h, w, 1 or 3) as a PNG file; with a palette, the bytes are indices into it."""
    rows, columns, channels = pixels.shape
    kind = 3 if palette else 2 if channels == 3 else 0  # PNG colour types: indexed, RGB, grey
    # Each row starts with its filter type, 0 for none.
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)], 1).tobytes()
    header = struct.pack(">IIBBBBB", columns, rows, 8, kind, 0, 0, 0)
    parts = {b"IHDR": header, **(palette or {}), b"IDAT": zlib.compress(lines, 9), b"IEND": b""}
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def to_data_uri(file: bytes) -> str:
    """Return a PNG file as a data URI."""
    return "data:image/png;base64," + base64.b64encode(file).decode()


MAX_IMAGE_SHAPE = (128, 256)
"""Rows and columns of the largest picture. In a larger matrix each pixel shows the largest entry of its cell."""
MAX_REMOVED_CHANNELS = 2048
"""Removed channels up to which the nearest scaling matrix is solved for: the solve is cubic in their number."""
SCALING_RIDGE = 1e-3
"""Ridge of that solve, relative to the mean square of the removed columns; similar columns make it ill-conditioned."""
POSITIVE_COLOUR, NEGATIVE_COLOUR = (37, 99, 235), (234, 88, 12)


@dataclass(frozen=True)
class ScalingImage:
    """A picture of the scaling matrix Z at one consumer layer, with the columns of the kept channels first.

    `exact` is whether the merge used this matrix. `top` is the value with full colour. `whole` is whether every
    entry has its own pixel.
    """

    reader: str
    shape: tuple[int, int]
    exact: bool
    top: float
    image: str
    whole: bool


def build_scaling_image(
    merge: Merge, kept: Units, removed: Units, tensors: Mapping[str, Tensor]
) -> ScalingImage | None:
    """Draw the scaling matrix that a merge used; if it used none, the matrix that comes nearest to the merge."""
    if merge.scaling is not None:
        scales = merge.scaling.to_dense().double().cpu().numpy()
    elif merge.columns is None:  # plain pruning
        scales = np.zeros((len(kept), len(removed)))
    else:
        fitted = _fit_scaling_matrix(merge, kept, removed, tensors)
        if fitted is None:
            return None
        scales = fitted
    reader = merge.consumer.node.module or merge.consumer.node.name
    exact = merge.scaling is not None or merge.columns is None
    return draw_scaling_matrix(np.concatenate([np.eye(len(kept)), scales], 1), len(kept), reader, exact)


def _fit_scaling_matrix(merge: Merge, kept: Units, removed: Units, tensors: Mapping[str, Tensor]) -> np.ndarray | None:
    """Solve for Z by least squares: the change of the kept columns as combinations of the removed columns."""
    consumer, axis = merge.consumer, merge.consumer.axis
    if axis is None or merge.columns is None or len(removed) > MAX_REMOVED_CHANNELS or (consumer.columns < 0).any():
        return None
    weight = axis.join_blocks(to_working_precision(tensors[axis.tensor].detach())).double().movedim(axis.dim, 0)
    index_of = {int(position): i for i, position in enumerate(merge.positions)}
    indices = [index_of.get(int(column), -1) for column in columns_of(consumer, kept)]
    if min(indices) < 0:  # the merge did not rewrite all kept columns
        return None
    new = merge.columns.double().movedim(axis.dim, 0)[indices]
    old, removed_columns = (weight[columns_of(consumer, units).to(weight.device)] for units in (kept, removed))
    change, basis = (new.to(old) - old).reshape(len(kept), -1), removed_columns.reshape(len(removed), -1)
    solved: np.ndarray = solve_scaling_matrix(basis, change, SCALING_RIDGE).T.cpu().numpy()
    return solved if np.isfinite(solved).all() else None


def draw_scaling_matrix(matrix: np.ndarray, kept: int, reader: str, exact: bool) -> ScalingImage:
    """Draw a matrix: blue above zero, orange below, transparent at zero."""
    rows, columns = matrix.shape
    # The colour scale follows the removed channels' columns; a quantile keeps one outlier from hiding the rest.
    scales = np.abs(matrix[:, kept:])
    top = float(np.quantile(scales[scales > 0], 0.99)) if (scales > 0).any() else 1.0
    small = _downsample_matrix(_downsample_matrix(matrix, MAX_IMAGE_SHAPE[0], 0), MAX_IMAGE_SHAPE[1], 1)
    level = np.clip(np.round(small / top * 127), -127, 127).astype(int) + 127
    image = to_data_uri(encode_png(level.astype(np.uint8)[:, :, None], _build_palette()))
    return ScalingImage(reader, (rows, columns), exact, top, image, whole=small.shape == matrix.shape)


def _downsample_matrix(matrix: np.ndarray, most: int, axis: int) -> np.ndarray:
    """Reduce a matrix to at most `most` rows or columns; each entry is the one of largest magnitude in its run.

    Z is sparse, so a mean would make single entries invisible.
    """
    step = -(-matrix.shape[axis] // most)
    if step == 1:
        return matrix
    parts = np.split(matrix, range(step, matrix.shape[axis], step), axis)
    strongest = [np.expand_dims(np.abs(part).argmax(axis), axis) for part in parts]
    picked = [np.take_along_axis(part, at, axis) for part, at in zip(parts, strongest, strict=True)]
    return np.concatenate(picked, axis)


def _build_palette() -> dict[bytes, bytes]:
    """Return PNG palette chunks for the levels 0…254; level 127 stands for zero and is transparent."""
    # An exponent below 1 makes small values visible.
    opacity = [round(255 * (abs(level - 127) / 127) ** 0.7) for level in range(255)]
    colours = b"".join(bytes(POSITIVE_COLOUR if level > 127 else NEGATIVE_COLOUR) for level in range(255))
    return {b"PLTE": colours, b"tRNS": bytes(opacity)}


LATENCY_BATCH_SIZES = (1, 16)
"""Batch sizes whose latency the report shows: a single request, and a small batch."""
REPORT_RUNS, REPORT_SECONDS = 30, 2.0
"""Runs of each batch size, and seconds after which no further run starts."""
MAX_BATCH_SECONDS = 20.0
"""A batch size is skipped if its smallest number of runs would take longer than this, in seconds."""
MAX_SIMILARITY_PAIRS = 2**24
"""Pairs of filters up to which similarities are computed (128 MiB); a wider layer has no histogram."""
SIMILARITY_DIGITS = 6
"""Decimal digits of a similarity that are stored: enough for a histogram, and the file stays small."""


@dataclass(frozen=True)
class LayerReport:
    """One group of channels.

    `merged` counts the removed channels that were merged at every consumer layer; None if that is unknown.
    `how` describes the outcome at each consumer layer. `similarity` is, for each removed channel, its largest cosine
    similarity to a kept one.
    """

    name: str
    before: int
    kept: int
    merged: int | None
    error: float | None
    how: tuple[str, ...]
    heat: ScalingImage | None = None
    similarity: tuple[float, ...] = ()
    units: tuple[int, ...] = ()
    """Indices of the kept channels."""
    saved: tuple[float, float] = (0.0, 0.0)
    """Shares of the network's parameters and MACs that this cut alone saves."""

    @property
    def dropped_count(self) -> int:
        """Removed channels that were not merged."""
        return self.before - self.kept - (self.merged or 0)

    @property
    def removed_units(self) -> tuple[int, ...]:
        """Indices of the removed channels."""
        kept = set(self.units)
        return tuple(unit for unit in range(self.before) if unit not in kept)

    @property
    def units_text(self) -> str:
        """Indices of the kept and the removed channels, as a text for the page."""
        return f"kept: {format_ranges(self.units)}; removed: {format_ranges(self.removed_units)}" if self.units else ""


def format_ranges(numbers: Sequence[int]) -> str:
    """Format increasing numbers as ranges.

    >>> format_ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)


@dataclass(frozen=True)
class LatencyComparison:
    """Median seconds of a forward pass of the original and of the small network, by batch size."""

    seconds: Mapping[int, tuple[float, float]]
    threads: int


@dataclass(frozen=True)
class Int8Comparison:
    """The smaller network as a float file and as an int8 file, side by side.

    `fidelity` and `level` are those of the outputs to the original's. `seconds` is the median of one input in
    onnxruntime. `float_layers` are layers that stay in float in the int8 file.
    """

    bytes: tuple[int, int]
    fidelity: tuple[float | None, float | None]
    level: tuple[str, str]
    seconds: tuple[float, float]
    float_layers: tuple[str, ...] = ()


def compare_with_int8(int8: Int8Network, fidelity: Fidelity, verdict: Verdict) -> Int8Comparison:
    """Collect the figures of both files from a comparison whose last two networks are these; the verdict is int8's."""
    both = fidelity.scores[-2].fidelity, fidelity.scores[-1].fidelity
    return Int8Comparison(
        int8.bytes, both, (choose_level(both[0], verdict.is_guess), verdict.level), int8.seconds, int8.float_layers
    )


@dataclass(frozen=True)
class Figures:
    """All measurements of a smaller network. A field that is None or empty was not measured, and the page says so.

    Attributes
    ----------
    summary
        Sizes before and after, group by group, with the verdict.
    bytes
        The size of all tensors before and after, in bytes.
    layers
        Each group, with similarities and a picture of its scaling matrix if there is one.
    fidelity
        The comparison of the networks' outputs.
    latency
        Median seconds of a forward pass.
    inputs
        Some synthesised inputs, as data URIs of pictures.
    int8
        The float file and the int8 file, if there is one.
    """

    summary: Summary
    bytes: tuple[int, int]
    layers: tuple[LayerReport, ...]
    fidelity: Fidelity | None
    latency: LatencyComparison | None = None
    inputs: tuple[str, ...] = ()
    int8: Int8Comparison | None = None


def collect_figures(
    analysis: Analysis,
    small: nn.Module,
    plan: Plan,
    summary: Summary,
    fidelity: Fidelity | None,
    merges: Sequence[Merge] = (),
    inputs: Iterable[Sequence[Any]] = (),
) -> Figures:
    """Collect the figures of every group that was cut. The latency is not measured here: that takes seconds.

    Similarities and pictures of scaling matrices need `merges`. Images among `inputs`, on which the merges were
    fitted, are included.
    """
    groups = {group.name: group for group in analysis.channels.groups}
    costs, shown = Costs(analysis), _find_images(inputs)
    return Figures(
        summary=summary,
        bytes=(_count_bytes(analysis.model), _count_bytes(small)),
        layers=tuple(
            replace(
                _describe_layer(choice, group_summary, groups[choice.name], analysis.graph, merges),
                units=tuple(choice.kept),
                saved=_compute_savings(costs, choice),
            )
            for choice, group_summary in zip(plan.groups, summary.groups, strict=True)
        ),
        fidelity=fidelity,
        inputs=() if shown is None else encode_images(shown),
    )


def _compute_savings(costs: Costs, choice: GroupDecision) -> tuple[float, float]:
    """Return the shares of parameters and MACs that cutting this group alone saves."""
    cut = {choice.name: choice.kept}
    return (
        1 - costs.parameters(cut) / max(1, costs.parameters({})),
        1 - costs.macs(cut) / max(1, costs.macs({})),
    )


def _describe_layer(
    choice: GroupDecision, summary: GroupSummary, group: Group, graph: Graph, merges: Sequence[Merge]
) -> LayerReport:
    group_merges = [merge for merge in merges if merge.group == choice.name]
    kept = np.array(choice.kept)
    if not merges:
        return LayerReport(choice.name, choice.size, len(kept), None, summary.error, summary.descriptions)
    removed = np.setdiff1d(np.arange(choice.size), kept)
    pictures = (build_scaling_image(merge, kept, removed, graph.tensors) for merge in group_merges)
    return LayerReport(
        name=choice.name,
        before=choice.size,
        kept=len(kept),
        # A channel counts as merged only if no consumer layer lost it, so the smallest number holds.
        merged=min((_count_merged(merge, len(removed)) for merge in group_merges), default=0),
        error=summary.error,
        how=summary.descriptions,
        heat=next(filter(None, pictures), None),
        similarity=_compute_filter_similarity(graph, group, kept, removed),
    )


def _count_merged(merge: Merge, removed: int) -> int:
    """Count the removed channels that were merged at a consumer layer; a fit without Z merges all of them."""
    return 0 if merge.kind is MergeKind.PRUNED else merge.folded if merge.scaling is not None else removed


def _compute_filter_similarity(graph: Graph, group: Group, kept: np.ndarray, removed: np.ndarray) -> tuple[float, ...]:
    """Return, for each removed channel, the largest cosine similarity of its filter to a kept filter."""
    if not group.producers or len(kept) * len(removed) > MAX_SIMILARITY_PAIRS:
        return ()
    rows = filters_of(graph, group).double()
    # The clamp keeps a filter of zeros from dividing by zero: its similarity is 0.
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    best = (rows[removed] @ rows[kept].T).amax(1)
    return tuple(round(value, SIMILARITY_DIGITS) for value in best.tolist())


def _count_bytes(model: nn.Module) -> int:
    """Count the bytes of all parameters and buffers, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _find_images(batches: Iterable[Sequence[Any]]) -> Tensor | None:
    """Return the first batch of images (n, c, h, w) among the inputs; None if there is none."""
    values = (value for batch in batches for value in flatten_inputs(batch))
    return next((value for value in values if is_signal(value) and value.ndim == 4), None)


def measure_latency(model: nn.Module, small: nn.Module, inputs: tuple[Any, ...]) -> LatencyComparison | None:
    """Measure the latency of both networks, for the batch sizes that they accept; None if there is none."""
    networks = {"original": copy_without_hooks(model).eval(), "small": copy_without_hooks(small).eval()}
    seconds: dict[int, tuple[float, float]] = {}
    for size in LATENCY_BATCH_SIZES:
        # Extrapolate from batch size 1, with one run more for the warm-up.
        if size * sum(seconds.get(1, ())) * (MIN_RUNS + 1) > MAX_BATCH_SECONDS:
            continue
        try:
            times = measure_latencies(networks, inputs, (size,), REPORT_RUNS, REPORT_SECONDS)
        except MergingError:  # the network has a fixed batch size
            continue
        seconds[size] = (times["original"][size], times["small"][size])
    return LatencyComparison(seconds, torch.get_num_threads()) if seconds else None
