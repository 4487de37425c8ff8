"""arrays: inputs and labels from a .npz or .safetensors file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from neuron_merging.data.faults import blaming
from neuron_merging.data.images import InMemory, Norm
from neuron_merging.errors import MergingError
from neuron_merging.statistics.synthetic import is_channels_last

SUFFIXES = (".npz", ".safetensors")
INPUTS, LABELS = ("x", "images", "inputs", "data"), ("y", "labels", "label", "targets", "target")
"""What people call the two arrays."""


@dataclass(frozen=True, eq=False)
class Arrays(InMemory):
    """Inputs in memory, one along the first axis each: bytes are pixels, other numbers go to the network as they are.

    Parameters
    ----------
    x
        The inputs.
    y
        Labels, int64 (N); -1 where there are none.
    mean
        For bytes: per channel, of pixels in 0..1; none if it is left open.
    std
        Per channel, of pixels in 0..1.
    name
        What they are, for people.
    classes
        How many classes there are; 0: no labels.
    last
        Whether the colours come last in what a network is given.

    Examples
    --------
    >>> arrays = Arrays(torch.ones(3, 5), torch.full((3,), -1), (), (), "ones", 0)
    >>> [tuple(x.shape) for x in arrays]
    [(3, 5)]
    """

    last: bool = False

    @property
    def holds_pixels(self) -> bool:
        return self.x.dtype == torch.uint8

    def like(self, example: Tensor, norm: Norm | None = None) -> Arrays:
        if not self.holds_pixels:
            return self
        last = is_channels_last(example)
        x = _channels_first(self.x, example.movedim(-1, 1) if last else example)
        norm = Norm(self.mean, self.std) if self.mean else norm or Norm.usual(x.shape[1])
        return replace(self, x=x, mean=norm.mean, std=norm.std, last=last)

    def normalised(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if x.dtype == torch.uint8:
            return super().normalised(x, dtype)
        return x.to(dtype) if x.is_floating_point() else x


def read_arrays(file: Path) -> Arrays:
    """What a file holds: inputs as x (images, inputs, data) and, if it has them, labels as y (labels, targets)."""
    with blaming(str(file)):
        found = _npz(file) if file.suffix == ".npz" else safetensors.torch.load_file(file)
    x = _named(found, INPUTS)
    if x is None or not x.ndim or not len(x):
        what = f"there is no array of inputs among {', '.join(found) or 'nothing'}"
        raise MergingError(what, where=str(file), fix=f"Call it {INPUTS[0]}, and the labels {LABELS[0]}.")
    y = _named(found, LABELS)
    if y is None:
        return Arrays(x, torch.full((len(x),), -1), (), (), file.name, 0)
    if y.is_floating_point() or y.shape != (len(x),) or int(y.min()) < 0:
        what = f"the labels are {y.dtype} of shape {tuple(y.shape)}, for {len(x)} inputs"
        raise MergingError(what, where=str(file), fix="Labels are whole numbers from 0 on, one for each input.")
    return Arrays(x, y.long(), (), (), file.name, int(y.max()) + 1)


def _npz(file: Path) -> dict[str, Tensor]:
    with np.load(file, allow_pickle=False) as archive:
        return {name: torch.from_numpy(np.ascontiguousarray(archive[name])) for name in archive.files}


def _named(found: Mapping[str, Tensor], names: Sequence[str]) -> Tensor | None:
    """The array of one of these names; inputs may be called as they like where there is nothing else."""
    known = next((found[name] for name in names if name in found), None)
    return next(iter(found.values())) if known is None and names is INPUTS and len(found) == 1 else known


def _channels_first(x: Tensor, example: Tensor) -> Tensor:
    """Pixels as (N, C, H, W): files often have the channels last, or, where there is one, none at all."""
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim == example.ndim == 4 and x.shape[1] != example.shape[1] and x.shape[3] == example.shape[1]:
        return x.permute(0, 3, 1, 2)
    return x
