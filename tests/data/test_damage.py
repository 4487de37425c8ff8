"""Damaged files are refused, never a raw error."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_merging.errors import MergingError
from neuron_merging.reproduction.datasets import load_dataset
from tests.data.tiny_datasets import (
    FORMS_10,
    GOOD_IDX,
    HWC,
    IMAGES,
    LABELS,
    X10,
    Y10,
    N,
    binary,
    idx,
    npz,
    pickled,
    pixels,
    refused,
    tar_gz,
    write,
)

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

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
    refused(lambda: load_dataset("fashion-mnist", root=tmp_path), str(tmp_path / name), word)


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
    refused(lambda: load_dataset("fashion-mnist", root=tmp_path), f"{IMAGES}.gz")


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
    refused(lambda: load_dataset("cifar-10", root=tmp_path), str(tmp_path / name))


def test_a_flipped_bit_in_an_archive_is_noticed(tmp_path: Path) -> None:
    """In stored (level 0) gzip nothing but the checksum can tell."""
    name = "cifar-10-binary.tar.gz"
    plain = gzip.decompress(FORMS_10["binary archive"][name])
    blob = bytearray(gzip.compress(plain, compresslevel=0))
    blob[5000] ^= 1
    write(tmp_path, {name: bytes(blob)})
    refused(lambda: load_dataset("cifar-10", root=tmp_path), name, "CRC")


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    write(tmp_path, {"cifar-10-binary.tar.gz": buffer.getvalue()})
    refused(lambda: load_dataset("cifar-10", root=tmp_path), "lacks")


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
        assert load_dataset("cifar-10", root=root).x.shape[1:] == (3, 32, 32)
    except MergingError as error:
        told = str(error)
    assert str(root / name) in told
