"""Methods to compare the paper's with: k-means folding, and linear combinations of filters (the idea of LBYL).

Folding: k-means starts at the kept channels. The mean of a cluster replaces its kept channel, and the consumer's
columns of all members are summed. The mean of different channels has less variance than each of them. The cosines
within the cluster determine how much less, and the mean is scaled accordingly.

Linear: each removed filter is a combination of all kept ones. Behind a batch norm, the filters are compared after the
norm: scaled by γ/σ, with the shift as a further entry. The activation is treated as linear, unlike in `Moments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neuron_merging.calibration.regression import check_ridge, solve_scaling_matrix
from neuron_merging.channels.analysis import Selection, Site
from neuron_merging.channels.groups import Axis, Consumer, Producer, is_position
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.channels.weight_views import columns_of, flatten_channels_first, is_followed_by_norm
from neuron_merging.graph.copying import to_working_precision
from neuron_merging.graph.graph import Graph, Ref
from neuron_merging.merging.channel_path import (
    NO_CHAIN,
    AffineStage,
    ChannelPath,
    compute_channel_rows,
    has_stored_filters,
    trace_channel_paths,
)
from neuron_merging.merging.protocol import Merge, MergeKind, MergeResult, Reason, ReasonCode, merger


def find_scaling_obstacle(site: Site, consumer: Consumer) -> Reason | None:
    """Return the reason why a consumer layer cannot absorb a scaling matrix, or None."""
    if consumer.axis is None:
        return Reason(ReasonCode.NOT_STORED)
    if not is_position(consumer.columns).all():
        return Reason(ReasonCode.UNEQUAL)
    if consumer.blocks > 1:
        return Reason(ReasonCode.GROUPED)
    if not has_stored_filters(site):
        return Reason(ReasonCode.COMPUTED)
    # A weight that two layers read cannot absorb two different matrices.
    same = [c for c in site.group.consumers if c.axis == consumer.axis]
    return None if len(same) == 1 else Reason(ReasonCode.SHARED)


def apply_scaling_matrix(site: Site, consumer: Consumer, z: Tensor, weight: Tensor | None = None) -> Merge:
    """Add the removed columns to the kept ones through z (kept × removed); `weight` overrides the stored one."""
    assert consumer.axis is not None
    stored = site.tensor(consumer.axis.tensor) if weight is None else weight
    weight = consumer.axis.join_blocks(stored).movedim(consumer.axis.dim, 0)
    width = consumer.columns.shape[1]
    kept, gone = (columns_of(consumer, units).to(weight.device) for units in (site.kept, site.removed))
    # V ×₂ Z of the paper: kept columns plus Z times the removed ones; `width` columns belong to one channel.
    lost = weight[gone].view(-1, width, *weight.shape[1:])
    added = torch.tensordot(z.to(weight), lost, 1).flatten(0, 1)
    columns = (weight[kept] + added).movedim(0, consumer.axis.dim)
    return Merge(
        site.group.name,
        consumer,
        MergeKind.MERGED,
        columns=columns,
        positions=columns_of(consumer, site.kept),
        folded=len(site.removed),
        removed=len(site.removed),
    )


KMEANS_ROUNDS = 30
"""An upper bound; the loop ends as soon as no row changes its cluster."""
DEAD_CHANNEL_DEVIATIONS = 6.0
"""A channel whose mean is this many standard deviations below zero never passes a ReLU: P ≈ 1e-9 for a Gaussian."""


@merger("fold")
@dataclass(frozen=True)
class Fold:
    """k-means folding: the mean of a cluster replaces its kept channel.

    Parameters
    ----------
    repair
        Scale each mean to the variance of its members.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> nm.compress(net, torch.zeros(1, 4), ratio=0.5, merger=Fold()).summary.groups[0].descriptions
    ('2: merged 4 of 4',)
    """

    repair: bool = True

    def merge(self, selection: Selection) -> MergeResult:
        """Replace kept filters by cluster means and sum the consumers' columns of each cluster."""
        changed: dict[str, Tensor] = {}
        clusters = [(site, self._fold_group(site, changed)) for site in selection.sites()]
        return MergeResult(
            tuple(merge for site, member in clusters for merge in _build_fold_merges(site, member, changed)), changed
        )

    def _fold_group(self, site: Site, changed: dict[str, Tensor]) -> Tensor | Reason:
        """Return the cluster of every unit and rewrite the producer in `changed`; or return the reason why not."""
        reached = trace_channel_paths(site)
        paths = [reached.get(c.input, NO_CHAIN) for c in site.group.consumers]
        reasons = [
            find_scaling_obstacle(site, c) or path.broken for c, path in zip(site.group.consumers, paths, strict=True)
        ]
        why = next(filter(None, reasons), None) or _find_fold_obstacle(site, paths)
        if why:
            return why
        (producer,) = site.group.producers
        rows = compute_channel_rows(site, paths[0])
        kept = torch.from_numpy(site.kept).to(rows.device)
        clusters = _cluster_channels(rows, kept, _find_live_channels(site, paths[0]).to(rows.device))
        if not self.repair:
            clusters = replace(clusters, gain=torch.ones_like(clusters.gain))
        changed |= _rewrite_producer(site, producer, paths[0].stages, clusters, changed)
        return clusters.membership


