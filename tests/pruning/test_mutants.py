"""Faults that are put into the engine on purpose are caught: a sample of benchmarks/mutants.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import mark_long

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import mutants

FAULTS = (*mutants.plan_mutants(), *mutants.surgery_mutants(), *mutants.merger_mutants())
PATCHED = {mutant.name: mutant for mutant in FAULTS}
RULES = {
    "linear": ("linear", "shifts labels by one"),
    "relu": ("linear", "reverses labels"),
    "add": ("residual", "unites nothing"),
    "batch_norm": ("batch norm 2d", "unites nothing"),
    "conv2d": ("conv2d", "swaps two labels"),
    "cat": ("cat", "shifts labels by one"),
    "flatten": ("flatten", "shifts labels by one"),
    "slice": ("every other channel", "refuses nothing"),
    "max_pool2d": ("max pool 2d", "shifts labels by one"),
}
LOST = {"softmax": ("softmax over channels", "refuses nothing"), "max_pool2d": ("max pool 2d", "forgets labels")}
"""Faults after which no layer reads the channels that it should."""


QUICK = {
    "plan keeps a wrong index",
    "plan forgets the groups of a layer",
    "surgery shuffles columns",
    "surgery forgets attributes",
    *(f"{merger}: columns at permuted positions" for merger in ("cosine", "moments")),
    "moments: one layer's columns are lost",
    "moments: other tensors stay as they were",
}
"""Faults that `make test` puts in; `make test-long` puts in the others."""
assert QUICK <= PATCHED.keys()


@pytest.mark.parametrize("name", mark_long(PATCHED, QUICK))
def test_a_broken_plan_surgery_or_merge_is_caught(name: str) -> None:
    assert mutants.judge(PATCHED[name]) == "caught"


@pytest.mark.parametrize("op", RULES)
def test_a_broken_rule_is_never_silent(op: str) -> None:
    network, fault = RULES[op]
    assert mutants.judge(mutants.broken_rule(op, fault, (network,))) == "caught"


@pytest.mark.parametrize("op", LOST)
def test_channels_whose_readers_are_lost_stay(op: str) -> None:
    network, fault = LOST[op]
    assert mutants.judge(mutants.broken_rule(op, fault, (network,))) in ("equivalent", "harmless")
