"""Load the paper's data sets from the disk or the web: FashionMNIST, CIFAR-10, CIFAR-100 and ImageNet's validation
images, and scikit-learn's digits.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, overload

import numpy as np
import torch

from neuron_merging.data.images import Images, report_read_errors
from neuron_merging.data.open_data import DatasetOpener, Split, register_datasets
from neuron_merging.data.user_files import FolderImages, open_imagenet_folder
from neuron_merging.errors import MergingError
from neuron_merging.graph.user_code import import_module_or_raise
from neuron_merging.reproduction.dataset_files import (
    ArrayPair,
    download_file,
    read_cifar_binary,
    read_cifar_pickle,
    read_mnist_idx,
    read_npz_images,
)


@dataclass(frozen=True)
class FileLayout:
    """One format in which a split is stored: files (gzipped or not), or an archive of them."""

    read: Callable[[bytes], ArrayPair]
    files: tuple[str, ...]
    archive: str = ""
    is_partial: bool = False
    """Whether the files contain only a part of the split."""

    @property
    def published_files(self) -> tuple[str, ...]:
        """The names of the files to download."""
        return (self.archive,) if self.archive else tuple(f"{name}.gz" for name in self.files)


@dataclass(frozen=True)
class DatasetSpec:
    """The format of a data set's images, and the folders in which to look for its files."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sizes: Mapping[str, int]
    url: str
    layouts: Mapping[str, tuple[FileLayout, ...]]
    """Formats by split; the first is the one to download."""
    subfolders: tuple[str, ...] = ("",)
    system_folders: tuple[str, ...] = ()


