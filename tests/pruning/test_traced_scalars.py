"""A number of channels that the code computes with is found before anything is cut, whatever the example shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from tests.exports import counted


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(self.a(x).relu())
        result: Tensor = self.c(self.b(y).relu())
        return result


def helped(y: Tensor) -> Tensor:
    return y * len(y[0])


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda y: y / y.shape[1],
    "a bound that is never reached": lambda y: y.clamp(max=100.0 * y.shape[1]),
    "a power": lambda y: y * y.shape[1] ** -0.5,
    "added where nothing is": lambda y: y + 1e-9 * y.shape[1],
    "in a helper": helped,
    "in place": lambda y: y.mul_(y.shape[1]),
    "a slope": lambda y: F.leaky_relu(y, 1 / y.shape[1]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_number_of_channels_keeps_its_layer_whole_and_no_other(way: str) -> None:
    with counted() as exports:
        small = nm.compress(Net(WAYS[way]), torch.zeros(2, 6), merger="none")
    assert [(group.name, group.after) for group in small.summary.groups] == [("b", 4)]
    (refusal,) = [refusal for refusal in small.summary.refusals if refusal.layer == "a"]
    assert "computes with the number of channels" in refusal.why and "test_traced_scalars.py" in refusal.place
    assert len(exports) == 1


class Behind(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        z = self.b(y) * y.shape[1] ** -0.5
        result: Tensor = self.c(z.relu())
        return result


def test_a_number_that_is_used_behind_the_reader_keeps_its_own_layer_whole() -> None:
    small = nm.compress(Behind(lambda y: y), torch.zeros(2, 6), merger="none")
    assert [group.name for group in small.summary.groups] == ["b"]


def test_sizes_that_are_only_sizes_are_no_numbers() -> None:
    net = Net(lambda y: y.view(y.shape[0], y.shape[1]).narrow(1, 0, y.shape[1]).reshape(-1, y.shape[1]))
    assert len(nm.compress(net, torch.randn(2, 6), merger="none").summary.groups) == 2
