"""folders: images that stay on the disk, one folder for each class, as those of ImageNet."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from neuron_merging.data.faults import blaming, need
from neuron_merging.data.images import Batched, Pairs


@dataclass(frozen=True, eq=False)
class FolderImages(Batched):
    """Images that stay on the disk, with the interface of `Images`.

    The order is that of the files, class by class: `head(n)` has the first classes only.

    Parameters
    ----------
    files
        One for each image.
    y
        Labels, int64 (N).
    mean
        Per channel, of pixels in 0..1.
    std
        Per channel, of pixels in 0..1.
    name
        What they are, for people.
    classes
        How many classes there are.

    Examples
    --------
    >>> load("imagenet", root="~/imagenet").head(100)                # doctest: +SKIP
    """

    files: tuple[Path, ...]
    y: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    classes: int

    def head(self, n: int) -> FolderImages:
        """The first n images."""
        return replace(self, files=self.files[:n], y=self.y[:n])

    def _content(self) -> Iterator[bytes]:
        """Names and sizes: to read all of ImageNet takes minutes."""
        yield repr([(path.name, os.path.getsize(path)) for path in self.files]).encode()
        yield self.y.numpy().tobytes()

    def _raw(self, size: int) -> Pairs:
        """While the caller works on one batch, threads decode the next two."""
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        try:
            decoded = _ahead(pool, self.files, 2 * size)
            for start in range(0, len(self), size):
                yield torch.stack(list(islice(decoded, size))), self.y[start : start + size]
        finally:
            pool.shutdown(cancel_futures=True)


def folder_images(place: Path) -> FolderImages | None:
    """Sorted folder names are the classes, empty ones included."""
    with blaming(str(place)):
        folders = sorted(p for p in place.iterdir() if p.is_dir() and p.name[0] != ".")
        inside = [(file, i) for i, folder in enumerate(folders) for file in sorted(folder.iterdir())]
    found = [(file, i) for file, i in inside if file.suffix.lower() in (".jpeg", ".jpg", ".png")]
    if not found:
        return None
    note = f" ({len(folders)} classes, not 1,000)" * (len(folders) != 1000)
    files, y = tuple(p for p, _ in found), torch.tensor([i for _, i in found])
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return FolderImages(files, y, mean, std, f"imagenet validation{note}", len(folders))


def _decode(path: Path) -> Tensor:
    """Short side to 256, the 224x224 in the middle, with torchvision's roundings."""
    pillow = need("PIL.Image", "Pillow")
    with blaming(str(path)), pillow.open(path) as file:
        image = file.convert("RGB")
        short = min(image.size)
        width, height = (256 * side // short for side in image.size)
        image = image.resize((width, height), pillow.Resampling.BILINEAR)
        left, top = round((width - 224) / 2), round((height - 224) / 2)
        pixels = np.array(image.crop((left, top, left + 224, top + 224)))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _ahead(pool: ThreadPoolExecutor, files: Iterable[Path], window: int) -> Iterator[Tensor]:
    """Decoded images in order; `window` of them are always under way."""
    waiting = iter(files)
    pending: deque[Future[Tensor]] = deque(pool.submit(_decode, f) for f in islice(waiting, window))
    while pending:
        image = pending.popleft().result()
        pending.extend(pool.submit(_decode, f) for f in islice(waiting, 1))
        yield image
