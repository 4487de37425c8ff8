"""A network that a cut would break: the group that does it stays whole, with a reason, and the rest is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i, self.a = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 64, 3, padding=1)
        self.b, self.c = nn.Conv2d(64, 16, 3, padding=1), nn.Conv2d(16, 5, 1)


class ConstantGroups(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(F.group_norm(self.a(self.i(x).relu()), 4).relu()).relu())


class GroupNorm(nn.Module):
    """Named like torch's, and another."""

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.rand(channels)), nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.groups, self.weight, self.bias)


class OwnGroupNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = GroupNorm(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.norm(self.a(self.i(x).relu())).relu()).relu())


class NumberBehindTheReader(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(self.i(x).relu()).relu()
        return self.c((self.b(y) * y.shape[1] ** -0.5).relu())


class NumberAtTheEnd(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(self.i(x).relu()).relu()
        return self.c(self.b(y).relu()) * y.shape[1] ** -0.5


class BranchOnASize(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(self.i(x).relu()).relu()
        z = self.b(y)
        return self.c((2 * z if y.shape[1] > 48 else z).relu())


class FailsBelowASize(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(self.i(x).relu()).relu()
        if y.shape[1] < 48:
            raise ValueError("at least 48 channels")
        return self.c(self.b(y).relu())


CAUSES = {
    ConstantGroups: "group_norm",
    OwnGroupNorm: "group_norm",
    NumberBehindTheReader: "number of channels",
    NumberAtTheEnd: "number of channels",
    BranchOnASize: "depends on",
    FailsBelowASize: "at least 48 channels",
}


@pytest.mark.parametrize("merger", ["none", None])
@pytest.mark.parametrize("kind", CAUSES)
def test_the_group_that_breaks_a_network_stays_whole_and_the_rest_is_cut(
    kind: type[nn.Module], merger: str | None
) -> None:
    small = nm.compress(kind(), torch.randn(2, 3, 8, 8), merger=merger)
    assert {choice.name for choice in small.plan.groups} == {"i", "b"}
    assert any(CAUSES[kind] in str(refusal) for refusal in small.summary.refusals if refusal.layer == "a")


class Subclassed(nn.GroupNorm):
    """Surgery knows its sizes: it is torch's own by descent."""


class KnownGroupNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Subclassed(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.norm(self.a(self.i(x).relu())).relu()).relu())


def test_a_group_norm_whose_number_of_groups_follows_is_cut() -> None:
    small = nm.compress(KnownGroupNorm(), torch.randn(2, 3, 8, 8), merger="none")
    assert small.model.norm.num_groups == 2 and small.model.a.weight.shape[0] == 32
