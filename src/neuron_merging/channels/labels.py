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
"""In labels: a broadcast that adapts to whatever it meets."""
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
