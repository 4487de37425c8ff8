"""Consumers given a whole scaling matrix: V' = V ×₂ Z, kept channels plus what removed ones are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from neuron_merging.channels.filters import columns_of
from neuron_merging.channels.groups import Consumer
from neuron_merging.channels.labels import is_place
from neuron_merging.channels.selection import Site
from neuron_merging.mergers._transfer import stored
from neuron_merging.mergers.interface import Kind, Merge, Reason, Why


def obstacle(site: Site, consumer: Consumer) -> Reason | None:
    """Why a consumer cannot take a scaling matrix, or nothing."""
    if consumer.axis is None:
        return Reason(Why.NOT_STORED)
    if not is_place(consumer.columns).all():
        return Reason(Why.UNEQUAL)
    if consumer.blocks > 1:
        return Reason(Why.GROUPED)
    if not stored(site):
        return Reason(Why.COMPUTED)
    same = [c for c in site.group.consumers if c.axis == consumer.axis]
    return None if len(same) == 1 else Reason(Why.SHARED)


def merge_with(site: Site, consumer: Consumer, z: Tensor, weight: Tensor | None = None) -> Merge:
    """Add to the kept columns the removed ones, through z (kept × removed); `weight` may stand for the stored one."""
    assert consumer.axis is not None
    own = site.tensor(consumer.axis.tensor) if weight is None else weight
    weight = consumer.axis.expose(own).movedim(consumer.axis.dim, 0)
    width = consumer.columns.shape[1]
    kept, gone = (columns_of(consumer, units).to(weight.device) for units in (site.kept, site.removed))
    lost = weight[gone].view(-1, width, *weight.shape[1:])
    added = torch.tensordot(z.to(weight), lost, 1).flatten(0, 1)
    columns = (weight[kept] + added).movedim(0, consumer.axis.dim)
    return Merge(
        site.group.name,
        consumer,
        Kind.MERGED,
        columns=columns,
        positions=columns_of(consumer, site.kept),
        folded=len(site.removed),
        removed=len(site.removed),
    )
