"""Outputs are compared before the last sigmoid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration.output_divergence import Divergence, strip_output_activations
from neuron_merging.selection.cut_simulator import CutSimulator


class Sure(nn.Module):
    """A network with saturated outputs: a probability near zero for any input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 3)
        nn.init.constant_(self.b.bias, -60.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.b(self.a(x).relu()))


def test_a_sure_network_has_something_to_lose() -> None:
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    analysis = nm.analyse(Sure(), x)
    assert analysis.graph.node(strip_output_activations(analysis.graph).outputs[0].name).op == "conv2d"  # type: ignore[union-attr]
    (group,) = analysis.channels.groups
    simulator = CutSimulator(analysis, [(x,)], {group.name: np.arange(8.0)}, ridge=0.0)
    few, many = simulator.measure_divergence({group.name: 2}), simulator.measure_divergence({group.name: 7})
    assert 0 < many < few < 2


def test_at_a_high_temperature_it_is_the_squared_error_of_the_scores() -> None:
    torch.manual_seed(0)
    before, noise = torch.randn(64, 10), 0.1 * torch.randn(64, 10)
    found = {}
    for temperature in (1.0, 4.0, 1e3):
        tally = Divergence(frozenset({0}), temperature)
        tally.add([before], [before + noise])
        found[temperature] = tally.value
    p, q = before.double().log_softmax(1), (before + noise).double().log_softmax(1)
    assert found[1.0] == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()))
    centred = noise.double() - noise.double().mean(1, keepdim=True)
    assert found[1e3] == pytest.approx(float(centred.square().mean(1).mean()) / 2, rel=1e-2)
    assert found[1.0] != pytest.approx(found[4.0], rel=0.01)
