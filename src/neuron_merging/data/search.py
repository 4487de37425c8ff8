"""search: find a data set on the disk, or download it, and put its files together."""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, overload

import numpy as np
import torch

from neuron_merging.data.download import fetch
from neuron_merging.data.faults import blaming, need
from neuron_merging.data.folders import FolderImages, folder_images
from neuron_merging.data.images import Images
from neuron_merging.data.readers import Part
from neuron_merging.data.sets import MD5, SETS, Form, Set
from neuron_merging.errors import MergingError

Split = Literal["train", "test"]
Root = str | Path | None
InMemory = Literal["fashion-mnist", "cifar-10", "cifar-100"]
DATASETS = (*SETS, "imagenet")


@overload
def load(name: InMemory, split: Split = ..., root: Root = ..., *, download: bool = ...) -> Images: ...
@overload
def load(name: Literal["imagenet"], split: Split = ..., root: Root = ..., *, download: bool = ...) -> FolderImages: ...
@overload
def load(name: str, split: Split = ..., root: Root = ..., *, download: bool = ...) -> Images | FolderImages: ...
def load(name: str, split: Split = "test", root: Root = None, *, download: bool = False) -> Images | FolderImages:
    """A data set from the disk, or from the web if that is allowed.

    A file that holds only a share of a split serves when the whole is nowhere and may not be downloaded; the name then
    says how many images there are.

    Parameters
    ----------
    name
        One of `DATASETS`.
    split
        "train" or "test".
    root
        The folder to look in first; then come $NEURON_MERGING_DATA, the cache and the system.
    download
        Whether to fetch what is missing.

    Returns
    -------
    Images | FolderImages
        Labelled images; those of ImageNet stay on the disk.

    Raises
    ------
    MergingError
        There is no such data set, it is nowhere, or a file is damaged.

    Examples
    --------
    >>> load("cifar-10", "train", root="~/data", download=True).name  # doctest: +SKIP
    'cifar-10 train'
    """
    if name not in DATASETS or split not in ("train", "test"):
        fix = f"Names: {', '.join(DATASETS)}; splits: train, test"
        raise MergingError(f"no data set {name!r} with split {split!r}", where="load()", fix=fix)
    if name == "imagenet":
        images = _imagenet(split, root)
        _check_root(root, str(images.files[0].parent.parent))
        return images
    form, files = _locate(name, split, _folders(root), download)
    _check_root(root, str(files[0].parent))
    return _assemble(form, files, name, split)


def _check_root(root: Root, found: str) -> None:
    """What lies elsewhere must not stand in for a folder that was named and is not there."""
    if root is not None and not Path(root).expanduser().exists():
        fix = f"Give the folder that you mean, or none: the data set is in {found}."
        raise MergingError("there is no such folder", where=str(root), fix=fix)


def _locate(name: str, split: str, folders: list[Path], download: bool) -> tuple[Form, list[Path]]:
    spec, forms = SETS[name], SETS[name].forms[split]
    places = [f / sub for f in folders for sub in spec.subfolders] + [*map(Path, spec.system)]
    found = _first([form for form in forms if not form.partial], places)
    if found is None and download:
        for file in forms[0].downloads:
            if not os.path.isfile(folders[0] / file):
                fetch(spec.url + file, folders[0] / file, MD5[file])
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


def _first(forms: Sequence[Form], places: list[Path]) -> tuple[Form, list[Path]] | None:
    found = ((form, _present(form, place)) for place in places for form in forms)
    return next((pair for pair in found if pair[1]), None)


def _present(form: Form, place: Path) -> list[Path]:
    """The files of a form in a place, or its archive, or nothing."""
    files = [path for name in form.files for path in _plain_or_gzipped(place / name)]
    if len(files) == len(form.files):
        return files
    archive = place / form.archive
    return [archive] if form.archive and os.path.isfile(archive) else []