def _list_fashion_mnist_layouts(stem: str) -> tuple[FileLayout, ...]:
    return (FileLayout(read_mnist_idx, (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")),)


def _list_cifar_layouts(classes: int, split: str, *batches: str) -> tuple[FileLayout, ...]:
    ten = classes == 10
    binary, python = ("batches-bin", "batches-py") if ten else ("binary", "python")
    from_binary = partial(read_cifar_binary, label_bytes=1 if ten else 2)
    from_python = partial(read_cifar_pickle, label="labels" if ten else "fine_labels")
    bins = tuple(f"cifar-{classes}-{binary}/{batch}.bin" for batch in batches)
    pickles = tuple(f"cifar-{classes}-{python}/{batch}" for batch in batches)
    partial_split = FileLayout(read_npz_images, (f"cifar{classes}_train_2k.npz",), is_partial=True)
    return (
        FileLayout(from_binary, bins, f"cifar-{classes}-binary.tar.gz"),
        FileLayout(from_python, pickles, f"cifar-{classes}-python.tar.gz"),
        FileLayout(read_npz_images, (f"cifar{classes}_{split}.npz",)),
        *([partial_split] if split == "train" else []),
    )


MD5_SUMS = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
"""Checksums of the published files. Only downloads are checked: repacked archives have other checksums."""

_FASHION_MNIST = DatasetSpec(
    shape=(1, 28, 28),
    classes=10,
    mean=(0.5,),
    std=(0.5,),
    sizes={"train": 60_000, "test": 10_000},
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    layouts={"train": _list_fashion_mnist_layouts("train"), "test": _list_fashion_mnist_layouts("t10k")},
    subfolders=("", "FashionMNIST/raw"),
    system_folders=("/usr/share/datasets/fashion-mnist",),
)
_CIFAR10 = DatasetSpec(
    shape=(3, 32, 32),
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    sizes={"train": 50_000, "test": 10_000},
    url="https://www.cs.toronto.edu/~kriz/",
    layouts={
        "train": _list_cifar_layouts(10, "train", *(f"data_batch_{i}" for i in range(1, 6))),
        "test": _list_cifar_layouts(10, "test", "test_batch"),
    },
)
_CIFAR100 = replace(
    _CIFAR10, classes=100, layouts={split: _list_cifar_layouts(100, split, split) for split in ("train", "test")}
)
DATASET_SPECS = {"fashion-mnist": _FASHION_MNIST, "cifar-10": _CIFAR10, "cifar-100": _CIFAR100}

DataRoot = str | Path | None
InMemoryName = Literal["fashion-mnist", "cifar-10", "cifar-100"]
PAPER_DATASETS = (*DATASET_SPECS, "imagenet")


@overload
def load_dataset(name: InMemoryName, split: Split = ..., root: DataRoot = ..., *, download: bool = ...) -> Images: ...
@overload
def load_dataset(
    name: Literal["imagenet"], split: Split = ..., root: DataRoot = ..., *, download: bool = ...
) -> FolderImages: ...
@overload
def load_dataset(
    name: str, split: Split = ..., root: DataRoot = ..., *, download: bool = ...
) -> Images | FolderImages: ...
def load_dataset(
    name: str, split: Split = "test", root: DataRoot = None, *, download: bool = False
) -> Images | FolderImages:
    """Load a data set from the disk, or download it if that is allowed.

    If only a file with a part of the split is found and downloads are off, that part is returned; its name then
    contains the number of images.

    Parameters
    ----------
    name
        One of `PAPER_DATASETS`.
    split
        "train" or "test".
    root
        The folder to search first, before $NEURON_MERGING_DATA, the cache and the system folders.
    download
        Whether to download missing files.

    Returns
    -------
    Images | FolderImages
        Labelled images; ImageNet's are read from the disk on demand.

    Raises
    ------
    MergingError
        The name is unknown, the files were not found, or a file is damaged.

    Examples
    --------
    >>> load_dataset("cifar-10", "train", root="~/data", download=True).name  # doctest: +SKIP
    'cifar-10 train'
    """
    if name not in PAPER_DATASETS or split not in ("train", "test"):
        fix = f"Names: {', '.join(PAPER_DATASETS)}; splits: train, test"
        raise MergingError(f"no data set {name!r} with split {split!r}", where="load()", fix=fix)
    if name == "imagenet":
        images = _load_imagenet(split, root)
        _check_root_exists(root, str(images.files[0].parent.parent))
        return images
    form, files = _locate_files(name, split, _list_data_folders(root), download)
    _check_root_exists(root, str(files[0].parent))
    return _assemble_images(form, files, name, split)


def _check_root_exists(root: DataRoot, found: str) -> None:
    """Raise if the given folder does not exist, even if the data were found elsewhere."""
    if root is not None and not Path(root).expanduser().exists():
        fix = f"Correct the path, or leave it out: the data set is in {found}."
        raise MergingError("there is no such folder", where=str(root), fix=fix)


def _locate_files(name: str, split: str, folders: list[Path], download: bool) -> tuple[FileLayout, list[Path]]:
    spec, forms = DATASET_SPECS[name], DATASET_SPECS[name].layouts[split]
    places = [f / sub for f in folders for sub in spec.subfolders] + [*map(Path, spec.system_folders)]
    # A complete split anywhere, or a download of it, is better than a part.
    found = _find_first_layout([form for form in forms if not form.is_partial], places)
    if found is None and download:
        for file in forms[0].published_files:
            if not os.path.isfile(folders[0] / file):
                download_file(spec.url + file, folders[0] / file, MD5_SUMS[file])
        found = _find_first_layout(forms, folders[:1])
    found = found or _find_first_layout(forms, places)
    if found is None:
        raise _make_missing_error(name, split, places, folders[0])
    return found


def _list_data_folders(root: DataRoot) -> list[Path]:
    """Return the folders to search; downloads go to the first."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "neuron-merging"
    given = [root, os.environ.get("NEURON_MERGING_DATA"), cache]
    return [Path(folder).expanduser() for folder in given if folder]


def _find_first_layout(forms: Sequence[FileLayout], places: list[Path]) -> tuple[FileLayout, list[Path]] | None:
    found = ((form, _find_layout_files(form, place)) for place in places for form in forms)
    return next((pair for pair in found if pair[1]), None)


def _find_layout_files(form: FileLayout, place: Path) -> list[Path]:
    """Return the files of a format in a folder, or its archive, or nothing."""
    files = [path for name in form.files for path in _find_plain_or_gzipped(place / name)]
    if len(files) == len(form.files):
        return files
    archive = place / form.archive
    return [archive] if form.archive and os.path.isfile(archive) else []


def _find_plain_or_gzipped(path: Path) -> list[Path]:
    return [p for p in (path, path.with_name(f"{path.name}.gz")) if os.path.isfile(p)][:1]


def _make_missing_error(name: str, split: str, places: list[Path], folder: Path) -> MergingError:
    spec = DATASET_SPECS[name]
    wanted = [form.archive or " + ".join(form.files) for form in spec.layouts[split]]
    files = [file for form in spec.layouts[split] for file in form.published_files if file in MD5_SUMS]
    published = [f"{spec.url}{file} (md5 {MD5_SUMS[file]})" for file in files]
    return MergingError(
        f"{name} ({split}) was not found: looked for {', or '.join(wanted)}, packed or unpacked",
        where=", ".join(map(str, places)),
        fix=f"Give --download (download=True), or the folder that has it by --data (root=) or in NEURON_MERGING_DATA, "
        f"or put into {folder}: {', '.join(published)}",
    )


def _iter_file_contents(form: FileLayout, files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each file for messages, and its bytes."""
    if files[0].name == form.archive:
        yield from _iter_archive_members(files[0], form.files)
        return
    for path in files:
        with report_read_errors(str(path)):
            blob = path.read_bytes()
            blob = gzip.decompress(blob) if path.suffix == ".gz" else blob
        yield str(path), blob


def _iter_archive_members(archive: Path, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield files of a tar archive from memory; nothing is extracted, so its paths cannot escape a folder."""
    found: dict[str, bytes] = {}
    with report_read_errors(str(archive)):
        with gzip.open(archive) as unzipped, tarfile.open(fileobj=unzipped, mode="r:") as tar:
            for member in tar:
                name = str(PurePosixPath(member.name))
                if name in names and member.isreg() and (content := tar.extractfile(member)):
                    found[name] = content.read()
            while unzipped.read(1 << 20):  # gzip's checksum is at the end, and only reading it detects damage
                pass
        if absent := [name for name in names if name not in found]:
            raise ValueError(f"lacks {', '.join(absent)}")
    yield from ((f"{archive}:{name}", found[name]) for name in names)


def _check_arrays(part: ArrayPair, spec: DatasetSpec) -> ArrayPair:
    x, y = part
    if x is not None and (x.dtype != np.uint8 or x.shape[1:] != spec.shape):
        raise ValueError(f"images are {x.dtype} {x.shape}, expected uint8 (N, *{spec.shape})")
    if y is not None and (y.dtype.kind not in "iu" or y.ndim != 1 or not len(y)):
        raise ValueError(f"labels are {y.dtype} {y.shape}, expected integers (N,)")
    if y is not None and not 0 <= y.min() <= y.max() < spec.classes:
        raise ValueError(f"labels run from {y.min()} to {y.max()}, expected 0..{spec.classes - 1}")
    return part


def _assemble_images(form: FileLayout, files: list[Path], name: str, split: str) -> Images:
    spec = DATASET_SPECS[name]
    parts: list[ArrayPair] = []
    for where, blob in _iter_file_contents(form, files):
        with report_read_errors(where):
            parts.append(_check_arrays(form.read(blob), spec))
    with report_read_errors(", ".join(map(str, files))):
        x = np.concatenate([x for x, _ in parts if x is not None])
        y = np.concatenate([y for _, y in parts if y is not None]).astype(np.int64)
        if len(x) != len(y):
            raise ValueError(f"{len(x)} images but {len(y)} labels")
    full_size = spec.sizes[split]
    title = f"{name} {split}" + (f" (only {len(y):,} of {full_size:,} images)" * (len(y) < full_size))
    pixels = torch.from_numpy(np.ascontiguousarray(x))
    return Images(pixels, torch.from_numpy(y), spec.mean, spec.std, title, spec.classes)


def _load_imagenet(split: str, root: DataRoot) -> FolderImages:
    """Open the first folder of class folders; `root` itself only if it contains no `val`."""
    if split != "test":
        what = "of ImageNet only the validation images are supported"
        raise MergingError(what, where="load()", fix='Give split="test"')
    import_module_or_raise("PIL.Image", "pip install Pillow", "images", MergingError)
    folders = _list_data_folders(root)
    places = [f / sub for f in folders for sub in ("val", "imagenet/val", "imagenet")]
    if root and not os.path.isdir(places[0]):
        places.insert(0, folders[0])
    for place in places:
        if os.path.isdir(place) and (images := open_imagenet_folder(place)):
            return images
    raise MergingError(
        "imagenet (validation) was not found: looked for a folder of class folders of images",
        where=", ".join(map(str, places)),
        fix="Get ILSVRC2012_img_val.tar from https://image-net.org, sort it into one folder per "
        "class (n01440764/...) and give the folder above them as root",
    )


def load_digits(split: Split = "test") -> Images:
    """Load scikit-learn's 1,797 handwritten digits (8x8). Every fourth image of each class is a test image.

    Parameters
    ----------
    split
        "train" or "test".

    Returns
    -------
    Images
        Labelled images, in memory.

    Raises
    ------
    MergingError
        scikit-learn is not installed.

    Examples
    --------
    >>> len(load_digits("train")), len(load_digits("test"))
    (1352, 445)
    """
    bunch = import_module_or_raise("sklearn.datasets", "pip install scikit-learn", "digits", MergingError).load_digits()
    x, y = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None], bunch.target
    # The number of an image within its class: the split is the same for every class and needs no random numbers.
    rank = np.array([np.sum(y[:i] == label) for i, label in enumerate(y)])
    chosen = (rank % 4 == 3) == (split == "test")
    pixels, labels = torch.from_numpy(x[chosen]), torch.from_numpy(y[chosen].astype(np.int64))
    return Images(pixels, labels, (0.3053,), (0.3761,), f"digits {split}", 10)


def register() -> None:
    """Register these data sets by name."""
    openers: dict[str, DatasetOpener] = {name: partial(_open_dataset, name) for name in PAPER_DATASETS}
    register_datasets({**openers, "digits": lambda split, root, download: load_digits(split)})


def _open_dataset(name: str, split: Split, root: Path | None, download: bool) -> Images | FolderImages:
    return load_dataset(name, split, root, download=download)
