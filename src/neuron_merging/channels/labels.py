"""Labels of single channels, the arrays that hold labels and units, and connected components of labels.

Every index of every axis of every parameter has a label, a number above `FIXED`. The labels of a value give the channel
at each index of its channel dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FIXED = 0
"""The label of an index that can never be removed."""
ANY = -1
"""The label of a broadcast dimension, which takes any size. Lower labels mark axes of constant tensors."""
NO_UNIT = -1
"""In arrays of units: the index belongs to no removable unit."""
NO_POSITION = -1
"""In tables of positions: fills the row of a unit that has fewer positions than the table has columns."""

AxisLabels = NDArray[np.int64]
"""The labels along one dimension; variables of this type are called `line`."""
Labels = dict[int, AxisLabels]
"""Maps dimensions to the labels along them. Dimensions without channels are left out."""
Units = NDArray[np.int64]
"""Numbers of units: those that are kept, or the unit at each index of a dimension."""
Positions = NDArray[np.int64]
"""One row per unit: its indices along an axis."""
Mask = NDArray[np.bool_]
"""A truth value for each unit or index."""
Scores = NDArray[np.float64]
"""The importance of each unit."""


def is_channel(line: AxisLabels) -> Mask:
    """Return which labels name a channel: neither fixed nor a broadcast.

    >>> is_channel(np.array([ANY, FIXED, 1])).tolist()
    [False, False, True]
    """
    return line > FIXED


def is_broadcast(line: AxisLabels) -> Mask:
    """Return which labels are broadcasts: they adapt to the labels that they are combined with.

    >>> is_broadcast(np.array([ANY - 1, ANY, FIXED, 1])).tolist()
    [True, True, False, False]
    """
    return line < FIXED


def select_channels(line: AxisLabels) -> AxisLabels:
    """Return the labels that name channels."""
    return line[is_channel(line)]


def make_fixed_labels(size: int) -> AxisLabels:
    """Return labels of an axis of which nothing can be removed."""
    return np.full(size, FIXED)


def fix_broadcasts(line: AxisLabels) -> AxisLabels:
    """Return the labels with broadcasts turned into fixed labels."""
    return np.where(is_broadcast(line), FIXED, line)


def is_unit(units: Units) -> Mask:
    """Return the indices that belong to a unit, as a mask.

    >>> is_unit(np.array([0, NO_UNIT, 3])).tolist()
    [True, False, True]
    """
    mask: Mask = units != NO_UNIT
    return mask


def make_empty_units(size: int) -> Units:
    """Return an axis of this size without units."""
    return np.full(size, NO_UNIT)


def is_position(positions: Positions) -> Mask:
    """Return which entries of a table of positions are indices, as opposed to padding."""
    mask: Mask = positions != NO_POSITION
    return mask


def build_position_table(units: Units, places: AxisLabels, size: int) -> Positions:
    """Return one row per unit with its positions, padded with `NO_POSITION`. `units[i]` is the unit at `places[i]`.

    >>> build_position_table(np.array([1, 0, 1]), np.array([4, 5, 6]), 2).tolist()
    [[5, -1], [4, 6]]
    """
    order = np.argsort(units, kind="stable")
    ordered = units[order]
    counts = np.bincount(ordered, minlength=size)
    table = np.full((size, int(counts.max(initial=0))), NO_POSITION)
    # The column of an entry is its rank among the entries of its unit.
    table[ordered, np.arange(len(ordered)) - (np.cumsum(counts) - counts)[ordered]] = places[order]
    return table


def find_connected_components(count: int, edges: Sequence[tuple[AxisLabels, AxisLabels]]) -> AxisLabels:
    """Return the smallest label of each label's connected component.

    Vectorised hooking and pointer jumping (Shiloach and Vishkin, 1982): a Python loop over edges would be slow on wide
    networks.
    """
    root = np.arange(count)
    if not edges:
        return root
    a = np.concatenate([edge[0] for edge in edges])
    b = np.concatenate([edge[1] for edge in edges])
    while True:
        low, high = np.minimum(root[a], root[b]), np.maximum(root[a], root[b])
        if (low == high).all():
            return root
        np.minimum.at(root, high, low)  # hooking: attach the larger root to the smaller
        while (root[root] != root).any():  # pointer jumping: flatten every tree to depth one
            root = root[root]
