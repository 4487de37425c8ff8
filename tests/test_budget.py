"""How many channels stay, which ones, and where: counts, patterns, scope, rounding and criteria, by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from graphs import CASES, Meet, Residual, around_flat, around_image, randomise
from torch import Tensor, nn

import neuron_merging as nm


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]


def kept(result: nm.Compressed) -> dict[str, tuple[int, ...]]:
    return {group.name: group.kept for group in result.plan.groups}


def counts(model: nn.Module, x: Tensor, **options: Any) -> dict[str, int]:
    result = nm.compress(model, x, merger="none", **options)
    return {group.name: group.after for group in result.summary.groups}


# How many


@pytest.mark.parametrize("ratio", ["0.1", "0.2", "0.3", "0.5", "0.6", "0.7", "0.8", "0.9", "0.95", "0.99", "0.999"])
def test_the_number_that_stays(ratio: str) -> None:
    """⌊N(1 − ratio)⌋ in exact arithmetic, but at least one."""
    widths = (5, 10, 16, 20, 30, 64, 100)
    exact = {str(2 * i): max(1, math.floor(n * (1 - Fraction(ratio)))) for i, n in enumerate(widths)}
    assert counts(mlp(4, *widths, 3), torch.zeros(1, 4), ratio=float(ratio)) == exact


@pytest.mark.parametrize("size", [1, 2, 3])
def test_at_least_one_stays(size: int) -> None:
    model = mlp(4, 8, size, 3)
    assert counts(model, torch.zeros(1, 4), ratio=0.999) == {"0": 1} | ({"2": 1} if size > 1 else {})


def test_a_small_ratio_can_leave_small_layers_whole() -> None:
    assert counts(mlp(4, 100, 3, 2), torch.zeros(1, 4), ratio=0.01) == {"0": 99, "2": 2}


def test_ratio_may_be_zero_for_some() -> None:
    assert counts(mlp(4, 8, 8, 3), torch.zeros(1, 4), ratio={"*": 0.5, "0": 0}) == {"2": 4}


# Patterns


@pytest.mark.parametrize(
    ("ratio", "wanted"),
    [
        ({"*": 0.5, "2": 0.25}, {"0": 8, "2": 12, "4": 8}),
        ({"2": 0.25, "*": 0.5}, {"0": 8, "2": 8, "4": 8}),
        ({"2": 0.25}, {"2": 12}),
        ({"[02]": 0.75}, {"0": 4, "2": 4}),
        ({"?": 0.5, "*": 0.75, "4": 0.25}, {"0": 4, "2": 4, "4": 12}),
    ],
)
def test_later_patterns_win(ratio: dict[str, float], wanted: dict[str, int]) -> None:
    assert counts(mlp(4, 16, 16, 16, 3), torch.zeros(1, 4), ratio=ratio) == wanted


def blocks() -> nn.Module:
    parts = {"body": mlp(4, 16, 16, 16), "act": nn.ReLU(), "head": mlp(16, 16, 3)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


@pytest.mark.parametrize("pattern", ["body", "body.*", "b*"])
def test_a_pattern_covers_the_layers_inside(pattern: str) -> None:
    wanted = {"body.0": 4, "body.2": 4, "body.4": 4}
    assert counts(blocks(), torch.zeros(1, 4), ratio={pattern: 0.75}) == wanted


def test_a_pattern_is_no_prefix() -> None:
    with pytest.raises(nm.MergingError, match="'bod'"):
        nm.compress(blocks(), torch.zeros(1, 4), ratio={"bod": 0.5})


@pytest.mark.parametrize(
    ("ignore", "left"),
    [("body", {"head.0"}), (["body.0", "head"], {"body.2", "body.4"}), (["*.0"], {"body.2", "body.4"})],
)
def test_ignored_layers_keep_their_channels(ignore: Any, left: set[str]) -> None:
    assert set(counts(blocks(), torch.zeros(1, 4), ignore=ignore)) == left


def test_ignoring_one_layer_keeps_all_that_share_its_channels() -> None:
    model = Meet(lambda x, y: x + y)
    result = nm.compress(model, torch.randn(2, 3, 8, 8), ignore=["d"], scope="all", merger="none")
    assert set(kept(result)) == {"b"}


def test_ignoring_a_layer_still_lets_its_input_shrink() -> None:
    result = nm.compress(mlp(4, 8, 8, 3), torch.zeros(1, 4), ignore=["2"], merger="none")
    assert tuple(result.model[2].weight.shape) == (8, 4)


# Rounding


@pytest.mark.parametrize(("round_to", "wanted"), [(1, (13, 7, 8)), (4, (16, 8, 8)), (8, (16, 8, 8)), (5, (15, 10, 10))])
def test_rounding_goes_up(round_to: int, wanted: tuple[int, ...]) -> None:
    model = mlp(4, 27, 15, 17, 3)
    found = counts(model, torch.zeros(1, 4), ratio=0.5, round_to=round_to)
    assert tuple(found.values()) == wanted


def test_rounding_never_goes_beyond_the_layer() -> None:
    assert counts(mlp(4, 6, 32, 3), torch.zeros(1, 4), ratio=0.5, round_to=8) == {"2": 16}


def test_rounding_counts_real_channels() -> None:
    """A pixel shuffle's unit is four filters: the convolution's width is what hardware sees."""
    case = CASES["pixel shuffle"]
    result = nm.compress(case.build(), case.inputs(), ratio={"a": 0.7}, round_to=8, merger="none")
    assert result.model.a.out_channels == 8


# Scope


def test_internal_scope_leaves_residual_streams() -> None:
    x = torch.randn(2, 3, 8, 8)
    assert set(counts(Residual(), x)) == {"a.0", "d.0"}
    assert set(counts(Residual(), x, scope="all")) == {"stem.0", "a.0", "d.0", "e.0"}


@pytest.mark.parametrize(
    "name", ["residual", "pre-activation", "inverted bottleneck", "add", "option A by cat", "mixer"]
)
def test_inspect_says_what_the_internal_scope_takes(name: str) -> None:
    case = CASES[name]
    found = nm.inspect(case.build(), case.inputs())
    inner = {group.name for group in found.groups if not group.residual}
    assert inner < {group.name for group in found.groups}
    assert set(counts(case.build(), case.inputs())) == inner


@pytest.mark.parametrize("name", ["dense block", "cat", "squeeze and excite", "mul", "inception", "u-net", "chunk"])
def test_only_sums_make_a_stream(name: str) -> None:
    case = CASES[name]
    assert not any(group.residual for group in nm.inspect(case.build(), case.inputs()).groups)


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


@pytest.mark.parametrize("criterion", ["random", "l2"])
def test_the_generator_of_the_user_is_left_alone(criterion: str) -> None:
    model = around_flat(nn.Sequential(nn.Dropout(), nn.RReLU()))
    before = torch.get_rng_state()
    nm.compress(model, torch.zeros(1, 6), criterion=criterion, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("merger", ["none", "cosine"])
def test_two_runs_are_equal_to_the_bit(merger: str) -> None:
    case = CASES["inverted bottleneck"]
    first, again = (nm.compress(case.build(), case.inputs(), scope="all", merger=merger) for _ in range(2))
    assert first.plan == again.plan
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))


def test_equal_scores_are_decided_by_position() -> None:
    result = nm.compress(mlp(4, 8, 3), torch.zeros(1, 4), criterion=lambda rows: torch.ones(len(rows)), merger="none")
    assert kept(result) == {"0": (0, 1, 2, 3)}


# What the summary says


def test_the_summary_counts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    summary = nm.compress(model, torch.zeros(1, 3, 6, 6), merger="none").summary
    assert summary.parameters == ((3 * 9 + 1) * 8 + 128 * 5 + 5, (3 * 9 + 1) * 4 + 64 * 5 + 5)
    assert summary.macs == (27 * 8 * 16 + 128 * 5, 27 * 4 * 16 + 64 * 5)
    assert [(g.name, g.layers, g.before, g.after, g.removed) for g in summary.groups] == [("0", ("0",), 8, 4, 4)]
    assert [(r.layer, r.operator) for r in summary.refusals] == [("3", "output")]
    assert summary.error is not None and summary.error < 1e-5


def test_without_verification_there_is_no_error_to_show() -> None:
    result = nm.compress(mlp(4, 8, 3), torch.zeros(1, 4), verify=False, merger="none")
    assert result.summary.error is None
    assert "verified" not in str(result.summary)


def test_hooks_are_reported() -> None:
    model = mlp(4, 8, 3)
    model[0].register_forward_hook(lambda module, inputs, output: None)
    summary = nm.compress(model, torch.zeros(1, 4)).summary
    assert any("hook" in note and "0" in note for note in summary.notes)


def test_a_layer_norm_over_fewer_channels_is_reported() -> None:
    case = CASES["layer norm over channels"]
    summary = nm.compress(case.build(), case.inputs(), merger="none").summary
    assert any("layer_norm" in note and "op" in note for note in summary.notes)


def test_inspect_counts_what_hangs_on_a_group() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    (group,) = nm.inspect(model, torch.zeros(1, 3, 6, 6)).groups
    assert (group.name, group.layers, group.channels, group.consumers) == ("0", ("0",), 8, ("3",))
    assert group.parameters == 8 * (3 * 9 + 1) + 4 * 8 + 4 * 8
