"""The paper's method: merge every removed channel into its most similar kept one (Algorithms 1-3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.analysis import Selection, Site
from neuron_merging.channels.groups import Consumer, is_position
from neuron_merging.channels.weight_views import columns_of
from neuron_merging.errors import MergingError
from neuron_merging.merging.channel_path import NO_CHAIN, ChannelPath, has_stored_filters, trace_channel_paths
from neuron_merging.merging.protocol import Merge, MergeKind, MergeResult, Reason, ReasonCode, merger

MAX_SCALE = 1e4
"""Largest scale. A kept channel that needs a larger one is almost dead, and scaling would amplify its rounding."""


@dataclass(frozen=True)
class ScaledTargets:
    """The one entry per column of Z: for each merged unit, its index, the position of its kept unit, and the scale."""

    removed: Tensor
    kept: Tensor
    scale: Tensor


@merger("cosine")
@dataclass(frozen=True)
class Cosine:
    """The paper's method: cosine similarity picks the kept channel, the ratio of norms (S behind a batch norm) its
    scale.

    Parameters
    ----------
    threshold
        The paper's t. A removed channel whose cosine to the chosen one is smaller is pruned without merging.
    balance
        The paper's λ: the weight of the cosine against the bias distance, behind a batch norm.
    bn
        "paper" computes equation 6 as printed; "released" computes what the authors' program does, which produced the
        published tables.

    Raises
    ------
    MergingError
        An option is not a number or outside its range.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> nm.compress(net, torch.zeros(1, 4), ratio=0.5, merger=Cosine(threshold=-1)).summary.groups[0].descriptions
    ('2: merged 4 of 4',)
    """

    threshold: float = 0.1
    balance: float = 0.85
    bn: Literal["paper", "released"] = "paper"

    def __post_init__(self) -> None:
        for name, value in (("threshold", self.threshold), ("balance", self.balance)):
            if not isinstance(value, (int, float)) or math.isnan(value):
                raise MergingError(f"{name} {value!r} is not a number", where=f"Cosine({name}=)", fix="Give a number.")
        if not -1 <= self.threshold <= 1:
            what = f"threshold {self.threshold} is outside [-1, 1], where cosines lie"
            raise MergingError(what, where="Cosine(threshold=)", fix='Try 0.1; merger="none" prunes without merging.')
        if not 0 <= self.balance <= 1:
            raise MergingError(f"balance {self.balance} is outside [0, 1]", where="Cosine(balance=)", fix="Try 0.85.")
        if self.bn not in ("paper", "released"):
            raise MergingError(f"unknown bn {self.bn!r}", where="Cosine(bn=)", fix='Use "paper" or "released".')

    def merge(self, selection: Selection) -> MergeResult:
        """Merge every removed unit into one kept unit, for each group and consumer layer."""
        return MergeResult(tuple(merge for site in selection.sites() for merge in self._merge_group(site)))

    def _merge_group(self, site: Site) -> list[Merge]:
        paths_by_value = trace_channel_paths(site)
        # A stored weight is merged once, for all layers that read it; a computed one has no axis and stands alone.
        by_axis: dict[object, list[Consumer]] = {}
        for consumer in site.group.consumers:
            by_axis.setdefault(consumer.axis or consumer.node.name, []).append(consumer)
        return [merge for consumers in by_axis.values() for merge in self._merge_axis(site, consumers, paths_by_value)]

    def _merge_axis(self, site: Site, consumers: list[Consumer], paths_by_value: dict[str, ChannelPath]) -> list[Merge]:
        """Merge one weight. Layers that share it share its merge, if their paths agree."""
        first = consumers[0]
        why = _find_obstacle(site, consumers, paths_by_value)
        if why:
            gone = len(site.removed)
            return [Merge(site.group.name, consumer, MergeKind.PRUNED, why, removed=gone) for consumer in consumers]
        targets = self._find_targets(site, paths_by_value[first.input], _assign_blocks(first, site.group.size))
        merge = add_scaled_columns(site, first, targets)
        return [merge, *(replace(merge, consumer=other, columns=None, scaling=None) for other in consumers[1:])]

    def _find_targets(self, site: Site, transfer: ChannelPath, block: np.ndarray) -> ScaledTargets:
        rows, device = site.rows, site.rows.device
        removed = torch.from_numpy(site.removed).to(device)
        kept = torch.from_numpy(site.kept).to(device)
        norms = rows.norm(dim=1)
        blocks = torch.from_numpy(block).to(device)
        # The cosine matrix is computed in strips of at most 2²² entries, to bound its memory.
        right, step = rows[kept], max(1, 2**22 // max(len(kept), 1))
        found = []
        for part in torch.split(removed, step):
            cosine = _compute_cosine(rows[part], right, norms[part], norms[kept])
            scale = norms[part, None] / norms[kept].clamp(min=_get_tiny(norms))
            # A filter of zeros has no direction to compare with and no norm to scale from.
            allowed = (blocks[part, None] == blocks[kept]) & (norms[kept] > 0)
            found.append(self._choose_targets(cosine, scale, allowed, transfer, part, kept))
        if not found:
            return ScaledTargets(removed, removed, norms[removed])
        best, factor, similar = (torch.cat(column) for column in zip(*found, strict=True))
        take = similar >= self.threshold  # below t, the column of Z stays zero: plain pruning of this channel
        return ScaledTargets(removed[take], best[take], factor[take])

    def _choose_targets(
        self, cosine: Tensor, scale: Tensor, allowed: Tensor, transfer: ChannelPath, n: Tensor, m: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each removed channel, the position of the chosen kept one, the scale and their cosine.

        Without a batch norm the largest cosine wins; with one, the smallest λ(1 − cos) + (1 − λ) minmax(|B|/S).
        """
        norms = [stage for stage in transfer.stages if stage.norm is not None]
        if not transfer.stages:
            distance = 1 - cosine
        elif self.bn == "released" and norms and norms[0].norm is not None:
            scale, bias = _compute_released_scale(scale, norms[0].norm, n, m)
            distance = self.balance * (1 - cosine) + (1 - self.balance) * _normalize_minmax(bias, allowed)
        else:
            scale, bias, same_sign = _compute_equation6(scale, transfer, n, m)
            allowed = allowed & same_sign
            distance = self.balance * (1 - cosine) + (1 - self.balance) * _normalize_minmax(bias, allowed)
        # Candidates that Theorem 1 forbids, or that need an extreme scale, lose against every other.
        distance = torch.where(allowed & (scale.abs() <= MAX_SCALE), distance, torch.inf)
        best = distance.argmin(1, keepdim=True)
        usable = torch.isfinite(distance.gather(1, best))[:, 0]
        similar = torch.where(usable, cosine.gather(1, best)[:, 0], -torch.inf)
        return best[:, 0], scale.gather(1, best)[:, 0], similar


