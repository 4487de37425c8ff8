"""Costs of cuts from one backward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration.layer_stats import find_consumer_weights
from neuron_merging.calibration.output_divergence import Divergence
from neuron_merging.channels.analysis import Selection
from neuron_merging.graph.interpreter import Interpreter
from neuron_merging.pipeline import select_channels
from neuron_merging.selection import elimination
from neuron_merging.selection.elimination import (
    EliminationOrder,
    build_loss_curve,
    measure_sensitivities,
    select_everything,
)


def _measure(model: nn.Module, x: torch.Tensor) -> tuple[nm.Analysis, list[float]]:
    analysis = nm.analyse(model.eval(), x[:1])
    weights = find_consumer_weights(select_everything(Selection(analysis, {}), analysis.channels.groups))
    return analysis, list(measure_sensitivities(analysis, weights, [(x,)]).values())


def test_the_estimate_is_the_divergence_of_a_small_error() -> None:
    torch.manual_seed(0)
    first, middle, last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 4)
    x = torch.randn(4000, 6)
    _, (sensitivity, _) = _measure(nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last), x)
    with torch.no_grad():
        hidden = middle(torch.tanh(first(x)))
        error = 0.03 * torch.randn_like(hidden)
        found = Divergence(frozenset([0]))
        found.add([last(torch.tanh(hidden))], [last(torch.tanh(hidden + error))])
    expected = sensitivity * float(error.square().sum(1).mean())
    assert 0.8 < expected / found.value < 1.25


def test_an_output_without_classes_counts_by_its_relative_error() -> None:
    torch.manual_seed(0)
    up, down, scale = nn.Linear(6, 12), nn.Linear(12, 8), nn.PReLU(8)
    x = torch.randn(4000, 6)
    model = nn.Sequential(up, nn.ReLU(), down, scale)  # ends in no linear layer: no class scores
    _, (sensitivity,) = _measure(model, x)
    with torch.no_grad():
        hidden = down(torch.relu(up(x)))
        error = 0.03 * torch.randn_like(hidden)
        found = Divergence()
        found.add([scale(hidden)], [scale(hidden + error)])
    expected = sensitivity * float(error.square().sum(1).mean())
    assert 0.8 < expected / found.value < 1.25


class Branches(nn.Module):
    """A residual stream, and a second output that an early layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.early, self.late = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        early = self.early(x.sin())
        for up, down in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = x + down(up(x).tanh())
        return early, self.late(x)


def test_gradients_section_by_section_are_those_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, counts = Branches(), torch.randn(40, 6), []
    run = elimination._run_in_sections

    def run_once(own: Interpreter, by_node: object) -> object:
        counts.append(len(run(own.fork(), by_node)[0]))
        return run(own, {})

    _, parts = _measure(model, x)
    monkeypatch.setattr(elimination, "_run_in_sections", run_once)
    _, whole = _measure(model, x)
    assert min(counts) > 3 and parts == pytest.approx(whole, rel=1e-5)


def test_curves_end_at_the_fewest_channels() -> None:
    order = EliminationOrder(np.arange(300), np.linspace(1, 300, 300))
    curve = build_loss_curve(order, 20, 4)
    assert curve.counts[0] == 300 and curve.counts[-1] == 20 and len(curve.counts) < 100
    assert curve.losses[-1] == 280 and list(curve.losses) == sorted(curve.losses)


def test_a_budget_by_gradients_spares_the_layer_that_matters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5)
    )
    with torch.no_grad():
        # The second wide layer computes nearly one function: most of its units are copies.
        model[4].weight.copy_(model[4].weight[:2].repeat(16, 1))
        model[4].bias.copy_(model[4].bias[:2].repeat(16))
    found = nm.compress(model.eval(), torch.randn(64, 8), budget={"params": 0.7}, allocation="gradient", ignore=["2"])
    kept = {group.name: len(group.kept) for group in found.plan.groups}
    assert kept["4"] < 16 and kept.get("0", 32) > 24
    assert found.summary.parameters[1] <= 0.7 * found.summary.parameters[0]


class OverwritesItsActivation(nn.Module):
    """Writes into the result of a sigmoid, which the gradient of the sigmoid needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).relu()).sigmoid()
        hidden.add_(1)
        out: Tensor = self.last(hidden)
        return out


def test_a_network_without_gradients_is_allocated_by_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    net = OverwritesItsActivation().eval()
    with pytest.raises(nm.MergingError, match="cannot be differentiated"):
        nm.compress(net, torch.randn(2, 4), budget={"params": 0.6}, allocation="gradient")
    monkeypatch.setattr(select_channels, "is_search_expensive", lambda *_: True)
    small = nm.compress(net, torch.randn(2, 4), budget={"params": 0.6}).model
    assert small.first.out_features + small.second.out_features < 32
