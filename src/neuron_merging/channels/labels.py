"""Labels of single channels, the arrays that hold labels and units, and connected components of labels. Every
index of every axis of every parameter has a label, a number above `FIXED`. A value's labels say, for each of
its dimensions that is made of channels, which channel is at which index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FIXED = 0
"""The label of what can never be removed."""
ANY = -1
"""In labels: a broadcast that adapts to whatever it meets. Below it: tensors with one value everywhere."""
NO_UNIT = -1
"""In units: an index that belongs to no unit that can be removed."""
NO_POSITION = -1
"""In positions: the unit stands at fewer places than the table has columns."""

AxisLabels = NDArray[np.int64]
"""The labels along one dimension."""
Labels = dict[int, AxisLabels]
"""By dimension, the labels along it; dimensions that are not made of channels are left out."""
Units = NDArray[np.int64]
"""Numbers of units: those that stay, or the one at each index of a dimension."""
Positions = NDArray[np.int64]
"""One row per unit: the places at which it stands."""
Mask = NDArray[np.bool_]
"""For each unit or index, yes or no."""
Scores = NDArray[np.float64]
"""For each unit, how much it is worth."""


def is_channel(line: AxisLabels) -> Mask:
    """Which labels name a channel, rather than something fixed or a broadcast.

    >>> is_channel(np.array([ANY, FIXED, 1])).tolist()
    [False, False, True]
    """
    return line > FIXED


def is_broadcast(line: AxisLabels) -> Mask:
    """Which labels adapt to whatever they meet.

    >>> is_broadcast(np.array([ANY - 1, ANY, FIXED, 1])).tolist()
    [True, True, False, False]
    """
    return line < FIXED


def select_channels(line: AxisLabels) -> AxisLabels:
    """The labels of a line that name channels."""
    return line[is_channel(line)]


def make_fixed_labels(size: int) -> AxisLabels:
    """A line of which nothing can be removed."""
    return np.full(size, FIXED)


def fix_broadcasts(line: AxisLabels) -> AxisLabels:
    """A line whose broadcasts have met nothing that they could adapt to: they are fixed."""
    return np.where(is_broadcast(line), FIXED, line)


def is_unit(units: Units) -> Mask:
    """At which indices a unit stands.

    >>> is_unit(np.array([0, NO_UNIT, 3])).tolist()
    [True, False, True]
    """
    there: Mask = units != NO_UNIT
    return there


def make_empty_units(size: int) -> Units:
    """A dimension of this size at which no unit stands."""
    return np.full(size, NO_UNIT)


def is_position(positions: Positions) -> Mask:
    """Which entries of a table of positions are places, rather than fill up a row."""
    there: Mask = positions != NO_POSITION
    return there


def build_position_table(units: Units, places: AxisLabels, size: int) -> Positions:
    """One row for each of `size` units with the places at which it stands.

    >>> build_position_table(np.array([1, 0, 1]), np.array([4, 5, 6]), 2).tolist()
    [[5, -1], [4, 6]]
    """
    order = np.argsort(units, kind="stable")
    ordered = units[order]
    counts = np.bincount(ordered, minlength=size)
    table = np.full((size, int(counts.max(initial=0))), NO_POSITION)
    table[ordered, np.arange(len(ordered)) - (np.cumsum(counts) - counts)[ordered]] = places[order]
    return table


def find_connected_components(count: int, edges: Sequence[tuple[AxisLabels, AxisLabels]]) -> AxisLabels:
    """The smallest label of each label's class (hooking and pointer jumping, vectorised)."""
    root = np.arange(count)
    if not edges:
        return root
    a = np.concatenate([edge[0] for edge in edges])
    b = np.concatenate([edge[1] for edge in edges])
    while True:
        low, high = np.minimum(root[a], root[b]), np.maximum(root[a], root[b])
        if (low == high).all():
            return root
        np.minimum.at(root, high, low)
        while (root[root] != root).any():
            root = root[root]
