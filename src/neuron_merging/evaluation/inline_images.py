"""PNG images embedded in the page: example inputs, and the scaling matrix Z of a merge.

V' = V ×₂ Z: column n of Z expresses channel n of the original in terms of the kept channels.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from neuron_merging.calibration.regression import solve_scaling_matrix
from neuron_merging.channels.labels import Units
from neuron_merging.channels.weight_views import columns_of
from neuron_merging.graph.precision import to_working_precision
from neuron_merging.merging.protocol import Merge

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
