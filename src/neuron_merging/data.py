"""Labelled images from files: FashionMNIST, CIFAR-10, CIFAR-100, ImageNet, scikit-learn's digits.

A reader turns the bytes of one file into arrays and knows nothing of places; the table `_SETS`
says which files, read by which reader, make up a data set; `load` looks for them.
"""

from __future__ import annotations

import _codecs
import gzip
import hashlib
import http.client
import io
import os
import pickle
import tarfile
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from neuron_merging.errors import MergingError

Split = Literal["train", "test"]
Root = str | Path | None
Device = torch.device | str
Pairs = Iterator[tuple[Tensor, Tensor]]
Part = tuple[np.ndarray | None, np.ndarray | None]
"""What one file holds: images (N, C, H, W) and labels (N,); an IDX file has only one of them."""


class _Batched:
    """Normalises what `_raw` yields: bytes travel to the device, not floats."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def batches(self, size: int, device: Device = "cpu", dtype: torch.dtype = torch.float32) -> Pairs:
        """Normalised images and their labels, in order, `size` at a time."""
        if size < 1:
            raise MergingError(f"a batch of {size} images", where="batches()", fix="Give size >= 1")
        for x, y in self._raw(size):
            yield self.normalised(x.to(device), dtype), y.to(device)

    def normalised(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Bytes as the numbers that a network is trained on, on the device where the bytes are."""
        work = torch.float64 if dtype == torch.float64 else torch.float32
        mean, std = (torch.tensor(v, device=x.device, dtype=work).view(-1, 1, 1) for v in (self.mean, self.std))
        # In the order of the published pipelines: WARE divides by logits near zero and feels a rounding.
        return x.to(work, copy=True).div_(255).sub_(mean).div_(std).to(dtype)

    def _raw(self, size: int) -> Pairs:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Images(_Batched):
    """Images in memory: `x` uint8 (N, C, H, W), `y` int64; `mean`, `std` per channel of 0..1.

    >>> pixels = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8)
    >>> images = Images(pixels, torch.arange(3), (0.5,), (0.5,), "white", 3)
    >>> [(len(x), round(x.max().item(), 3), y.tolist()) for x, y in images.batches(2)]
    [(2, 1.0, [0, 1]), (1, 1.0, [2])]
    """

    x: Tensor
    y: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    classes: int

    def __len__(self) -> int:
        return len(self.y)

    def head(self, n: int) -> Images:
        """The first n images, without a copy."""
        return replace(self, x=self.x[:n], y=self.y[:n])

    def _raw(self, size: int) -> Pairs:
        for start in range(0, len(self), size):
            yield self.x[start : start + size], self.y[start : start + size]


@dataclass(frozen=True, eq=False)
class FolderImages(_Batched):
    """Images that stay on the disk, with the interface of `Images`.

    The order is that of the files, class by class: `head(n)` has the first classes only.
    """

    files: tuple[Path, ...]
    y: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    classes: int

    def __len__(self) -> int:
        return len(self.files)

    def head(self, n: int) -> FolderImages:
        """The first n images."""
        return replace(self, files=self.files[:n], y=self.y[:n])

    def _raw(self, size: int) -> Pairs:
        """While the caller works on one batch, threads decode the next two."""
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
        try:
            decoded = _ahead(pool, self.files, 2 * size)
            for start in range(0, len(self), size):
                yield torch.stack(list(islice(decoded, size))), self.y[start : start + size]
        finally:
            pool.shutdown(cancel_futures=True)


# Readers: the bytes of one file -> arrays. They raise plain errors; `_blaming` adds the file.


@contextmanager
def _blaming(where: str) -> Iterator[None]:
    """Whatever goes wrong inside is told as a fault of the file `where`.

    Every exception, because a damaged file can raise any: zlib, tar, zip and pickle each have
    their own and pass on more.
    """
    try:
        yield
    except MergingError:
        raise
    except Exception as error:
        what = f"cannot read this file: {error or type(error).__name__}"
        fix = "It is damaged, cut short or something else: remove it and get it again"
        raise MergingError(what, where=where, fix=fix) from error


