"""Labelled images in batches: normalisation, subsampling, and errors of unreadable files as one MergingError."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from neuron_merging.errors import MergingError


@contextmanager
def report_read_errors(where: str) -> Iterator[None]:
    """Turn any exception inside the block into a MergingError about the file `where`.

    Every exception is caught, because a damaged file can raise any: zlib, tar, zip and pickle have their own
    exceptions and pass on others.
    """
    try:
        yield
    except MergingError:
        raise
    except FileNotFoundError as error:
        raise MergingError("there is no such file", where=where, fix="Check the path") from error
    except PermissionError as error:
        fix = "Allow it to be read, or give another folder"
        raise MergingError(f"cannot read this file: {error.strerror}", where=where, fix=fix) from error
    except Exception as error:
        what = f"cannot read this file: {str(error) or type(error).__name__}"
        fix = "It is damaged, cut short or something else: remove it and get it again"
        raise MergingError(what, where=where, fix=fix) from error


Device = torch.device | str
ImageLabelBatches = Iterator[tuple[Tensor, Tensor]]
IMAGE_BATCH_SIZE = 128
"""Images in a batch by default."""


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation per channel, for pixels in 0..1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def imagenet_default(cls, channels: int) -> Normalization:
        """Return ImageNet's statistics; for another number of channels than three, their mean over channels."""
        if channels == 3:
            return cls((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        return cls((0.449,) * channels, (0.226,) * channels)


class BatchedDataset(ABC):
    """A data set that yields normalised batches. It moves bytes to the device and converts them to floats there."""

    y: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int
    channels_last: bool = False
    """Whether the network takes images as (N, H, W, C)."""
    whole_numbers: bool = False
    """Whether the network takes pixels as they are stored, 0 to 255."""

    def __len__(self) -> int:
        return len(self.y)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches like a data loader: pairs of images and labels, or images alone."""
        for x, y in self.batches(IMAGE_BATCH_SIZE):
            yield (x, y) if self.has_labels else x

    @property
    def has_labels(self) -> bool:
        """Whether the images have labels."""
        return self.classes > 0

    def adapt_to(self, example: Tensor, norm: Normalization | None = None) -> Self:
        """Return the data set with the example's image size and a normalisation, where these are still open."""
        return self

    @abstractmethod
    def select(self, indices: Sequence[int]) -> Self:
        """Return the images at these indices, in this order."""

    def subsample(self, count: int) -> Self:
        """Return `count` images at equal distances: files are often sorted by class."""
        step = max(1, len(self) // count)
        return self.select(range(0, len(self), step)[:count])

    def batches(self, size: int, device: Device = "cpu", dtype: torch.dtype = torch.float32) -> ImageLabelBatches:
        """Yield normalised images and their labels, in order.

        Parameters
        ----------
        size
            Images in a batch; the last may have fewer.
        device
            The device of the batches.
        dtype
            The type of the images.

        Yields
        ------
        tuple[Tensor, Tensor]
            Images and labels.

        Raises
        ------
        MergingError
            A size below one.
        """
        if size < 1:
            raise MergingError(f"a batch of {size} images", where="batches()", fix="Give size >= 1")
        for x, y in self._iter_raw_batches(size):
            images = self.normalize(x.to(device), dtype)
            # After the normalisation, which works on (N, C, H, W).
            yield images.movedim(1, -1).contiguous() if self.channels_last else images, y.to(device)

    def normalize(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Convert bytes to normalised floats, (x / 255 − mean) / std, on the device of the bytes."""
        if self.whole_numbers:
            return x
        if not self.mean:
            return x.to(torch.float32).div_(255).to(dtype)
        # float16 would lose digits in the division; the result is rounded once, at the end.
        work = torch.float64 if dtype == torch.float64 else torch.float32
        mean, std = (torch.tensor(v, device=x.device, dtype=work).view(-1, 1, 1) for v in (self.mean, self.std))
        # In the order of the published pipelines: WARE divides by logits near zero, which amplifies rounding.
        return x.to(work, copy=True).div_(255).sub_(mean).div_(std).to(dtype)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content and the normalisation."""
        checksum = hashlib.sha256(repr((self.mean, self.std)).encode())
        for part in self._iter_content():
            checksum.update(part)
        return checksum.hexdigest()

    @abstractmethod
    def _iter_content(self) -> Iterator[bytes]:
        """Yield the bytes that the digest covers."""

    @abstractmethod
    def _iter_raw_batches(self, size: int) -> ImageLabelBatches:
        """Yield bytes and labels, `size` images at a time."""


@dataclass(frozen=True, eq=False)
class InMemoryDataset(BatchedDataset):
    """Inputs and labels as two tensors."""

    x: Tensor
    y: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    classes: int

    def select(self, indices: Sequence[int]) -> Self:
        chosen = torch.tensor(list(indices), dtype=torch.int64, device="cpu")
        return replace(self, x=self.x[chosen], y=self.y[chosen])

    def _iter_content(self) -> Iterator[bytes]:
        yield self.x.cpu().contiguous().numpy().tobytes()
        yield self.y.cpu().numpy().tobytes()

    def _iter_raw_batches(self, size: int) -> ImageLabelBatches:
        for start in range(0, len(self), size):
            yield self.x[start : start + size], self.y[start : start + size]


@dataclass(frozen=True, eq=False)
class Images(InMemoryDataset):
    """Labelled images in memory.

    Parameters
    ----------
    x
        Bytes, uint8 (N, C, H, W).
    y
        Labels, int64 (N).
    mean
        Mean per channel, for pixels in 0..1.
    std
        Standard deviation per channel, for pixels in 0..1.
    name
        Name of the data, for reports.
    classes
        Number of classes.

    Examples
    --------
    >>> pixels = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8)
    >>> images = Images(pixels, torch.arange(3), (0.5,), (0.5,), "white", 3)
    >>> [(len(x), round(x.max().item(), 3), y.tolist()) for x, y in images.batches(2)]
    [(2, 1.0, [0, 1]), (1, 1.0, [2])]
    """

    def head(self, n: int) -> Images:
        """Return the first n images, without a copy."""
        return replace(self, x=self.x[:n], y=self.y[:n])
