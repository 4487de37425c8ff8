"""Which channels stay: criteria by brute force, criteria of one's own, chance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from tests.failing import X, compressing, failing, small_net
from tests.selection.counting import kept, mlp
from tests.zoo import CASES
from tests.zoo.meeting import Meet
from tests.zoo.registry import around_flat, around_image, randomise

# A criterion of one's own


BAD_SCORES: dict[str, Callable[[Tensor], Any]] = {
    "too few": lambda rows: rows.norm(dim=1)[1:],
    "a matrix": lambda rows: rows,
    "a number": lambda rows: rows.norm(),
    "a list": lambda rows: rows.norm(dim=1).tolist(),
    "nothing": lambda rows: None,
    "nan": lambda rows: rows.norm(dim=1) * float("nan"),
    "infinity": lambda rows: rows.norm(dim=1) / 0,
}


@pytest.mark.parametrize("name", BAD_SCORES)
def test_criterion_that_returns_no_scores(name: str) -> None:
    failing(compressing(criterion=BAD_SCORES[name]), "criterion")


def test_criterion_cannot_change_the_model() -> None:
    model = small_net()
    before = model[0].weight.detach().clone()
    nm.compress(model, X, criterion=lambda rows: rows.zero_().sum(1))
    assert torch.equal(model[0].weight, before)


# Which: criteria by brute force


def rows_of(layer: nn.Module, bias: bool) -> list[list[float]]:
    rows = [row.flatten().tolist() for row in layer.weight.detach()]
    return [[*row, b] for row, b in zip(rows, layer.bias.tolist(), strict=True)] if bias else rows


def l1(rows: list[list[float]]) -> list[float]:
    return [sum(abs(value) for value in row) for row in rows]


def l2(rows: list[list[float]]) -> list[float]:
    return [math.sqrt(sum(value * value for value in row)) for row in rows]


def l2_gm(rows: list[list[float]]) -> list[float]:
    return [sum(math.dist(row, other) for other in rows) for row in rows]


BRUTE: dict[str, Callable[[list[list[float]]], list[float]]] = {"l1": l1, "l2": l2, "l2-gm": l2_gm}


def best(scores: list[float], number: int) -> tuple[int, ...]:
    return tuple(sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:number]))


def loud_biases(model: nn.Module) -> nn.Module:
    """Biases so large that they decide, where they count at all."""
    randomise(model)
    with torch.no_grad():
        model.a.bias.mul_(5)
    return model


NORMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "bias counts": (nn.ReLU, True),
    "batch norm follows": (lambda: nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()), False),
    "batch norm follows later": (lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(16)), True),
    "instance norm follows": (lambda: nn.Sequential(nn.InstanceNorm2d(16), nn.ReLU()), False),
    "group norm follows": (lambda: nn.Sequential(nn.GroupNorm(16, 16), nn.ReLU()), False),
}


@pytest.mark.parametrize("criterion", BRUTE)
@pytest.mark.parametrize("name", NORMS)
def test_criteria_of_a_convolution(name: str, criterion: str) -> None:
    op, bias = NORMS[name]
    model = loud_biases(around_image(op(), mid=16, out=16))
    result = nm.compress(model, torch.randn(2, 3, 8, 8), ratio={"a": 0.4}, criterion=criterion, merger="none")
    assert kept(result)["a"] == best(BRUTE[criterion](rows_of(model.a, bias)), 9)
    assert best(BRUTE[criterion](rows_of(model.a, not bias)), 9) != kept(result)["a"]


@pytest.mark.parametrize("criterion", BRUTE)
@pytest.mark.parametrize("bias", [True, False])
def test_criteria_of_a_linear_layer(bias: bool, criterion: str) -> None:
    model = around_flat(nn.ReLU(), mid=20, out=20)
    model.a = nn.Linear(6, 20, bias=bias)
    randomise(model)
    result = nm.compress(model, torch.randn(2, 6), ratio={"a": 0.4}, criterion=criterion, merger="none")
    assert kept(result)["a"] == best(BRUTE[criterion](rows_of(model.a, bias)), 12)


@pytest.mark.parametrize("criterion", BRUTE)
def test_criteria_of_a_transposed_convolution(criterion: str) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 4, 1))
    result = nm.compress(model, torch.randn(2, 3, 6, 6), criterion=criterion, merger="none")
    rows = [[*model[0].weight[:, i].flatten().tolist(), float(model[0].bias.detach()[i])] for i in range(12)]
    assert kept(result)["0"] == best(BRUTE[criterion](rows), 6)


@pytest.mark.parametrize("criterion", BRUTE)
def test_layers_that_share_channels_have_their_filters_side_by_side(criterion: str) -> None:
    model = Meet(lambda x, y: x + y)
    randomise(model)
    result = nm.compress(model, torch.randn(2, 3, 8, 8), criterion=criterion, scope="all", merger="none")
    rows = [a + d for a, d in zip(rows_of(model.a, True), rows_of(model.d, True), strict=True)]
    assert kept(result)["a"] == best(BRUTE[criterion](rows), 4)


@pytest.mark.parametrize("criterion", BRUTE)
def test_concatenated_layers_are_judged_apart(criterion: str) -> None:
    model = Meet(lambda x, y: torch.cat([x, y], 1), out=14, second=6)
    randomise(model)
    result = nm.compress(model, torch.randn(2, 3, 8, 8), criterion=criterion, scope="all", merger="none")
    assert kept(result)["a"] == best(BRUTE[criterion](rows_of(model.a, True)), 4)
    assert kept(result)["d"] == best(BRUTE[criterion](rows_of(model.d, True)), 3)
    columns = next(cut.kept for cut in result.plan.cuts if cut.tensor == "b.weight" and cut.dim == 1)
    assert columns == kept(result)["a"] + tuple(8 + i for i in kept(result)["d"])


def test_filters_of_one_unit_are_judged_together() -> None:
    """A pixel shuffle's output channel is made by four filters."""
    case = CASES["pixel shuffle"]
    model = case.build()
    result = nm.compress(model, case.inputs(), ratio={"a": 0.5}, criterion="l2", merger="none")
    rows = rows_of(model.a, True)
    units = [rows[4 * i] + rows[4 * i + 1] + rows[4 * i + 2] + rows[4 * i + 3] for i in range(4)]
    assert kept(result)["a"] == best(l2(units), 2)


