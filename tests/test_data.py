"""Readers against files written here, damaged files, downloads from a local server."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gzip
import hashlib
import io
import os
import pickle
import struct
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_merging import data
from neuron_merging.data import FolderImages, Images, load
from neuron_merging.errors import MergingError

N = 10  # images per written file
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
REAL = os.environ.get("NEURON_MERGING_DATA", "")
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def nothing_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test writes can be found: no data folder, no cache, no system files."""
    monkeypatch.delenv("NEURON_MERGING_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    fashion = dataclasses.replace(data.sets.SETS["fashion-mnist"], system=())
    monkeypatch.setitem(data.sets.SETS, "fashion-mnist", fashion)


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


# Reading


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("folder", ["", "FashionMNIST/raw/"])
def test_fashion_mnist(tmp_path: Path, suffix: str, folder: str) -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if suffix else bytes
    write(tmp_path, {folder + k + suffix: pack(v) for k, v in fashion_files().items()})
    images = load("fashion-mnist", root=tmp_path)
    assert same(images, pixels((N, 28, 28))[:, None], labels())
    assert (images.mean, images.std, images.classes) == ((0.5,), (0.5,), 10)


@pytest.mark.parametrize("form", FORMS_10)
def test_cifar_10(tmp_path: Path, form: str) -> None:
    write(tmp_path, FORMS_10[form])
    images = load("cifar-10", root=str(tmp_path))
    assert same(images, X10, Y10)
    assert images.classes == 10
    assert images.name == "cifar-10 test (only 10 of 10,000 images)"


@pytest.mark.parametrize("form", FORMS_100)
def test_cifar_100_takes_the_fine_label(tmp_path: Path, form: str) -> None:
    write(tmp_path, FORMS_100[form])
    images = load("cifar-100", root=tmp_path)
    assert same(images, X10, Y100)
    assert images.classes == 100


def test_cifar_10_train_joins_five_batches_in_order(tmp_path: Path) -> None:
    parts = [(pixels((N, 3, 32, 32), i), labels(i)) for i in range(1, 6)]
    files = {f"cifar-10-batches-bin/data_batch_{i}.bin": binary(*p) for i, p in enumerate(parts, 1)}
    write(tmp_path, {"cifar-10-binary.tar.gz": tar_gz(dict(reversed(files.items())))})
    images = load("cifar-10", "train", tmp_path)
    assert same(images, np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))


def test_two_thousand_training_images_serve_only_when_nothing_else_is_there(tmp_path: Path) -> None:
    write(tmp_path / "a", {"cifar10_train_2k.npz": npz(x=HWC[:4], y=Y10[:4])})
    assert load("cifar-10", "train", tmp_path / "a").name == ("cifar-10 train (only 4 of 50,000 images)")
    write(tmp_path / "cache" / "neuron-merging", {"cifar10_train.npz": npz(x=HWC, y=Y10)})
    assert len(load("cifar-10", "train", tmp_path / "a")) == N


def test_root_comes_before_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "env", {"cifar10_test.npz": npz(x=HWC[:3], y=Y10[:3])})
    write(tmp_path / "root", {"cifar10_test.npz": npz(x=HWC, y=Y10)})
    monkeypatch.setenv("NEURON_MERGING_DATA", str(tmp_path / "env"))
    assert len(load("cifar-10")) == 3
    assert len(load("cifar-10", root=tmp_path / "root")) == N


# Refusing


def refused(read: Callable[[], object], *words: str) -> MergingError:
    with pytest.raises(MergingError) as caught:
        read()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar-10", "cifar-100"])
def test_missing_data_says_what_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("NEURON_MERGING_DATA", str(tmp_path / "env"))
    root = tmp_path / "nowhere"
    words = [
        name,
        str(root),
        str(tmp_path / "env"),
        str(tmp_path / "cache"),
        "download=True",
        "http",
        "md5",
        "NEURON_MERGING_DATA",
    ]
    refused(lambda: load(name, root=root), *words)


