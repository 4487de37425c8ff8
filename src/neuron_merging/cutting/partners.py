"""Partners: which kept channels took in a removed one, and how much of it, for whoever reads the plan.

Some methods say so themselves. Of the others it is read off the new columns: what was added to each kept column, as a
sum of the removed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.groups import Group
from neuron_merging.channels.labels import Units, is_place
from neuron_merging.mergers.interface import Merge

Partners = dict[int, dict[int, float]]
"""By removed unit, the kept units that it went into, each with its weight."""
MOST = 2
"""Partners of a removed unit that are named: the strongest."""
LEAST = 0.05
"""A weight below that is not worth a word."""
LARGEST = 2**23
"""Entries of the removed columns that are still looked through."""
WIDEST = 2**11
"""Removed units that are still told apart: the work grows with their cube."""


def partners_of(group: Group, kept: Units, merges: Sequence[Merge], tensors: Mapping[str, Tensor]) -> Partners:
    """The strongest partners of every removed unit, as the first reader that can tell has them."""
    removed = np.setdiff1d(np.arange(group.size), kept)
    for merge in merges:
        shares = _shares(group, kept, removed, merge, tensors) if len(removed) else None
        if shares is not None:
            return {int(unit): _strongest(row, kept) for unit, row in zip(removed, shares, strict=True)}
    return {}


def _strongest(row: Tensor, kept: Units) -> dict[int, float]:
    order = row.abs().argsort(descending=True)[:MOST].tolist()
    return {int(kept[i]): round(float(row[i]), 3) for i in order if abs(float(row[i])) >= LEAST}


def _shares(group: Group, kept: Units, removed: Units, merge: Merge, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """A row for each removed unit, a column for each kept one."""
    if merge.scaling is not None:
        return merge.scaling.to_dense().T
    axis = merge.consumer.axis
    if merge.columns is None or axis is None or not is_place(merge.consumer.columns).all():
        return None
    places = merge.consumer.columns
    stored = axis.expose(tensors[axis.tensor].detach()).movedim(axis.dim, 0).flatten(1)
    if len(removed) > WIDEST or places[removed].size * stored.shape[1] > LARGEST:
        return None
    old = stored.double().cpu()
    new = old.clone()
    new[merge.positions.cpu()] = merge.columns.detach().movedim(axis.dim, 0).flatten(1).double().cpu()
    gone = old[torch.from_numpy(places[removed])].flatten(1)
    added = (new - old)[torch.from_numpy(places[kept])].flatten(1)
    square = gone @ gone.T
    ridge = 1e-6 * float(square.diagonal().mean()) + 1e-30
    square.diagonal().add_(ridge)
    found: Tensor = torch.linalg.solve(square, gone @ added.T)
    return found
