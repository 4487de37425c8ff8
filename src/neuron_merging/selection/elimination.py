"""Which channels are kept, by the error that the fit without them is expected to make.

Backward elimination with the algebra of the optimal brain surgeon: with the inverse P of the covariance of a
layer's inputs and its weights M, removing the rows q and refitting the others costs tr(M_qᵀ P_qq⁻¹ M_q). The
cheapest channel is removed, weights and inverse are updated, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.calibration.consumer_weights import ConsumerWeight, find_consumer_weights
from neuron_merging.calibration.regression import FitStatistics, JointMoments
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis, Group
from neuron_merging.channels.labels import Scores, Units, is_position
from neuron_merging.graph.graph import Graph
from neuron_merging.merging.protocol import StatisticsSource

BLOCKWISE_FEATURES, ELIMINATION_BLOCKS = 1024, 32
"""Beyond so many features units go in blocks, a part of those that are left at a time: chosen one by one among twice as
many that are cheap alone, but taken out of the large system together."""
EXPECTED_ERROR = "expected-error"
"""The criterion of this file, by name."""
AUTO_CRITERION = "auto"
"""That criterion where what layers read is known from data or remembered, else norms of filters."""


@dataclass(frozen=True)
class EliminationOrder:
    """Units in the order in which they go, and the error, relative to the readers' outputs, so far."""

    units: Units
    errors: Scores

    @property
    def scores(self) -> Scores:
        ranks = np.empty(len(self.units))
        ranks[self.units] = np.arange(len(self.units))
        return ranks


@dataclass
class _ConsumerSystem:
    """One layer that reads the group: weights (features × outputs), inverse, and features of a unit."""

    weights: Tensor
    inverse: Tensor
    features: Tensor
    scale: float

    def compute_costs(self, units: Tensor) -> Tensor:
        index = self.features[units]
        rows = self.weights[index]
        if index.shape[1] == 1:
            alone: Tensor = rows.square().sum((1, 2)) / self.inverse.diagonal()[index[:, 0]] / self.scale
            return alone
        blocks = self.inverse[index[:, :, None], index[:, None, :]]
        costs: Tensor = (rows * torch.linalg.solve(blocks, rows)).sum((1, 2)) / self.scale
        return costs

    def drop(self, units: Sequence[int]) -> None:
        """Leave these out, and fit the others anew."""
        index = self.features[list(units)].flatten()
        side = self.inverse[:, index]
        step = torch.linalg.solve(side[index], torch.cat([side.T, self.weights[index]], 1))
        self.weights.addmm_(side, step[:, len(side) :], alpha=-1)
        self.inverse.addmm_(side, step[:, : len(side)], alpha=-1)

    def restrict_to(self, units: Tensor) -> _ConsumerSystem:
        """These units alone: what leaving out some of them costs depends on no other."""
        index = self.features[units]
        flat = index.flatten()
        own = torch.arange(len(flat), device=flat.device).view_as(index)
        return _ConsumerSystem(self.weights[flat], self.inverse[flat][:, flat], own, self.scale)