def _read_idx(blob: bytes) -> Part:
    """MNIST's format: a magic number (2051 images, 2049 labels), sizes, bytes."""
    axes = {b"\0\0\x08\x03": 3, b"\0\0\x08\x01": 1}.get(blob[:4])
    if axes is None:
        raise ValueError(f"starts with {blob[:4].hex()}, not with an IDX magic number")
    start = 4 + 4 * axes
    if len(blob) < start:
        raise ValueError(f"ends after {len(blob)} bytes, inside its header")
    shape = [int.from_bytes(blob[i : i + 4], "big") for i in range(4, start, 4)]
    count = int(np.prod(shape, dtype=object))
    if len(blob) - start != count:
        raise ValueError(f"holds {len(blob) - start} bytes of data, its header says {count}")
    values = np.frombuffer(blob, np.uint8, offset=start).reshape(shape)
    return (values[:, None], None) if axes == 3 else (None, values)


def _read_binary(blob: bytes, label_bytes: int) -> Part:
    """CIFAR's binary records: label bytes (the last is the fine label), then 3x32x32 pixels."""
    record = label_bytes + 3072
    if not blob or len(blob) % record:
        raise ValueError(f"{len(blob)} bytes are no whole number of records of {record} bytes")
    rows = np.frombuffer(blob, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]


class _PickledType:
    """Stands for numpy.dtype in a pickle. numpy's own lets a file clear its flags and so pass raw
    bytes off as object pointers: to allow numpy's names would be no protection."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"array of type {code!r}, CIFAR has u1")

    def __setstate__(self, state: object) -> None:
        """Byte order and flags: nothing that a byte has."""


class _PickledArray:
    """Stands for numpy.ndarray and its reconstruction in a pickle: an array of bytes."""

    def __init__(self, *_: object) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _PickledType):
            raise pickle.UnpicklingError("array without a type")
        order: Literal["F", "C"] = "F" if fortran else "C"
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order=order)


class _CifarUnpickler(pickle.Unpickler):
    """Knows the five names that CIFAR's files use, and none that runs anything."""

    known: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledType,
        ("_codecs", "encode"): _codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"refused: the pickle asks for {module}.{name}")
        return self.known[module, name]


def _read_python(blob: bytes, label: str) -> Part:
    """CIFAR's Python files: a pickled dictionary of `data` (N, 3072) and a list of labels."""
    content = _CifarUnpickler(io.BytesIO(blob), encoding="bytes").load()
    if not isinstance(content, dict):
        raise TypeError(f"holds a {type(content).__name__}, not a dictionary")
    named = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
    data, labels = named.get("data"), named.get(label)
    if not isinstance(data, _PickledArray) or not isinstance(labels, list):
        raise TypeError(f"lacks the array 'data' or the list {label!r}")
    return data.values.reshape(len(labels), 3, 32, 32), np.array(labels)


def _read_npz(blob: bytes) -> Part:
    """x uint8 (N, H, W, C) and y (N,) in a numpy archive."""
    with np.load(io.BytesIO(blob), allow_pickle=False) as archive:
        x, y = archive["x"], archive["y"]
    if x.ndim != 4:
        raise ValueError(f"x has shape {x.shape}, not (N, H, W, C)")
    return x.transpose(0, 3, 1, 2), y


# The table of data sets


@dataclass(frozen=True)
class _Form:
    """One way in which a split lies on a disk: files (gzipped or not), or an archive of them."""

    read: Callable[[bytes], Part]
    files: tuple[str, ...]
    archive: str = ""
    partial: bool = False

    @property
    def downloads(self) -> tuple[str, ...]:
        return (self.archive,) if self.archive else tuple(f"{name}.gz" for name in self.files)


@dataclass(frozen=True)
class _Set:
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sizes: Mapping[str, int]
    url: str
    forms: Mapping[str, tuple[_Form, ...]]
    """By split; the first is the one to download."""
    subfolders: tuple[str, ...] = ("",)
    system: tuple[str, ...] = ()


