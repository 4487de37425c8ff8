"""The choice by expected error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.channels.analysis import Selection
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.selection import elimination
from neuron_merging.selection.elimination import compute_orders_by_group
from tests.merging.fitting import distance


def test_expected_error_keeps_what_cannot_be_replaced(
    residual: tuple[nn.Module, Tensor], residual_analysis: nm.Analysis
) -> None:
    (model, x), analysis = residual, residual_analysis
    fit = nm.Calibrated([x], sequential=False)
    best = distance(nm.compress(analysis, criterion="expected-error", merger=fit).model, model, x)
    others = [nm.compress(analysis, criterion="random", seed=s, merger=fit).model for s in range(8)]
    assert best < np.mean([distance(other, model, x) for other in others])
    assert nm.compress(analysis, criterion="expected-error").summary.groups


def test_elimination_costs_what_the_fit_loses() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)), torch.randn(5000, 6)
    analysis = analyse(model, x[:1])
    task = Selection(analysis, {})
    method = nm.Calibrated([x], ridge=0.0, sequential=False)
    with torch.no_grad():
        order = compute_orders_by_group(task, {"0": 1.0}, method, ridge=0.0)["0"]
    assert sorted(order.units) == list(range(10)) and (np.diff(order.errors) >= -1e-9).all()
    for removed in (1, 4, 7):
        stay = set(order.units[removed:].tolist())
        criterion = lambda rows, stay=stay: torch.tensor([float(i in stay) for i in range(len(rows))])  # noqa: E731
        small = nm.compress(analysis, ratio=removed / 10, criterion=criterion, merger=method).model
        with torch.no_grad():
            lost, whole = (small(x) - model(x)).var(0).sum(), model(x).var(0).sum()
        assert float(lost / whole) == pytest.approx(order.errors[removed - 1], rel=0.05, abs=1e-4)


MAPS = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
VECTORS = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("layers, shape", [(VECTORS, (1, 6)), (MAPS, (1, 1, 6, 6))], ids=["closed form", "dead leaves"])
def test_channels_of_networks_without_norms_are_chosen_by_expected_error(
    layers: tuple[nn.Module, ...], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*layers)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    analysis = nm.analyse(net, torch.zeros(shape))

    def kept(**options: Any) -> list[tuple[int, ...]]:
        return [tuple(group.kept) for group in nm.compress(analysis, ratio=0.5, **options).plan.groups]

    assert kept() == kept(criterion="expected-error") != kept(criterion="l2")
    assert kept(effort="fast") != kept(criterion="l2")


def test_wide_windows_are_ordered_by_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without taps of their own, channels that nobody needs still go first, and errors still grow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 40, 3)).eval()
    with torch.no_grad():
        model[2].weight[:, [2, 5, 7]] = 0
    x = torch.randn(16, 3, 10, 10)
    method = nm.Calibrated([x], sequential=False)
    monkeypatch.setattr(elimination, "MAX_WINDOW_FEATURES", 50)
    with torch.no_grad():
        order = compute_orders_by_group(Selection(analyse(model, x[:1]), {}), {"0": 1.0}, method)["0"]
    assert set(order.units[:3].tolist()) == {2, 5, 7} and order.errors[2] < 1e-9 < order.errors[3]
    assert (np.diff(order.errors) >= -1e-9).all()


def test_many_outputs_cost_no_more_columns_than_features() -> None:
    """Costs depend on M Mᵀ alone: a layer written out three times has the order and the errors of one."""
    torch.manual_seed(0)
    once, x = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8)), torch.randn(2000, 6)
    thrice = nn.Sequential(once[0], nn.Tanh(), nn.Linear(10, 24))
    with torch.no_grad():
        thrice[2].weight.copy_(once[2].weight.repeat(3, 1))
        method = nm.Calibrated([x], sequential=False)
        one, other = (
            compute_orders_by_group(Selection(analyse(net, x[:1]), {}), {"0": 1.0}, method)["0"]
            for net in (once, thrice)
        )
    assert one.units.tolist() == other.units.tolist() and np.allclose(one.errors, other.errors, rtol=1e-6)
