"""How many channels stay, and where: counts, patterns, rounding, scope."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from tests.failing import X, compressing, failing, small_net
from tests.selection.counting import counts, kept, mlp
from tests.zoo import CASES
from tests.zoo.meeting import Meet
from tests.zoo.residual import Residual

# Nothing to do


def test_a_single_layer_has_nothing_to_prune() -> None:
    with pytest.raises(nm.NothingToPrune, match="what the network returns"):
        nm.compress(nn.Linear(6, 3), X)


def test_a_network_without_layers() -> None:
    with pytest.raises(nm.NothingToPrune, match="no layer"):
        nm.compress(nn.ReLU(), X)


class Refusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).softmax(1)).cumsum(1))


def test_a_network_that_refuses_everywhere_gives_every_reason() -> None:
    error = failing(compressing(Refusing()), "a: softmax", "b: cumsum", "c: output", "self.a(x).softmax(1)")
    assert isinstance(error, nm.NothingToPrune)


@pytest.mark.parametrize("options", [{"ratio": 0.0}, {"ratio": {"0": 0}}, {"ignore": ["*"]}, {"round_to": 8}], ids=str)
def test_options_that_leave_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(nm.NothingToPrune):
        nm.compress(small_net(), X, **options)


def test_only_residual_streams() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.c((x + self.b(x)).relu())

    with pytest.raises(nm.NothingToPrune, match='scope="all"'):
        nm.compress(Stream(), X)


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
    assert set(counts(Residual(), x)) == {"a.0", "d.0", "e.0"}
    assert set(counts(Residual(), x, scope="all")) == {"stem.0", "a.0", "d.0", "e.0"}


@pytest.mark.parametrize("name", ["residual", "pre-activation", "inverted bottleneck", "option A by cat", "mixer"])
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