def test_a_folder_that_is_not_there_is_not_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "env"
    place.mkdir()
    for name, content in GOOD_IDX.items():
        (place / name).write_bytes(content)
    monkeypatch.setenv("NEURON_MERGING_DATA", str(place))
    assert len(load("fashion-mnist")) > 0
    refused(lambda: load("fashion-mnist", root=tmp_path / "typo"), "typo", "no such folder", str(place))


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in GOOD_IDX.items():
        (tmp_path / name).write_bytes(content)

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    error = refused(lambda: load("fashion-mnist", root=tmp_path), "Permission denied", "Allow it to be read")
    assert "damaged" not in str(error)


def test_unknown_names_and_splits() -> None:
    refused(lambda: load("mnist"), "mnist", "cifar-10")
    refused(lambda: load("cifar-10", "val"), "val", "train")  # type: ignore[call-overload]
    refused(lambda: load("imagenet", "train"), "validation")


GOOD_IDX = fashion_files()
IMAGES, LABELS = GOOD_IDX
DAMAGED_IDX = {
    "empty": (IMAGES, b"", "magic"),
    "short header": (IMAGES, GOOD_IDX[IMAGES][:9], "header"),
    "short": (IMAGES, GOOD_IDX[IMAGES][:-1], "7839 bytes"),
    "long": (IMAGES, GOOD_IDX[IMAGES] + b"\0", "7841 bytes"),
    "wrong magic": (IMAGES, b"\0\0\x0d\x03" + GOOD_IDX[IMAGES][4:], "magic"),
    "huge sizes": (IMAGES, GOOD_IDX[IMAGES][:4] + b"\xff" * 12, "header says"),
    "wrong image size": (IMAGES, idx(pixels((N, 32, 32))), "28"),
    "label out of range": (LABELS, idx(np.full(N, 10, np.uint8)), "0..9"),
    "no labels": (LABELS, idx(np.zeros(0, np.uint8)), "labels"),
    "fewer labels": (LABELS, idx(np.zeros(N - 1, np.uint8)), "9 labels"),
    "images for labels": (LABELS, GOOD_IDX[IMAGES], IMAGES),
}


