"""Everything that is measured of a smaller network for its page and its card: sizes, layers, similarities,
latency, and pictures as inline images.
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
from neuron_merging.channels.groups import Group
from neuron_merging.channels.labels import Units
from neuron_merging.channels.weight_views import columns_of, filters_of
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.latency import MIN_RUNS, measure_latencies
from neuron_merging.evaluation.summary import GroupSummary, Summary
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.graph import Graph
from neuron_merging.graph.precision import to_working_precision
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs.synthetic import is_signal
from neuron_merging.merging.protocol import Merge, MergeKind
from neuron_merging.pruning.plan import GroupDecision, Plan

MAX_IMAGES, MIN_IMAGES = 24, 4
MAX_IMAGE_VALUES = 2**20
"""Values of all images together, beyond the fewest that are shown: the page holds them, and so does its folder."""
MAX_IMAGE_SIDE = 256
"""Pixels of a side; of larger images every second, third … is shown."""


def encode_images(images: Tensor, most: int | None = None) -> tuple[str, ...]:
    """Images (n, c, h, w) as addresses of PNG files for the page; each is spread over all brightnesses.

    `most` is how many; left out, fewer of large ones.

    >>> import torch
    >>> [address[:22] for address in encode_images(torch.rand(2, 3, 4, 4))]
    ['data:image/png;base64,', 'data:image/png;base64,']
    """
    step = max(1, -(-max(images.shape[2:]) // MAX_IMAGE_SIDE))
    images = images[..., ::step, ::step]
    if most is None:
        most = min(MAX_IMAGES, max(MIN_IMAGES, MAX_IMAGE_VALUES // max(1, images[:1].numel())))
    return tuple(
        to_data_uri(encode_png(_scale_to_pixels(image.detach().double().cpu().numpy()))) for image in images[:most]
    )


def _scale_to_pixels(image: np.ndarray) -> np.ndarray:
    """Bytes (h, w, 1 or 3); of another number of channels their mean is shown."""
    shown = image if len(image) in (1, 3) else image.mean(0, keepdims=True)
    shown = np.nan_to_num(shown, posinf=0.0, neginf=0.0)
    low, high = shown.min(), shown.max()
    scaled = (shown - low) / (high - low) if high > low else np.full_like(shown, 0.5)
    return np.moveaxis(np.round(255 * scaled).astype(np.uint8), 0, 2)


def encode_png(pixels: np.ndarray, palette: dict[bytes, bytes] | None = None) -> bytes:
    """Bytes (h, w, 1 or 3) as a file; with a palette, of levels that stand for its colours."""
    rows, columns, channels = pixels.shape
    kind = 3 if palette else 2 if channels == 3 else 0
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)], 1).tobytes()
    header = struct.pack(">IIBBBBB", columns, rows, 8, kind, 0, 0, 0)
    parts = {b"IHDR": header, **(palette or {}), b"IDAT": zlib.compress(lines, 9), b"IEND": b""}
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def to_data_uri(file: bytes) -> str:
    """A file as the address of itself."""
    return "data:image/png;base64," + base64.b64encode(file).decode()


MAX_IMAGE_SHAPE = (128, 256)
"""Rows and columns of the largest picture; of more, each cell shows its largest entry."""
MAX_REMOVED_CHANNELS = 2048
"""Removed channels for which the nearest matrix is still computed."""
SCALING_RIDGE = 1e-3
POSITIVE_COLOUR, NEGATIVE_COLOUR = (37, 99, 235), (234, 88, 12)


@dataclass(frozen=True)
class ScalingImage:
    """A picture of Z with the kept channels' columns first. `top` is the value of full colour."""

    reader: str
    shape: tuple[int, int]
    exact: bool
    top: float
    image: str
    whole: bool


def build_scaling_image(
    merge: Merge, kept: Units, removed: Units, tensors: Mapping[str, Tensor]
) -> ScalingImage | None:
    """The matrix that a merge used or, where it used none, the one that comes nearest to it."""
    if merge.scaling is not None:
        scales = merge.scaling.to_dense().double().cpu().numpy()
    elif merge.columns is None:
        scales = np.zeros((len(kept), len(removed)))
    else:
        found = _fit_scaling_matrix(merge, kept, removed, tensors)
        if found is None:
            return None
        scales = found
    reader = merge.consumer.node.module or merge.consumer.node.name
    exact = merge.scaling is not None or merge.columns is None
    return draw_scaling_matrix(np.concatenate([np.eye(len(kept)), scales], 1), len(kept), reader, exact)


