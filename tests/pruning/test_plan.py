"""Plans: they rebuild the network, and say why they do not fit another."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

import neuron_merging as nm
from tests.failing import X, failing, small_net
from tests.pruning.zeroing import distance, run
from tests.zoo.pruning import every_graph, prune


@every_graph
def test_the_plan_rebuilds_the_network(name: str) -> None:
    done = prune(name)
    plan = nm.Plan.from_json(done.result.plan.to_json())
    assert plan == done.result.plan
    fresh = done.case.build(seed=7)
    state = copy.deepcopy(fresh.state_dict())
    rebuilt = nm.apply_plan(fresh, plan)
    assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
    rebuilt.load_state_dict(done.small.state_dict())
    for mine, theirs in zip(rebuilt.parameters(), done.small.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)
    give_lost_buffers(rebuilt, done.small)
    assert distance(run(rebuilt, done.case.inputs(2)), run(done.small, done.case.inputs(2))) == 0


def give_lost_buffers(model: nn.Module, source: nn.Module) -> None:
    """Buffers that are not persistent are in no state dict."""
    theirs = dict(source.named_buffers())
    for key, buffer in model.named_buffers():
        if key not in source.state_dict():
            buffer.copy_(theirs[key])


@pytest.fixture
def plan() -> nm.Plan:
    return nm.compress(small_net(), X, merger="none").plan


def test_plan_on_a_network_with_other_layers(plan: nm.Plan) -> None:
    failing(lambda: nm.apply_plan(nn.Linear(6, 3), plan), "does not fit", "0.weight")


def test_plan_on_a_narrower_network() -> None:
    plan = nm.compress(small_net(16), X, merger="none", criterion=lambda rows: torch.arange(len(rows))).plan
    failing(lambda: nm.apply_plan(small_net(8), plan), "does not fit", "(8, 6)")


def test_plan_on_a_wider_network(plan: nm.Plan) -> None:
    failing(lambda: nm.apply_plan(small_net(16), plan), "does not fit")


def test_plan_on_the_network_that_it_has_made_already() -> None:
    result = nm.compress(small_net(), X, merger="none", criterion=lambda rows: -torch.arange(len(rows)))
    failing(lambda: nm.apply_plan(result.model, result.plan), "does not fit")


def test_plan_on_no_network(plan: nm.Plan) -> None:
    with pytest.raises(nm.MergingError):
        nm.apply_plan(small_net().state_dict(), plan)


@pytest.mark.parametrize(
    "text", ["", "garbage", "[]", "null", "{}", '{"version": "one"}', '{"version": 1}', b"\xff\xfe"]
)
def test_garbage_is_no_plan(text: str | bytes) -> None:
    failing(lambda: nm.Plan.from_json(text), "not a plan")


def test_half_a_plan(plan: nm.Plan) -> None:
    text = plan.to_json()
    for end in (1, len(text) // 2, len(text) - 2):
        failing(lambda end=end: nm.Plan.from_json(text[:end]), "not a plan")


def test_a_plan_of_a_newer_version(plan: nm.Plan) -> None:
    newer = json.loads(plan.to_json()) | {"version": 99, "something": "else"}
    failing(lambda: nm.Plan.from_json(json.dumps(newer)), "99", "Update")


@pytest.mark.parametrize("kept", [[-1, 2], [3, 1], [2, 2], [0.5]], ids=str)
def test_a_plan_with_impossible_indices(plan: nm.Plan, kept: list[Any]) -> None:
    damaged = json.loads(plan.to_json())
    damaged["cuts"][0]["kept"] = kept
    failing(lambda: nm.apply_plan(small_net(), nm.Plan.from_json(json.dumps(damaged))), "plan")