def test_groups_of_a_convolution_keep_equally_many() -> None:
    case = CASES["grouped"]
    model = case.build()
    with torch.no_grad():
        model.a.weight[:4] *= 100
    result = nm.compress(model, case.inputs(), ratio={"a": 0.5}, criterion="l2", merger="none")
    scores = l2(rows_of(model.a, True))
    assert kept(result)["a"] == best(scores[:4], 2) + tuple(4 + i for i in best(scores[4:], 2))


def test_a_criterion_of_ones_own() -> None:
    seen: list[tuple[int, ...]] = []

    @nm.criterion("first-entry")
    def first_entry(rows: Tensor) -> Tensor:
        seen.append(tuple(rows.shape))
        return rows[:, 0]

    model = mlp(4, 10, 3)
    by_name = nm.compress(model, torch.zeros(1, 4), criterion="first-entry", merger="none")
    by_function = nm.compress(model, torch.zeros(1, 4), criterion=lambda rows: rows[:, 0], merger="none")
    assert kept(by_name) == kept(by_function) == {"0": best(model[0].weight[:, 0].tolist(), 5)}
    assert seen == [(10, 5)]


def test_many_channels_do_not_change_l2_gm() -> None:
    """Far from the origin the distances are small differences of large numbers."""
    model = mlp(4, 40, 3)
    with torch.no_grad():
        model[0].weight += 100
    result = nm.compress(model, torch.zeros(1, 4), criterion="l2-gm", merger="none")
    assert kept(result)["0"] == best(l2_gm(rows_of(model[0], True)), 20)


# Chance


def test_random_follows_the_seed() -> None:
    model, x = mlp(4, 64, 64, 3), torch.zeros(1, 4)
    first, again, other = (nm.compress(model, x, criterion="random", seed=seed, merger="none") for seed in (1, 1, 2))
    assert kept(first) == kept(again)
    assert kept(first) != kept(other)
    assert kept(first)["0"] != kept(first)["2"]


def test_equal_scores_are_decided_by_position() -> None:
    result = nm.compress(mlp(4, 8, 3), torch.zeros(1, 4), criterion=lambda rows: torch.ones(len(rows)), merger="none")
    assert kept(result) == {"0": (0, 1, 2, 3)}