@pytest.mark.parametrize("case", DAMAGED_IDX)
def test_damaged_idx(tmp_path: Path, case: str) -> None:
    name, content, word = DAMAGED_IDX[case]
    write(tmp_path, GOOD_IDX | {name: content})
    refused(lambda: load("fashion-mnist", root=tmp_path), str(tmp_path / name), word)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-20],
        lambda b: b[:40] + b"\xff" * 40 + b[80:],
        lambda b: b"",
        lambda b: b"nonsense",
        lambda b: b[:-5] + b"xxxxx",
    ],
)
def test_damaged_gzip(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    files = {f"{k}.gz": gzip.compress(v) for k, v in GOOD_IDX.items()}
    write(tmp_path, files | {f"{IMAGES}.gz": damage(files[f"{IMAGES}.gz"])})
    refused(lambda: load("fashion-mnist", root=tmp_path), f"{IMAGES}.gz")


DAMAGED_CIFAR: dict[str, tuple[str, bytes]] = {
    "binary, wrong record": ("cifar-10-batches-bin/test_batch.bin", binary(X10, Y10)[:-1]),
    "binary, empty": ("cifar-10-batches-bin/test_batch.bin", b""),
    "binary, label": ("cifar-10-batches-bin/test_batch.bin", binary(X10, Y10 + 200)),
    "pickle, short": ("cifar-10-batches-py/test_batch", pickled(X10, Y10)[:-900]),
    "pickle, empty": ("cifar-10-batches-py/test_batch", b""),
    "pickle, list": ("cifar-10-batches-py/test_batch", pickle.dumps([1, 2])),
    "pickle, no labels": ("cifar-10-batches-py/test_batch", pickled(X10, Y10, "lables")),
    "pickle, text labels": (
        "cifar-10-batches-py/test_batch",
        pickled(X10, Y10.astype(str)),
    ),
    "pickle, floats": ("cifar-10-batches-py/test_batch", pickled(X10 / 255, Y10)),
    "tar, short": (
        "cifar-10-binary.tar.gz",
        FORMS_10["binary archive"]["cifar-10-binary.tar.gz"][:-99],
    ),
    "tar, without the file": ("cifar-10-binary.tar.gz", tar_gz({"readme": b"x"})),
    "tar, no tar": ("cifar-10-binary.tar.gz", gzip.compress(b"x" * 2000)),
    "npz, no zip": ("cifar10_test.npz", b"PK\3\4" + b"x" * 50),
    "npz, short": ("cifar10_test.npz", npz(x=HWC, y=Y10)[:-100]),
    "npz, without y": ("cifar10_test.npz", npz(x=HWC)),
    "npz, floats": ("cifar10_test.npz", npz(x=HWC / 255, y=Y10)),
    "npz, channels first": ("cifar10_test.npz", npz(x=X10, y=Y10)),
    "npz, flat": ("cifar10_test.npz", npz(x=HWC.reshape(N, -1), y=Y10)),
    "npz, fractional labels": ("cifar10_test.npz", npz(x=HWC, y=Y10 / 2)),
    "npz, two columns": ("cifar10_test.npz", npz(x=HWC, y=np.stack([Y10, Y10], 1))),
    "npz, fewer labels": ("cifar10_test.npz", npz(x=HWC, y=Y10[:-1])),
    "npz, negative label": ("cifar10_test.npz", npz(x=HWC, y=Y10.astype(int) - 20)),
    "npz, objects": ("cifar10_test.npz", npz(x=HWC, y=np.array([print] * N))),
}


@pytest.mark.parametrize("case", DAMAGED_CIFAR)
def test_damaged_cifar(tmp_path: Path, case: str) -> None:
    name, content = DAMAGED_CIFAR[case]
    write(tmp_path, {name: content})
    refused(lambda: load("cifar-10", root=tmp_path), str(tmp_path / name))


def test_a_flipped_bit_in_an_archive_is_noticed(tmp_path: Path) -> None:
    """In stored (level 0) gzip nothing but the checksum can tell."""
    name = "cifar-10-binary.tar.gz"
    plain = gzip.decompress(FORMS_10["binary archive"][name])
    blob = bytearray(gzip.compress(plain, compresslevel=0))
    blob[5000] ^= 1
    write(tmp_path, {name: bytes(blob)})
    refused(lambda: load("cifar-10", root=tmp_path), name, "CRC")


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    write(tmp_path, {"cifar-10-binary.tar.gz": buffer.getvalue()})
    refused(lambda: load("cifar-10", root=tmp_path), "lacks")


@quick
@given(
    cut=st.integers(0, 10**6),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=4),
    form=st.sampled_from(sorted(FORMS_10)),
)
def test_any_damage_is_read_or_refused_never_a_raw_error(
    tmp_path: Path, cut: int, flips: list[tuple[int, int]], form: str
) -> None:
    ((name, content),) = FORMS_10[form].items()
    blob = bytearray(content[: cut % len(content) + 1])
    for position, mask in flips:
        blob[position % min(len(blob), 400)] ^= mask
    root = tmp_path / form
    write(root, {name: bytes(blob)})
    told = str(root / name)
    try:
        assert load("cifar-10", root=root).x.shape[1:] == (3, 32, 32)
    except MergingError as error:
        told = str(error)
    assert str(root / name) in told


# Hostile pickles


class Payload:
    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


RAN: list[str] = []


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [
    (os.system, "touch {ran}"), (eval, "open('{ran}', 'w')"), (exec, "open('{ran}', 'w')"),
    (open, "{ran}", "w"), (os.mkdir, "{ran}"), (RAN.append, "ran"),
    (functools.partial, os.mkdir, "{ran}"), (getattr, os, "mkdir"),
    (np.save, "{ran}.npy", 1), (collections.OrderedDict,),
])  # fmt: skip
def test_hostile_pickles_are_refused_and_nothing_runs(tmp_path: Path, call: tuple[Any, ...], protocol: int) -> None:
    ran = tmp_path / "ran"
    arguments = [a.format(ran=ran) if isinstance(a, str) else a for a in call[1:]]
    if any(a is os for a in arguments):
        arguments[0] = Payload(__import__, "os")
    payload = pickle.dumps({"data": Payload(call[0], *arguments), "labels": []}, protocol)
    write(tmp_path / "root", {"cifar-10-batches-py/test_batch": payload})
    refused(lambda: load("cifar-10", root=tmp_path / "root"), "refused", "test_batch")
    assert not RAN
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]


