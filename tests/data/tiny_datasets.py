"""Data sets in miniature, written in every format that is read."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neuron_merging.data import Images
from neuron_merging.errors import MergingError

N = 10  # images per written file


def pixels(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels(seed: int = 0, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(seed + 100).integers(0, classes, N, dtype=np.uint8)


# Writers, one per format


def idx(values: np.ndarray) -> bytes:
    magic = 2048 + values.ndim
    return struct.pack(f">{1 + values.ndim}I", magic, *values.shape) + values.tobytes()


def fashion_files(stem: str = "t10k") -> dict[str, bytes]:
    x, y = pixels((N, 28, 28)), labels()
    return {f"{stem}-images-idx3-ubyte": idx(x), f"{stem}-labels-idx1-ubyte": idx(y)}


def binary(x: np.ndarray, y: np.ndarray, coarse: bool = False) -> bytes:
    columns = [np.full((N, 1), 7, np.uint8)] if coarse else []
    return np.hstack([*columns, y[:, None], x.reshape(N, -1)]).tobytes()


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def pickled(x: np.ndarray, y: np.ndarray, label: str = "labels", old: bool = True) -> bytes:
    content = {"data": x.reshape(N, -1), label: y.tolist(), "batch_label": "one"}
    blob = pickle.dumps(content, protocol=2)
    assert b"numpy._core.multiarray" in blob or b"numpy.core.multiarray" in blob
    here, there = b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"
    return blob.replace(here, there) if old else blob.replace(there, here)


def python2(x: np.ndarray, y: np.ndarray) -> bytes:
    """The official files as Python 2 wrote them: every string a byte string (opcode U)."""

    def text(s: bytes) -> bytes:
        return b"U" + bytes([len(s)]) + s

    raw = x.tobytes()
    shape = b"(K" + bytes([N]) + b"M" + struct.pack("<H", 3072) + b"t"
    dtype = (
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\0K\1tR(K\3" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t"
        + text(b"b")
        + b"tR(K\1"
        + shape
        + dtype
        + b"\x89T"
        + struct.pack("<I", len(raw))
        + raw
        + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([v]) for v in y.tolist()) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def tar_gz(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


X10, Y10 = pixels((N, 3, 32, 32)), labels()
Y100 = labels(classes=100)
HWC = X10.transpose(0, 2, 3, 1)
FORMS_10: dict[str, dict[str, bytes]] = {
    "binary folder": {"cifar-10-batches-bin/test_batch.bin": binary(X10, Y10)},
    "binary archive": {"cifar-10-binary.tar.gz": tar_gz({"cifar-10-batches-bin/test_batch.bin": binary(X10, Y10)})},
    "python folder": {"cifar-10-batches-py/test_batch": pickled(X10, Y10)},
    "python folder, new numpy": {"cifar-10-batches-py/test_batch": pickled(X10, Y10, old=False)},
    "python 2": {"cifar-10-batches-py/test_batch": python2(X10, Y10)},
    "python archive": {"cifar-10-python.tar.gz": tar_gz({"./cifar-10-batches-py/test_batch": pickled(X10, Y10)})},
    "npz": {"cifar10_test.npz": npz(x=HWC, y=Y10)},
}
FORMS_100: dict[str, dict[str, bytes]] = {
    "binary folder": {"cifar-100-binary/test.bin": binary(X10, Y100, coarse=True)},
    "binary archive": {"cifar-100-binary.tar.gz": tar_gz({"cifar-100-binary/test.bin": binary(X10, Y100, True)})},
    "python folder": {"cifar-100-python/test": pickled(X10, Y100, "fine_labels")},
    "python archive": {"cifar-100-python.tar.gz": tar_gz({"cifar-100-python/test": pickled(X10, Y100, "fine_labels")})},
    "npz": {"cifar100_test.npz": npz(x=HWC, y=Y100)},
}


def same(images: Images, x: np.ndarray, y: np.ndarray) -> bool:
    assert images.x.dtype == torch.uint8
    assert images.y.dtype == torch.int64
    assert images.x.is_contiguous()
    return np.array_equal(images.x.numpy(), x) and np.array_equal(images.y.numpy(), y)


# Refusing


def refused(read: Callable[[], object], *words: str) -> MergingError:
    with pytest.raises(MergingError) as caught:
        read()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    return caught.value


GOOD_IDX = fashion_files()
IMAGES, LABELS = GOOD_IDX
