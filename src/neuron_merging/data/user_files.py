"""Read the user's data sets: a folder of images, with or without a subfolder per class, or a .npz or .safetensors file
of arrays.
"""

from __future__ import annotations

import os
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from neuron_merging.data.images import (
    IMAGE_BATCH_SIZE,
    BatchedDataset,
    ImageLabelBatches,
    InMemoryDataset,
    Normalization,
    report_read_errors,
)
from neuron_merging.errors import MergingError
from neuron_merging.graph.user_code import import_module_or_raise
from neuron_merging.inputs.input_scale import COLOR_COUNTS, is_channels_last

LAYOUTS = CHANNELS_FIRST, CHANNELS_LAST = "NCHW", "NHWC"
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")


@dataclass(frozen=True, eq=False)
class FolderImages(BatchedDataset):
    """Images that are read from disk batch by batch, with the interface of `Images`.

    Files are sorted by class: `head(n)` has only the first classes, `subsample(n)` has all of them.

    Parameters
    ----------
    files
        One file per image.
    y
        Labels, int64 (N); -1 without classes.
    mean
        Mean per channel, for pixels in 0..1; one number for grey images, empty if still open.
    std
        Standard deviation per channel, for pixels in 0..1.
    name
        Name of the data, for reports.
    classes
        Number of classes; 0 without labels.
    resize
        Length of the short side after resizing; None does not resize.
    crop
        Height and width of the centre crop; None does not crop.
    channels_last
        Whether the network takes images as (N, H, W, C).
    bgr
        Whether the network takes the channels in the order blue, green, red.
    layout
        How the network takes images, "NCHW" or "NHWC"; None if its example input decides.
    whole_numbers
        Whether the network takes pixels as they are stored, 0 to 255.

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
    resize: int | None = 256
    crop: tuple[int, int] | None = (224, 224)
    channels_last: bool = False
    bgr: bool = False
    layout: str | None = None
    whole_numbers: bool = False

    def adapt_to(self, example: Tensor, norm: Normalization | None = None) -> FolderImages:
        last = is_channels_last(example) if self.layout is None else self.layout == CHANNELS_LAST
        example = example.movedim(-1, 1) if last else example
        channels, *size = example.shape[1:] if example.ndim == 4 else (3,)
        if self.layout is not None and channels not in COLOR_COUNTS:
            what = f"the network's input has {channels} channels in the layout {self.layout}"
            raise MergingError(what, where="layout=", fix="Give the other layout, or leave it out.")
        if channels not in COLOR_COUNTS:
            what = f"the network's input has {channels} channels, pictures have {' or '.join(map(str, COLOR_COUNTS))}"
            raise MergingError(what, where=self.name, fix="Give the inputs as array x of a .npz file.")
        norm = Normalization(self.mean, self.std) if self.mean else norm or Normalization.imagenet_default(channels)
        crop = self.crop or ((size[0], size[1]) if len(size) == 2 else None)
        # A crop that comes from the example has to fit into the image, so the short side is resized to it.
        resize = self.resize or (max(crop) if crop and not self.crop else None)
        whole = not example.is_floating_point()
        adapted = replace(self, mean=norm.mean, std=norm.std, resize=resize, crop=crop, channels_last=last)
        return replace(adapted, whole_numbers=whole)

    def select(self, indices: Sequence[int]) -> FolderImages:
        return replace(self, files=tuple(self.files[i] for i in indices), y=self.y[list(indices)])

    def head(self, n: int) -> FolderImages:
        """Return the first n images."""
        return replace(self, files=self.files[:n], y=self.y[:n])

    def _iter_content(self) -> Iterator[bytes]:
        """Yield names and sizes of the files instead of their content: reading all of ImageNet takes minutes."""
        yield repr([(path.name, os.path.getsize(path)) for path in self.files]).encode()
        yield self.y.cpu().numpy().tobytes()

    def _iter_raw_batches(self, size: int) -> ImageLabelBatches:
        """Yield batches; while the caller works on one, threads decode the next two."""
        # Threads suffice: Pillow releases the GIL while it decodes.
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        try:
            decode = partial(_decode_image, channels=len(self.mean), resize=self.resize, crop=self.crop)
            decoded = _decode_ahead(pool, decode, self.files, 2 * size)
            for start in range(0, len(self), size):
                stacked = _stack_images(list(islice(decoded, size)), self.files[start])
                yield stacked.flip(1) if self.bgr else stacked, self.y[start : start + size]
        finally:  # also when the caller stops in the middle
            pool.shutdown(cancel_futures=True)


def open_imagenet_folder(place: Path) -> FolderImages | None:
    """Open an ImageNet validation folder; None if it has no images.

    Sorted folder names are the classes. Empty folders count too, so that labels stay right in a partial copy.
    """
    folders, found = list_images_by_class(place)
    if not found:
        return None
    note = f" ({len(folders)} classes, not 1,000)" * (len(folders) != 1000)
    files, y = tuple(p for p, _ in found), torch.tensor([i for _, i in found])
    norm = Normalization.imagenet_default(3)
    return FolderImages(files, y, norm.mean, norm.std, f"imagenet validation{note}", len(folders))


def open_image_folder(place: Path) -> FolderImages:
    """Open a folder of class folders, or of images without labels. Normalisation and size are still open."""
    folders, found = list_images_by_class(place)
    with report_read_errors(str(place)):
        loose = sorted(file for file in place.iterdir() if _is_image_file(file))
    if found and loose:
        what = f"there are images beside folders of images: {loose[0].name} and {found[0][0].parent.name}"
        raise MergingError(what, where=str(place), fix="Give a folder for each class, or one folder without labels.")
    if not found and not loose:
        fix = f"Put images ({', '.join(IMAGE_SUFFIXES)}) there, in a folder for each class if they have labels."
        raise MergingError("the folder has no images", where=str(place), fix=fix)
    pairs = found or [(file, -1) for file in loose]
    files, y = tuple(p for p, _ in pairs), torch.tensor([i for _, i in pairs])
    return FolderImages(files, y, (), (), place.name or str(place), len(folders) if found else 0, None, None)


def list_images_by_class(place: Path) -> tuple[list[Path], list[tuple[Path, int]]]:
    """List the class folders, and the images in them with their labels."""
    with report_read_errors(str(place)):
        folders = sorted(p for p in place.iterdir() if p.is_dir() and p.name[0] != ".")
        inside = [(file, i) for i, folder in enumerate(folders) for file in sorted(folder.iterdir())]
    return folders, [(file, i) for file, i in inside if _is_image_file(file)]


def _is_image_file(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()


def _decode_image(path: Path, *, channels: int, resize: int | None, crop: tuple[int, int] | None) -> Tensor:
    """Decode an image, resize its short side and crop the centre, with the roundings of torchvision."""
    pillow = import_module_or_raise("PIL.Image", "pip install Pillow", "images", MergingError)
    with report_read_errors(str(path)), pillow.open(path) as file:
        image = file.convert("L" if channels == 1 else "RGB")
        width, height = image.size
        if resize is not None:
            short = min(width, height)
            width, height = (resize * side // short for side in (width, height))  # torchvision truncates
            image = image.resize((width, height), pillow.Resampling.BILINEAR)
        if crop is not None:
            if width < crop[1] or height < crop[0]:
                what = f"{width}x{height} pixels are too few to cut {crop[1]}x{crop[0]} out"
                raise MergingError(what, where=str(path), fix="Give a resize.")
            left, top = round((width - crop[1]) / 2), round((height - crop[0]) / 2)
            image = image.crop((left, top, left + crop[1], top + crop[0]))
        pixels = np.array(image)
    # (H, W) or (H, W, 3) to channels first
    planes = pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(planes))


def _stack_images(images: list[Tensor], first: Path) -> Tensor:
    """Stack images of one batch; refuse images of different sizes. `first` is a file of the batch."""
    shapes = {tuple(image.shape[1:]) for image in images}
    if len(shapes) > 1:
        what = f"the images have different sizes: {', '.join(f'{w}x{h}' for h, w in sorted(shapes)[:3])}"
        raise MergingError(what, where=str(first.parent), fix="Give resize and crop.")
    return torch.stack(images)


def _decode_ahead(
    pool: ThreadPoolExecutor, decode: Callable[[Path], Tensor], files: Iterable[Path], window: int
) -> Iterator[Tensor]:
    """Yield decoded images in order, with `window` of them always submitted: this bounds the memory."""
    remaining = iter(files)
    pending: deque[Future[Tensor]] = deque(pool.submit(decode, f) for f in islice(remaining, window))
    while pending:
        image = pending.popleft().result()
        pending.extend(pool.submit(decode, f) for f in islice(remaining, 1))
        yield image


ARRAY_SUFFIXES = (".npz", ".safetensors")
INPUT_ARRAY_NAMES, LABEL_ARRAY_NAMES = ("x", "images", "inputs", "data"), ("y", "labels", "label", "targets", "target")
"""Accepted names of the two arrays, in order of preference."""


@dataclass(frozen=True, eq=False)
class Arrays(InMemoryDataset):
    """Inputs in memory, one per index of the first axis. Bytes are pixels; other values reach the network unchanged.

    Parameters
    ----------
    x
        The inputs.
    y
        Labels, int64 (N); -1 without labels.
    mean
        For bytes: mean per channel, for pixels in 0..1; empty if still open.
    std
        Standard deviation per channel, for pixels in 0..1.
    name
        Name of the data, for reports.
    classes
        Number of classes; 0 without labels.
    channels_last
        Whether the network takes images as (N, H, W, C).
    whole_numbers
        Whether the network takes pixels as they are stored, 0 to 255.

    Examples
    --------
    >>> arrays = Arrays(torch.ones(3, 5), torch.full((3,), -1), (), (), "ones", 0)
    >>> [tuple(x.shape) for x in arrays]
    [(3, 5)]
    """

    channels_last: bool = False
    whole_numbers: bool = False

    @property
    def holds_pixels(self) -> bool:
        return self.x.dtype == torch.uint8

    def adapt_to(self, example: Tensor, norm: Normalization | None = None) -> Arrays:
        if not self.holds_pixels:
            return self
        last = is_channels_last(example)
        x = _to_channels_first(self.x, example.movedim(-1, 1) if last else example)
        norm = Normalization(self.mean, self.std) if self.mean else norm or Normalization.imagenet_default(x.shape[1])
        whole = not example.is_floating_point()
        return replace(self, x=x, mean=norm.mean, std=norm.std, channels_last=last, whole_numbers=whole)

    def normalize(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if x.dtype == torch.uint8:
            return super().normalize(x, dtype)
        return x.to(dtype) if x.is_floating_point() else x


def read_array_file(file: Path) -> Arrays | dict[str, Tensor]:
    """Read inputs as x (or images, inputs, data) and optional labels as y (or labels, targets) from a file.

    Arrays of other names are further inputs of the network: all arrays are then returned by name.
    """
    with report_read_errors(str(file)):
        arrays = _read_npz_arrays(file) if file.suffix == ".npz" else safetensors.torch.load_file(file)
    x = _pick_array(arrays, INPUT_ARRAY_NAMES)
    if x is not None and not x.numel():
        raise MergingError("the array of inputs is empty", where=str(file), fix="Give at least one sample.")
    inputs = [name for name in arrays if name not in LABEL_ARRAY_NAMES]
    if len(inputs) > 1:
        return _check_equal_lengths(arrays, file)
    if x is None or not x.ndim:
        what = f"there is no array of inputs among {', '.join(arrays) or 'nothing'}"
        raise MergingError(
            what, where=str(file), fix=f"Call it {INPUT_ARRAY_NAMES[0]}, and the labels {LABEL_ARRAY_NAMES[0]}."
        )
    y = _pick_array(arrays, LABEL_ARRAY_NAMES)
    if y is None:
        return Arrays(x, torch.full((len(x),), -1), (), (), file.name, 0)
    if y.is_floating_point() or y.shape != (len(x),) or int(y.min()) < 0:
        what = f"the labels are {y.dtype} of shape {tuple(y.shape)}, for {len(x)} inputs"
        raise MergingError(what, where=str(file), fix="Give integer labels from 0 on, one for each input.")
    return Arrays(x, y.long(), (), (), file.name, int(y.max()) + 1)


def _check_equal_lengths(arrays: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return the arrays of several inputs; raise unless each has one entry per sample."""
    lengths = {name: len(value) if value.ndim else 0 for name, value in arrays.items()}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        what = f"the arrays have different lengths: {', '.join(f'{name} {n}' for name, n in lengths.items())}"
        raise MergingError(what, where=str(file), fix="Give an entry per sample in each array.")
    return arrays


