"""Means and covariances of all that layers read, gathered once for every choice of channels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from neuron_merging.channels.groups import Axis
from neuron_merging.channels.selection import Selection
from neuron_merging.graph.execution import run
from neuron_merging.graph.precision import working
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Node
from neuron_merging.statistics.regression import Joint
from neuron_merging.statistics.sampled import sampler
from neuron_merging.statistics.uses import Use, read


@dataclass(frozen=True)
class Covariance:
    """Mean and covariance of what one block of a layer reads, and on how many rows they were measured."""

    mean: Tensor
    cov: Tensor
    rows: int

    def joint(self, matrix: Tensor, kept: Tensor) -> Joint:
        """What a fit of the columns `kept` of the weight matrix needs."""
        return replace(Joint.of(self.mean, self.cov, matrix.to(self.mean), kept.to(self.mean.device)), rows=self.rows)


@dataclass
class _Sums:
    """Over rows, around the first batch's mean."""

    rows: int = 0
    centre: Tensor | None = None
    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))
    square: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))

    def add(self, rows: Tensor) -> None:
        if self.centre is None:
            self.centre = rows.mean(0)
        centred = rows - self.centre
        self.rows += len(rows)
        self.total = self.total.to(centred) + centred.sum(0)
        self.square = self.square.to(centred) + centred.T @ centred

    def covariance(self) -> Covariance:
        assert self.centre is not None
        mean = self.total.double() / self.rows
        cov = self.square.double() / self.rows - torch.outer(mean, mean)
        return Covariance(self.centre.double() + mean, cov, self.rows)


def covariances(
    selection: Selection, uses: Sequence[Use], batches: Iterable[Sequence[Any]], seed: int = 0
) -> dict[Axis, list[Covariance]]:
    """Run batches through the original network; by the weight that reads, one covariance for each of its blocks."""
    sums = {use.axis: [_Sums() for _ in range(use.blocks)] for use in uses}
    by_node = {name: use for use in uses for name in use.inputs}
    sample = sampler(seed)

    def call(node: Node, args: dict[str, Any]) -> Any:
        if node.name in by_node:
            use = by_node[node.name]
            value = read(use, node, args)
            places = use.places(node)
            for own, rows in zip(sums[use.axis], places.rows(value, places.pick(value, sample)), strict=True):
                own.add(working(rows))
        return node.compute(args)

    for batch in batches:
        run(selection.analysis.graph_for(batch), flat(batch), selection.graph.tensors, call)
    return {axis: [own.covariance() for own in parts] for axis, parts in sums.items()}