def test_a_type_that_hides_pointers_is_refused(tmp_path: Path) -> None:
    """With numpy's own dtype this pickle makes bytes into object pointers and kills the process."""
    forged = (
        b"\x80\x02}(X\x04\0\0\0datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\x01btR"
        b"(K\1(K\1tcnumpy\ndtype\n(X\x01\0\0\0OK\0K\1tR(K\3X\x01\0\0\0|NNNK\x08K\x08K\0tb"
        b"\x89U\x08AAAAAAAAtbX\x06\0\0\0labels](K\1eu."
    )
    write(tmp_path, {"cifar-10-batches-py/test_batch": forged})
    refused(lambda: load("cifar-10", root=tmp_path), "'O'", "test_batch")


@pytest.mark.parametrize("name", [b"numpy\ndtype", b"numpy\nndarray", b"_codecs\nencode"])
def test_a_pickle_cannot_change_what_it_names(tmp_path: Path, name: bytes) -> None:
    before = [dict(vars(kind)) for kind in (data.readers._PickledArray, data.readers._PickledType)]
    blob = b"\x80\x02c" + name + b"\n(N}X\x08\0\0\0__init__K\1stb."
    write(tmp_path, {"cifar-10-batches-py/test_batch": blob})
    refused(lambda: load("cifar-10", root=tmp_path), "test_batch")
    assert before == [dict(vars(kind)) for kind in (data.readers._PickledArray, data.readers._PickledType)]


# Batches


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4, N, 64])
def test_batches_are_the_naive_normalisation(dtype: torch.dtype, size: int) -> None:
    mean, std = data.sets.SETS["cifar-10"].mean, data.sets.SETS["cifar-10"].std
    images = Images(torch.from_numpy(X10), torch.from_numpy(Y10).long(), mean, std, "x", 10)
    x, y = (torch.cat(column) for column in zip(*images.batches(size, dtype=dtype), strict=True))
    m, s = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (mean, std))
    expected = (torch.from_numpy(X10).double() / 255 - m) / s
    assert x.dtype == dtype
    assert torch.equal(y, images.y)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    half = dtype in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(x, expected.to(dtype), rtol=0.01 if half else 0, atol=0 if half else tolerance)


def test_head_len_and_sizes() -> None:
    images = data.digits()
    assert len(images.head(7)) == 7
    assert len(images.head(10**6)) == len(images)
    assert [len(y) for _, y in images.head(7).batches(3)] == [3, 3, 1]
    assert list(images.head(0).batches(3)) == []
    refused(lambda: next(images.batches(0)), "size")


def test_batches_leave_the_images_alone() -> None:
    images = data.digits()
    before = images.x.clone()
    for x, _ in images.batches(100):
        x.zero_()
    assert torch.equal(images.x, before)


def test_digits_are_split_by_class_without_overlap() -> None:
    train, test = data.digits("train"), data.digits()
    assert len(train) + len(test) == 1797
    assert train.x.shape[1:] == (1, 8, 8)
    share = test.y.bincount() / (train.y.bincount() + test.y.bincount())
    assert ((share - 0.25).abs() < 0.01).all()
    scaled = torch.cat([train.x, test.x]).double() / 255
    assert abs(scaled.mean() - train.mean[0]) < 1e-3
    assert abs(scaled.std() - train.std[0]) < 1e-3


# ImageNet


def image_folder(root: Path, sizes: list[tuple[int, int]]) -> None:
    image = pytest.importorskip("PIL.Image")
    for i, (width, height) in enumerate(sizes):
        folder = root / f"n{i % 3:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels((height, width, 3), i)).save(folder / f"{i}.png")
    (root / "n00000003").mkdir()
    (root / "n00000000" / "notes.txt").write_text("no image")


SIZES = [(256, 256), (300, 400), (401, 299), (224, 500), (1000, 260), (257, 311), (90, 60)]


@pytest.mark.parametrize("inner", ["", "val", "imagenet/val", "imagenet"])
def test_imagenet_from_class_folders(tmp_path: Path, inner: str) -> None:
    image_folder(tmp_path / "root" / inner, SIZES)
    images = load("imagenet", root=tmp_path / "root")
    assert isinstance(images, FolderImages)
    assert len(images) == len(SIZES)
    assert images.y.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert images.classes == 4
    assert "4 classes" in images.name
    assert [tuple(x.shape) for x, _ in images.head(5).batches(2)] == [
        (2, 3, 224, 224), (2, 3, 224, 224), (1, 3, 224, 224),
    ]  # fmt: skip


