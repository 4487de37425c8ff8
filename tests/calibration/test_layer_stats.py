"""Statistics of what consumer layers read, for any choice of channels: as sums, or as rows if there are few."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration import layer_stats
from neuron_merging.calibration.layer_stats import (
    ConsumerWeight,
    CovarianceStats,
    RowStats,
    collect_fit_statistics,
    collect_layer_stats,
    find_consumer_weights,
)
from neuron_merging.calibration.regression import FitSolution, FitStatistics, solve_fit
from neuron_merging.channels.analysis import Selection
from neuron_merging.graph.interpreter import Interpreter

KEPT = torch.arange(0, 24, 2)


@torch.no_grad()
def known(rows: int, batches: int = 1) -> tuple[ConsumerWeight, CovarianceStats | RowStats, Tensor]:
    """Of a layer that reads 24 channels: what is known of them, and its weight."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5)).eval()
    selection = Selection(nm.analyse(net, torch.randn(1, 8)), {"0": KEPT.numpy()})
    (use,) = find_consumer_weights(selection)
    ((found,),) = collect_layer_stats(selection, [use], [(torch.randn(rows, 8),)] * batches).values()
    return use, found, net[2].weight.detach()


def solution(joint: FitStatistics, weight: Tensor) -> FitSolution:
    found = solve_fit(weight[:, KEPT], joint, 0.01, restore=True)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("rows", "batches", "kind"),
    [(24, 1, RowStats), (25, 1, CovarianceStats), (9, 2, RowStats), (9, 3, CovarianceStats)],
)
def test_as_many_rows_as_features_are_kept_as_they_are(rows: int, batches: int, kind: type) -> None:
    assert isinstance(known(rows, batches)[1], kind)


def test_few_rows_are_fitted_like_their_covariances() -> None:
    _, few, weight = known(20)
    assert isinstance(few, RowStats)
    x = few.rows.double()
    sums = CovarianceStats(x.mean(0), (x - x.mean(0)).T @ (x - x.mean(0)) / len(x), len(x))
    one, other = (solution(own.to_fit_statistics(weight, KEPT), weight) for own in (few, sums))
    assert torch.allclose(one.weight.double(), other.weight, atol=1e-3)
    assert torch.allclose(one.offset.double(), other.offset, atol=1e-3)
    assert one.error == pytest.approx(other.error, rel=1e-2)


def test_the_variance_of_outputs_follows_from_covariances() -> None:
    _, found, weight = known(200)
    assert isinstance(found, CovarianceStats)
    joint = found.to_fit_statistics(weight, KEPT)
    bare = joint.__class__(joint.mean, joint.target, joint.xx, joint.xt, joint.tt, joint.yy[:0], joint.rows)
    assert torch.allclose(bare.with_output_variance(weight[:, KEPT]).yy, joint.yy)
    assert joint.with_output_variance(weight[:, KEPT]) is joint


@torch.no_grad()
@pytest.mark.parametrize("held", [2**20, 0])
def test_statistics_in_parts_are_those_of_one_pass(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is a part of its own; runs are continued where the next part begins, if they can be held."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)]
    analysis = nm.analyse(nn.Sequential(*layers).eval(), torch.randn(1, 8))
    selection = Selection(analysis, {group.name: np.arange(4) for group in analysis.channels.groups})
    weights, batches = find_consumer_weights(selection), [(torch.randn(50, 8),) for _ in range(3)]
    whole = dict(collect_fit_statistics(selection, weights, batches))
    computed, run_node = [], Interpreter.run_node
    monkeypatch.setattr(layer_stats, "split_by_memory", lambda _, own: [[weight] for weight in own])
    monkeypatch.setattr(layer_stats, "MAX_HELD_BYTES", held)
    monkeypatch.setattr(Interpreter, "run_node", lambda own, node: (computed.append(node.name), run_node(own, node)))
    parts = dict(collect_fit_statistics(selection, weights, batches))
    assert len(parts) == 3 and parts.keys() == whole.keys()
    for axis, (own,) in parts.items():
        # Up to rounding: rows are added in another order.
        assert torch.allclose(own.xx, whole[axis][0].xx, atol=1e-6)
        assert torch.allclose(own.xt, whole[axis][0].xt, atol=1e-6)
    # One pass of seven nodes over three batches, or one pass per part that ends with its layer.
    assert len(computed) == 3 * (7 if held else 3 + 5 + 7)
