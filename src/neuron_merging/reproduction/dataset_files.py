"""Download data sets with checksums, and read their files: IDX, CIFAR binaries and pickles, NumPy archives."""

from __future__ import annotations

import _codecs
import hashlib
import http.client
import io
import os
import pickle
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from neuron_merging import atomic
from neuron_merging.errors import MergingError

ArrayPair = tuple[np.ndarray | None, np.ndarray | None]
"""Images (N, C, H, W) and labels (N,) of one file; an IDX file contains only one of them."""


def read_mnist_idx(blob: bytes) -> ArrayPair:
    """Read MNIST's IDX format: a magic number (2051 images, 2049 labels), sizes, bytes."""
    axes = {b"\0\0\x08\x03": 3, b"\0\0\x08\x01": 1}.get(blob[:4])
    if axes is None:
        raise ValueError(f"starts with {blob[:4].hex()}, not with an IDX magic number")
    start = 4 + 4 * axes
    if len(blob) < start:
        raise ValueError(f"ends after {len(blob)} bytes, inside its header")
    shape = [int.from_bytes(blob[i : i + 4], "big") for i in range(4, start, 4)]
    count = int(np.prod(shape, dtype=object))  # Python integers: sizes of a damaged header overflow int64
    if len(blob) - start != count:
        raise ValueError(f"holds {len(blob) - start} bytes of data, its header says {count}")
    values = np.frombuffer(blob, np.uint8, offset=start).reshape(shape)
    return (values[:, None], None) if axes == 3 else (None, values)


def read_cifar_binary(blob: bytes, label_bytes: int) -> ArrayPair:
    """Read CIFAR's binary records: label bytes (the last is the fine label), then 3x32x32 pixels."""
    record = label_bytes + 3072
    if not blob or len(blob) % record:
        raise ValueError(f"{len(blob)} bytes are no whole number of records of {record} bytes")
    rows = np.frombuffer(blob, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]


class _PickledDtype:
    """Replaces numpy.dtype while unpickling. The real one lets a file clear its flags and pass raw bytes off
    as object pointers, so unpickling numpy's classes would not be safe."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"array of type {code!r}, CIFAR has u1")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and flags, which do not matter for bytes."""


class _PickledArray:
    """Replaces numpy.ndarray and its reconstruction while unpickling, as an array of bytes."""

    def __init__(self, *_: object) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _PickledDtype):
            raise pickle.UnpicklingError("array without a type")
        order: Literal["F", "C"] = "F" if fortran else "C"
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order=order)


class _CifarUnpickler(pickle.Unpickler):
    """Allows the five names that CIFAR's files use; none of them executes code."""

    allowed_names: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy", "dtype"): _PickledDtype,
        ("_codecs", "encode"): _codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed_names:
            raise pickle.UnpicklingError(f"refused: the pickle asks for {module}.{name}")
        return self.allowed_names[module, name]


def read_cifar_pickle(blob: bytes, label: str) -> ArrayPair:
    """Read CIFAR's Python files: a pickled dictionary of `data` (N, 3072) and a list of labels."""
    content = _CifarUnpickler(io.BytesIO(blob), encoding="bytes").load()
    if not isinstance(content, dict):
        raise TypeError(f"holds a {type(content).__name__}, not a dictionary")
    named = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
    data, labels = named.get("data"), named.get(label)
    if not isinstance(data, _PickledArray) or not isinstance(labels, list):
        raise TypeError(f"lacks the array 'data' or the list {label!r}")
    return data.values.reshape(len(labels), 3, 32, 32), np.array(labels)


def read_npz_images(blob: bytes) -> ArrayPair:
    """Read x, uint8 (N, H, W, C), and y (N,) from a numpy archive."""
    with np.load(io.BytesIO(blob), allow_pickle=False) as archive:
        x, y = archive["x"], archive["y"]
    if x.ndim != 4:
        raise ValueError(f"x has shape {x.shape}, not (N, H, W, C)")
    return x.transpose(0, 3, 1, 2), y


def download_file(url: str, target: Path, md5: str) -> None:
    """Download to `target`, which appears only when complete and checked; an interrupted download is resumed."""
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic.lock_path(target):
            if target.exists():  # another process has downloaded it meanwhile
                return
            _receive_part(url, part)
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


def _receive_part(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # range not satisfiable: the part is complete, and the checksum decides
            return
        raise
    with response:
        have = have if response.status == 206 else 0  # 200: the server ignores ranges and sends all of it
        remaining = int(response.headers["Content-Length"] or 0)
        with part.open("ab" if have else "wb") as file:
            _copy_with_progress(response, file, part.stem, have, have + remaining)
        if part.stat().st_size < have + remaining:
            raise OSError(f"the connection ended {have + remaining - part.stat().st_size} bytes early")


def _copy_with_progress(response: Any, file: IO[bytes], title: str, have: int, total: int) -> None:
    from rich import console, progress

    columns = ("{task.description}", progress.BarColumn(), progress.DownloadColumn())
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or None, completed=have)
        while chunk := response.read(1 << 16):
            file.write(chunk)
            bar.advance(task, len(chunk))
