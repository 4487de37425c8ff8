"""Classes of things that are linked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from neuron_merging.channels.labels import Line


def components(count: int, edges: Sequence[tuple[Line, Line]]) -> Line:
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
