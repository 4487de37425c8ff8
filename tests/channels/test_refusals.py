"""Channels that are not prunable: the refusal names the operator and the source line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from tests.zoo import CASES
from tests.zoo.pruning import graphs, output_cuts, prune
from tests.zoo.unusual import VECTORS, AlwaysDropping, TwoLayers


@graphs(lambda case: case.refused)
def test_refusals_give_operator_or_line(name: str) -> None:
    done = prune(name)
    for layer, word in done.case.refused.items():
        assert f"{layer}.weight" not in output_cuts(done)
        reasons = [str(r) + r.operator + r.place for r in done.result.summary.refusals if r.layer == layer]
        assert any(word in reason for reason in reasons), done.result.summary.refusals


def first_four(x: Tensor) -> Tensor:
    return x[:, :4]


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = first_four(self.a(x))
        return self.c(self.b(x).relu())


def test_a_constant_in_a_helper_gives_its_own_line() -> None:
    refusals = nm.compress(Helped(), torch.randn(2, 6)).summary.refusals
    assert any("return x[:, :4]" in refusal.place for refusal in refusals if refusal.layer == "a")


class Graded(TwoLayers):
    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Ungraded(TwoLayers):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Autocast(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("kind", [Graded, Autocast])
def test_layers_in_a_context_are_refused_for_it(kind: type[nn.Module]) -> None:
    with pytest.raises(nm.NothingToPrune, match="enable_grad or autocast"):
        nm.compress(kind(), torch.randn(2, 6))


def test_layers_without_gradients_are_cut() -> None:
    assert nm.compress(Ungraded(), torch.randn(2, 6), merger="none", effort="fast").plan.cuts


def test_every_layer_is_cut_or_refused() -> None:
    case = CASES["depthwise on the input"]
    found = nm.inspect(case.build(), case.inputs())
    named = {layer for group in found.groups for layer in group.layers} | {r.layer for r in found.refusals}
    assert named == {"a", "b", "c"}


def test_chance_refuses_the_channels_that_it_touches() -> None:
    with pytest.raises(nm.NothingToPrune, match="dropout draws at random"):
        nm.compress(AlwaysDropping(), VECTORS)
