"""A selection: an analysed network, and the units that each group keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.filters import filters_of
from neuron_merging.channels.groups import Channels, Group
from neuron_merging.channels.labels import Units
from neuron_merging.graph.precision import working
from neuron_merging.graph.values import Graph


@dataclass(frozen=True)
class Selection:
    """What a merger is given: the network, the units that stay, and unlabelled batches if there are any.

    `kept` has an entry for each group that takes part, by the group's name.
    """

    analysis: Analysis
    kept: Mapping[str, Units]
    calibration: Iterable[Any] | None = field(default=None, repr=False)

    @property
    def graph(self) -> Graph:
        return self.analysis.graph

    @property
    def channels(self) -> Channels:
        return self.analysis.channels

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.analysis.inputs

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer, detached, in the precision that merging computes in."""
        return working(self.graph.tensors[name].detach())

    def sites(self) -> list[Site]:
        """One for each group that takes part."""
        chosen = (group for group in self.channels.groups if group.name in self.kept)
        return [Site(self.graph, self.channels, group, self.kept[group.name]) for group in chosen]


@dataclass(frozen=True)
class Site:
    """One group, what it keeps, and the network around it."""

    graph: Graph
    channels: Channels
    group: Group
    kept: Units

    @cached_property
    def removed(self) -> Units:
        return np.setdiff1d(np.arange(self.group.size), self.kept)

    @cached_property
    def rows(self) -> Tensor:
        """The filters of all units, one row each."""
        return filters_of(self.graph, self.group)

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer, detached, in the precision that merging computes in."""
        return working(self.graph.tensors[name].detach())
