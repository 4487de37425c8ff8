"""Some of the fuzzer's cases with a fixed seed; `python -m tests.fuzz` runs any number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import neuron_merging as nm
from tests.conftest import mark_long

from . import oracle
from .network import build_network, draw_recipe
from .planted import DEAD_LOSS, TWIN_LOSS, measure_loss, plant_network
from .site import KINDS
from .trial import BAD, FINE, REFUSED, Outcome, run_case

GRAPHS, BATCH, MERGED, DEEPEST = 240, 20, 5, 4
QUICK = range(40)
"""Graphs that `make test` tries; `make test-long` tries the others."""


def list_failures(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.kind} {o.recipe.seed} [{o.merger}] {o.detail}" for o in outcomes if o.kind in BAD]


@pytest.mark.parametrize("first", mark_long(range(0, GRAPHS, BATCH), QUICK))
def test_pruned_networks_are_the_zeroed_originals(first: int) -> None:
    outcomes = [run_case(draw_recipe(0, index, DEEPEST)) for index in range(first, first + BATCH)]
    assert not list_failures(outcomes)
    assert sum(outcome.kind == FINE for outcome in outcomes) >= BATCH // 2


def test_merged_networks_are_their_own_tensors_scattered() -> None:
    outcomes = [run_case(draw_recipe(1, index, DEEPEST), "default") for index in range(MERGED)]
    assert not list_failures(outcomes)
    assert {FINE, REFUSED} >= {outcome.kind for outcome in outcomes}


@pytest.mark.parametrize("seed", range(3))
def test_dead_channels_go_without_loss(seed: int) -> None:
    assert measure_loss(plant_network(seed, twins=False), None) < DEAD_LOSS


@pytest.mark.parametrize("seed", range(3))
def test_twins_merge_almost_without_loss(seed: int) -> None:
    planted = plant_network(seed, twins=True)
    assert measure_loss(planted, None) < TWIN_LOSS < measure_loss(planted, "none")


def test_there_are_many_kinds() -> None:
    assert len(KINDS) >= 120


def test_a_recipe_builds_the_same_network_again() -> None:
    one, two = (oracle.collect_tensors(build_network(draw_recipe(3, 5)).model) for _ in range(2))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# The oracle itself must detect damage


def make_network() -> nn.Module:
    torch.manual_seed(0)
    grouped = nn.Conv2d(8, 8, 3, groups=2)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(), grouped, nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)]
    return nn.Sequential(*layers).double().eval()


def measure_gap(small: nm.Compressed, reference: nn.Module) -> float:
    x = torch.randn(3, 3, 6, 6, dtype=torch.float64)
    return oracle.measure_difference(oracle.run_network(small.model, (x,)), oracle.run_network(reference, (x,)))


@pytest.mark.parametrize("damage", ["nothing", "weight", "order", "statistics"])
def test_the_oracle_sees_damage(damage: str) -> None:
    small = nm.compress(make_network(), torch.zeros(2, 3, 6, 6, dtype=torch.float64), merger="none")
    with torch.no_grad():
        if damage == "weight":
            small.model[6].weight[0, 0] += 1e-3
        if damage == "order":
            small.model[3].weight.copy_(small.model[3].weight.flip(1))
        if damage == "statistics":
            small.model[1].running_var.mul_(1.001)
    assert (measure_gap(small, oracle.build_pruned_reference(make_network(), small.plan)) < 1e-12) == (
        damage == "nothing"
    )
