"""Networks without values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from neuron_merging.graph.hollow import Hollow


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
    graph = Hollow(model, lambda tensor: tuple(tensor.shape)).trace((torch.zeros(2, 3, 4),))
    assert graph.nodes[-1].op == "add" and graph.nodes[-1].shape == (2, 3, 4)
    assert "places" in vars(model)  # the user's own is as it was
