"""Similarities of channels, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from neuron_merging.errors import MergingError
from neuron_merging.reproduction import layer_metrics


def test_the_largest_cosine_to_another_row() -> None:
    rows = torch.tensor([[3.0, 0.0], [1.0, 1.0], [0.0, 2.0], [-1.0, 0.0], [0.0, 0.0]])
    half = math.sqrt(0.5)
    assert layer_metrics.max_cosine(rows).tolist() == pytest.approx([half, half, half, 0.0, 0.0])
    with pytest.raises(MergingError, match="1 rows"):
        layer_metrics.max_cosine(rows[:1])


def test_many_rows_are_compared_in_parts() -> None:
    rows = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    unit = rows / rows.norm(dim=1, keepdim=True)
    whole = (unit @ unit.T).fill_diagonal_(-2).amax(1)
    assert torch.allclose(layer_metrics.max_cosine(rows), whole, atol=1e-6)


def test_a_bias_counts_only_where_no_norm_follows() -> None:
    with_norm = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 1, 1))
    without = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 1))
    for net in (with_norm, without):
        with torch.no_grad():
            net[0].weight.fill_(1.0)
            net[0].bias.copy_(torch.tensor([0.0, 1.0]))
    x = torch.zeros(1, 1, 2, 2)
    assert layer_metrics.max_similarities(with_norm, x)["0"].tolist() == pytest.approx([1.0, 1.0])
    assert layer_metrics.max_similarities(without, x)["0"].tolist() == pytest.approx([math.sqrt(0.5)] * 2)


def test_similarities_stay_inside_the_blocks_unless_asked() -> None:
    from neuron_merging import models

    model, x = models.create_network("resnet-20"), torch.zeros(1, 3, 32, 32)
    inside = layer_metrics.max_similarities(model, x)
    assert list(inside) == [f"layer{stage}.{block}.conv1" for stage in (1, 2, 3) for block in range(3)]
    assert [len(values) for values in inside.values()] == [16] * 3 + [32] * 3 + [64] * 3
    assert len(layer_metrics.max_similarities(model, x, scope="all")) > len(inside)
