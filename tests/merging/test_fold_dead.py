"""Folding keeps channels that a rectifier never lets through out of those that it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm

DEAD = slice(0, 8)


def keep_live(rows: Tensor) -> Tensor:
    """The dead ones, which come first, go."""
    return torch.arange(len(rows), dtype=torch.float64)


@torch.no_grad()
def network(norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16) if norm else nn.Identity(), nn.ReLU(), nn.Conv2d(16, 4, 3)
    )
    if norm:
        model[1].weight[DEAD], model[1].bias[DEAD] = 0.1, -2.0
    else:
        model[0].bias[DEAD] = -30.0
    return model.eval()


@pytest.mark.parametrize("norm", [False, True])
def test_dead_channels_go_without_a_trace(norm: bool) -> None:
    model, x = network(norm), torch.randn(8, 3, 8, 8)
    small = nm.compress(model, x[:1], criterion=keep_live, merger="fold").model
    with torch.no_grad():
        assert torch.allclose(small(x), model(x), atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_dead_channels_that_stay_take_no_live_ones_in(norm: bool) -> None:
    model, x = network(norm), torch.randn(8, 3, 8, 8)
    merges = nm.compress(model, x[:1], criterion=lambda rows: -keep_live(rows), merger="fold").merged.merges
    assert [merge.folded for merge in merges] == [0]


def test_without_a_rectifier_nothing_is_dead() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].bias[DEAD] = -30.0
    merges = nm.compress(model, torch.randn(1, 6), criterion=keep_live, merger="fold").merged.merges
    assert [merge.folded for merge in merges] == [8]
