"""selection: which channels stay, by the error that the fit without them is expected to make.

Backward elimination with the algebra of the optimal brain surgeon: with the inverse P of what a layer's
inputs have as covariance and its weights M, leaving out the rows q and fitting the others anew costs
tr(M_qᵀ P_qq⁻¹ M_q). The cheapest channel goes, weights and inverse are updated, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.channels.groups import Axis, Group
from neuron_merging.channels.labels import Scores, Units, is_place
from neuron_merging.channels.selection import Selection
from neuron_merging.graph.values import Graph
from neuron_merging.statistics.regression import Joint, Known
from neuron_merging.statistics.uses import Use, find_uses

WIDE, BLOCKS = 1024, 32
"""Beyond so many features units go in blocks, a part of those that are left at a time: chosen one by one among twice as
many that are cheap alone, but taken out of the large system together."""
EXPECTED_ERROR = "expected-error"
"""The criterion of this file, by name."""
AUTO = "auto"
"""That criterion where what layers read is known from data or remembered, else norms of filters."""


@dataclass(frozen=True)
class Order:
    """Units in the order in which they go, and the error, relative to the readers' outputs, so far."""

    units: Units
    errors: Scores

    @property
    def scores(self) -> Scores:
        ranks = np.empty(len(self.units))
        ranks[self.units] = np.arange(len(self.units))
        return ranks


@dataclass
class _Reader:
    """One layer that reads the group: weights (features × outputs), inverse, and features of a unit."""

    weights: Tensor
    inverse: Tensor
    features: Tensor
    scale: float

    def costs(self, units: Tensor) -> Tensor:
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

    def among(self, units: Tensor) -> _Reader:
        """These units alone: what leaving out some of them costs depends on no other."""
        index = self.features[units]
        flat = index.flatten()
        own = torch.arange(len(flat), device=flat.device).view_as(index)
        return _Reader(self.weights[flat], self.inverse[flat][:, flat], own, self.scale)


def elimination(
    graph: Graph,
    group: Group,
    uses: Sequence[Use],
    found: Mapping[Axis, Sequence[Known]],
    ridge: float,
    share: float = 1.0,
) -> Order | None:
    """The order in which a group's units go; None where no reader has statistics.

    Beyond the first `share` of them it does not matter, and they follow by what each of them would cost alone.
    """
    readers = [r for use in uses if use.axis in found for r in _readers(graph, group, use, found[use.axis], ridge)]
    if not readers:
        return None
    wide = max(len(reader.weights) for reader in readers) > WIDE
    left = torch.ones(group.size, dtype=torch.bool, device="cpu")
    order: list[int] = []
    errors: list[float] = []
    while bool(left.any()):
        units, total = left.nonzero()[:, 0], errors[-1] if errors else 0.0
        costs = _costs(readers, units)
        ranks = costs.argsort()
        if len(order) >= share * group.size:
            order += units[ranks].tolist()
            errors += (total + costs[ranks].cumsum(0)).tolist()
            break
        count = max(1, len(units) // BLOCKS) if wide else 1
        near = units[ranks[: 2 * count]]
        chosen, losses = (
            _cheapest([reader.among(near) for reader in readers], count) if count > 1 else ([0], costs[ranks])
        )
        gone = [int(near[place]) for place in chosen]
        order += gone
        errors += [total + float(losses[: i + 1].sum()) for i in range(len(gone))]
        left[gone] = False
        for reader in readers if bool(left.any()) else ():
            reader.drop(gone)
    return Order(np.array(order), np.array(errors))


def _costs(readers: Sequence[_Reader], units: Tensor) -> Tensor:
    return torch.stack([reader.costs(units).cpu() for reader in readers]).sum(0)


def _cheapest(readers: Sequence[_Reader], count: int) -> tuple[list[int], Tensor]:
    """So many units, one after the other, and what each of them costs."""
    left = list(range(len(readers[0].features)))
    chosen: list[int] = []
    losses: list[float] = []
    for _ in range(count):
        costs = _costs(readers, torch.tensor(left, device="cpu"))
        best = int(costs.argmin())
        losses.append(float(costs[best]))
        chosen.append(left.pop(best))
        for reader in readers:
            reader.drop(chosen[-1:])
    return chosen, torch.tensor(losses, dtype=torch.float64, device="cpu")


def _readers(graph: Graph, group: Group, use: Use, joints: Sequence[Known], ridge: float) -> list[_Reader]:
    consumers = [c for name, c in use.consumers if name == group.name]
    if use.blocks != 1 or not consumers or not is_place(consumers[0].columns).all():
        return []
    (joint,) = joints
    if not isinstance(joint, Joint):  # too wide for an inverse
        return []
    columns = torch.from_numpy(consumers[0].columns)
    features = (columns[:, :, None] * use.taps + torch.arange(use.taps, device="cpu")).flatten(1)
    diagonal = joint.xx.diagonal()
    loaded = joint.xx + torch.diag(ridge * diagonal + 1e-8 * diagonal.mean().clamp(min=1e-30))
    inverse = torch.linalg.inv(loaded)
    weights = use.matrices(graph.tensors[use.axis.tensor].detach().double())[0].T.clone()
    scale = float(joint.yy.sum().clamp(min=1e-30))
    usable = bool(inverse.isfinite().all())
    return [_Reader(weights, inverse, features.to(inverse.device), scale)] if usable else []


def orders(selection: Selection, groups: Mapping[str, float], source: Source, ridge: float = 0.01) -> dict[str, Order]:
    """The order of elimination in each of these groups, as far as the share of it that goes, where the source knows
    what its readers read."""
    chosen = [group for group in selection.channels.groups if group.name in groups]
    whole = replace(selection, kept={group.name: np.arange(group.size) for group in chosen})
    uses = find_uses(whole)
    found = source.statistics(whole, uses)
    reading: dict[str, list[Use]] = {}
    for use in uses:
        for name in dict.fromkeys(name for name, _ in use.consumers):
            reading.setdefault(name, []).append(use)
    made = {
        group.name: elimination(selection.graph, group, reading.get(group.name, ()), found, ridge, groups[group.name])
        for group in progress.each(chosen, "choosing channels")
    }
    return {name: order for name, order in made.items() if order is not None}


@runtime_checkable
class Source(Protocol):
    """A merger that knows what layers read: see `Moments` and `Calibrated`."""

    def is_sure(self, selection: Selection) -> bool:
        """Whether it knows that from inputs like those that the network is for."""
        ...

    def statistics(self, selection: Selection, uses: Sequence[Use]) -> dict[Axis, list[Known]]: ...
