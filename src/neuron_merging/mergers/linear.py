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
    """Ridge regression of every removed filter on the kept ones, as if the activation were linear.

    Parameters
    ----------
    ridge
        Relative to the kept filters' mean square.

    Raises
    ------
    MergingError
        A ridge that is no number, or negative.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> nm.compress(net, torch.zeros(1, 4), ratio=0.5, merger=Linear(ridge=0.05)).summary.groups[0].said
    ('2: merged 4 of 4',)
    """

    ridge: float = 0.01

    def __post_init__(self) -> None:
        check_ridge(self.ridge, "Linear(ridge=)")

    def merge(self, selection: Selection) -> Merged:
        """Every removed unit into a combination of all kept ones."""
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
