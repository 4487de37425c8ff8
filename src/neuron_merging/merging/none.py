"""Plain pruning: removed channels are dropped and nothing makes up for them."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_merging.channels.analysis import Selection
from neuron_merging.merging.protocol import MergeResult, merger, prune_without_merging


@merger("none")
@dataclass(frozen=True)
class Prune:
    """Leave the consumers' remaining weights as they are."""

    def merge(self, selection: Selection) -> MergeResult:
        return prune_without_merging(selection)