def add_scaled_columns(site: Site, consumer: Consumer, targets: ScaledTargets) -> Merge:
    """Add the scaled columns of each removed channel to those of its kept one: V' = V ×₂ Z."""
    assert consumer.axis is not None
    positions = columns_of(consumer, site.kept)
    weight = consumer.axis.join_blocks(site.tensor(consumer.axis.tensor))
    width = consumer.columns.shape[1]
    columns = weight.index_select(consumer.axis.dim, positions.to(weight.device))
    shape = [1] * weight.ndim
    shape[consumer.axis.dim] = -1
    # In chunks, because every removed channel takes a copy of its columns.
    for removed, kept, scale in zip(*(torch.split(t, 1024) for t in vars(targets).values()), strict=True):
        taken = columns_of(consumer, removed.cpu().numpy()).to(weight.device)
        # A unit may have several columns (a flattened map): each is added to the same one of the kept unit.
        into = (kept[:, None] * width + torch.arange(width, device=kept.device)).flatten()
        factor = scale.repeat_interleave(width).to(weight.dtype).view(shape)
        columns.index_add_(consumer.axis.dim, into, weight.index_select(consumer.axis.dim, taken) * factor)
    return Merge(
        site.group.name,
        consumer,
        MergeKind.MERGED,
        columns=columns,
        positions=positions,
        folded=len(targets.removed),
        removed=len(site.removed),
        scaling=_build_scaling_matrix(site, targets),
    )


def _build_scaling_matrix(site: Site, targets: ScaledTargets) -> Tensor:
    """Build the columns of Z that belong to removed units, as a sparse matrix with at most one entry in each."""
    place = torch.searchsorted(torch.from_numpy(site.removed), targets.removed.cpu())
    at, size = torch.stack([targets.kept.cpu(), place]), (len(site.kept), len(site.removed))
    return torch.sparse_coo_tensor(at, targets.scale.cpu(), size, check_invariants=False)