def _fit_scaling_matrix(merge: Merge, kept: Units, removed: Units, tensors: Mapping[str, Tensor]) -> np.ndarray | None:
    """Z by least squares: new columns minus old ones, in terms of the removed ones."""
    consumer, axis = merge.consumer, merge.consumer.axis
    if axis is None or merge.columns is None or len(removed) > MAX_REMOVED_CHANNELS or (consumer.columns < 0).any():
        return None
    weight = axis.join_blocks(to_working_precision(tensors[axis.tensor].detach())).double().movedim(axis.dim, 0)
    place = {int(position): i for i, position in enumerate(merge.positions)}
    at = [place.get(int(column), -1) for column in columns_of(consumer, kept)]
    if min(at) < 0:
        return None
    new = merge.columns.double().movedim(axis.dim, 0)[at]
    old, gone = (weight[columns_of(consumer, units).to(weight.device)] for units in (kept, removed))
    change, basis = (new.to(old) - old).reshape(len(kept), -1), gone.reshape(len(removed), -1)
    solved: np.ndarray = solve_scaling_matrix(basis, change, SCALING_RIDGE).T.cpu().numpy()
    return solved if np.isfinite(solved).all() else None


def draw_scaling_matrix(matrix: np.ndarray, kept: int, reader: str, exact: bool) -> ScalingImage:
    """A matrix as an image: blue above zero, orange below, clear at zero."""
    rows, columns = matrix.shape
    aside = np.abs(matrix[:, kept:])
    top = float(np.quantile(aside[aside > 0], 0.99)) if (aside > 0).any() else 1.0
    small = _downsample_matrix(_downsample_matrix(matrix, MAX_IMAGE_SHAPE[0], 0), MAX_IMAGE_SHAPE[1], 1)
    level = np.clip(np.round(small / top * 127), -127, 127).astype(int) + 127
    image = to_data_uri(encode_png(level.astype(np.uint8)[:, :, None], _build_palette()))
    return ScalingImage(reader, (rows, columns), exact, top, image, whole=small.shape == matrix.shape)


