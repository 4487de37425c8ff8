"""Folding: channels are clustered, and a cluster's mean takes the place of its kept channel.

k-means starts at the kept channels, so every cluster has one. Members of a cluster feed the next layer
through their mean, so the columns that read them add up. A mean of channels that are not alike has
less variance than each; the cosines within the cluster say how much, and it is scaled back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuron_merging.channels.filters import channels_first, norm_follows
from neuron_merging.channels.groups import Axis, Producer
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Selection, Site
from neuron_merging.graph.precision import working
from neuron_merging.graph.values import Graph, Ref
from neuron_merging.mergers._transfer import NO_CHAIN, Stage, Transfer, channel_rows, transfers
from neuron_merging.mergers._whole import merge_with, obstacle
from neuron_merging.mergers.interface import Kind, Merge, Merged, Reason, Why, merger

ROUNDS = 30
REACH = 6.0
"""Deviations below zero beyond which a channel is taken for dead."""


@merger("fold")
@dataclass(frozen=True)
class Fold:
    """k-means folding: a cluster's mean takes the place of its kept channel.

    Parameters
    ----------
    repair
        Scale each mean to the variance that its members had.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> nm.compress(net, torch.zeros(1, 4), ratio=0.5, merger=Fold()).summary.groups[0].said
    ('2: merged 4 of 4',)
    """

    repair: bool = True

    def merge(self, selection: Selection) -> Merged:
        """The means as new filters, and the sums of the columns that read their members."""
        changed: dict[str, Tensor] = {}
        clusters = [(site, self._fold(site, changed)) for site in selection.sites()]
        return Merged(tuple(merge for site, member in clusters for merge in _merges(site, member, changed)), changed)

    def _fold(self, site: Site, changed: dict[str, Tensor]) -> Tensor | Reason:
        """The cluster of every unit, its producer's tensors rewritten; or why that cannot be."""
        reached = transfers(site)
        paths = [reached.get(c.input, NO_CHAIN) for c in site.group.consumers]
        reasons = [obstacle(site, c) or path.broken for c, path in zip(site.group.consumers, paths, strict=True)]
        why = next(filter(None, reasons), None) or _unlike(site, paths)
        if why:
            return why
        (producer,) = site.group.producers
        rows = channel_rows(site, paths[0])
        kept = torch.from_numpy(site.kept).to(rows.device)
        clusters = _clusters(rows, kept, _alive(site, paths[0]).to(rows.device))
        if not self.repair:
            clusters = replace(clusters, gain=torch.ones_like(clusters.gain))
        changed |= _rewritten(site, producer, paths[0].stages, clusters, changed)
        return clusters.member


def _merges(site: Site, member: Tensor | Reason, changed: Mapping[str, Tensor]) -> list[Merge]:
    if isinstance(member, Reason):
        gone = len(site.removed)
        return [Merge(site.group.name, c, Kind.PRUNED, member, removed=gone) for c in site.group.consumers]
    removed = torch.from_numpy(site.removed).to(member.device)
    z = torch.zeros(len(site.kept), len(removed), dtype=torch.float64, device=member.device)
    taken = (member[removed] >= 0).nonzero()[:, 0]
    z[member[removed[taken]], taken] = 1
    weights = ((c, changed.get(c.axis.tensor) if c.axis else None) for c in site.group.consumers)
    return [replace(merge_with(site, consumer, z, weight), folded=len(taken)) for consumer, weight in weights]


def _unlike(site: Site, paths: list[Transfer]) -> Reason | None:
    """One layer, at most one batch norm of its own behind it, the same way to every reader."""
    if not paths:
        return Reason(Why.UNREAD)
    if len(site.group.producers) != 1 or site.group.producers[0].rows.shape[1] != 1:
        return Reason(Why.SEVERAL_LAYERS)
    own_bias = site.group.producers[0].bias is not None
    if any(path.stages and not _one_norm(path.stages, own_bias) for path in paths):
        return Reason(Why.SEVERAL_NORMS)
    if any(len(path.stages) != len(paths[0].stages) for path in paths):
        return Reason(Why.DIFFERENT_NORMS)
    producer = site.group.producers[0]
    if paths[0].stages and (not norm_follows(site.graph, producer) or len(site.graph.users(producer.node.name)) != 1):
        return Reason(Why.NORM_ELSEWHERE)
    if paths[0].stages and site.graph.users(producer.node.name)[0].args.get("weight") is None:
        return Reason(Why.NORM_BARE)
    return None


def _one_norm(stages: tuple[Stage, ...], own_bias: bool) -> bool:
    """A batch norm, and before it at most the bias of the layer itself."""
    return stages[-1].norm is not None and len(stages) <= 1 + own_bias


def _alive(site: Site, transfer: Transfer) -> Tensor:
    """Channels that a rectifier lets through at some time; the others are zero, whatever their filters look like.

    A channel has the mean and deviation that its batch norm states; without one, those of its filter on standardised
    inputs.
    """
    rows = channel_rows(site, transfer)
    everything = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    biased = bool(transfer.stages) or site.group.producers[0].bias is not None
    if not biased or not _rectified(site):
        return everything
    norm = transfer.stages[-1].norm if transfer.stages else None
    shift = rows[:, -1] if norm is None else norm[1].to(rows)
    spread = rows[:, :-1].norm(dim=1) if norm is None else norm[0].to(rows).abs()
    return shift + REACH * spread > 0