def compute_elimination_order(
    graph: Graph,
    group: Group,
    consumer_weights: Sequence[ConsumerWeight],
    found: Mapping[Axis, Sequence[FitStatistics]],
    ridge: float,
    share: float = 1.0,
) -> EliminationOrder | None:
    """The order in which a group's units go; None where no reader has statistics.

    Beyond the first `share` of them it does not matter, and they follow by what each of them would cost alone.
    """
    readers = [
        r
        for consumer_weight in consumer_weights
        if consumer_weight.axis in found
        for r in _build_consumer_systems(graph, group, consumer_weight, found[consumer_weight.axis], ridge)
    ]
    if not readers:
        return None
    wide = max(len(reader.weights) for reader in readers) > BLOCKWISE_FEATURES
    left = torch.ones(group.size, dtype=torch.bool, device="cpu")
    order: list[int] = []
    errors: list[float] = []
    while bool(left.any()):
        units, total = left.nonzero()[:, 0], errors[-1] if errors else 0.0
        costs = _sum_costs(readers, units)
        ranks = costs.argsort()
        if len(order) >= share * group.size:
            order += units[ranks].tolist()
            errors += (total + costs[ranks].cumsum(0)).tolist()
            break
        count = max(1, len(units) // ELIMINATION_BLOCKS) if wide else 1
        near = units[ranks[: 2 * count]]
        chosen, losses = (
            _take_cheapest([reader.restrict_to(near) for reader in readers], count)
            if count > 1
            else ([0], costs[ranks])
        )
        gone = [int(near[place]) for place in chosen]
        order += gone
        errors += [total + float(losses[: i + 1].sum()) for i in range(len(gone))]
        left[gone] = False
        for reader in readers if bool(left.any()) else ():
            reader.drop(gone)
    return EliminationOrder(np.array(order), np.array(errors))


def _sum_costs(readers: Sequence[_ConsumerSystem], units: Tensor) -> Tensor:
    return torch.stack([reader.compute_costs(units).cpu() for reader in readers]).sum(0)


def _take_cheapest(readers: Sequence[_ConsumerSystem], count: int) -> tuple[list[int], Tensor]:
    """So many units, one after the other, and what each of them costs."""
    left = list(range(len(readers[0].features)))
    chosen: list[int] = []
    losses: list[float] = []
    for _ in range(count):
        costs = _sum_costs(readers, torch.tensor(left, device="cpu"))
        best = int(costs.argmin())
        losses.append(float(costs[best]))
        chosen.append(left.pop(best))
        for reader in readers:
            reader.drop(chosen[-1:])
    return chosen, torch.tensor(losses, dtype=torch.float64, device="cpu")


def _build_consumer_systems(
    graph: Graph, group: Group, consumer_weight: ConsumerWeight, statistics: Sequence[FitStatistics], ridge: float
) -> list[_ConsumerSystem]:
    consumers = [c for name, c in consumer_weight.consumers if name == group.name]
    if consumer_weight.blocks != 1 or not consumers or not is_position(consumers[0].columns).all():
        return []
    (stats,) = statistics
    if not isinstance(stats, JointMoments):  # too wide for an inverse
        return []
    columns = torch.from_numpy(consumers[0].columns)
    features = (columns[:, :, None] * consumer_weight.taps + torch.arange(consumer_weight.taps, device="cpu")).flatten(
        1
    )
    diagonal = stats.xx.diagonal()
    loaded = stats.xx + torch.diag(ridge * diagonal + 1e-8 * diagonal.mean().clamp(min=1e-30))
    inverse = torch.linalg.inv(loaded)
    weights = consumer_weight.to_matrices(graph.tensors[consumer_weight.axis.tensor].detach().double())[0].T.clone()
    scale = float(stats.yy.sum().clamp(min=1e-30))
    usable = bool(inverse.isfinite().all())
    return [_ConsumerSystem(weights, inverse, features.to(inverse.device), scale)] if usable else []


def compute_orders_by_group(
    selection: Selection, groups: Mapping[str, float], source: StatisticsSource, ridge: float = 0.01
) -> dict[str, EliminationOrder]:
    """The order of elimination in each of these groups, as far as the share of it that goes, where the source knows
    what its readers read."""
    chosen = [group for group in selection.channels.groups if group.name in groups]
    whole = replace(selection, kept={group.name: np.arange(group.size) for group in chosen})
    consumer_weights = find_consumer_weights(whole)
    found = source.statistics(whole, consumer_weights)
    reading: dict[str, list[ConsumerWeight]] = {}
    for consumer_weight in consumer_weights:
        for name in dict.fromkeys(name for name, _ in consumer_weight.consumers):
            reading.setdefault(name, []).append(consumer_weight)
    made = {
        group.name: compute_elimination_order(
            selection.graph, group, reading.get(group.name, ()), found, ridge, groups[group.name]
        )
        for group in progress.track_progress(chosen, "choosing channels")
    }
    return {name: order for name, order in made.items() if order is not None}
