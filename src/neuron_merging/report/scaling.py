"""scaling: the scaling matrix Z of a merge, as a picture.

V' = V ×₂ Z: column n of Z says what channel n of the original becomes in terms of the kept ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.filters import columns_of
from neuron_merging.channels.labels import Units
from neuron_merging.graph.precision import working
from neuron_merging.mergers.interface import Merge
from neuron_merging.report.gallery import as_address, png

CELLS = (128, 256)
"""Rows and columns of the largest picture; of more, each cell shows its largest entry."""
LARGEST = 2048
"""Removed channels for which the nearest matrix is still computed."""
RIDGE = 1e-3
POSITIVE, NEGATIVE = (37, 99, 235), (234, 88, 12)


@dataclass(frozen=True)
class Heat:
    """A picture of Z with the kept channels' columns first. `top` is the value of full colour."""

    reader: str
    shape: tuple[int, int]
    exact: bool
    top: float
    image: str
    whole: bool


def heat(merge: Merge, kept: Units, removed: Units, tensors: Mapping[str, Tensor]) -> Heat | None:
    """The matrix that a merge used or, where it used none, the one that comes nearest to it."""
    if merge.scaling is not None:
        scales = merge.scaling.to_dense().double().cpu().numpy()
    elif merge.columns is None:
        scales = np.zeros((len(kept), len(removed)))
    else:
        found = _nearest(merge, kept, removed, tensors)
        if found is None:
            return None
        scales = found
    reader = merge.consumer.node.module or merge.consumer.node.name
    exact = merge.scaling is not None or merge.columns is None
    return picture(np.concatenate([np.eye(len(kept)), scales], 1), len(kept), reader, exact)


def _nearest(merge: Merge, kept: Units, removed: Units, tensors: Mapping[str, Tensor]) -> np.ndarray | None:
    """Z by least squares: new columns minus old ones, in terms of the removed ones."""
    consumer, axis = merge.consumer, merge.consumer.axis
    if axis is None or merge.columns is None or len(removed) > LARGEST or (consumer.columns < 0).any():
        return None
    weight = axis.expose(working(tensors[axis.tensor].detach())).double().movedim(axis.dim, 0)
    place = {int(position): i for i, position in enumerate(merge.positions)}
    at = [place.get(int(column), -1) for column in columns_of(consumer, kept)]
    if min(at) < 0:
        return None
    new = merge.columns.double().movedim(axis.dim, 0)[at]
    old, gone = (weight[columns_of(consumer, units).to(weight.device)] for units in (kept, removed))
    change, basis = (new.to(old) - old).reshape(len(kept), -1), gone.reshape(len(removed), -1)
    gram = basis @ basis.T
    gram.diagonal().add_(RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny)
    solved: np.ndarray = torch.linalg.solve(gram, basis @ change.T).T.cpu().numpy()
    return solved if np.isfinite(solved).all() else None


def picture(matrix: np.ndarray, kept: int, reader: str, exact: bool) -> Heat:
    """A matrix as an image: blue above zero, orange below, clear at zero."""
    rows, columns = matrix.shape
    aside = np.abs(matrix[:, kept:])
    top = float(np.quantile(aside[aside > 0], 0.99)) if (aside > 0).any() else 1.0
    small = _shrunk(_shrunk(matrix, CELLS[0], 0), CELLS[1], 1)
    level = np.clip(np.round(small / top * 127), -127, 127).astype(int) + 127
    image = as_address(png(level.astype(np.uint8)[:, :, None], _palette()))
    return Heat(reader, (rows, columns), exact, top, image, whole=small.shape == matrix.shape)


def _shrunk(matrix: np.ndarray, most: int, axis: int) -> np.ndarray:
    """At most this many rows or columns, each the entry of largest size of those that it stands for."""
    step = -(-matrix.shape[axis] // most)
    if step == 1:
        return matrix
    parts = np.split(matrix, range(step, matrix.shape[axis], step), axis)
    strongest = [np.expand_dims(np.abs(part).argmax(axis), axis) for part in parts]
    picked = [np.take_along_axis(part, at, axis) for part, at in zip(parts, strongest, strict=True)]
    return np.concatenate(picked, axis)


def _palette() -> dict[bytes, bytes]:
    """Colours of the levels 0…254 with 127 for zero, which lets the page shine through."""
    strength = [round(255 * (abs(level - 127) / 127) ** 0.7) for level in range(255)]
    colours = b"".join(bytes(POSITIVE if level > 127 else NEGATIVE) for level in range(255))
    return {b"PLTE": colours, b"tRNS": bytes(strength)}
