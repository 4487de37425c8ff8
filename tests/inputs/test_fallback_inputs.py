"""Fallback inputs, and how messages describe them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.graph.example_inputs import take_samples
from neuron_merging.inputs.input_sets import make_fallback_inputs


class Fixed(nn.Module):
    """Takes two rows at a time and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).reshape(2, 3)


class Picky(Fixed):
    """Takes the example and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.equal(x, torch.ones_like(x)):
            raise ValueError("not what I know")
        return self.b(self.a(x).relu())


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)), torch.zeros(1, 3, 8, 8), "20 synthetic images"),
        (nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 2, 1)), torch.zeros(1, 3, 8), "20 synthetic series"),
        (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), torch.zeros(2, 6), "20 random numbers"),
        (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), torch.zeros(1, 5, dtype=torch.int64), "20 random tokens"),
        (Fixed(), torch.zeros(2, 6), "20 random numbers"),
    ],
)
def test_what_they_are(model: nn.Module, example: Tensor, said: str) -> None:
    analysis = nm.analyse(model, example)
    found = make_fallback_inputs(analysis, 20, seed=0)
    assert str(found) == said and all(model(*batch) is not None for batch in found.batches)
    assert torch.equal(found.batches[0][0], make_fallback_inputs(analysis, 20, seed=0).batches[0][0])


def test_a_network_that_takes_nothing_else_gets_its_example() -> None:
    analysis = nm.analyse(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), torch.ones(2, 6))
    found = make_fallback_inputs(nm.Analysis(Picky(), analysis.inputs, analysis.graph, analysis.channels), 20, seed=0)
    assert str(found) == "2 example inputs"


def test_some_of_a_batch() -> None:
    x, extra = torch.arange(10), torch.ones(3)
    assert [tuple(value.shape) for value in take_samples((x, extra), 4)] == [(4,), (3,)]