def test_imagenet_is_cut_as_torchvision_cuts_it(tmp_path: Path) -> None:
    """Its Resize(256) and CenterCrop(224), written out: it need not be installed."""
    image = pytest.importorskip("PIL.Image")
    image_folder(tmp_path / "val", SIZES)
    images = load("imagenet", root=tmp_path)
    mean, std = np.array(images.mean), np.array(images.std)
    for (x, _), file in zip(images.batches(1), images.files, strict=True):
        picture = image.open(file).convert("RGB")
        w, h = picture.size
        size = (256, int(256 * h / w)) if w <= h else (int(256 * w / h), 256)
        whole = np.array(picture.resize(size, image.BILINEAR)) / 255
        top = round((size[1] - 224) / 2.0)
        left = round((size[0] - 224) / 2.0)
        expected = (whole[top : top + 224, left : left + 224] - mean) / std
        assert np.allclose(x[0].permute(1, 2, 0).numpy(), expected, rtol=0, atol=2e-6)


def test_imagenet_breaking_off_ends_the_threads(tmp_path: Path) -> None:
    image_folder(tmp_path / "val", SIZES)
    before = threading.active_count()
    batches = load("imagenet", root=tmp_path).batches(1)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_imagenet_damaged_image_and_missing_folder(tmp_path: Path) -> None:
    image_folder(tmp_path / "val", SIZES)
    broken = tmp_path / "val" / "n00000001" / "a.JPEG"
    broken.write_bytes(b"\xff\xd8nonsense")
    refused(lambda: list(load("imagenet", root=tmp_path).batches(4)), str(broken))
    refused(lambda: load("imagenet", root=tmp_path / "no"), str(tmp_path / "no"), "image-net.org")


def test_unsorted_validation_images_are_not_taken_for_a_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for folder in ("val", "test"):
        (tmp_path / folder).mkdir()
        image.new("RGB", (300, 300)).save(tmp_path / folder / "a.png")
    refused(lambda: load("imagenet", root=tmp_path), "class folders")


@pytest.mark.parametrize(("module", "package", "use"), [
    ("PIL.Image", "Pillow", lambda: load("imagenet")),
    ("sklearn.datasets", "scikit-learn", data.digits),
])  # fmt: skip
def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, use: Callable[[], object]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    refused(use, f"pip install {package}")


# Downloads


class Server(ThreadingHTTPServer):
    files: dict[str, bytes]
    asked: list[tuple[str, str | None]]
    ranges = True
    cut = 0  # leave this many bytes unsent


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content, wanted = self.server.files.get(self.path[1:]), self.headers["Range"]
        self.server.asked.append((self.path[1:], wanted))
        start = int(wanted[6:-1]) if wanted and self.server.ranges else 0
        if content is None or (start and start >= len(content)):
            self.send_error(404 if content is None else 416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : len(content) - self.server.cut])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        running.files, running.asked = {"a.bin": CONTENT}, []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


CONTENT = pixels((300_000,)).tobytes()
MD5 = hashlib.md5(CONTENT).hexdigest()