def _find_obstacle(site: Site, consumers: list[Consumer], paths_by_value: dict[str, ChannelPath]) -> Reason | None:
    """Return why a weight cannot be merged; None if it can."""
    first = consumers[0]
    if first.axis is None:
        return Reason(ReasonCode.NOT_STORED)
    if not is_position(first.columns).all():
        return Reason(ReasonCode.UNEQUAL)
    if not has_stored_filters(site):
        return Reason(ReasonCode.COMPUTED)
    paths = [paths_by_value.get(consumer.input, NO_CHAIN) for consumer in consumers]
    broken = next((path.broken for path in paths if path.broken), None)
    if not broken and any(not _is_same_path(paths[0], other) for other in paths[1:]):
        return Reason(ReasonCode.SHARED_NORMS)
    return broken


def _is_same_path(a: ChannelPath, b: ChannelPath) -> bool:
    if len(a.stages) != len(b.stages):
        return False
    pairs = zip(a.stages, b.stages, strict=True)
    return all(torch.equal(x.scale, y.scale) and torch.equal(x.shift, y.shift) for x, y in pairs)


def _assign_blocks(consumer: Consumer, size: int) -> np.ndarray:
    """Return the block of each unit: a grouped consumer can merge a channel only into one of the same block."""
    if consumer.blocks == 1:
        return np.zeros(size, int)
    # Columns are numbered through all blocks; this many belong to each.
    share = -(-(int(consumer.columns.max()) + 1) // consumer.blocks)
    blocks: np.ndarray = consumer.columns[:, 0] // share
    return blocks


def _compute_cosine(left: Tensor, right: Tensor, left_norm: Tensor, right_norm: Tensor) -> Tensor:
    tiny = _get_tiny(left_norm)
    return (left @ right.T) / left_norm.clamp(min=tiny)[:, None] / right_norm.clamp(min=tiny)


def _get_tiny(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).tiny)


def _compute_equation6(scale: Tensor, transfer: ChannelPath, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute S and |B|/S of equation 6 for all pairs, and where S > 0 holds at every stage, as Theorem 1 demands.

    A batch norm is the affine stage x → (γ/σ)x + (β − γμ/σ), so a chain of stages generalises the equation.
    """
    total = scale
    same_sign = torch.ones_like(scale, dtype=torch.bool)
    shift = torch.zeros_like(scale)
    for stage in transfer.stages:
        own, offset = stage.scale.to(scale), stage.shift.to(scale)
        # A kept channel that the stage sets to zero gets the ratio 0, so it is no candidate.
        ratio = own[n, None] / torch.where(own[m] == 0, torch.inf, own[m])
        same_sign &= ratio > 0
        total = total * ratio
        # x_n = S·x_m + B before the stage becomes S'·x_m + B' behind it.
        shift = own[n, None] * shift + offset[n, None] - total * offset[m]
    return total, shift.abs() / total.clamp(min=_get_tiny(scale)), same_sign


def _compute_released_scale(
    s: Tensor, norm: tuple[Tensor, Tensor, Tensor, Tensor], n: Tensor, m: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute S and |B|/S as the published program does.

    It differs from equation 6: the running variance stands for the deviation, without ε; the roles of the two filters
    are swapped; |B| is divided by the signed S, so that a negative scale can win.
    """
    g1, b1, mu1, v1 = (t[n, None] for t in norm)
    g2, b2, mu2, v2 = (t[m] for t in norm)
    scale = s * (g2 / g1) * (v1 / v2)
    bias = (g2 / v2 * (s * (mu1 - v1 * b1 / g1) - mu2) + b2).abs() / scale
    return scale, torch.nan_to_num(bias, nan=torch.inf)


def _normalize_minmax(values: Tensor, allowed: Tensor) -> Tensor:
    """Scale each row to [0, 1] over its allowed entries; a row of ties becomes zeros instead of 0/0 = NaN."""
    finite = allowed & torch.isfinite(values)
    low = torch.where(finite, values, torch.inf).amin(1, keepdim=True)
    high = torch.where(finite, values, -torch.inf).amax(1, keepdim=True)
    span = high - low
    scaled = (values - low) / torch.where(span > 0, span, 1)
    # Forbidden entries get the worst value instead of NaN, which would win or lose at random.
    return torch.where(finite, torch.where(span > 0, scaled, 0.0), 1.0)
