"""Budgets in the forms in which users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_merging.errors import MergingError
from neuron_merging.selection.budget import BUDGET_KINDS, BudgetLimit, parse_budget


@pytest.mark.parametrize(
    ("key", "value", "amount", "share"),
    [
        ("macs", 0.5, 0.5, True),
        ("macs", 1, 1.0, True),
        ("macs", "50%", 0.5, True),
        ("macs", "0.3", 0.3, True),
        ("macs", "1.2G", 1.2e9, False),
        ("params", "1.2M", 1.2e6, False),
        ("params", 250_000, 250_000, False),
        ("params", "250,000", 250_000, False),
        ("weights", "3MB", 3e6, False),
        ("weights", "3 MiB", 3 * 2**20, False),
        ("latency", "5ms", 5e-3, False),
        ("latency", "800 µs", 8e-4, False),
    ],
)
def test_shares_and_figures(key: str, value: object, amount: float, share: bool) -> None:
    (limit,) = parse_budget({key: value})
    assert limit.key == key and limit.share is share and limit.amount == pytest.approx(amount)


def test_a_share_is_of_the_original() -> None:
    assert BudgetLimit("macs", 0.25, share=True).compute_allowed(400) == 100
    assert BudgetLimit("macs", 70, share=False).compute_allowed(400) == 70


@pytest.mark.parametrize(
    "budget",
    [
        {}, None, True, 50, "150%",
        {"flops": 0.5}, {"macs": 0}, {"macs": -1}, {"macs": "fast"}, {"macs": "5ms"}, {"params": "3MB"},
        {"latency": 5}, {"latency": "5M"}, {"macs": "150%"}, {"macs": True}, {"macs": float("nan")}, {"macs": "1e999"},
        {"macs": [0.5]},
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_with_what_would_have(budget: object) -> None:
    with pytest.raises(MergingError) as caught:
        parse_budget(budget)
    assert "budget" in caught.value.where and caught.value.fix


@given(st.sampled_from(sorted(BUDGET_KINDS)), st.text(max_size=12))
def test_no_text_ends_in_anything_but_a_limit_or_an_error(key: str, text: str) -> None:
    try:
        (limit,) = parse_budget({key: text})
    except MergingError:
        return
    assert 0 < limit.amount < float("inf")


@pytest.mark.parametrize(
    "given",
    [
        {"latency@onnxruntime": "5ms"}, {"latency": "800 µs"}, {"weights": "3MiB"}, {"macs": "50%"}, {"macs": 0.7},
        {"params": 250_000}, {"params": "1.2M", "macs": "33.3%"}, {"weights": 3000},
    ],
    ids=str,
)  # fmt: skip
def test_a_budget_is_read_back_as_it_was_written(given: dict[str, object]) -> None:
    budget = parse_budget(given)
    assert parse_budget({limit.key: limit.value for limit in budget}) == budget


@pytest.mark.parametrize(
    ("budget", "fix"),
    [
        ({"macs": 50}, 'Did you mean "50%"?'), ({"params": "30"}, 'Did you mean "30%"?'),
        ({"mac": 0.5}, "Did you mean macs?"), ({"latncy": "5ms"}, "Did you mean latency"),
    ],
)  # fmt: skip
def test_a_slip_is_answered_with_what_was_meant(budget: object, fix: str) -> None:
    with pytest.raises(MergingError) as caught:
        parse_budget(budget)
    assert fix in caught.value.fix


def test_a_share_alone_is_of_the_multiply_accumulates() -> None:
    assert parse_budget("50%") == parse_budget({"macs": "50%"}) and parse_budget(0.5) == parse_budget({"macs": 0.5})


def test_costs_are_told_in_the_unit_of_the_limit() -> None:
    limits = parse_budget({"params": 5000, "macs": 0.5, "weights": "3MB", "latency": "5ms"})
    assert [limit.format_cost(1234, 2468) for limit in limits[:3]] == ["1,234", "0.5", "0.001234MB"]
    assert limits[3].format_cost(0.0071, 1) == "7.1ms"