def _downsample_matrix(matrix: np.ndarray, most: int, axis: int) -> np.ndarray:
    """At most this many rows or columns, each the entry of largest size of those that it stands for."""
    step = -(-matrix.shape[axis] // most)
    if step == 1:
        return matrix
    parts = np.split(matrix, range(step, matrix.shape[axis], step), axis)
    strongest = [np.expand_dims(np.abs(part).argmax(axis), axis) for part in parts]
    picked = [np.take_along_axis(part, at, axis) for part, at in zip(parts, strongest, strict=True)]
    return np.concatenate(picked, axis)


def _build_palette() -> dict[bytes, bytes]:
    """Colours of the levels 0…254 with 127 for zero, which lets the page shine through."""
    strength = [round(255 * (abs(level - 127) / 127) ** 0.7) for level in range(255)]
    colours = b"".join(bytes(POSITIVE_COLOUR if level > 127 else NEGATIVE_COLOUR) for level in range(255))
    return {b"PLTE": colours, b"tRNS": bytes(strength)}


LATENCY_BATCH_SIZES = (1, 16)
REPORT_RUNS, REPORT_SECONDS = 30, 2.0
MAX_BATCH_SECONDS = 20.0
"""Seconds that a batch size may take at least; larger ones are left out."""
MAX_SIMILARITY_PAIRS = 2**24
"""Pairs of filters that are compared; the page of a wider layer has no histogram."""
SIMILARITY_DIGITS = 6
"""Digits of a similarity that are kept: the page shows a histogram."""


@dataclass(frozen=True)
class LayerReport:
    """One group of channels.

    `merged` counts the removed channels that every reader took in; None where it is not known.
    `similarity` is, for each removed channel, its largest cosine similarity to a kept one.
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
    """The numbers of the kept channels."""
    saved: tuple[float, float] = (0.0, 0.0)
    """Shares of the network's parameters and multiply-accumulates that this cut alone saves."""

    @property
    def dropped(self) -> int:
        return self.before - self.kept - (self.merged or 0)

    @property
    def gone(self) -> tuple[int, ...]:
        """The numbers of the removed channels."""
        kept = set(self.units)
        return tuple(unit for unit in range(self.before) if unit not in kept)

    @property
    def numbers(self) -> str:
        """Which channels stay and which go."""
        return f"kept: {format_ranges(self.units)}; removed: {format_ranges(self.gone)}" if self.units else ""


def format_ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, as people write them.

    >>> format_ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("–".join(map(str, run)) for run in found)


@dataclass(frozen=True)
class LatencyComparison:
    """Median seconds of a forward pass, by batch size: original and small."""

    seconds: Mapping[int, tuple[float, float]]
    threads: int


@dataclass(frozen=True)
class Figures:
    """Everything that was measured of a smaller network. What is None or empty is not known, and the page says so.

    Attributes
    ----------
    summary
        Before and after, group by group, with the verdict.
    bytes
        The size of all tensors before and after.
    layers
        Each group, with similarities and a picture of its scaling matrix where there is one.
    fidelity
        How alike the networks' answers are.
    latency
        Median seconds of a forward pass.
    inputs
        Some synthetic inputs, as addresses of pictures.
    """

    summary: Summary
    bytes: tuple[int, int]
    layers: tuple[LayerReport, ...]
    fidelity: Fidelity | None
    latency: LatencyComparison | None = None
    inputs: tuple[str, ...] = ()


def collect_figures(
    analysis: Analysis,
    small: nn.Module,
    plan: Plan,
    summary: Summary,
    fidelity: Fidelity | None,
    merges: Sequence[Merge] = (),
    inputs: Iterable[Sequence[Any]] = (),
) -> Figures:
    """Look at every group of the original that was cut. The latency is not measured here: that takes seconds.

    Without `merges` it is not known how channels were merged; similarities and pictures are left out.
    Images among `inputs`, which the merges were fitted on, are shown.
    """
    groups = {group.name: group for group in analysis.channels.groups}
    costs, shown = Costs(analysis), _find_images(inputs)
    return Figures(
        summary=summary,
        bytes=(_count_bytes(analysis.model), _count_bytes(small)),
        layers=tuple(
            replace(
                _describe_layer(choice, told, groups[choice.name], analysis.graph, merges),
                units=tuple(choice.kept),
                saved=_compute_savings(costs, choice),
            )
            for choice, told in zip(plan.groups, summary.groups, strict=True)
        ),
        fidelity=fidelity,
        inputs=() if shown is None else encode_images(shown),
    )


def _compute_savings(costs: Costs, choice: GroupDecision) -> tuple[float, float]:
    """Shares of parameters and multiply-accumulates that go with this group's channels alone."""
    cut = {choice.name: choice.kept}
    return (
        1 - costs.parameters(cut) / max(1, costs.parameters({})),
        1 - costs.macs(cut) / max(1, costs.macs({})),
    )


def _describe_layer(
    choice: GroupDecision, told: GroupSummary, group: Group, graph: Graph, merges: Sequence[Merge]
) -> LayerReport:
    own = [merge for merge in merges if merge.group == choice.name]
    kept = np.array(choice.kept)
    if not merges:
        return LayerReport(choice.name, choice.size, len(kept), None, told.error, told.said)
    removed = np.setdiff1d(np.arange(choice.size), kept)
    pictures = (build_scaling_image(merge, kept, removed, graph.tensors) for merge in own)
    return LayerReport(
        name=choice.name,
        before=choice.size,
        kept=len(kept),
        merged=min((_count_merged(merge, len(removed)) for merge in own), default=0),
        error=told.error,
        how=told.said,
        heat=next(filter(None, pictures), None),
        similarity=_compute_filter_similarity(graph, group, kept, removed),
    )


def _count_merged(merge: Merge, removed: int) -> int:
    """How many of the removed channels a reader took in."""
    return 0 if merge.kind is MergeKind.PRUNED else merge.folded if merge.scaling is not None else removed


def _compute_filter_similarity(graph: Graph, group: Group, kept: np.ndarray, removed: np.ndarray) -> tuple[float, ...]:
    """For each removed channel, the largest cosine of its filter with that of a kept one."""
    if not group.producers or len(kept) * len(removed) > MAX_SIMILARITY_PAIRS:
        return ()
    rows = filters_of(graph, group).double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    best = (rows[removed] @ rows[kept].T).amax(1)
    return tuple(round(value, SIMILARITY_DIGITS) for value in best.tolist())


def _count_bytes(model: nn.Module) -> int:
    """Of the weights, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _find_images(batches: Iterable[Sequence[Any]]) -> Tensor | None:
    """The first batch of images (n, c, h, w)."""
    values = (value for batch in batches for value in flatten_inputs(batch))
    return next((value for value in values if is_signal(value) and value.ndim == 4), None)


def measure_latency(model: nn.Module, small: nn.Module, inputs: tuple[Any, ...]) -> LatencyComparison | None:
    """Measured, for the batch sizes that the network takes."""
    networks = {"original": copy_without_hooks(model).eval(), "small": copy_without_hooks(small).eval()}
    found: dict[int, tuple[float, float]] = {}
    for size in LATENCY_BATCH_SIZES:
        if size * sum(found.get(1, ())) * (MIN_RUNS + 1) > MAX_BATCH_SECONDS:
            continue
        try:
            times = measure_latencies(networks, inputs, (size,), REPORT_RUNS, REPORT_SECONDS)
        except MergingError:
            continue
        found[size] = (times["original"][size], times["small"][size])
    return LatencyComparison(found, torch.get_num_threads()) if found else None
