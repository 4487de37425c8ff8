"""Open a data set by name, by path, or by a function that yields its batches. Other packages register named data sets
with `register_datasets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from neuron_merging.data import user_files
from neuron_merging.data.images import Images
from neuron_merging.data.texts import TEXT_SUFFIXES, TextFile
from neuron_merging.data.user_files import (
    LAYOUTS,
    Arrays,
    FolderImages,
    iterate_array_batches,
    open_image_folder,
    read_array_file,
)
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
"""Opens a data set, given the split, the folder to look in, and whether it may be downloaded."""
DATASETS: dict[str, DatasetOpener] = {}
"""Registered data sets, by name."""


def register_datasets(openers: Mapping[str, DatasetOpener]) -> None:
    """Register data sets by name."""
    DATASETS.update(openers)


def list_dataset_names() -> tuple[str, ...]:
    """Return the names that `--calibrate` and `--eval` accept."""
    load_plugins()
    return tuple(DATASETS)


@dataclass(frozen=True)
class Preprocessing:
    """The user's preprocessing: mean and std per channel, short side after resizing, size of the centre crop.

    Empty or None means that the network's example input decides.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    resize: int | None = None
    crop: tuple[int, int] | None = None
    bgr: bool = False
    layout: str | None = None


@dataclass(frozen=True)
class FunctionBatches:
    """Batches from a function of the user, which is called for every pass."""

    make_batches: Callable[[], Any]
    name: str
    max_batches: int | None = None
    """The largest number of batches; None takes all."""

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from islice(self.make_batches(), self.max_batches)
        except MergingError:
            raise
        except Exception as error:  # any exception of the user's code
            what = f"{self.name} raised {describe_error(error)}"
            fix = "It is called without arguments and yields batches."
            raise MergingError(what, where=find_user_line(error) or self.name, fix=fix) from error


def open_dataset(
    text: str, split: Split, *, download: bool = False, framing: Preprocessing | None = None
) -> AnyDataset:
    """Open the data set `NAME` or `NAME:PATH`, where PATH is a folder or a file in it; or open a folder or file."""
    name, path = split_reference(text)
    if name not in list_dataset_names():
        found = images(text, **vars(framing or Preprocessing()))
        if isinstance(found, FunctionBatches):
            what = "the file holds several inputs, and one is expected"
            raise MergingError(what, where=text, fix="Give inputs x and labels y.")
        return found
    root = Path(path).expanduser() if path else None
    # A file stands for the folder that it lies in.
    return DATASETS[name](split, root.parent if root and root.is_file() else root, download)


def open_batches(
    text: str, split: Split, framing: Preprocessing | None = None
) -> AnyDataset | FunctionBatches | TextFile:
    """Open a data set as `open_dataset` does, a text file, or the batches of `package.module:function`."""
    if Path(text).suffix in TEXT_SUFFIXES:
        return TextFile(text)
    if Path(text).suffix in user_files.ARRAY_SUFFIXES:
        return images(text, **vars(framing or Preprocessing()))
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
    bgr: bool = False,
    layout: str | None = None,
) -> FolderImages | Arrays | FunctionBatches:
    """Open images from a folder or a file, for `compress(calibration=, evaluate=)`.

    Parameters
    ----------
    place
        A folder with one subfolder of images per class, a folder of images (no labels), or a .npz or .safetensors
        file with inputs `x` and optional labels `y`. In a file, uint8 values are pixels; other values reach the
        network unchanged. For a network of several inputs, the file has an array for each, with the input's name; `x`
        may stand for the first.
    mean
        Mean per channel, for pixels in 0..1; one number for grey images. Default: ImageNet's.
    std
        Standard deviation per channel.
    resize
        The length of the short side after resizing, in pixels.
    crop
        The size, or height and width, of the centre crop. Without `resize` and `crop`, images are resized and
        cropped to the size of the network's example input.
    bgr
        Whether the network takes the images of a folder in the order blue, green, red; `mean` and `std` are then in
        this order, too.
    layout
        "NCHW" or "NHWC", how the network takes the images of a folder. Default: what the shape of the network's
        example input says, which is ambiguous where height or width is 1 or 3.

    Returns
    -------
    FolderImages | Arrays | FunctionBatches
        The images, with labels if there are classes. `subsample(n)` returns n of them at equal distances.

    Raises
    ------
    MergingError
        The path does not exist, has no images, or cannot be read.

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
        found, layout = open_image_folder(path), _check_layout(layout)
        return replace(found, mean=norm[0], std=norm[1], resize=resize, crop=size, bgr=bgr, layout=layout)
    if path.suffix in user_files.ARRAY_SUFFIXES:
        arrays = read_array_file(path)
        if isinstance(arrays, dict):
            return FunctionBatches(partial(iterate_array_batches, arrays), path.name)
        return replace(arrays, mean=norm[0], std=norm[1])
    raise MergingError(
        f"{str(place)!r} is no folder, no file of arrays and no data set", where="data", fix=_describe_data_forms()
    )


def _check_layout(layout: str | None) -> str | None:
    """Return the layout in capital letters."""
    if layout is None or layout.upper() in LAYOUTS:
        return layout and layout.upper()
    raise MergingError(f"{layout!r} is no layout of images", where="layout=", fix=f"Give {' or '.join(LAYOUTS)}.")


def _describe_data_forms() -> str:
    names = ", ".join(list_dataset_names())
    return f"Give a folder of images, a .npz, .safetensors or .txt file, {names}, or package.module:function."


def _check_normalization(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    if len(mean) != len(std) or len(mean) not in (0, 1, 3) or not all(value > 0 for value in std):
        what = f"mean {list(mean)} and std {list(std)} are no normalisation"
        raise MergingError(
            what, where="mean=, std=", fix="Give both, one or three numbers each; deviations are positive."
        )
