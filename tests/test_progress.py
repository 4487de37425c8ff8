"""How far long work is, as a listener hears it."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.progress import each, listening

X = torch.randn(4, 6)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def heard(**options: object) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    with listening(lambda stage, done, total: found.setdefault(stage, []).append((done, total))):
        nm.compress(network(), X, **options)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("options", "stage", "total"),
    [
        ({}, "fitting layers", 2),
        ({"merger": "none"}, "running the network", 5),
        ({"calibration": [X]}, "fitting layer after layer", 5),
    ],
)
def test_every_stage_is_told_from_nothing_to_all(options: dict[str, object], stage: str, total: int) -> None:
    told = heard(**options)[stage]
    assert told[0] == (0, total) and told[-1] == (total, total)
    assert all(after[0] in (before[0] + 1, 0) for before, after in pairwise(told))


def test_nobody_needs_to_listen_and_the_last_listener_is_forgotten() -> None:
    said: list[str] = []
    with pytest.raises(KeyError), listening(lambda stage, done, total: said.append(stage)):
        raise KeyError
    assert list(each("abc", "reading")) == ["a", "b", "c"]
    assert said == []
