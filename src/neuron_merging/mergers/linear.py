"""Each removed filter as a combination of all kept ones, in the space of weights (the idea of LBYL).

Behind a batch norm channels are compared as the norm leaves them: filters scaled by γ/σ, with the shift as
one more entry. The combination passes the activation as if that were linear, which is what this method
leaves out and `Moments` does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neuron_merging.channels.groups import Consumer
from neuron_merging.channels.selection import Selection, Site
from neuron_merging.mergers._transfer import NO_CHAIN, Transfer, channel_rows, transfers
from neuron_merging.mergers._whole import merge_with, obstacle
from neuron_merging.mergers.interface import Kind, Merge, Merged, merger
from neuron_merging.statistics.regression import check_ridge


@merger("linear")
@dataclass(frozen=True)
class Linear:
    """Ridge regression of every removed channel on the kept ones; `ridge` is relative to their mean square."""

    ridge: float = 0.01

    def __post_init__(self) -> None:
        check_ridge(self.ridge, "Linear(ridge=)")

    def merge(self, selection: Selection) -> Merged:
        return Merged(tuple(merge for site in selection.sites() for merge in self._group(site)))

    def _group(self, site: Site) -> list[Merge]:
        reached = transfers(site)
        return [self._consumer(site, consumer, reached) for consumer in site.group.consumers]

    def _consumer(self, site: Site, consumer: Consumer, reached: dict[str, Transfer]) -> Merge:
        transfer = reached.get(consumer.input, NO_CHAIN)
        why = obstacle(site, consumer) or transfer.broken
        if why:
            return Merge(site.group.name, consumer, Kind.PRUNED, why, removed=len(site.removed))
        rows = channel_rows(site, transfer).double()
        kept, gone = rows[site.kept], rows[site.removed]
        gram = kept @ kept.T
        loaded = gram + torch.diag(torch.full_like(gram[0], self.ridge * float(gram.diagonal().mean()) + 1e-12))
        return merge_with(site, consumer, torch.linalg.solve(loaded, kept @ gone.T))
