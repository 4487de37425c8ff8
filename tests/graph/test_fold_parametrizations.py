"""Weights that torch computes at every call are made plain in a copy, and merged like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import neuron_merging as nm
from neuron_merging.graph.module_rewrites import find_computed_weights, fold_parametrizations

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight norm": weight_norm,
    "old spectral norm": spectral_norm,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Tanh()),
}


class Tanh(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def network(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    WAYS[way](model[2])
    return model.eval()


@torch.no_grad()
def error(small: nn.Module, model: nn.Module, x: Tensor) -> float:
    wanted = model(x)
    return float((small.eval()(x) - wanted).square().mean() / wanted.var())


@pytest.mark.parametrize("way", WAYS)
def test_a_computed_weight_is_baked_and_merged(way: str, tmp_path: Path) -> None:
    model, x = network(way), torch.randn(256, 16)
    before, kind = model(x).detach(), type(model[2])
    merged = nm.compress(model, x[:1], ratio={"0": 0.5})
    pruned = nm.compress(model, x[:1], ratio={"0": 0.5}, merger="none")
    assert error(merged.model, model, x) < 0.7 * error(pruned.model, model, x)
    assert type(merged.model[2]) is nn.Linear and sorted(merged.model[2].state_dict()) == ["bias", "weight"]
    assert any("2.weight was computed" in note for note in merged.summary.notes)
    assert type(model[2]) is kind and torch.equal(model(x), before), "the user's model was touched"
    merged.save(tmp_path / "small")
    again = nm.load(tmp_path / "small", build=lambda: network(way))
    assert torch.equal(again(x), merged.model.eval()(x))


def test_a_plain_network_is_not_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    assert fold_parametrizations(model) is model and find_computed_weights(model) == {}


def test_several_computed_tensors_of_one_layer() -> None:
    layer = nn.Linear(4, 3)
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, Tanh())
    x = torch.randn(2, 4)
    plain = fold_parametrizations(layer)
    assert set(find_computed_weights(layer)) == {"weight", "bias"} and type(plain) is nn.Linear
    assert torch.equal(plain(x), layer(x)) and parametrize.is_parametrized(layer)


def test_what_was_frozen_stays_frozen() -> None:
    model = network("weight norm").requires_grad_(False)
    small = nm.compress(model, torch.zeros(1, 16), ratio={"0": 0.5}).model
    assert not any(p.requires_grad for p in small.parameters())


@pytest.mark.parametrize("way", ["prune", "old weight norm", "old spectral norm"])
def test_weights_that_were_loaded_or_cast_since_the_last_call_are_computed_anew(way: str) -> None:
    net = network(way)
    with torch.no_grad():
        for tensor in net[2].parameters():
            tensor.mul_(3)
    net.double()
    x = torch.randn(4, 16, dtype=torch.float64)
    plain = fold_parametrizations(net)
    assert torch.allclose(plain(x), net(x), atol=1e-12) and plain[2].weight.dtype == torch.float64
