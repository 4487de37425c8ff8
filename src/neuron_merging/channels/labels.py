"""Labels: names of single channels, and the arrays in which they and the units made of them are kept.

Every index of every axis of every parameter has a label, a number above `FIXED`. A value's labels say, for each
of its dimensions that is made of channels, which channel stands at which index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FIXED = 0
"""The label of what can never be removed."""
ANY = -1
"""In labels: a broadcast that adapts to whatever it meets. Below it: tensors with one value everywhere."""
NO_UNIT = -1
"""In units: an index that belongs to no unit that can be removed."""
NO_MORE = -1
"""In positions: the unit stands at fewer places than the table has columns."""

Line = NDArray[np.int64]
"""The labels along one dimension."""
Labels = dict[int, Line]
"""By dimension, the labels along it; dimensions that are not made of channels are left out."""
Units = NDArray[np.int64]
"""Numbers of units: those that stay, or the one at each index of a dimension."""
Positions = NDArray[np.int64]
"""One row per unit: the places at which it stands."""
Mask = NDArray[np.bool_]
"""For each unit or index, yes or no."""
Scores = NDArray[np.float64]
"""For each unit, how much it is worth."""


def is_channel(line: Line) -> Mask:
    """Which labels name a channel, rather than something fixed or a broadcast.

    >>> is_channel(np.array([ANY, FIXED, 1])).tolist()
    [False, False, True]
    """
    return line > FIXED


def is_open(line: Line) -> Mask:
    """Which labels adapt to whatever they meet.

    >>> is_open(np.array([ANY - 1, ANY, FIXED, 1])).tolist()
    [True, True, False, False]
    """
    return line < FIXED


def channels_in(line: Line) -> Line:
    """The labels of a line that name channels."""
    return line[is_channel(line)]


def fixed(size: int) -> Line:
    """A line of which nothing can be removed."""
    return np.full(size, FIXED)


def settled(line: Line) -> Line:
    """A line whose broadcasts have met nothing that they could adapt to: they are fixed."""
    return np.where(is_open(line), FIXED, line)


def is_unit(units: Units) -> Mask:
    """At which indices a unit stands.

    >>> is_unit(np.array([0, NO_UNIT, 3])).tolist()
    [True, False, True]
    """
    there: Mask = units != NO_UNIT
    return there


def no_units(size: int) -> Units:
    """A dimension of this size at which no unit stands."""
    return np.full(size, NO_UNIT)


def is_place(positions: Positions) -> Mask:
    """Which entries of a table of positions are places, rather than fill up a row."""
    there: Mask = positions != NO_MORE
    return there


def positions_of(units: Units, places: Line, size: int) -> Positions:
    """One row for each of `size` units with the places at which it stands.

    >>> positions_of(np.array([1, 0, 1]), np.array([4, 5, 6]), 2).tolist()
    [[5, -1], [4, 6]]
    """
    order = np.argsort(units, kind="stable")
    ordered = units[order]
    counts = np.bincount(ordered, minlength=size)
    table = np.full((size, int(counts.max(initial=0))), NO_MORE)
    table[ordered, np.arange(len(ordered)) - (np.cumsum(counts) - counts)[ordered]] = places[order]
    return table
