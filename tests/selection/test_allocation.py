"""Channels go where they cost least, within the budget to the channel."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_merging.errors import MergingError
from neuron_merging.selection.budget import (
    LossCurve,
    allocate_channels,
    allocate_uniformly,
    exchange_channels,
    refill_channels,
)


def over(prices: Mapping[str, float], limit: float):  # type: ignore[no-untyped-def]
    return lambda counts: sum(prices[name] * count for name, count in counts.items()) / limit - 1


def quadratic(size: int, worth: float) -> LossCurve:
    counts = tuple(range(size, 0, -1))
    return LossCurve(counts, tuple(worth * (size - count) ** 2 for count in counts))


@given(
    worths=st.lists(st.floats(0.01, 10), min_size=2, max_size=3),
    prices=st.lists(st.floats(1, 5), min_size=3, max_size=3),
    share=st.floats(0.4, 0.95),
)
@settings(max_examples=60, deadline=None)
def test_near_the_best_of_all_cuts_that_fit(worths: list[float], prices: list[float], share: float) -> None:
    size = 8
    names = "abc"[: len(worths)]
    curves = {name: quadratic(size, worth) for name, worth in zip(names, worths, strict=True)}
    price = dict(zip(names, prices, strict=False))
    overspent = over(price, share * sum(size * price[name] for name in names))
    found = allocate_channels(curves, overspent, dict.fromkeys(names, 1))
    assert overspent(found) <= 0

    def loss(counts: Mapping[str, int]) -> float:
        return sum(curves[name].loss(count) for name, count in counts.items())

    every = [dict(zip(names, counts, strict=True)) for counts in product(range(1, size + 1), repeat=len(names))]
    best = min(loss(counts) for counts in every if overspent(counts) <= 0)
    coarse = max(worths) * 2 * size  # what one channel more or less is worth at most
    assert loss(found) <= best + coarse


def test_no_channel_more_would_fit() -> None:
    curves = {"a": quadratic(16, 1), "b": quadratic(16, 3)}
    overspent = over({"a": 2, "b": 3}, 47)
    found = allocate_channels(curves, overspent, {"a": 1, "b": 1})
    assert overspent(found) <= 0
    assert all(overspent({**found, name: found[name] + 1}) > 0 for name in found if found[name] < 16)


def test_a_group_that_is_worth_nothing_goes_first() -> None:
    curves = {"dead": quadratic(16, 0.0), "alive": quadratic(16, 1)}
    found = allocate_channels(curves, over({"dead": 1, "alive": 1}, 20), {"dead": 1, "alive": 1})
    assert found["alive"] == 16 and found["dead"] == 4


def test_steps_of_several_channels_are_kept() -> None:
    curves = {"a": LossCurve((16, 12, 8, 4), (0, 1, 2, 9)), "b": quadratic(10, 1)}
    found = allocate_channels(curves, over({"a": 1, "b": 1}, 15), {"a": 4, "b": 1})
    assert found["a"] % 4 == 0 and sum(found.values()) <= 15


def test_a_budget_below_all_that_can_go_is_refused() -> None:
    with pytest.raises(MergingError, match="cannot be met"):
        allocate_channels({"a": quadratic(8, 1)}, over({"a": 1}, 0.5), {"a": 1})
    with pytest.raises(MergingError, match="cannot be met"):
        allocate_uniformly({"a": 8}, over({"a": 1}, 0.5), {"a": 1}, {"a": 1})


def test_uniform_takes_the_same_share_everywhere() -> None:
    found = allocate_uniformly({"a": 100, "b": 10}, over({"a": 1, "b": 1}, 55), {"a": 1, "b": 1}, {"a": 1, "b": 1})
    assert found == {"a": 50, "b": 5}


def test_what_is_given_back_is_what_is_worth_most() -> None:
    curves = {"a": quadratic(8, 1), "b": quadratic(8, 100)}
    found = refill_channels(curves, {"a": 4, "b": 4}, over({"a": 1, "b": 1}, 10), {"a": 1, "b": 1})
    assert found == {"a": 4, "b": 6}


def test_an_exchange_moves_channels_to_where_they_bring_more() -> None:
    overspent = over({"a": 1, "b": 1}, 12)
    reach = {"a": (4, 8), "b": (4, 8)}
    found = exchange_channels({"a": 6, "b": 6}, {"a": (0.1, 0.1), "b": (5.0, 4.0)}, reach, overspent, {"a": 1, "b": 1})
    assert found == {"a": 4, "b": 8} and overspent(found) <= 0
    same = exchange_channels({"a": 6, "b": 6}, {"a": (1.0, 1.0), "b": (1.0, 1.0)}, reach, overspent, {"a": 1, "b": 1})
    assert same == {"a": 6, "b": 6}
