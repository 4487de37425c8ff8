"""Invalid or contradictory options raise one clear error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

import neuron_merging as nm
from tests.failing import X, compressing, failing
from tests.zoo.unusual import VECTORS, Plain


def test_numbers_of_numpy_are_numbers() -> None:
    ratio, multiple = np.float32(0.5), np.int64(4)
    assert nm.compress(Plain(), VECTORS, ratio=ratio, round_to=multiple).model.a.out_features == 8  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize("ratio", [1.0, 1.5, -0.1, float("nan"), float("inf"), "0.5", "half", True, False, 1j, [0.5]])
def test_ratio_that_is_no_share(ratio: Any) -> None:
    failing(compressing(ratio=ratio), repr(ratio), "[0, 1)")


@pytest.mark.parametrize("ratio", [1.0, float("nan"), "half", True, None])
def test_ratio_of_a_pattern_that_is_no_share(ratio: Any) -> None:
    failing(compressing(ratio={"*": 0.5, "2": ratio}), repr(ratio), "'2'", "[0, 1)")


@pytest.mark.parametrize("pattern", ["layer9", "0.weight", "[", "", 0])
def test_ratio_pattern_without_a_match(pattern: Any) -> None:
    failing(compressing(ratio={pattern: 0.5}), repr(pattern), "Layers that can: 0, 2")


def test_ratio_pattern_of_a_layer_that_cannot_be_pruned() -> None:
    failing(compressing(ratio={"4": 0.5}), "'4'", "what the network returns", "Layers that can: 0, 2")


def test_ratio_without_patterns() -> None:
    failing(compressing(ratio={}), "ratio")


@pytest.mark.parametrize("ignore", [["layer9"], "layer9", ["0", "layer9"]])
def test_ignore_pattern_without_a_match(ignore: Any) -> None:
    failing(compressing(ignore=ignore), "'layer9'", "ignore=", "Layers: 0, 2, 4")


@pytest.mark.parametrize("criterion", ["l3", "", None, 2, ["l1"]])
def test_unknown_criterion(criterion: Any) -> None:
    failing(compressing(criterion=criterion), repr(criterion), "l1, l2, l2-gm, random")


@pytest.mark.parametrize("merger", ["cosin", ""])
def test_unknown_merger(merger: str) -> None:
    failing(compressing(merger=merger), repr(merger), "cosine", "none")


@pytest.mark.parametrize("merger", [2, ["cosine"], nm.Cosine])
def test_not_a_merger(merger: Any) -> None:
    failing(compressing(merger=merger), "merger=", "not a merger")


@pytest.mark.parametrize(
    "setting",
    [
        *({"bn": "relased"}, {"balance": 1.5}, {"balance": -0.1}),
        *({"threshold": value} for value in (float("nan"), "0.1", 5.0, -1.01)),
    ],
    ids=str,
)
def test_settings_of_the_merger(setting: dict[str, Any]) -> None:
    failing(lambda: nm.compress(normed(), X, merger=nm.Cosine(**setting)), *setting)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("scope", ["inner", "", None, ["all"]])
def test_unknown_scope(scope: Any) -> None:
    failing(compressing(scope=scope), repr(scope), "internal", "all")


@pytest.mark.parametrize("round_to", [0, -8, 1.5, 8.0, True, "8", None])
def test_bad_round_to(round_to: Any) -> None:
    failing(compressing(round_to=round_to), repr(round_to), "round_to=")


@pytest.mark.parametrize("seed", ["x", None])
def test_bad_seed(seed: Any) -> None:
    failing(compressing(seed=seed), "seed")
