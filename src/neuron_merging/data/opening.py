"""A data set by the text that names it, and by the folder or file that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from neuron_merging.data import arrays
from neuron_merging.data.arrays import Arrays, read_arrays
from neuron_merging.data.embedded import digits
from neuron_merging.data.folders import FolderImages, own_images
from neuron_merging.data.images import Images
from neuron_merging.data.search import DATASETS, Split, load
from neuron_merging.errors import MergingError, told
from neuron_merging.graph.usercode import imported, names_code, place_of

FORMS = (
    f"Give a folder of images, a .npz or .safetensors file, {', '.join(DATASETS)}, digits, or package.module:function."
)
NAMES = (*DATASETS, "digits")
Data = Images | FolderImages | Arrays


@dataclass(frozen=True)
class Framing:
    """How pixels become inputs, as far as the user says: per-channel mean and std, short side, size of the middle."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    resize: int | None = None
    crop: tuple[int, int] | None = None


@dataclass(frozen=True)
class Yielded:
    """Batches of a function of the user's, which is called for every pass over them."""

    make: Callable[[], Any]
    name: str
    count: int | None = None
    """At most so many batches."""

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from islice(self.make(), self.count)
        except MergingError:
            raise
        except Exception as error:  # whatever the user's code raises is told as its own
            what = f"{self.name} raised {told(error)}"
            fix = "It is called without arguments and yields batches."
            raise MergingError(what, where=place_of(error) or self.name, fix=fix) from error


def open_data(text: str, split: Split, *, download: bool = False, framing: Framing | None = None) -> Data:
    """The data set of `NAME` or `NAME:PATH`, where PATH is a folder or a file in it, or of a folder or file."""
    name, _, path = text.partition(":")
    if name == "digits":
        return digits(split)
    if name not in NAMES:
        return images(text, **vars(framing or Framing()))
    root = Path(path).expanduser() if path else None
    return load(name, split, root.parent if root and root.is_file() else root, download=download)


def open_batches(text: str, split: Split, framing: Framing | None = None) -> Data | Yielded:
    """The same, or the batches of `package.module:function`."""
    if not names_code(text, NAMES):
        return open_data(text, split, framing=framing)
    module, _, name = text.partition(":")
    return Yielded(imported(module, name, text), text)


def images(
    place: str | Path,
    *,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    resize: int | None = None,
    crop: int | tuple[int, int] | None = None,
) -> FolderImages | Arrays:
    """Images of yours, from a folder or a file, for `compress(calibration=, evaluate=)`.

    Parameters
    ----------
    place
        A folder with a folder of images for each class, a folder of images (no labels), or a .npz or .safetensors
        file with inputs `x` and, if there are any, labels `y`. In a file, bytes are pixels; other numbers go to the
        network as they are.
    mean
        Of each channel, of pixels in 0..1; one number for grey images. Left out: ImageNet's.
    std
        Of each channel.
    resize
        What the short side of each image becomes.
    crop
        The size, or height and width, that is cut out of the middle. Left out with `resize`: images are
        brought to the size that the network takes.

    Returns
    -------
    FolderImages | Arrays
        With labels where there are classes; `some(n)` has n of them, at equal distances.

    Raises
    ------
    MergingError
        There is nothing, or it cannot be read.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as place:
    ...     np.savez(f"{place}/test.npz", x=np.zeros((20, 3, 8, 8), np.uint8), y=np.arange(20) % 5)
    ...     test = images(f"{place}/test.npz", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    >>> len(test), test.classes, test.some(3).y.tolist()
    (20, 5, [0, 1, 2])
    """
    path, norm = Path(place).expanduser(), (tuple(map(float, mean)), tuple(map(float, std)))
    _check_norm(*norm)
    if path.is_dir():
        size = (crop, crop) if isinstance(crop, int) else crop
        found = own_images(path)
        return replace(found, mean=norm[0], std=norm[1], resize=resize, crop=size)
    if path.suffix in arrays.SUFFIXES:
        return replace(read_arrays(path), mean=norm[0], std=norm[1])
    raise MergingError(f"{str(place)!r} is no folder, no file of arrays and no data set", where="data", fix=FORMS)


def _check_norm(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    if len(mean) != len(std) or len(mean) not in (0, 1, 3) or not all(value > 0 for value in std):
        what = f"mean {list(mean)} and std {list(std)} are no normalisation"
        raise MergingError(
            what, where="mean=, std=", fix="Give both, one or three numbers each; deviations are positive."
        )
