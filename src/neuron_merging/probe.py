"""probe: does the model's own code cope with fewer channels?

A captured graph shows sizes as numbers; it cannot tell `x.view(b, 4, 16)` from
`x.view(b, 4, x.shape[1] // 4)`. So where a size is in doubt, one channel is removed on trial, the
smaller network is captured again, and every value's shape is compared with the prediction. A line
that does not follow refuses the channels that reach it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn

from neuron_merging.capture import Graph, Node, as_inputs, capture
from neuron_merging.channels import Channels, Group, find_channels
from neuron_merging.errors import MergingError
from neuron_merging.operators import Vector
from neuron_merging.plan import make_plan, unit_mask
from neuron_merging.surgery import apply_plan
from neuron_merging.verify import VerificationError, run_small

CONSTANT = "holds a constant of the model's code that fixes the number of channels"


def analyse(
    model: nn.Module,
    graph: Graph,
    example_inputs: Any,
    known: Mapping[str, str] | None = None,
    held: Mapping[str, str] | None = None,
) -> Channels:
    """The channels of a graph, with every doubtful size settled by trial.

    `known` names nodes, with the reason, whose channels are refused from the start; `held` those that only make them.
    """
    refused = dict(known or {})
    while True:
        channels = find_channels(graph, refused, held)
        doubtful = _doubtful(channels, refused)
        groups = [g for g in channels.groups if any(_touches(channels, graph, node, g) for node in doubtful)]
        if not groups:
            return channels
        guilty = _trial(model, graph, channels, groups, doubtful, example_inputs)
        if not guilty:
            return channels
        fresh = [name for name in guilty if name not in refused] or [node.name for node in doubtful]
        refused |= dict.fromkeys(fresh, CONSTANT)


def sizes_used_as_numbers(graph: Graph, small: nn.Module, example_inputs: Any) -> dict[str, str]:
    """Nodes that compute with another number in the smaller network: `x / x.shape[1]` and its like."""
    try:
        after = capture(small, example_inputs)
    except MergingError:  # it does not run at all, which is another matter
        return {}
    found = {}
    for node, new in zip(graph.nodes, after.nodes, strict=False):
        if node.op != new.op:
            break
        if _numbers(node) != _numbers(new):
            found[node.name] = "computes with the number of channels"
    return found


def layers_it_breaks_without(
    model: nn.Module, graph: Graph, channels: Channels, names: Iterable[str], example_inputs: Any
) -> dict[str, str]:
    """Layers that must stay whole, with the reason, since the network does not run without one of their channels."""
    found: dict[str, str] = {}
    for group in (group for group in channels.groups if group.name in names):
        kept = {group.name: _without_one(group)}
        try:
            run_small(apply_plan(model, make_plan(model, graph, channels, kept)), as_inputs(example_inputs))
        except VerificationError as error:
            why = f"has channels that the model's code counts on: {error.what}" + f", {error.where}" * bool(error.where)
            found |= {producer.node.name: why for producer in group.producers}
    return found


def _numbers(node: Node) -> dict[str, object]:
    return {k: v for k, v in node.args.items() if isinstance(v, (int, float)) and k not in ("groups", "num_groups")}


def _doubtful(channels: Channels, refused: dict[str, str]) -> list[Node]:
    return [node for node in channels.doubts if node.name not in refused]


def _touches(channels: Channels, graph: Graph, node: Node, group: Group) -> bool:
    return any(channels.carries(name, group) for name in (node.name, *(ref.name for ref in node.refs())))


def _trial(
    model: nn.Module, graph: Graph, channels: Channels, groups: list[Group], doubtful: list[Node], inputs: Any
) -> list[str]:
    """The nodes that do not follow when one unit of every cell goes."""
    kept = {group.name: _without_one(group) for group in groups}
    stays = unit_mask(channels, kept)
    try:
        after = capture(apply_plan(model, make_plan(model, graph, channels, kept)), inputs)
    except MergingError as error:
        return _at(doubtful, error.where) or [node.name for node in doubtful]
    for node, new in zip(graph.nodes, after.nodes, strict=False):
        if node.op != new.op:
            return [node.name for node in doubtful]
        if len(node.shapes) == 1 and new.shape != channels.new_shape(node.name, node.shape, stays):
            return [node.name, *_at(doubtful, node.source)]
    return []


def _at(nodes: list[Node], place: str) -> list[str]:
    """A line is guilty wherever it runs: in every block that repeats it."""
    line = place.split(": ")[0]
    return [node.name for node in nodes if line and node.source.split(": ")[0] == line]


def _without_one(group: Group) -> Vector:
    gone = []
    for cell in range(int(group.cells.max()) + 1):
        free = np.flatnonzero((group.cells == cell) & ~group.locked)
        if len(free) == 0 or (group.cells == cell).sum() < 2:
            return np.arange(group.size)
        gone.append(free[-1])
    return np.setdiff1d(np.arange(group.size), gone)
