"""Residual streams: a layer reads the channels, and its output is added to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm


class Net(nn.Module):
    def __init__(self, join: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.gate = (nn.Linear(8, 8) for _ in range(4))
        self.end, self.join = nn.Linear(8, 3), join

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.join(self, x).relu())


def skip(net: Net, x: Tensor) -> Tensor:
    x = net.stem(x)
    return x + net.b(net.a(x).relu())


def skip_in_place(net: Net, x: Tensor) -> Tensor:
    x = net.stem(x)
    y = net.b(net.a(x).relu())
    y += x
    return y


def cubic(net: Net, x: Tensor) -> Tensor:
    x = net.stem(x)
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


def branches(net: Net, x: Tensor) -> Tensor:
    return net.stem(x) + net.b(net.a(x).relu())


def embedding(net: Net, x: Tensor) -> Tensor:
    return net.stem(x.relu()) + net.gate(x.mean(0, keepdim=True))


def gated_cubic(net: Net, x: Tensor) -> Tensor:
    x = net.stem(x)
    x = x * net.b(net.a(x).relu()).sigmoid()
    return x + 0.044715 * x.pow(3)


def shared_table(net: Net, x: Tensor) -> Tensor:
    """What is looked up by place is the same whatever comes in: it passes by no layer."""
    table = nn.functional.embedding(torch.arange(2), net.gate.weight)
    x = net.stem(x) + table
    return net.b(net.a(x).relu() + table) + table


@pytest.mark.parametrize("join", [skip, skip_in_place], ids=lambda join: join.__name__)
def test_sums_across_a_skip_are_residual(join: Callable[[Net, Tensor], Tensor]) -> None:
    groups = {group.name: group.residual for group in nm.inspect(Net(join), torch.randn(2, 8)).groups}
    assert groups == {"stem": True, "a": False}


OTHERS = [cubic, branches, embedding, gated_cubic, shared_table]


@pytest.mark.parametrize("join", OTHERS, ids=lambda join: join.__name__)
def test_other_sums_are_not(join: Callable[[Net, Tensor], Tensor]) -> None:
    found = nm.inspect(Net(join), torch.randn(2, 8))
    assert found.groups and not any(group.residual for group in found.groups)
    assert nm.compress(Net(join), torch.randn(2, 8), merger="none").model.stem.out_features == 4
