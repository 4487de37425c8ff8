"""What a network, and a group of its channels, costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from neuron_merging.channels.groups import Channels, Group
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.execution import run
from neuron_merging.graph.quiet import plain_attention, quiet
from neuron_merging.graph.trees import as_inputs, copied, flat
from neuron_merging.graph.values import Graph, Node


def count_parameters(model: nn.Module) -> int:
    """Trainable and frozen parameters, shared ones once.

    Parameters
    ----------
    model
        The network.

    Returns
    -------
    int
        How many numbers its parameters hold.

    Examples
    --------
    >>> count_parameters(nn.Linear(4, 2))
    10
    """
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, example_inputs: Any) -> int:
    """Multiply-accumulates of one forward pass, counted by torch's flop counter (two flops each).

    Parameters
    ----------
    model
        The network; it runs in evaluation mode, on a copy.
    example_inputs
        A tensor, or a tuple of the network's positional inputs.

    Returns
    -------
    int
        For the whole batch.

    Examples
    --------
    >>> count_macs(nn.Linear(4, 2), torch.zeros(1, 4))
    8
    """
    # The counter asks for gradients of parameters that modules hand on, so it gets parameters without any.
    frozen = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    twin = bare_copy(model, frozen).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad(), quiet(), plain_attention():
        twin(*copied(as_inputs(example_inputs)))
    return int(counter.get_total_flops()) // 2


def group_parameters(graph: Graph, group: Group) -> int:
    """Entries of all tensors that go if the whole group goes."""
    total = 0
    for axis, units in group.cuts.items():
        tensor = graph.tensors[axis.tensor]
        total += int((units >= 0).sum()) * tensor.numel() // (tensor.shape[axis.dim] * axis.blocks)
    return total


def group_macs(graph: Graph, channels: Channels, group: Group, spent: Mapping[str, int]) -> int:
    """Multiply-accumulates that go if the whole group goes: in the layers that make it and those that read it."""
    total = 0.0
    for node in graph.nodes:
        if spent.get(node.name):
            read = max((_share(channels, group, ref.name) for ref in node.refs()), default=0.0)
            total += spent[node.name] * (1 - (1 - read) * (1 - _share(channels, group, node.name)))
    return round(total)


def node_macs(graph: Graph, inputs: tuple[Any, ...]) -> dict[str, int]:
    """Multiply-accumulates of every operator, by torch's flop counter (two flops each)."""
    found = {}

    def count(node: Node, args: dict[str, Any]) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = node.compute(args)
        found[node.name] = int(counter.get_total_flops()) // 2
        return value

    with torch.no_grad():
        run(graph, flat(inputs), graph.tensors, count)
    return found


def _share(channels: Channels, group: Group, value: str) -> float:
    """Of a value's entries, how many belong to the group."""
    rest = 1.0
    for units in channels.units.get(value, {}).values():
        rest *= 1 - float(((units >= group.start) & (units < group.start + group.size)).mean())
    return 1 - rest
