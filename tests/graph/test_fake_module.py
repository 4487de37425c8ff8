"""Fake modules: networks with shapes and without values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from neuron_merging.graph.fake_module import FakeModule


class Placed(nn.Module):
    """Positions from a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.places = nn.Linear(4, 4), torch.arange(12.0).view(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x) + self.places.to(x.device, dtype=x.dtype)
        return out


def test_a_network_with_plain_tensors_is_traced_without_values() -> None:
    model = Placed()
    graph = FakeModule(model, lambda tensor: tuple(tensor.shape)).trace((torch.zeros(2, 3, 4),))
    assert graph.nodes[-1].op == "add" and graph.nodes[-1].shape == (2, 3, 4)
    assert "places" in vars(model)  # the user's own is as it was


class Remembering(nn.Module):
    """A tensor that its code sets, under a name that its class has as well."""

    places = torch.empty(0)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.places.shape != x.shape[1:]:
            self.places = torch.ones(x.shape[1:])
        out: Tensor = self.up(x) + self.places
        return out


def test_plain_tensors_that_the_class_names_too_are_seen() -> None:
    model = Remembering()
    model(torch.zeros(2, 3, 4))
    hollow = FakeModule(model, lambda tensor: tuple(tensor.shape))
    assert hollow.run((torch.zeros(2, 3, 4),)).shape == (2, 3, 4)
    assert [node.op for node in hollow.trace((torch.zeros(2, 3, 4),)).nodes] == ["linear", "add"]
    assert isinstance(hollow.model, Remembering) and type(model) is Remembering