def _build_fold_merges(site: Site, member: Tensor | Reason, changed: Mapping[str, Tensor]) -> list[Merge]:
    if isinstance(member, Reason):
        gone = len(site.removed)
        return [Merge(site.group.name, c, MergeKind.PRUNED, member, removed=gone) for c in site.group.consumers]
    removed = torch.from_numpy(site.removed).to(member.device)
    z = torch.zeros(len(site.kept), len(removed), dtype=torch.float64, device=member.device)
    # Dead channels are in no cluster: they are removed without a trace.
    taken = (member[removed] >= 0).nonzero()[:, 0]
    z[member[removed[taken]], taken] = 1
    weights = ((c, changed.get(c.axis.tensor) if c.axis else None) for c in site.group.consumers)
    return [replace(apply_scaling_matrix(site, consumer, z, weight), folded=len(taken)) for consumer, weight in weights]


def _find_fold_obstacle(site: Site, paths: list[ChannelPath]) -> Reason | None:
    """Return why a group cannot be folded.

    Folding needs a single producer, at most one batch norm right behind it, and equal paths to all consumer layers.
    """
    if not paths:
        return Reason(ReasonCode.UNREAD)
    if len(site.group.producers) != 1 or site.group.producers[0].rows.shape[1] != 1:
        return Reason(ReasonCode.SEVERAL_LAYERS)
    own_bias = site.group.producers[0].bias is not None
    if any(path.stages and not _is_single_norm(path.stages, own_bias) for path in paths):
        return Reason(ReasonCode.SEVERAL_NORMS)
    if any(len(path.stages) != len(paths[0].stages) for path in paths):
        return Reason(ReasonCode.DIFFERENT_NORMS)
    producer = site.group.producers[0]
    if paths[0].stages and (
        not is_followed_by_norm(site.graph, producer) or len(site.graph.users(producer.node.name)) != 1
    ):
        return Reason(ReasonCode.NORM_ELSEWHERE)
    if paths[0].stages and site.graph.users(producer.node.name)[0].args.get("weight") is None:
        return Reason(ReasonCode.NORM_BARE)
    return None


def _is_single_norm(stages: tuple[AffineStage, ...], own_bias: bool) -> bool:
    """Return whether the stages are one batch norm, after at most the bias of the layer."""
    return stages[-1].norm is not None and len(stages) <= 1 + own_bias


def _find_live_channels(site: Site, transfer: ChannelPath) -> Tensor:
    """Return a mask of the channels that are not always zero behind a ReLU.

    Mean and deviation of a channel are those of its batch norm; without one, those of its filter on standardised
    inputs.
    """
    rows = compute_channel_rows(site, transfer)
    all_alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    # Without any shift a channel is positive for half of its inputs, so none is dead.
    biased = bool(transfer.stages) or site.group.producers[0].bias is not None
    if not biased or not _is_rectified(site):
        return all_alive
    norm = transfer.stages[-1].norm if transfer.stages else None
    shift = rows[:, -1] if norm is None else norm[1].to(rows)
    spread = rows[:, :-1].norm(dim=1) if norm is None else norm[0].to(rows).abs()
    return shift + DEAD_CHANNEL_DEVIATIONS * spread > 0