def _plain_or_gzipped(path: Path) -> list[Path]:
    return [p for p in (path, path.with_name(f"{path.name}.gz")) if os.path.isfile(p)][:1]


def _missing(name: str, split: str, places: list[Path], folder: Path) -> MergingError:
    spec = SETS[name]
    wanted = [form.archive or " + ".join(form.files) for form in spec.forms[split]]
    files = [file for form in spec.forms[split] for file in form.downloads if file in MD5]
    published = [f"{spec.url}{file} (md5 {MD5[file]})" for file in files]
    return MergingError(
        f"{name} ({split}) is not at hand: looked for {', or '.join(wanted)}, packed or unpacked",
        where=", ".join(map(str, places)),
        fix=f"Give --download (download=True), or the folder that has it by --data (root=) or in NEURON_MERGING_DATA, "
        f"or put into {folder}: {', '.join(published)}",
    )


def _contents(form: Form, files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """What to call each file in a message, and its bytes."""
    if files[0].name == form.archive:
        yield from _members(files[0], form.files)
        return
    for path in files:
        with blaming(str(path)):
            blob = path.read_bytes()
            blob = gzip.decompress(blob) if path.suffix == ".gz" else blob
        yield str(path), blob


def _members(archive: Path, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Files out of a tar archive, by way of memory: no path of the archive reaches the disk."""
    found: dict[str, bytes] = {}
    with blaming(str(archive)):
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


def _checked(part: Part, spec: Set) -> Part:
    x, y = part
    if x is not None and (x.dtype != np.uint8 or x.shape[1:] != spec.shape):
        raise ValueError(f"images are {x.dtype} {x.shape}, expected uint8 (N, *{spec.shape})")
    if y is not None and (y.dtype.kind not in "iu" or y.ndim != 1 or not len(y)):
        raise ValueError(f"labels are {y.dtype} {y.shape}, expected whole numbers (N,)")
    if y is not None and not 0 <= y.min() <= y.max() < spec.classes:
        raise ValueError(f"labels run from {y.min()} to {y.max()}, expected 0..{spec.classes - 1}")
    return part


def _assemble(form: Form, files: list[Path], name: str, split: str) -> Images:
    spec = SETS[name]
    parts: list[Part] = []
    for where, blob in _contents(form, files):
        with blaming(where):
            parts.append(_checked(form.read(blob), spec))
    with blaming(", ".join(map(str, files))):
        x = np.concatenate([x for x, _ in parts if x is not None])
        y = np.concatenate([y for _, y in parts if y is not None]).astype(np.int64)
        if len(x) != len(y):
            raise ValueError(f"{len(x)} images but {len(y)} labels")
    whole = spec.sizes[split]
    title = f"{name} {split}" + (f" (only {len(y):,} of {whole:,} images)" * (len(y) < whole))
    pixels = torch.from_numpy(np.ascontiguousarray(x))
    return Images(pixels, torch.from_numpy(y), spec.mean, spec.std, title, spec.classes)


def _imagenet(split: str, root: Root) -> FolderImages:
    """The first folder of class folders; `root` itself only if it has no `val` inside."""
    if split != "test":
        what = "of ImageNet only the validation images are read"
        raise MergingError(what, where="load()", fix='Give split="test"')
    need("PIL.Image", "Pillow")
    folders = _folders(root)
    places = [f / sub for f in folders for sub in ("val", "imagenet/val", "imagenet")]
    if root and not os.path.isdir(places[0]):
        places.insert(0, folders[0])
    for place in places:
        if os.path.isdir(place) and (images := folder_images(place)):
            return images
    raise MergingError(
        "imagenet (validation) is not at hand: looked for a folder of class folders of images",
        where=", ".join(map(str, places)),
        fix="Get ILSVRC2012_img_val.tar from https://image-net.org, sort it into one folder per "
        "class (n01440764/...) and give the folder above them as root",
    )
