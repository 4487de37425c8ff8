"""Images in memory: batches, sizes, splits."""

from __future__ import annotations

import pytest
import torch

from neuron_merging.data import Images
from neuron_merging.reproduction import datasets
from tests.data.tiny_datasets import X10, Y10, N, refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4, N, 64])
def test_batches_are_the_naive_normalisation(dtype: torch.dtype, size: int) -> None:
    mean, std = datasets.DATASET_SPECS["cifar-10"].mean, datasets.DATASET_SPECS["cifar-10"].std
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
    images = datasets.load_digits()
    assert len(images.head(7)) == 7
    assert len(images.head(10**6)) == len(images)
    assert [len(y) for _, y in images.head(7).batches(3)] == [3, 3, 1]
    assert list(images.head(0).batches(3)) == []
    refused(lambda: next(images.batches(0)), "size")


def test_batches_leave_the_images_alone() -> None:
    images = datasets.load_digits()
    before = images.x.clone()
    for x, _ in images.batches(100):
        x.zero_()
    assert torch.equal(images.x, before)


def test_digits_are_split_by_class_without_overlap() -> None:
    train, test = datasets.load_digits("train"), datasets.load_digits()
    assert len(train) + len(test) == 1797
    assert train.x.shape[1:] == (1, 8, 8)
    share = test.y.bincount() / (train.y.bincount() + test.y.bincount())
    assert ((share - 0.25).abs() < 0.01).all()
    scaled = torch.cat([train.x, test.x]).double() / 255
    assert abs(scaled.mean() - train.mean[0]) < 1e-3
    assert abs(scaled.std() - train.std[0]) < 1e-3