def _is_rectified(site: Site) -> bool:
    """Return whether every path from the layer to its consumer layers passes a ReLU."""
    # Nodes that the layer reaches without passing a ReLU or another layer.
    reached = {site.group.producers[0].node.name}
    for node in site.graph.nodes:
        row = lookup_operator(node)
        if not row.rectifies and not row.layer and any(ref.name in reached for ref in node.refs()):
            reached.add(node.name)
    return not any(consumer.input in reached for consumer in site.group.consumers)


@dataclass(frozen=True)
class _Clusters:
    """The cluster of each unit (-1: none), the mean row of each cluster, and the gain that restores the variance."""

    membership: Tensor
    means: Tensor
    gain: Tensor


def _cluster_channels(rows: Tensor, kept: Tensor, alive: Tensor) -> _Clusters:
    """Cluster the live channels. A dead channel belongs to no cluster; a kept dead one is a cluster of its own."""
    number = torch.full((len(rows),), -1, dtype=torch.int64, device=rows.device)
    number[kept] = torch.arange(len(kept), device=rows.device)
    means, gain = rows[kept].double(), torch.ones(len(kept), dtype=torch.float64, device=rows.device)
    live = alive.nonzero()[:, 0]
    centres = alive[kept].nonzero()[:, 0]
    if len(centres):
        member, means[centres], gain[centres] = _run_kmeans(rows[live], torch.searchsorted(live, kept[centres]))
        number[live] = centres[member]
    return _Clusters(number, means, gain)


