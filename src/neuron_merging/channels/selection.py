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

    Attributes
    ----------
    analysis
        The network, captured and understood; `graph`, `channels` and `inputs` are short for its parts.
    kept
        The units that stay, for each group that takes part, by the group's name.
    calibration
        Batches, where `compress(calibration=)` has them.
    new_biases
        Whether layers that have no bias may be given one.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> selection = Selection(nm.analyse(net, torch.zeros(1, 4)), {"0": np.array([0, 1, 2])})
    >>> [(site.group.name, site.removed.tolist()) for site in selection.sites()]
    [('0', [3, 4, 5, 6, 7])]
    """

    analysis: Analysis
    kept: Mapping[str, Units]
    calibration: Iterable[Any] | None = field(default=None, repr=False)
    new_biases: bool = True

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
    """One group, what it keeps, and the network around it.

    Attributes
    ----------
    graph
        The network's operators and tensors.
    channels
        All of its groups.
    group
        This one.
    kept
        The units that stay, counted from the group's first.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> (site,) = Selection(nm.analyse(net, torch.zeros(1, 4)), {"0": np.array([1, 2])}).sites()
    >>> site.rows.shape, site.removed.tolist()
    (torch.Size([8, 5]), [0, 3, 4, 5, 6, 7])
    """

    graph: Graph
    channels: Channels
    group: Group
    kept: Units

    @cached_property
    def removed(self) -> Units:
        """The units that go."""
        return np.setdiff1d(np.arange(self.group.size), self.kept)

    @cached_property
    def rows(self) -> Tensor:
        """The filters of all units, one row each."""
        return filters_of(self.graph, self.group)

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer, detached, in the precision that merging computes in."""
        return working(self.graph.tensors[name].detach())
