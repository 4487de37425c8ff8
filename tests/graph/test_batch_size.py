"""The graph of another batch size, captured anew, has the names of the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.graph.interpreter import run_graph


class OnceMore(nn.Module):
    """Expands a table for more than one sample, and splits its features with a view that names the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(4.0).view(1, 4, 1)
        places = places if len(x) == 1 else places.expand(len(x), 4, 1)
        hidden = self.one(x + places[torch.arange(len(x))]).relu().view(len(x), 4, -1)
        hidden = hidden * self.two(x).expand(len(x), -1, -1)
        out: Tensor = self.last(hidden)
        return out


def test_names_behind_an_operator_more_are_those_of_the_example() -> None:
    torch.manual_seed(0)
    known = nm.analyse(OnceMore().eval(), torch.randn(1, 4, 6))
    batch = (torch.randn(5, 4, 6),)
    other = known.graph_for(batch)
    assert len(other.nodes) == len(known.graph.nodes) + 1
    names = [node.name for node in known.graph.nodes]
    assert [node.name for node in other.nodes if node.name in names] == names
    for node in known.graph.nodes:
        twin = other.node(node.name)
        assert twin is not None and (twin.op, twin.module, len(twin.shape)) == (node.op, node.module, len(node.shape))
    assert torch.equal(run_graph(other, batch, other.tensors)[0], known.model(*batch))


def test_budgets_are_found_on_such_batches() -> None:
    torch.manual_seed(0)
    small = nm.compress(
        OnceMore().eval(), torch.randn(1, 4, 6), budget={"params": 0.6}, calibration=[torch.randn(9, 4, 6)]
    )
    assert small.summary.parameters[1] <= 0.6 * small.summary.parameters[0]


@pytest.mark.parametrize("channels", [8, 12])
@pytest.mark.parametrize("options", [{"ratio": 0.5}, {"budget": {"macs": 0.6}}])
def test_a_sample_without_a_batch_dimension_is_a_batch_of_one(channels: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(channels, 12, 1, bias=False), nn.Tanh()
    )
    x = torch.randn(3, 12, 12)
    alone, batched = (nm.compress(model, given, **options).model for given in (x, x[None]))
    assert torch.equal(alone(x), batched(x)) and alone[0].out_channels < channels


def test_a_vector_is_a_batch_of_one() -> None:
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    assert nm.compress(model, torch.randn(20), ratio=0.5).model[0].out_features == 8


def test_a_network_that_takes_one_sample_only_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(0), nn.Linear(8, 4))
    with pytest.raises(nm.MergingError, match="takes no batch of such samples") as error:
        nm.compress(model, torch.randn(3, 12, 12))
    assert "x.unsqueeze(0)" in str(error.value)
