"""ImageNet from folders of classes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from neuron_merging.data import FolderImages
from neuron_merging.data.open_data import images
from neuron_merging.reproduction import datasets
from neuron_merging.reproduction.datasets import load_dataset
from tests.data.tiny_datasets import pixels, refused


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
    images = load_dataset("imagenet", root=tmp_path / "root")
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
    images = load_dataset("imagenet", root=tmp_path)
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
    batches = load_dataset("imagenet", root=tmp_path).batches(1)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_imagenet_damaged_image_and_missing_folder(tmp_path: Path) -> None:
    image_folder(tmp_path / "val", SIZES)
    broken = tmp_path / "val" / "n00000001" / "a.JPEG"
    broken.write_bytes(b"\xff\xd8nonsense")
    refused(lambda: list(load_dataset("imagenet", root=tmp_path).batches(4)), str(broken))
    refused(lambda: load_dataset("imagenet", root=tmp_path / "no"), str(tmp_path / "no"), "image-net.org")


def test_unsorted_validation_images_are_not_taken_for_a_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for folder in ("val", "test"):
        (tmp_path / folder).mkdir()
        image.new("RGB", (300, 300)).save(tmp_path / folder / "a.png")
    refused(lambda: load_dataset("imagenet", root=tmp_path), "class folders")


@pytest.mark.parametrize(("module", "package", "use"), [
    ("PIL.Image", "Pillow", lambda: load_dataset("imagenet")),
    ("sklearn.datasets", "scikit-learn", datasets.load_digits),
])  # fmt: skip
def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, use: Callable[[], object]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    refused(use, f"pip install {package}")


def test_images_in_the_order_blue_green_red(tmp_path: Path) -> None:
    image_folder(tmp_path / "val", SIZES[:2])
    red, blue = (images(tmp_path / "val", mean=[0.0] * 3, std=[1.0] * 3, crop=32, bgr=bgr) for bgr in (False, True))
    (x, _), (y, _) = next(iter(red.batches(2))), next(iter(blue.batches(2)))
    assert x.flip(1).equal(y) and not x.equal(y)


def test_the_layout_can_be_given(tmp_path: Path) -> None:
    image_folder(tmp_path / "val", SIZES[:2])
    ambiguous = torch.zeros(1, 3, 32, 3)  # three rows of channels-last pixels, or three narrow planes
    last, first = (
        images(tmp_path / "val", resize=32, crop=crop, layout=layout).adapt_to(ambiguous)
        for layout, crop in (("nhwc", (3, 32)), ("NCHW", (32, 3)))
    )
    assert next(iter(last.batches(2)))[0].shape == (2, 3, 32, 3) and last.channels_last
    assert next(iter(first.batches(2)))[0].shape == (2, 3, 32, 3) and not first.channels_last
    refused(lambda: images(tmp_path / "val", layout="HWC"), "NCHW or NHWC")
    refused(lambda: images(tmp_path / "val", layout="NHWC").adapt_to(torch.zeros(1, 3, 32, 32)), "32 channels")
