"""Each removed filter as a combination of all kept ones, in the space of weights (the idea of LBYL).

Behind a batch norm channels are compared as the norm leaves them: filters scaled by γ/σ, with the shift as
one more entry. The combination passes the activation as if that were linear, which is what this method
leaves out and `Moments` does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_merging.channels import Consumer
from neuron_merging.mergers.transfer import Transfer, transfers
from neuron_merging.mergers.whole import merge_with, obstacle
from neuron_merging.regression import check_ridge
from neuron_merging.task import Merge, Site, Task


@dataclass(frozen=True)
class Linear:
    """Ridge regression of every removed channel on the kept ones; `ridge` is relative to their mean square."""

    ridge: float = 0.01

    def __post_init__(self) -> None:
        check_ridge(self.ridge, "Linear(ridge=)")

    def merge(self, task: Task) -> list[Merge]:
        return [merge for site in task.sites() for merge in self._group(site)]

    def _group(self, site: Site) -> list[Merge]:
        reached = transfers(site)
        return [self._consumer(site, consumer, reached) for consumer in site.group.consumers]

    def _consumer(self, site: Site, consumer: Consumer, reached: dict[str, Transfer]) -> Merge:
        transfer = reached.get(consumer.input, Transfer(broken="its path is not a chain of layers"))
        why = obstacle(site, consumer) or transfer.broken
        if why:
            return Merge(site.group.name, consumer, f"pruned: {why}")
        rows = channel_rows(site, transfer).double()
        kept, gone = rows[site.kept], rows[site.removed]
        gram = kept @ kept.T
        loaded = gram + torch.diag(torch.full_like(gram[0], self.ridge * float(gram.diagonal().mean()) + 1e-12))
        return merge_with(site, consumer, torch.linalg.solve(loaded, kept @ gone.T))


def channel_rows(site: Site, transfer: Transfer) -> Tensor:
    """What a channel is before its activation: filter and shift, through every scale on the way."""
    rows = site.rows
    shift = rows.new_zeros(len(rows))
    for stage in transfer.stages:
        scale = stage.scale.to(rows)
        rows, shift = rows * scale[:, None], shift * scale + stage.shift.to(rows)
    return torch.cat([rows, shift[:, None]], 1) if transfer.stages else rows
