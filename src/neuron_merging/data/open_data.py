"""Open a data set by its name, its path, or the function that yields its batches. Named data sets are registered
by other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from neuron_merging.data import user_files
from neuron_merging.data.images import Images
from neuron_merging.data.user_files import Arrays, FolderImages, open_image_folder, read_array_file
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.user_code import (
    find_user_line,
    import_object,
    is_code_reference,
    load_plugins,
    split_reference,
)

Split = Literal["train", "test"]
AnyDataset = Images | FolderImages | Arrays
DatasetOpener = Callable[[Split, Path | None, bool], AnyDataset]
"""Opens a data set: its split, the folder to look in, and whether it may be downloaded."""
DATASETS: dict[str, DatasetOpener] = {}
"""Registered data sets, by name."""


def register_datasets(openers: Mapping[str, DatasetOpener]) -> None:
    """Add data sets by name."""
    DATASETS.update(openers)


def list_dataset_names() -> tuple[str, ...]:
    """The names that `--calibrate` and `--eval` know."""
    load_plugins()
    return tuple(DATASETS)


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become inputs, as far as the user says: per-channel mean and std, short side, size of the middle."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    resize: int | None = None
    crop: tuple[int, int] | None = None


@dataclass(frozen=True)
class FunctionBatches:
    """Batches of a function of the user's, which is called for every pass over them."""

    make_batches: Callable[[], Any]
    name: str
    max_batches: int | None = None
    """At most so many batches."""

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from islice(self.make_batches(), self.max_batches)
        except MergingError:
            raise
        except Exception as error:  # whatever the user's code raises is told as its own
            what = f"{self.name} raised {describe_error(error)}"
            fix = "It is called without arguments and yields batches."
            raise MergingError(what, where=find_user_line(error) or self.name, fix=fix) from error


def open_dataset(
    text: str, split: Split, *, download: bool = False, framing: Preprocessing | None = None
) -> AnyDataset:
    """The data set of `NAME` or `NAME:PATH`, where PATH is a folder or a file in it, or of a folder or file."""
    name, path = split_reference(text)
    if name not in list_dataset_names():
        return images(text, **vars(framing or Preprocessing()))
    root = Path(path).expanduser() if path else None
    return DATASETS[name](split, root.parent if root and root.is_file() else root, download)


def open_batches(text: str, split: Split, framing: Preprocessing | None = None) -> AnyDataset | FunctionBatches:
    """The same, or the batches of `package.module:function`."""
    if not is_code_reference(text, list_dataset_names()):
        return open_dataset(text, split, framing=framing)
    module, name = split_reference(text)
    return FunctionBatches(import_object(module, name, text), text)


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
    >>> len(test), test.classes, test.subsample(3).y.tolist()
    (20, 5, [0, 1, 2])
    """
    path, norm = Path(place).expanduser(), (tuple(map(float, mean)), tuple(map(float, std)))
    _check_normalization(*norm)
    if path.is_dir():
        size = (crop, crop) if isinstance(crop, int) else crop
        found = open_image_folder(path)
        return replace(found, mean=norm[0], std=norm[1], resize=resize, crop=size)
    if path.suffix in user_files.ARRAY_SUFFIXES:
        return replace(read_array_file(path), mean=norm[0], std=norm[1])
    raise MergingError(
        f"{str(place)!r} is no folder, no file of arrays and no data set", where="data", fix=_describe_data_forms()
    )


def _describe_data_forms() -> str:
    names = ", ".join(list_dataset_names())
    return f"Give a folder of images, a .npz or .safetensors file, {names}, or package.module:function."


def _check_normalization(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    if len(mean) != len(std) or len(mean) not in (0, 1, 3) or not all(value > 0 for value in std):
        what = f"mean {list(mean)} and std {list(std)} are no normalisation"
        raise MergingError(
            what, where="mean=, std=", fix="Give both, one or three numbers each; deviations are positive."
        )