def _run_kmeans(rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run k-means from the kept rows; return the cluster of each row, the means, and the variance gains."""
    rows = rows.double()
    centres = rows[kept]
    member = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    for _ in range(KMEANS_ROUNDS):
        # In the weights alone: folding uses no data.
        new = torch.cdist(rows, centres).argmin(1)
        new[kept] = torch.arange(len(kept), device=rows.device)  # a kept row never leaves its cluster
        if bool((new == member).all()):
            break
        member = new
        share = torch.nn.functional.one_hot(member, len(kept)).to(rows)
        centres = (share.T @ rows) / share.sum(0)[:, None]
    # The mean of n unit vectors has norm ‖Σu‖ / n. Its inverse restores the members' scale, up to a factor of 2.
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    share = torch.nn.functional.one_hot(member, len(kept)).to(rows)
    size = share.sum(0)
    squared_norm = (share.T @ unit).square().sum(1)
    return member, centres, ((size.square() / squared_norm.clamp(min=1e-30)).sqrt().clamp(1, 2))


def _rewrite_producer(
    site: Site, producer: Producer, stages: tuple[AffineStage, ...], clusters: _Clusters, changed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the producer with the means as filters of the kept units, and a batch norm that leaves them unchanged."""
    axis, means = producer.axis, clusters.means
    # A single column: `_find_fold_obstacle` refused producers with several rows per unit.
    at = torch.from_numpy(producer.rows[site.kept, 0]).to(means.device)
    weight = changed.get(axis.tensor, to_working_precision(site.graph.tensors[axis.tensor].detach())).clone()
    width = flatten_channels_first(weight, axis).shape[1]
    rows = {axis.tensor: _replace_rows(weight, axis, at, means[:, :width] * clusters.gain[:, None])}
    if means.shape[1] == width:
        return rows
    shift = means[:, width]
    if stages:
        return {**rows, **_build_norm(site.graph, producer, stages, clusters, shift, at)}
    return {**rows, **_build_bias(site.graph, producer, shift * clusters.gain, at)}


def _replace_rows(weight: Tensor, axis: Axis, at: Tensor, rows: Tensor) -> Tensor:
    """Return the weight with new filters at the channels `at`."""
    shaped = axis.join_blocks(weight).movedim(axis.dim, 0)
    shaped[at] = rows.view(-1, *shaped.shape[1:]).to(weight)
    return axis.split_blocks(shaped.movedim(0, axis.dim))


def _build_bias(graph: Graph, producer: Producer, values: Tensor, at: Tensor) -> dict[str, Tensor]:
    return {} if producer.bias is None else {producer.bias: _replace_entries(graph.tensors[producer.bias], at, values)}


def _build_norm(
    graph: Graph, producer: Producer, stages: tuple[AffineStage, ...], clusters: _Clusters, shift: Tensor, at: Tensor
) -> dict[str, Tensor]:
    """Return a batch norm that does not rescale and that shifts by the cluster's mean."""
    (norm,) = graph.users(producer.node.name)
    stored = {key: ref.name for key, ref in norm.args.items() if isinstance(ref, Ref)}
    names = {key: graph.parameters[name] for key, name in stored.items() if name in graph.parameters}
    gain, zeros, norm_stage = clusters.gain, torch.zeros_like(clusters.gain), stages[-1].norm
    centre = (
        _average_by_cluster(norm_stage[1].to(clusters.means), clusters.membership, len(clusters.means))
        if norm_stage
        else zeros
    )
    # γ = √(var + ε) and mean 0 make the norm an identity: γ/σ is already contained in the rows.
    deviation = (graph.tensors[names["running_var"]].double()[at] + float(norm.args.get("eps", 1e-5))).sqrt()
    values = {"running_mean": zeros, "weight": deviation, "bias": centre + gain * (shift - centre)}
    new = {names[key]: _replace_entries(graph.tensors[names[key]], at, value) for key, value in values.items()}
    return {**new, **_build_bias(graph, producer, zeros, at)}


def _average_by_cluster(values: Tensor, member: Tensor, count: int) -> Tensor:
    """Return the mean of the values of each cluster's members."""
    values, member = values[member >= 0], member[member >= 0]
    total = torch.zeros(count, dtype=values.dtype, device=values.device)
    return total.index_add_(0, member, values) / torch.bincount(member, minlength=count)


def _replace_entries(tensor: Tensor, at: Tensor, values: Tensor) -> Tensor:
    new = to_working_precision(tensor.detach()).clone()
    new[at] = values.to(new)
    return new


@merger("linear")
@dataclass(frozen=True)
class Linear:
    """Ridge regression of every removed filter on the kept ones, as if the activation were linear.

    Parameters
    ----------
    ridge
        The ridge penalty, relative to the mean square of the kept filters.

    Raises
    ------
    MergingError
        The ridge is negative, NaN or infinite.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> nm.compress(net, torch.zeros(1, 4), ratio=0.5, merger=Linear(ridge=0.05)).summary.groups[0].descriptions
    ('2: merged 4 of 4',)
    """

    ridge: float = 0.01

    def __post_init__(self) -> None:
        check_ridge(self.ridge, "Linear(ridge=)")

    def merge(self, selection: Selection) -> MergeResult:
        """Replace every removed unit by a combination of all kept ones."""
        return MergeResult(tuple(merge for site in selection.sites() for merge in self._merge_group(site)))

    def _merge_group(self, site: Site) -> list[Merge]:
        reached = trace_channel_paths(site)
        return [self._merge_consumer(site, consumer, reached) for consumer in site.group.consumers]

    def _merge_consumer(self, site: Site, consumer: Consumer, reached: dict[str, ChannelPath]) -> Merge:
        transfer = reached.get(consumer.input, NO_CHAIN)
        why = find_scaling_obstacle(site, consumer) or transfer.broken
        if why:
            return Merge(site.group.name, consumer, MergeKind.PRUNED, why, removed=len(site.removed))
        rows = compute_channel_rows(site, transfer).double()
        scaling = solve_scaling_matrix(rows[site.kept], rows[site.removed], self.ridge, floor=1e-12)
        return apply_scaling_matrix(site, consumer, scaling)
