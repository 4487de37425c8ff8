"""Classes of linked labels, against a plain union-find."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from neuron_merging.channels.groups import find_connected_components


def union_find(count: int, pairs: list[tuple[int, int]]) -> list[int]:
    """The smallest member of everyone's class, one pair after the other."""
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for a, b in pairs:
        low, high = sorted((root(a), root(b)))
        parent[high] = low
    return [root(i) for i in range(count)]


@st.composite
def linked(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]]]:
    count = draw(st.integers(1, 40))
    label = st.integers(0, count - 1)
    return count, draw(st.lists(st.lists(st.tuples(label, label), max_size=12), max_size=8))


@given(linked())
def test_classes_are_those_of_a_union_find(case: tuple[int, list[list[tuple[int, int]]]]) -> None:
    count, edges = case
    lines = [(np.array([a for a, _ in part], int), np.array([b for _, b in part], int)) for part in edges]
    assert find_connected_components(count, lines).tolist() == union_find(
        count, [pair for part in edges for pair in part]
    )


def test_without_links_everyone_is_alone() -> None:
    assert find_connected_components(4, []).tolist() == [0, 1, 2, 3]


def test_a_long_chain_in_any_order_is_one_class() -> None:
    links = np.random.default_rng(0).permutation(999)
    assert (find_connected_components(1000, [(links + 1, links)]) == 0).all()
