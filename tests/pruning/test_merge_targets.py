"""The plan names the kept channels that each removed channel was merged into."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import neuron_merging as nm


def twins() -> nn.Module:
    """Channel 4 + i is half of channel i, and the smaller of the two."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 16))
    with torch.no_grad():
        net[0].weight[4:], net[0].bias[4:] = 0.5 * net[0].weight[:4], 0.5 * net[0].bias[:4]  # type: ignore[index, operator]
    return net


@pytest.mark.parametrize("merger", [nm.Cosine(threshold=0.9), nm.Moments()])
def test_a_removed_twin_went_into_its_twin(merger: nm.Cosine | nm.Moments) -> None:
    (group,) = nm.compress(twins(), torch.randn(4, 6), ratio=0.5, merger=merger).plan.groups
    assert group.kept == (0, 1, 2, 3)
    for removed, into in group.partners.items():
        assert max(into, key=lambda unit: abs(into[unit])) == removed - 4
        assert into[removed - 4] == pytest.approx(0.5, abs=0.05)
    assert set(group.partners) == {4, 5, 6, 7}


def test_what_is_pruned_went_nowhere() -> None:
    small = nm.compress(twins(), torch.randn(4, 6), ratio=0.5, merger="none")
    assert small.plan.groups[0].partners == {}
    assert nm.Plan.from_json(small.plan.to_json()) == small.plan
