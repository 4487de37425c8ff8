"""Folding and weight-space combinations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import neuron_merging as nm
from tests.merging.fitting import distance, keep_first


def fold_copies(bn: bool) -> nn.Module:
    """Channels 4-7 are multiples or fold_copies of channels 0-3."""
    torch.manual_seed(1)
    first, norm = nn.Conv2d(3, 8, 3, padding=1, bias=not bn), nn.BatchNorm2d(8) if bn else nn.Identity()
    with torch.no_grad():
        first.weight[4:] = first.weight[:4]
        if first.bias is not None:
            first.bias[4:] = first.bias[:4]
        if bn:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
            for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
                tensor[4:] = tensor[:4]
    return nn.Sequential(first, norm, nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


@pytest.mark.parametrize("bn", [False, True])
@pytest.mark.parametrize("merger", [nm.Fold(), nm.Linear(ridge=1e-9)], ids=str)
def test_copies_fold_without_loss(merger: nm.Fold | nm.Linear, bn: bool) -> None:
    model, x = fold_copies(bn), torch.randn(4, 3, 8, 8)
    small = nm.compress(model, x, ratio={"0": 0.5}, criterion=keep_first, merger=merger)
    assert distance(small.model, model, x) < 1e-4, str(small.summary)
    assert distance(nm.compress(model, x, ratio={"0": 0.5}, criterion=keep_first, merger="none").model, model, x) > 0.1


def test_folding_two_layers_in_a_row_rewrites_rows_and_columns() -> None:
    torch.manual_seed(2)
    model, x = (
        nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)),
        torch.randn(64, 5),
    )
    with torch.no_grad():
        for layer, half in ((model[0], 4), (model[2], 3)):
            layer.weight[half:], layer.bias[half:] = layer.weight[:half], layer.bias[:half]
    for merger in (nm.Fold(), nm.Linear(ridge=1e-9)):
        assert distance(nm.compress(model, x[:1], criterion=keep_first, merger=merger).model, model, x) < 1e-4


def test_folding_repairs_the_variance() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)).eval()
    x = torch.randn(4000, 16)
    model[1].momentum = None
    model.train()(x)
    model.eval()
    spread = {}
    for repair in (True, False):
        small = nm.compress(model, x[:1], merger=nm.Fold(repair=repair)).model
        with torch.no_grad():
            spread[repair] = float(small[1](small[0](x)).std(0).mean())
    with torch.no_grad():
        original = float(model[1](model[0](x)).std(0).mean())
    assert abs(spread[True] - original) < abs(spread[False] - original)


def test_folding_refuses_a_batch_norm_without_a_scale() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    assert "no scale" in nm.compress(model, torch.randn(1, 3, 8, 8), merger="fold").summary.groups[0].descriptions[0]


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf"), "small"])
@pytest.mark.parametrize(
    "method", [nm.Linear, lambda ridge: nm.Calibrated([], ridge=ridge)], ids=["linear", "calibrated"]
)
def test_a_ridge_is_a_number(method: type[nm.Linear], ridge: float) -> None:
    with pytest.raises(nm.MergingError, match="ridge"):
        method(ridge=ridge)
