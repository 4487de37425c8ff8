"""Budgets in the words in which people say them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_merging.errors import MergingError
from neuron_merging.selection.budget import BUDGET_KEYS, BudgetLimit, parse_budget


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
    assert BudgetLimit("macs", 0.25, share=True).of(400) == 100 and BudgetLimit("macs", 70, share=False).of(400) == 70


@pytest.mark.parametrize(
    "budget",
    [
        {}, None, 0.5, {"flops": 0.5}, {"macs": 0}, {"macs": -1}, {"macs": "fast"}, {"macs": "5ms"}, {"params": "3MB"},
        {"latency": 5}, {"latency": "5M"}, {"macs": "150%"}, {"macs": True}, {"macs": float("nan")}, {"macs": "1e999"},
        {"macs": [0.5]},
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_with_what_would_have(budget: object) -> None:
    with pytest.raises(MergingError) as caught:
        parse_budget(budget)
    assert "budget" in caught.value.where and caught.value.fix


@given(st.sampled_from(sorted(BUDGET_KEYS)), st.text(max_size=12))
def test_no_text_ends_in_anything_but_a_limit_or_an_error(key: str, text: str) -> None:
    try:
        (limit,) = parse_budget({key: text})
    except MergingError:
        return
    assert 0 < limit.amount < float("inf")
