"""The filters that make a group's channels, and the columns that read them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.groups import Axis, Consumer, Group, Producer
from neuron_merging.channels.labels import Positions, Units, is_place
from neuron_merging.channels.operators.table import row_of
from neuron_merging.graph.precision import working
from neuron_merging.graph.values import Graph


def filters_of(graph: Graph, group: Group) -> Tensor:
    """The filters that make a group's channels, as a criterion sees them.

    Parameters
    ----------
    graph
        The network.
    group
        One of its groups.

    Returns
    -------
    Tensor
        One row per unit: its filters in every producer, and biases where no norm follows.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> filters_of(analysis.graph, analysis.channels.groups[0]).shape
    torch.Size([8, 5])
    """
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
    return bool(users) and all(row_of(user).norm for user in users)


def channels_first(weight: Tensor, axis: Axis) -> Tensor:
    return axis.expose(weight).movedim(axis.dim, 0).flatten(1)


def _gather(rows: Tensor, positions: Positions) -> Tensor:
    """Rows in the order of units; a unit with several rows has them side by side."""
    if positions.shape[1] == 1 and np.array_equal(positions[:, 0], np.arange(len(rows))):
        return rows
    there = torch.from_numpy(is_place(positions)).to(rows.device)
    index = torch.from_numpy(positions).to(rows.device)
    return (rows[index * there] * there[..., None]).flatten(1)


def columns_of(consumer: Consumer, units: Units) -> Tensor:
    """Where units stand on a reader's channel axis.

    Parameters
    ----------
    consumer
        The layer that reads them.
    units
        Numbers of units, counted from the group's first.

    Returns
    -------
    Tensor
        Positions, unit after unit; behind a flatten one unit has several.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> group = nm.analyse(net, torch.zeros(1, 1, 2, 2)).channels.groups[0]
    >>> columns_of(group.consumers[0], np.array([0, 2]))
    tensor([ 0,  1,  2,  3,  8,  9, 10, 11])
    """
    columns = consumer.columns[units].ravel()
    return torch.from_numpy(columns[is_place(columns)])
