"""What holds for every method of merging."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from tests.zoo import CASES
from tests.zoo.pruning import every_graph, prune


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = inputs["x"]
        x += 1
        result: Tensor = self.net(2 * x) + self.net(x)
        return result


@pytest.mark.parametrize("merger", ["none", "cosine", "moments", None])
def test_a_network_may_write_into_its_inputs(merger: str | None) -> None:
    x = torch.randn(3, 4)
    given, model = x.clone(), Writing()
    found = nm.compress(model, ({"x": given},), merger=merger, calibration=None if merger else [({"x": given},)])
    assert found.summary.parameters[1] < found.summary.parameters[0]
    nm.inspect(model, ({"x": given},))
    assert torch.equal(given, x)


@every_graph
def test_merging_keeps_topology_and_numbers(name: str) -> None:
    done = prune(name)
    merged = nm.compress(done.analysis, ratio=0.5, merger="cosine", scope="all")
    shapes = {key: value.shape for key, value in done.small.state_dict().items()}
    assert {key: value.shape for key, value in merged.model.state_dict().items()} == shapes
    assert merged.plan.cuts == done.result.plan.cuts
    assert merged.summary.error is None or merged.summary.error < 1e-4
    assert all(group.said for group in merged.summary.groups)


@pytest.mark.parametrize("merger", ["fold", "linear", "moments"])
@pytest.mark.parametrize("name", sorted(CASES)[::8])
def test_methods_are_verified_or_refuse_on_many_networks(name: str, merger: str) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[name].build(), CASES[name].inputs()
    try:
        small = nm.compress(model, inputs, merger=merger, scope="all")
    except nm.MergingError:
        with pytest.raises(nm.MergingError):
            nm.compress(model, inputs, merger="none", scope="all")
        return
    assert small.summary.error is None or small.summary.error < 1e-4
    assert small.summary.parameters[1] < small.summary.parameters[0]
    assert all(group.said for group in small.summary.groups)
