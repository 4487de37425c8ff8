"""Only a weight that is a stored tensor, or a view of one, is rewritten; what is computed from one never is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.merging.protocol import MergeKind

Read = Callable[["Reader", Tensor], Tensor]


class Reader(nn.Module):
    def __init__(self, read: Read) -> None:
        super().__init__()
        self.a, self.c, self.read = nn.Linear(16, 32), nn.Linear(24, 4), read
        self.weight = nn.Parameter(torch.randn(24, 32) / 5)
        self.turned = nn.Parameter(torch.randn(32, 24) / 5)
        self.deep = nn.Parameter(torch.randn(6, 32, 4) / 5)
        self.scale = nn.Parameter(0.1 + torch.rand(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.read(self, self.a(x).relu()).relu())
        return y


COMPUTED: dict[str, Read] = {
    "scaled": lambda m, h: F.linear(h, m.weight * m.scale),
    "small": lambda m, h: F.linear(h, m.weight * 0.01),
    "negative": lambda m, h: F.linear(h, -m.weight),
    "tanh": lambda m, h: F.linear(h, m.weight.tanh()),
    "sign": lambda m, h: F.linear(h, m.weight.sign()),
    "abs": lambda m, h: F.linear(h, m.weight.abs()),
    "rounded": lambda m, h: F.linear(h, (m.weight * 16).round() / 16),
    "normalised": lambda m, h: F.linear(h, m.weight / (1 + m.scale)),
    "turned and scaled": lambda m, h: h @ (m.turned * 0.5),
    "also read elsewhere": lambda m, h: F.linear(h, m.weight) + F.linear(h, m.weight.abs()),
}
VIEWS: dict[str, Read] = {
    "itself": lambda m, h: F.linear(h, m.weight),
    "transposed": lambda m, h: h @ m.weight.t(),
    "twice transposed": lambda m, h: F.linear(h, m.weight.t().contiguous().transpose(0, 1)),
    "the other way round": lambda m, h: F.linear(h, m.turned.t()),
    "product": lambda m, h: h @ m.turned,
    "permuted and flattened": lambda m, h: h @ m.deep.permute(1, 0, 2).flatten(1),
}


def squared(small: nn.Module, model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((small(x) - model(x)).square().mean() / model(x).var())


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_is_left_alone(name: str) -> None:
    model, x = Reader(COMPUTED[name]), torch.randn(128, 16)
    analysis = nm.analyse(model, x[:1])
    for merger in (None, "cosine", "linear", "fold"):
        result = nm.compress(analysis, ratio={"a": 0.5}, merger=merger)
        plain = nm.compress(analysis, ratio={"a": 0.5}, merger="none")
        assert {merge.kind for merge in result.merged.merges} == {MergeKind.PRUNED}, merger
        assert squared(result.model, model, x) == squared(plain.model, model, x), merger
        assert "cannot be rewritten" in str(result.summary), merger


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_stored_weight_is_merged(name: str) -> None:
    model, x = Reader(VIEWS[name]), torch.randn(128, 16)
    analysis = nm.analyse(model, x[:1])
    result, pruned = (nm.compress(analysis, ratio={"a": 0.5}, merger=merger) for merger in (None, "none"))
    assert {merge.kind for merge in result.merged.merges} == {MergeKind.FITTED}
    assert squared(result.model, model, x) < 0.7 * squared(pruned.model, model, x)


@pytest.mark.parametrize("merger", ["cosine", "linear", "fold"])
def test_filters_that_are_computed_are_not_compared(merger: str) -> None:
    """With a mask on the rows, stored filters that look alike are not the ones that make the channels."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gate = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.rand(12, 1))
            self.c = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.c(F.linear(x, self.weight * self.gate).relu())
            return y

    merges = nm.compress(Masked(), torch.randn(1, 8), merger=merger).merged.merges
    assert [str(merge.reason) for merge in merges] == ["its filters are computed, not stored"]
