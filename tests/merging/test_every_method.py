"""What holds for every method of merging."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.config import CompressConfig
from neuron_merging.pipeline import compress_analysis
from tests.zoo import CASES
from tests.zoo.pruning import every_graph, graphs, prune


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
    settings = CompressConfig(ratio=0.5, merger="cosine", scope="all")
    merged = compress_analysis(done.analysis, settings, judge=False)
    shapes = {key: value.shape for key, value in done.small.state_dict().items()}
    assert {key: value.shape for key, value in merged.model.state_dict().items()} == shapes
    assert merged.plan.cuts == done.result.plan.cuts
    assert merged.summary.error is None or merged.summary.error < 1e-4
    assert all(group.descriptions for group in merged.summary.groups)


@graphs(lambda case: case.name in sorted(CASES)[::8])
def test_methods_are_verified_on_many_networks(name: str) -> None:
    for merger in ("fold", "linear", "moments"):
        small = nm.compress(prune(name).analysis, merger=merger, scope="all")
        assert small.summary.error is None or small.summary.error < 1e-4
        assert small.summary.parameters[1] < small.summary.parameters[0]
        assert all(group.descriptions for group in small.summary.groups)