def url(server: Server, name: str = "") -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/{name}"


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_download_shows_progress_on_stderr(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.download.fetch(url(server, "a.bin"), tmp_path / "new" / "a.bin", MD5)
    assert (tmp_path / "new" / "a.bin").read_bytes() == CONTENT
    assert left(tmp_path / "new") == ["a.bin"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "a.bin" in err
    assert "300" in err


def test_download_resumes(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:100_000])
    data.download.fetch(url(server, "a.bin"), tmp_path / "a.bin", MD5)
    assert server.asked == [("a.bin", "bytes=100000-")]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert left(tmp_path) == ["a.bin"]


def test_download_starts_again_where_the_server_knows_no_ranges(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"old" * 1000)
    data.download.fetch(url(server, "a.bin"), tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_part_that_is_already_whole_is_kept(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    data.download.fetch(url(server, "a.bin"), tmp_path / "a.bin", MD5)
    assert left(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("part", [b"", b"stale" * 100, CONTENT + b"more"])
def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path, part: bytes) -> None:
    server.files["a.bin"] = CONTENT if part else CONTENT[::-1]
    if part:
        (tmp_path / "a.bin.part").write_bytes(part)
    refused(lambda: data.download.fetch(url(server, "a.bin"), tmp_path / "a.bin", MD5), "md5", MD5)
    assert left(tmp_path) == []


def test_a_broken_connection_keeps_the_part_for_the_next_time(server: Server, tmp_path: Path) -> None:
    server.cut = 1000
    refused(lambda: data.download.fetch(url(server, "a.bin"), tmp_path / "a.bin", MD5), "a.bin", "again")
    assert left(tmp_path) == ["a.bin.part"]
    server.cut = 0
    data.download.fetch(url(server, "a.bin"), tmp_path / "a.bin", MD5)
    assert server.asked[1] == ("a.bin", "bytes=299000-")
    assert left(tmp_path) == ["a.bin"]


def test_two_downloads_of_one_file_take_turns(server: Server, tmp_path: Path) -> None:
    fetch = functools.partial(data.download.fetch, url(server, "a.bin"), tmp_path / "a.bin", MD5)
    with ThreadPoolExecutor(4) as pool:
        for task in [pool.submit(fetch) for _ in range(4)]:
            task.result()
    assert server.asked == [("a.bin", None)]
    assert left(tmp_path) == ["a.bin"]


def test_no_such_file_no_server_no_folder(server: Server, tmp_path: Path) -> None:
    refused(lambda: data.download.fetch(url(server, "b.bin"), tmp_path / "b.bin", MD5), "404", "b.bin")
    refused(lambda: data.download.fetch("http://127.0.0.1:9/a", tmp_path / "a", MD5), "127.0.0.1:9")
    (tmp_path / "file").write_text("in the way")
    refused(lambda: data.download.fetch(url(server, "a.bin"), tmp_path / "file" / "a.bin", MD5), "root")


def test_load_downloads_only_when_allowed_and_only_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files |= {f"{k}.gz": gzip.compress(v, mtime=0) for k, v in fashion_files().items()}
    for name, content in server.files.items():
        monkeypatch.setitem(data.sets.MD5, name, hashlib.md5(content).hexdigest())
    spec = dataclasses.replace(data.sets.SETS["fashion-mnist"], url=url(server))
    monkeypatch.setitem(data.sets.SETS, "fashion-mnist", spec)
    refused(lambda: load("fashion-mnist", root=tmp_path), "download=True")
    assert server.asked == []
    for _ in range(2):
        images = load("fashion-mnist", root=tmp_path, download=True)
        assert same(images, pixels((N, 28, 28))[:, None], labels())
    assert [name for name, _ in server.asked] == [f"{IMAGES}.gz", f"{LABELS}.gz"]


# Real data


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
@pytest.mark.parametrize(("split", "count"), [("test", 10_000), ("train", 60_000)])
def test_the_real_fashion_mnist(monkeypatch: pytest.MonkeyPatch, split: Any, count: int) -> None:
    monkeypatch.setitem(data.sets.SETS, "fashion-mnist", data.sets._FASHION)
    images = load("fashion-mnist", split)
    assert images.x.shape == (count, 1, 28, 28)
    assert images.name == f"fashion-mnist {split}"
    assert images.y.bincount().tolist() == [count // 10] * 10


@pytest.mark.skipif(not REAL, reason="NEURON_MERGING_DATA is not set")
def test_the_real_cifar_10(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (Path(REAL) / "cifar10_test.npz").is_file():
        pytest.skip("no cifar10_test.npz in NEURON_MERGING_DATA")
    monkeypatch.setenv("NEURON_MERGING_DATA", REAL)
    images = load("cifar-10")
    assert images.x.shape == (10_000, 3, 32, 32)
    assert images.name == "cifar-10 test"
    assert images.y.bincount().tolist() == [1000] * 10
    assert images.y[:5].tolist() == [3, 8, 8, 0, 6]  # the order as published
    x = torch.cat([x for x, _ in images.batches(500)])
    std = x.std(dim=(0, 2, 3)) * torch.tensor(images.std)
    assert x.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (std - torch.tensor([0.2470, 0.2435, 0.2616])).abs().max() < 0.001  # the data's own
