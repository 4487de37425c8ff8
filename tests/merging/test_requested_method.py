"""The method that was asked for is the one that runs; another one has a reason, and a fault is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration import gaussian
from neuron_merging.merging import moments
from neuron_merging.merging.protocol import MergeKind


def images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    ).eval()


def vectors() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


NETWORKS = {"images": (images, (1, 3, 12, 12)), "vectors": (vectors, (1, 6))}


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("surroundings", ["bfloat16", "float64", "another device"])
def test_defaults_of_the_program_change_nothing(name: str, surroundings: str) -> None:
    make, shape = NETWORKS[name]
    model, x = make(), torch.zeros(shape)
    wanted = nm.compress(model, x)
    default = torch.device("meta") if surroundings == "another device" else precision(getattr(torch, surroundings))
    with default:
        found = nm.compress(model, x)
    assert {merge.kind for merge in found.merged.merges} == {MergeKind.FITTED}
    for key, value in wanted.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[key], value), key


@pytest.mark.parametrize("samples", [0, -1, 1.5, True, "128"])
def test_a_number_of_samples_that_cannot_be_meant(samples: object) -> None:
    with pytest.raises(nm.MergingError, match="samples"):
        nm.Moments(samples=samples)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 0.5, 2**64, None])
def test_a_seed_that_cannot_be_meant(seed: object) -> None:
    with pytest.raises(nm.MergingError, match="seed"):
        nm.Moments(seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fault_in_the_statistics_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    make, shape = NETWORKS[name]
    monkeypatch.setattr(moments, "collect_fit_statistics", broken)
    monkeypatch.setattr(gaussian, "apply_linear", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        nm.compress(make(), torch.zeros(shape))


class Unbatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.a(x).relu()).relu())
        return y


def test_an_example_without_a_batch_is_fitted_as_a_batch_of_one() -> None:
    found = nm.compress(Unbatched(), torch.randn(3, 8, 8))
    assert {merge.kind for merge in found.merged.merges} == {MergeKind.FITTED}


def test_the_paper_s_method_is_only_a_stand_in_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.calibration.layer_stats.MAX_COVARIANCE_FEATURES", 4)
    found = nm.compress(vectors(), torch.zeros(1, 6))
    assert all(merge.reason is not None for merge in found.merged.merges if merge.kind is not MergeKind.FITTED)


def test_a_product_with_a_bias_is_fitted() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.weight, self.bias = (
                nn.Linear(6, 20),
                nn.Parameter(torch.randn(20, 5)),
                nn.Parameter(torch.randn(5)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, self.a(x).relu(), self.weight)

    found = nm.compress(Product(), torch.randn(1, 6))
    assert [merge.kind for merge in found.merged.merges] == [MergeKind.FITTED]