def _fashion(stem: str) -> tuple[_Form, ...]:
    return (_Form(_read_idx, (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")),)


def _cifar(classes: int, split: str, *batches: str) -> tuple[_Form, ...]:
    ten = classes == 10
    binary, python = ("batches-bin", "batches-py") if ten else ("binary", "python")
    read_binary = partial(_read_binary, label_bytes=1 if ten else 2)
    read_python = partial(_read_python, label="labels" if ten else "fine_labels")
    bins = tuple(f"cifar-{classes}-{binary}/{batch}.bin" for batch in batches)
    pickles = tuple(f"cifar-{classes}-{python}/{batch}" for batch in batches)
    some = _Form(_read_npz, (f"cifar{classes}_train_2k.npz",), partial=True)
    return (
        _Form(read_binary, bins, f"cifar-{classes}-binary.tar.gz"),
        _Form(read_python, pickles, f"cifar-{classes}-python.tar.gz"),
        _Form(_read_npz, (f"cifar{classes}_{split}.npz",)),
        *([some] if split == "train" else []),
    )


_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
"""As published, for downloads only: the same data packed by someone else has another sum."""

_FASHION = _Set(
    shape=(1, 28, 28),
    classes=10,
    mean=(0.5,),
    std=(0.5,),
    sizes={"train": 60_000, "test": 10_000},
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    forms={"train": _fashion("train"), "test": _fashion("t10k")},
    subfolders=("", "FashionMNIST/raw"),
    system=("/usr/share/datasets/fashion-mnist",),
)
_CIFAR10 = _Set(
    shape=(3, 32, 32),
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    sizes={"train": 50_000, "test": 10_000},
    url="https://www.cs.toronto.edu/~kriz/",
    forms={
        "train": _cifar(10, "train", *(f"data_batch_{i}" for i in range(1, 6))),
        "test": _cifar(10, "test", "test_batch"),
    },
)
_CIFAR100 = replace(_CIFAR10, classes=100, forms={split: _cifar(100, split, split) for split in ("train", "test")})
_SETS = {"fashion-mnist": _FASHION, "cifar-10": _CIFAR10, "cifar-100": _CIFAR100}
DATASETS = (*_SETS, "imagenet")
InMemory = Literal["fashion-mnist", "cifar-10", "cifar-100"]


# Looking for a data set


@overload
def load(name: InMemory, split: Split = ..., root: Root = ..., *, download: bool = ...) -> Images: ...
@overload
def load(name: Literal["imagenet"], split: Split = ..., root: Root = ..., *, download: bool = ...) -> FolderImages: ...
@overload
def load(name: str, split: Split = ..., root: Root = ..., *, download: bool = ...) -> Images | FolderImages: ...
def load(name: str, split: Split = "test", root: Root = None, *, download: bool = False) -> Images | FolderImages:
    """The data set `name`, from `root`, the folder $NEURON_MERGING_DATA, the cache or the system.

    A file that holds only a share of a split serves when the whole is nowhere and may not be
    downloaded; the name then says how many images there are.

    >>> load("cifar-10", "train", root="~/data", download=True).name  # doctest: +SKIP
    'cifar-10 train'
    """
    if name not in DATASETS or split not in ("train", "test"):
        fix = f"Names: {', '.join(DATASETS)}; splits: train, test"
        raise MergingError(f"no data set {name!r} with split {split!r}", where="load()", fix=fix)
    if name == "imagenet":
        return _imagenet(split, root)
    form, files = _locate(name, split, _folders(root), download)
    return _assemble(form, files, name, split)


def _locate(name: str, split: str, folders: list[Path], download: bool) -> tuple[_Form, list[Path]]:
    spec, forms = _SETS[name], _SETS[name].forms[split]
    places = [f / sub for f in folders for sub in spec.subfolders] + [*map(Path, spec.system)]
    found = _first([form for form in forms if not form.partial], places)
    if found is None and download:
        for file in forms[0].downloads:
            if not os.path.isfile(folders[0] / file):
                fetch(spec.url + file, folders[0] / file, _MD5[file])
        found = _first(forms, folders[:1])
    found = found or _first(forms, places)
    if found is None:
        raise _missing(name, split, places, folders[0])
    return found


def _folders(root: Root) -> list[Path]:
    """Where data may lie, the first being where downloads go."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "neuron-merging"
    given = [root, os.environ.get("NEURON_MERGING_DATA"), cache]
    return [Path(folder).expanduser() for folder in given if folder]


def _first(forms: Sequence[_Form], places: list[Path]) -> tuple[_Form, list[Path]] | None:
    found = ((form, _present(form, place)) for place in places for form in forms)
    return next((pair for pair in found if pair[1]), None)


def _present(form: _Form, place: Path) -> list[Path]:
    """The files of a form in a place, or its archive, or nothing."""
    files = [path for name in form.files for path in _plain_or_gzipped(place / name)]
    if len(files) == len(form.files):
        return files
    archive = place / form.archive
    return [archive] if form.archive and os.path.isfile(archive) else []


def _plain_or_gzipped(path: Path) -> list[Path]:
    return [p for p in (path, path.with_name(f"{path.name}.gz")) if os.path.isfile(p)][:1]


def _missing(name: str, split: str, places: list[Path], folder: Path) -> MergingError:
    spec = _SETS[name]
    wanted = [form.archive or " + ".join(form.files) for form in spec.forms[split]]
    files = [file for form in spec.forms[split] for file in form.downloads if file in _MD5]
    published = [f"{spec.url}{file} (md5 {_MD5[file]})" for file in files]
    return MergingError(
        f"{name} ({split}) is not at hand: looked for {', or '.join(wanted)}, packed or unpacked",
        where=", ".join(map(str, places)),
        fix=f"Allow download=True, or set NEURON_MERGING_DATA or root to the folder that has it, "
        f"or put into {folder}: {', '.join(published)}",
    )


def _contents(form: _Form, files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """What to call each file in a message, and its bytes."""
    if files[0].name == form.archive:
        yield from _members(files[0], form.files)
        return
    for path in files:
        with _blaming(str(path)):
            blob = path.read_bytes()
            blob = gzip.decompress(blob) if path.suffix == ".gz" else blob
        yield str(path), blob


def _members(archive: Path, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Files out of a tar archive, by way of memory: no path of the archive reaches the disk."""
    found: dict[str, bytes] = {}
    with _blaming(str(archive)):
        with gzip.open(archive) as unzipped, tarfile.open(fileobj=unzipped, mode="r:") as tar:
            for member in tar:
                name = str(PurePosixPath(member.name))
                if name in names and member.isreg() and (content := tar.extractfile(member)):
                    found[name] = content.read()
            while unzipped.read(1 << 20):  # gzip's checksum stands at the end
                pass
        if absent := [name for name in names if name not in found]:
            raise ValueError(f"lacks {', '.join(absent)}")
    yield from ((f"{archive}:{name}", found[name]) for name in names)


def _checked(part: Part, spec: _Set) -> Part:
    x, y = part
    if x is not None and (x.dtype != np.uint8 or x.shape[1:] != spec.shape):
        raise ValueError(f"images are {x.dtype} {x.shape}, expected uint8 (N, *{spec.shape})")
    if y is not None and (y.dtype.kind not in "iu" or y.ndim != 1 or not len(y)):
        raise ValueError(f"labels are {y.dtype} {y.shape}, expected whole numbers (N,)")
    if y is not None and not 0 <= y.min() <= y.max() < spec.classes:
        raise ValueError(f"labels run from {y.min()} to {y.max()}, expected 0..{spec.classes - 1}")
    return part


def _assemble(form: _Form, files: list[Path], name: str, split: str) -> Images:
    spec = _SETS[name]
    parts: list[Part] = []
    for where, blob in _contents(form, files):
        with _blaming(where):
            parts.append(_checked(form.read(blob), spec))
    with _blaming(", ".join(map(str, files))):
        x = np.concatenate([x for x, _ in parts if x is not None])
        y = np.concatenate([y for _, y in parts if y is not None]).astype(np.int64)
        if len(x) != len(y):
            raise ValueError(f"{len(x)} images but {len(y)} labels")
    whole = spec.sizes[split]
    title = f"{name} {split}" + (f" (only {len(y):,} of {whole:,} images)" * (len(y) < whole))
    pixels = torch.from_numpy(np.ascontiguousarray(x))
    return Images(pixels, torch.from_numpy(y), spec.mean, spec.std, title, spec.classes)


# Downloads


def fetch(url: str, target: Path, md5: str) -> None:
    """Download to `target`, which appears only whole and checked; goes on where it broke off."""
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _receive(url, part)
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found == md5:
            os.replace(part, target)
            return
        part.unlink()
    except (OSError, http.client.HTTPException) as error:
        fix = f"Run again, it goes on from {part}; or give a root that can be written"
        raise MergingError(f"download failed: {error}", where=url, fix=fix) from error
    what = f"the download has md5 {found}, published is {md5}; it was removed"
    raise MergingError(what, where=url, fix="Run again, or get the file by another way")


def _receive(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # nothing is left to send: the checksum decides
            return
        raise
    with response:
        have = have if response.status == 206 else 0
        left = int(response.headers["Content-Length"] or 0)
        with part.open("ab" if have else "wb") as file:
            _copy(response, file, part.stem, have, have + left)
        if part.stat().st_size < have + left:
            raise OSError(f"the connection ended {have + left - part.stat().st_size} bytes early")


def _copy(response: Any, file: IO[bytes], title: str, have: int, total: int) -> None:
    from rich import console, progress

    columns = ("{task.description}", progress.BarColumn(), progress.DownloadColumn())
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or None, completed=have)
        while chunk := response.read(1 << 16):
            file.write(chunk)
            bar.advance(task, len(chunk))


# ImageNet and the digits


def _need(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        what, fix = f"these images need {package}", f"pip install {package}"
        raise MergingError(what, where=f"import {module}", fix=fix) from error


def _imagenet(split: str, root: Root) -> FolderImages:
    """The first folder of class folders; `root` itself only if it has no `val` inside."""
    if split != "test":
        what = "of ImageNet only the validation images are read"
        raise MergingError(what, where="load()", fix='Give split="test"')
    _need("PIL.Image", "Pillow")
    folders = _folders(root)
    places = [f / sub for f in folders for sub in ("val", "imagenet/val", "imagenet")]
    if root and not os.path.isdir(places[0]):
        places.insert(0, folders[0])
    for place in places:
        if os.path.isdir(place) and (images := _folder_images(place)):
            return images
    raise MergingError(
        "imagenet (validation) is not at hand: looked for a folder of class folders of images",
        where=", ".join(map(str, places)),
        fix="Get ILSVRC2012_img_val.tar from https://image-net.org, sort it into one folder per "
        "class (n01440764/...) and give the folder above them as root",
    )


def _folder_images(place: Path) -> FolderImages | None:
    """Sorted folder names are the classes, empty ones included."""
    with _blaming(str(place)):
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
    pillow = _need("PIL.Image", "Pillow")
    with _blaming(str(path)), pillow.open(path) as file:
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


def digits(split: Split = "test") -> Images:
    """scikit-learn's 1,797 handwritten digits (8x8): of each class every fourth is for the test.

    >>> len(digits("train")), len(digits("test"))
    (1352, 445)
    """
    bunch = _need("sklearn.datasets", "scikit-learn").load_digits()
    x, y = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None], bunch.target
    rank = np.array([np.sum(y[:i] == label) for i, label in enumerate(y)])
    chosen = (rank % 4 == 3) == (split == "test")
    pixels, labels = torch.from_numpy(x[chosen]), torch.from_numpy(y[chosen].astype(np.int64))
    return Images(pixels, labels, (0.3053,), (0.3761,), f"digits {split}", 10)
