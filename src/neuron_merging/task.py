"""task: what a merger is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from neuron_merging.capture import Graph, Node, flat
from neuron_merging.channels import Axis, Channels, Consumer, Group, Producer
from neuron_merging.operators import Vector

NORMS = ("batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm")


@dataclass(frozen=True)
class Merge:
    """What happens to one consumer of one group.

    `columns` are the new values of the consumer's weight at `positions` of its channel axis, which
    are those of the kept units; None leaves them as they are (plain pruning). `tensors` are new
    values of other tensors, at their original size, and `bias` is one to be made. `error` is the share
    of the consumer's output variance that the method expects to lose. `scaling` is the
    part of Z for removed units, a row per kept and a column per removed one, where the method has such a
    matrix; it may be sparse. `how` is for people.
    """

    group: str
    consumer: Consumer
    how: str
    columns: Tensor | None = None
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    bias: Tensor | None = None
    folded: int = 0
    error: float | None = None
    scaling: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Task:
    """The whole job: a network, and the units that each participating group keeps."""

    graph: Graph
    channels: Channels
    kept: Mapping[str, Vector]
    inputs: tuple[Any, ...] = ()
    recapture: Callable[[tuple[Any, ...]], Graph] | None = None
    recaptured: dict[str, Graph] = field(default_factory=dict, repr=False)
    """Graphs for other batches, by the shapes of those."""

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer, detached, in the precision that merging computes in."""
        return working(self.graph.tensors[name].detach())

    def graph_for(self, batch: Sequence[Any]) -> Graph:
        """The graph, captured anew where the batch size is written into it."""
        sizes = {v.shape[0] for v in flat(self.inputs) if isinstance(v, Tensor) and v.ndim}
        pairs = zip(flat(self.inputs), flat(batch), strict=True)
        same = all(a.shape == b.shape for a, b in pairs if isinstance(a, Tensor))
        if same or self.recapture is None or not any(_holds(node, sizes) for node in self.graph.nodes):
            return self.graph
        shapes = str([getattr(value, "shape", value) for value in flat(batch)])
        if shapes not in self.recaptured:
            self.recaptured[shapes] = self.recapture(tuple(batch))
        return self.recaptured[shapes]

    def sites(self) -> list[Site]:
        chosen = (group for group in self.channels.groups if group.name in self.kept)
        return [Site(self.graph, self.channels, group, self.kept[group.name]) for group in chosen]


@dataclass(frozen=True)
class Site:
    """One group, what it keeps, and the network around it."""

    graph: Graph
    channels: Channels
    group: Group
    kept: Vector

    @cached_property
    def removed(self) -> Vector:
        return np.setdiff1d(np.arange(self.group.size), self.kept)

    @cached_property
    def rows(self) -> Tensor:
        return unit_rows(self.graph, self.group)

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer, detached, in the precision that merging computes in."""
        return working(self.graph.tensors[name].detach())


class Merger(Protocol):
    """Folds the removed units of every group into the weights of its consumers."""

    def merge(self, task: Task) -> list[Merge]: ...


def _holds(node: Node, sizes: set[int]) -> bool:
    """Whether one of these sizes is written into an operator's shape argument, or may be the end of a range."""
    if node.op == "arange":
        end = node.args.get("end")
        return isinstance(end, int) and any(end % size == 0 for size in sizes)
    shapes = (node.args.get(name) for name in ("size", "shape", "sizes", "repeats"))
    return any(isinstance(shape, list) and sizes & set(shape) for shape in shapes)


def working(tensor: Tensor) -> Tensor:
    """float64 stays, half precision is computed in float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def unit_rows(graph: Graph, group: Group) -> Tensor:
    """One row per unit: its filters in every producer, and biases where no norm follows."""
    parts = []
    for producer in group.producers:
        rows = _producer_rows(graph, producer)
        parts.append(_gather(rows, producer.rows))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _producer_rows(graph: Graph, producer: Producer) -> Tensor:
    weight = channels_first(working(graph.tensors[producer.axis.tensor].detach()), producer.axis)
    if producer.bias is None or norm_follows(graph, producer):
        return weight
    return torch.cat([weight, working(graph.tensors[producer.bias].detach())[:, None].to(weight.dtype)], 1)


def norm_follows(graph: Graph, producer: Producer) -> bool:
    users = graph.users(producer.node.name)
    return bool(users) and all(user.op in NORMS for user in users)


def channels_first(weight: Tensor, axis: Axis) -> Tensor:
    return axis.expose(weight).movedim(axis.dim, 0).flatten(1)


def _gather(rows: Tensor, positions: Vector) -> Tensor:
    """Rows in the order of units; a unit with several rows has them side by side."""
    if positions.shape[1] == 1 and np.array_equal(positions[:, 0], np.arange(len(rows))):
        return rows
    index = torch.from_numpy(positions).to(rows.device)
    gathered = rows[index.clamp(min=0)] * (index >= 0)[..., None]
    return gathered.flatten(1)


def columns_of(consumer: Consumer, units: Vector) -> Tensor:
    """Positions on the consumer's channel axis, unit after unit."""
    columns = consumer.columns[units].ravel()
    return torch.from_numpy(columns[columns >= 0])
