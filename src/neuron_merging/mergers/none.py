"""Plain pruning: removed channels are dropped and nothing makes up for them."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_merging.channels.selection import Selection
from neuron_merging.mergers.interface import Merged, merger, pruned


@merger("none")
@dataclass(frozen=True)
class Prune:
    """Leave the consumers' remaining weights as they are."""

    def merge(self, selection: Selection) -> Merged:
        return pruned(selection)
