"""Plain pruning: removed channels are dropped and nothing makes up for them."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_merging.mergers.base import Merge, Site


@dataclass(frozen=True)
class Prune:
    """Leave the consumers' remaining weights as they are."""

    def merge(self, site: Site) -> list[Merge]:
        return [Merge(consumer, "pruned") for consumer in site.group.consumers]
