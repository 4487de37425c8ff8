"""What layers read, gathered once for every choice of channels: means and covariances, or rows if there are few."""

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
from neuron_merging.statistics.regression import MOST_ROWS, Joint, Sample, with_squares
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


@dataclass(frozen=True)
class Few:
    """Rows themselves of what one block of a layer reads, fewer than there are features."""

    rows: Tensor

    def joint(self, matrix: Tensor, kept: Tensor) -> Sample:
        """What a fit of the columns `kept` of the weight matrix needs."""
        matrix, kept = matrix.to(self.rows), kept.to(self.rows.device)
        features, output = self.rows[:, kept], self.rows @ matrix.T
        return Sample.of(features, output - features @ matrix[:, kept].T, output)


Gathered = Covariance | Few
"""What is known of what one block reads."""


@dataclass
class _Sums:
    """Over rows, around the first batch's mean; until there are as many rows as features, the rows themselves."""

    rows: int = 0
    few: list[Tensor] = field(default_factory=list)
    centre: Tensor | None = None
    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))
    square: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))

    def add(self, rows: Tensor) -> None:
        self.rows += len(rows)
        self.few.append(rows)
        if self.rows > min(rows.shape[1], MOST_ROWS):
            self._sum(torch.cat(self.few))
            self.few.clear()

    def _sum(self, rows: Tensor) -> None:
        if self.centre is None:
            self.centre = rows.mean(0)
        centred = rows - self.centre
        self.total = self.total.to(centred) + centred.sum(0)
        self.square = with_squares(self.square, centred)

    def known(self) -> Gathered:
        if self.centre is None:
            return Few(torch.cat(self.few).float())
        mean = self.total.double() / self.rows
        cov = self.square.double() / self.rows - torch.outer(mean, mean)
        return Covariance(self.centre.double() + mean, cov, self.rows)


def gather(
    selection: Selection, uses: Sequence[Use], batches: Iterable[Sequence[Any]], seed: int = 0
) -> dict[Axis, list[Gathered]]:
    """Run batches through the original network; by the weight that reads, what is known of each of its blocks."""
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
    return {axis: [own.known() for own in parts] for axis, parts in sums.items()}
