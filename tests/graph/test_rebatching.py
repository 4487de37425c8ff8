"""The graph of another batch size, captured anew, has the names of the first."""

from __future__ import annotations

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
