"""Readers against files written here."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neuron_merging.reproduction import datasets
from neuron_merging.reproduction.datasets import load_dataset
from tests.data.tiny_datasets import (
    FORMS_10,
    FORMS_100,
    GOOD_IDX,
    HWC,
    X10,
    Y10,
    Y100,
    N,
    binary,
    fashion_files,
    labels,
    npz,
    pixels,
    refused,
    same,
    tar_gz,
    write,
)

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
REAL = os.environ.get("NEURON_MERGING_DATA", "")


# Reading


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("folder", ["", "FashionMNIST/raw/"])
def test_fashion_mnist(tmp_path: Path, suffix: str, folder: str) -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if suffix else bytes
    write(tmp_path, {folder + k + suffix: pack(v) for k, v in fashion_files().items()})
    images = load_dataset("fashion-mnist", root=tmp_path)
    assert same(images, pixels((N, 28, 28))[:, None], labels())
    assert (images.mean, images.std, images.classes) == ((0.5,), (0.5,), 10)


@pytest.mark.parametrize("form", FORMS_10)
def test_cifar_10(tmp_path: Path, form: str) -> None:
    write(tmp_path, FORMS_10[form])
    images = load_dataset("cifar-10", root=str(tmp_path))
    assert same(images, X10, Y10)
    assert images.classes == 10
    assert images.name == "cifar-10 test (only 10 of 10,000 images)"


@pytest.mark.parametrize("form", FORMS_100)
def test_cifar_100_takes_the_fine_label(tmp_path: Path, form: str) -> None:
    write(tmp_path, FORMS_100[form])
    images = load_dataset("cifar-100", root=tmp_path)
    assert same(images, X10, Y100)
    assert images.classes == 100


def test_cifar_10_train_joins_five_batches_in_order(tmp_path: Path) -> None:
    parts = [(pixels((N, 3, 32, 32), i), labels(i)) for i in range(1, 6)]
    files = {f"cifar-10-batches-bin/data_batch_{i}.bin": binary(*p) for i, p in enumerate(parts, 1)}
    write(tmp_path, {"cifar-10-binary.tar.gz": tar_gz(dict(reversed(files.items())))})
    images = load_dataset("cifar-10", "train", tmp_path)
    assert same(images, np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))


def test_two_thousand_training_images_serve_only_when_nothing_else_is_there(tmp_path: Path) -> None:
    write(tmp_path / "a", {"cifar10_train_2k.npz": npz(x=HWC[:4], y=Y10[:4])})
    assert load_dataset("cifar-10", "train", tmp_path / "a").name == ("cifar-10 train (only 4 of 50,000 images)")
    write(tmp_path / "cache" / "neuron-merging", {"cifar10_train.npz": npz(x=HWC, y=Y10)})
    assert len(load_dataset("cifar-10", "train", tmp_path / "a")) == N


def test_root_comes_before_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "env", {"cifar10_test.npz": npz(x=HWC[:3], y=Y10[:3])})
    write(tmp_path / "root", {"cifar10_test.npz": npz(x=HWC, y=Y10)})
    monkeypatch.setenv("NEURON_MERGING_DATA", str(tmp_path / "env"))
    assert len(load_dataset("cifar-10")) == 3
    assert len(load_dataset("cifar-10", root=tmp_path / "root")) == N


# Refusing


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
    refused(lambda: load_dataset(name, root=root), *words)


def test_a_folder_that_is_not_there_is_not_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "env"
    place.mkdir()
    for name, content in GOOD_IDX.items():
        (place / name).write_bytes(content)
    monkeypatch.setenv("NEURON_MERGING_DATA", str(place))
    assert len(load_dataset("fashion-mnist")) > 0
    refused(lambda: load_dataset("fashion-mnist", root=tmp_path / "typo"), "typo", "no such folder", str(place))


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in GOOD_IDX.items():
        (tmp_path / name).write_bytes(content)

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    error = refused(lambda: load_dataset("fashion-mnist", root=tmp_path), "Permission denied", "Allow it to be read")
    assert "damaged" not in str(error)


def test_unknown_names_and_splits() -> None:
    refused(lambda: load_dataset("mnist"), "mnist", "cifar-10")
    refused(lambda: load_dataset("cifar-10", "val"), "val", "train")  # type: ignore[call-overload]
    refused(lambda: load_dataset("imagenet", "train"), "validation")


# Real data


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
@pytest.mark.parametrize(("split", "count"), [("test", 10_000), ("train", 60_000)])
def test_the_real_fashion_mnist(monkeypatch: pytest.MonkeyPatch, split: Any, count: int) -> None:
    monkeypatch.setitem(datasets.DATASET_SPECS, "fashion-mnist", datasets._FASHION_MNIST)
    images = load_dataset("fashion-mnist", split)
    assert images.x.shape == (count, 1, 28, 28)
    assert images.name == f"fashion-mnist {split}"
    assert images.y.bincount().tolist() == [count // 10] * 10


@pytest.mark.skipif(not REAL, reason="NEURON_MERGING_DATA is not set")
def test_the_real_cifar_10(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (Path(REAL) / "cifar10_test.npz").is_file():
        pytest.skip("no cifar10_test.npz in NEURON_MERGING_DATA")
    monkeypatch.setenv("NEURON_MERGING_DATA", REAL)
    images = load_dataset("cifar-10")
    assert images.x.shape == (10_000, 3, 32, 32)
    assert images.name == "cifar-10 test"
    assert images.y.bincount().tolist() == [1000] * 10
    assert images.y[:5].tolist() == [3, 8, 8, 0, 6]  # the order as published
    x = torch.cat([x for x, _ in images.batches(500)])
    std = x.std(dim=(0, 2, 3)) * torch.tensor(images.std)
    assert x.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (std - torch.tensor([0.2470, 0.2435, 0.2616])).abs().max() < 0.001  # the data's own