def _rectified(site: Site) -> bool:
    """Whether every way from the layer to its readers leads through a rectifier."""
    behind = {site.group.producers[0].node.name}
    for node in site.graph.nodes:
        if node.op != "relu" and any(ref.name in behind for ref in node.refs()) and row_of(node).layer == "":
            behind.add(node.name)
    return not any(consumer.input in behind for consumer in site.group.consumers)


@dataclass(frozen=True)
class _Clusters:
    """The cluster of each unit (-1: none), each cluster's mean row, and what gives it its members' variance back."""

    member: Tensor
    means: Tensor
    gain: Tensor


def _clusters(rows: Tensor, kept: Tensor, alive: Tensor) -> _Clusters:
    """What is not alive is in no cluster, or alone in its own if it is kept."""
    number = torch.full((len(rows),), -1, dtype=torch.int64, device=rows.device)
    number[kept] = torch.arange(len(kept), device=rows.device)
    means, gain = rows[kept].double(), torch.ones(len(kept), dtype=torch.float64, device=rows.device)
    own = alive.nonzero()[:, 0]
    centres = alive[kept].nonzero()[:, 0]
    if len(centres):
        member, means[centres], gain[centres] = _means(rows[own], torch.searchsorted(own, kept[centres]))
        number[own] = centres[member]
    return _Clusters(number, means, gain)


def _means(rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k-means that starts at the kept rows."""
    rows = rows.double()
    centres = rows[kept]
    member = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for _ in range(ROUNDS):
        new = torch.cdist(rows, centres).argmin(1)
        new[kept] = torch.arange(len(kept), device=rows.device)
        if bool((new == member).all()):
            break
        member = new
        share = torch.nn.functional.one_hot(member, len(kept)).to(rows)
        centres = (share.T @ rows) / share.sum(0)[:, None]
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    share = torch.nn.functional.one_hot(member, len(kept)).to(rows)
    size = share.sum(0)
    together = (share.T @ unit).square().sum(1)
    return member, centres, ((size.square() / together.clamp(min=1e-30)).sqrt().clamp(1, 2))


def _rewritten(
    site: Site, producer: Producer, stages: tuple[Stage, ...], clusters: _Clusters, changed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """New rows of the producer at the kept units, and a batch norm that passes them on as they are."""
    axis, means = producer.axis, clusters.means
    at = torch.from_numpy(producer.rows[site.kept, 0]).to(means.device)
    weight = changed.get(axis.tensor, working(site.graph.tensors[axis.tensor].detach())).clone()
    width = channels_first(weight, axis).shape[1]
    rows = {axis.tensor: _with_rows(weight, axis, at, means[:, :width] * clusters.gain[:, None])}
    if means.shape[1] == width:
        return rows
    shift = means[:, width]
    if stages:
        return {**rows, **_new_norm(site.graph, producer, stages, clusters, shift, at)}
    return {**rows, **_new_bias(site.graph, producer, shift * clusters.gain, at)}


def _with_rows(weight: Tensor, axis: Axis, at: Tensor, rows: Tensor) -> Tensor:
    """The weight with new filters at some of its channels."""
    shaped = axis.expose(weight).movedim(axis.dim, 0)
    shaped[at] = rows.view(-1, *shaped.shape[1:]).to(weight)
    return axis.restore(shaped.movedim(0, axis.dim))


def _new_bias(graph: Graph, producer: Producer, values: Tensor, at: Tensor) -> dict[str, Tensor]:
    return {} if producer.bias is None else {producer.bias: _with(graph.tensors[producer.bias], at, values)}


def _new_norm(
    graph: Graph, producer: Producer, stages: tuple[Stage, ...], clusters: _Clusters, shift: Tensor, at: Tensor
) -> dict[str, Tensor]:
    """A batch norm that divides by nothing, and shifts as the cluster's mean says."""
    (norm,) = graph.users(producer.node.name)
    stored = {key: ref.name for key, ref in norm.args.items() if isinstance(ref, Ref)}
    names = {key: graph.parameters[name] for key, name in stored.items() if name in graph.parameters}
    gain, nothing, own = clusters.gain, torch.zeros_like(clusters.gain), stages[-1].norm
    centre = _mean_of(own[1].to(clusters.means), clusters.member, len(clusters.means)) if own else nothing
    deviation = (graph.tensors[names["running_var"]].double()[at] + float(norm.args.get("eps", 1e-5))).sqrt()
    values = {"running_mean": nothing, "weight": deviation, "bias": centre + gain * (shift - centre)}
    new = {names[key]: _with(graph.tensors[names[key]], at, value) for key, value in values.items()}
    return {**new, **_new_bias(graph, producer, nothing, at)}


def _mean_of(values: Tensor, member: Tensor, count: int) -> Tensor:
    """Over the members of each cluster."""
    values, member = values[member >= 0], member[member >= 0]
    total = torch.zeros(count, dtype=values.dtype, device=values.device)
    return total.index_add_(0, member, values) / torch.bincount(member, minlength=count)


def _with(tensor: Tensor, at: Tensor, values: Tensor) -> Tensor:
    new = working(tensor.detach()).clone()
    new[at] = values.to(new)
    return new
