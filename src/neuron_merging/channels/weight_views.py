"""Channels in stored weights: the filters that produce a group's channels, the columns that read them, and whether a
layer reads a stored tensor directly, through views, or computes its weight from it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.groups import Axis, Consumer, Group, Positions, Producer, Units, is_position
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.copying import to_working_precision
from neuron_merging.graph.graph import Graph, Node


def filters_of(graph: Graph, group: Group) -> Tensor:
    """Return the filters that produce a group's channels, in the form that criteria take.

    Parameters
    ----------
    graph
        The network.
    group
        One of its groups.

    Returns
    -------
    Tensor
        One row per unit: its filters in every producer, with the bias unless a norm follows.

    Examples
    --------
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> filters_of(analysis.graph, analysis.channels.groups[0]).shape
    torch.Size([8, 5])
    """
    parts = []
    for producer in group.producers:
        rows = _get_producer_filters(graph, producer)
        parts.append(_gather_unit_rows(rows, producer.rows))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _get_producer_filters(graph: Graph, producer: Producer) -> Tensor:
    weight = flatten_channels_first(to_working_precision(graph.tensors[producer.axis.tensor].detach()), producer.axis)
    # A norm subtracts the mean, and the bias with it: then it says nothing about the channel.
    if producer.bias is None or is_followed_by_norm(graph, producer):
        return weight
    return torch.cat([weight, to_working_precision(graph.tensors[producer.bias].detach())[:, None].to(weight.dtype)], 1)


def is_followed_by_norm(graph: Graph, producer: Producer) -> bool:
    """Return whether only norms read a producer's output."""
    users = graph.users(producer.node.name)
    return bool(users) and all(lookup_operator(user).norm for user in users)


def flatten_channels_first(weight: Tensor, axis: Axis) -> Tensor:
    """Return the weight as a matrix with one row per channel of the axis."""
    return axis.join_blocks(weight).movedim(axis.dim, 0).flatten(1)


def _gather_unit_rows(rows: Tensor, positions: Positions) -> Tensor:
    """Return the rows in the order of units. Several rows of a unit are put side by side."""
    if positions.shape[1] == 1 and np.array_equal(positions[:, 0], np.arange(len(rows))):
        return rows
    valid = torch.from_numpy(is_position(positions)).to(rows.device)
    index = torch.from_numpy(positions).to(rows.device)
    # Padding reads row 0 and is then set to zero, so that all units have rows of equal length.
    return (rows[index * valid] * valid[..., None]).flatten(1)


def columns_of(consumer: Consumer, units: Units) -> Tensor:
    """Return the indices of units on a consumer layer's channel axis.

    Parameters
    ----------
    consumer
        The consumer layer.
    units
        Numbers of units, counted from the group's first.

    Returns
    -------
    Tensor
        Indices, unit after unit. After a flatten one unit has several.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> group = nm.analyse(net, torch.zeros(1, 1, 2, 2)).channels.groups[0]
    >>> columns_of(group.consumers[0], np.array([0, 2]))
    tensor([ 0,  1,  2,  3,  8,  9, 10, 11])
    """
    columns = consumer.columns[units].ravel()
    return torch.from_numpy(columns[is_position(columns)])


MAX_NUMBERED_ENTRIES = 2**26
"""Largest weight, in entries, whose layout is traced entry by entry (512 MB of int64). Of larger ones only a
transposition is recognised."""


def is_stored_weight(graph: Graph, node: Node, weight: str, axis: Axis) -> bool:
    """Return whether a node's `weight` holds all entries of the axis's tensor in the order that merging assumes.

    A convolution must read the tensor in its stored layout. A matrix product must read the matrix of the axis against
    all other dimensions in their order.
    """
    chain = _find_view_chain(graph, weight, axis.tensor)
    if chain is None:
        return False
    reordering = [step for step in chain if lookup_operator(step).layout != "same"]
    shape = graph.tensors[axis.tensor].shape
    if not reordering:
        return lookup_operator(node).convolves or (bool(lookup_operator(node).layer) and len(shape) == 2)
    if axis.blocks > 1 or lookup_operator(node).layer not in ("linear", "product"):
        return False
    if shape.numel() > MAX_NUMBERED_ENTRIES:
        return len(shape) == 2 and all(lookup_operator(step).layout == "permuted" for step in reordering)
    # Number all entries, send the numbers through the views, and compare with the expected layout.
    numbers = torch.arange(shape.numel(), device="cpu").view(shape)
    wanted, layout = numbers.movedim(axis.dim, -1).flatten(0, -2), _execute_moves(reordering, numbers)
    return layout.ndim == 2 and (torch.equal(layout, wanted) or torch.equal(layout.T, wanted))


def _execute_moves(steps: list[Node], numbers: Tensor) -> Tensor:
    for step in steps:
        (name,) = (key for key, value in step.args.items() if value in list(step.refs()))
        numbers = step.compute({**step.args, name: numbers})
    return numbers


def _find_view_chain(graph: Graph, value: str, tensor: str) -> list[Node] | None:
    """Return the operators from a stored tensor to a value if each only moves entries of one operand; else None."""
    steps: list[Node] = []
    while value not in graph.parameters:
        node = graph.node(value)
        refs = list(node.refs()) if node else []
        if node is None or len(refs) != 1 or len(node.shapes) != 1 or not _only_moves_entries(node):
            return None
        steps.append(node)
        value = refs[0].name
    return steps[::-1] if graph.parameters[value] == tensor else None


def _only_moves_entries(node: Node) -> bool:
    return lookup_operator(node).moves and not node.inplace and not node.args.get("train")


def find_nodes_using_weight(graph: Graph, tensor: str) -> set[str]:
    """Return the nodes that compute with a stored tensor, directly or after operators that only move its entries."""
    users: set[str] = set()
    ahead = [name for name, stored in graph.parameters.items() if stored == tensor]
    while ahead:
        for node in graph.users(ahead.pop()):
            if _only_moves_entries(node) and len(node.shapes) == 1 and len(list(node.refs())) == 1:
                ahead.append(node.name)
            else:
                users.add(node.name)
    return users