def iterate_array_batches(arrays: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield batches of the inputs of a network that has several, by name."""
    count = len(next(iter(arrays.values())))
    for start in range(0, count, IMAGE_BATCH_SIZE):
        yield {name: value[start : start + IMAGE_BATCH_SIZE] for name, value in arrays.items()}


def _read_npz_arrays(file: Path) -> dict[str, Tensor]:
    if file.is_file() and not zipfile.is_zipfile(file):
        raise ValueError("it is no .npz archive")
    # Without pickle: an object array could run code.
    with np.load(file, allow_pickle=False) as archive:
        return {name: torch.from_numpy(np.ascontiguousarray(archive[name])) for name in archive.files}


def _pick_array(arrays: Mapping[str, Tensor], names: Sequence[str]) -> Tensor | None:
    """Return the array with one of these names; a single array is the inputs, whatever its name."""
    named = next((arrays[name] for name in names if name in arrays), None)
    return next(iter(arrays.values())) if named is None and names is INPUT_ARRAY_NAMES and len(arrays) == 1 else named


def _to_channels_first(x: Tensor, example: Tensor) -> Tensor:
    """Convert pixels to (N, C, H, W): files often store (N, H, W, C), or (N, H, W) for grey images."""
    if x.ndim == 3:
        x = x[:, None]
    # Only if the channels cannot be where the network wants them: a 3×3 image fits both ways.
    if x.ndim == example.ndim == 4 and x.shape[1] != example.shape[1] and x.shape[3] == example.shape[1]:
        return x.permute(0, 3, 1, 2)
    return x
