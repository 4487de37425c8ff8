"""Does the model's own code cope with fewer channels?

A captured graph shows sizes as numbers; it cannot tell `x.view(b, 4, 16)` from `x.view(b, 4, x.shape[1] // 4)`.
So where a size is in doubt, one channel of every group is removed on trial, from a network without values, whose
code runs in no time. What does not run, takes another shape than predicted, or computes with another number
refuses the channels that reach it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.find import find_channels
from neuron_merging.channels.groups import Channels, Group
from neuron_merging.channels.labels import Units
from neuron_merging.channels.masks import staying
from neuron_merging.channels.operators.elementwise import pointwise
from neuron_merging.channels.operators.table import row_of
from neuron_merging.cutting.plan import Plan, make_plan
from neuron_merging.cutting.surgery import hollow
from neuron_merging.errors import MergingError, told
from neuron_merging.graph.capture import capture
from neuron_merging.graph.trees import as_inputs, copied
from neuron_merging.graph.usercode import place_of
from neuron_merging.graph.values import Graph, Node

CONSTANT = "holds a constant of the model's code that fixes the number of channels"
NUMBER = "computes with the number of channels"
COUNTED = "has channels that the model's code counts on"
EXPORTS = 2
"""Trial cuts that are exported; what is still in doubt then is refused."""


@dataclass(frozen=True)
class Guilt:
    """Nodes, with the reason, that refuse all channels that reach them, and nodes that only keep what they make."""

    refused: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Guilt) -> Guilt:
        return Guilt({**self.refused, **other.refused}, {**self.held, **other.held})

    def __bool__(self) -> bool:
        return bool(self.refused or self.held)

    def beyond(self, analysis: Analysis) -> Guilt:
        """What the analysis does not know yet."""
        refused = {name: why for name, why in self.refused.items() if name not in analysis.refused}
        return Guilt(refused, {name: why for name, why in self.held.items() if name not in analysis.held})


def analyse(model: nn.Module | Analysis, example_inputs: Any = None) -> Analysis:
    """Capture a network and find its channels, once for every later call.

    Parameters
    ----------
    model
        The network, or an analysis, which comes back as it is.
    example_inputs
        A tensor, or a tuple of the network's positional inputs.

    Returns
    -------
    What `compress`, `inspect`, `apply` and the report take in place of a model.

    Raises
    ------
    ModelError
        The model cannot be captured.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> analysis = analyse(net, torch.zeros(1, 4))
    >>> [group.name for group in analysis.channels.groups]
    ['0']
    """
    if isinstance(model, Analysis):
        if example_inputs is not None:
            what = "an analysis has example inputs of its own"
            raise MergingError(what, where="example_inputs", fix="Leave them out, or give the model.")
        return model
    if example_inputs is None:
        what = "a model needs example inputs to be captured with"
        raise MergingError(what, where="example_inputs", fix="Give a tensor or a tuple of tensors.")
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        inputs = as_inputs(copied(example_inputs))  # what was made in inference mode cannot be used outside of it
        graph = capture(model, inputs)
        return _settled(Analysis(model, inputs, graph, find_channels(graph)))


def _settled(analysis: Analysis) -> Analysis:
    """Every doubtful size tried."""
    left = EXPORTS
    while doubts := _doubts(analysis):
        guilt = _breaks(analysis, doubts)
        if not guilt and left:
            left -= 1
            guilt = _strays(analysis, _trial_plan(analysis, analysis.channels.groups), doubts)
            if not guilt:
                return analysis
        fresh = guilt.beyond(analysis) or Guilt(dict.fromkeys(doubts, CONSTANT))
        analysis = _without(analysis, fresh)
    return analysis


def narrowed(analysis: Analysis, plan: Plan) -> Analysis | None:
    """The analysis of a network that a cut has broken, less what broke it; None if nothing can be found."""
    guilt = _alone(analysis, {}, {choice.name for choice in plan.groups})
    guilt = guilt or _strays(analysis, plan, {})
    fresh = guilt.beyond(analysis)
    return _settled(_without(analysis, fresh)) if fresh else None


def _without(analysis: Analysis, guilt: Guilt) -> Analysis:
    known = Guilt(analysis.refused, analysis.held) | guilt
    channels = find_channels(analysis.graph, known.refused, known.held)
    return replace(analysis, channels=channels, refused=known.refused, held=known.held)


def _doubts(analysis: Analysis) -> dict[str, Node]:
    """The doubtful operators that channels which could be removed still reach."""
    channels, groups = analysis.channels, analysis.channels.groups
    nodes = [node for node in channels.doubts if node.name not in analysis.refused]
    return {node.name: node for node in nodes if any(_touches(channels, node, group) for group in groups)}


def _touches(channels: Channels, node: Node, group: Group) -> bool:
    return any(channels.carries(name, group) for name in (node.name, *(ref.name for ref in node.refs())))


def _breaks(analysis: Analysis, doubts: Mapping[str, Node]) -> Guilt:
    """What stops the code from running when one unit of every group is gone."""
    try:
        hollow(analysis.model, _trial_plan(analysis, analysis.channels.groups)).run(analysis.inputs)
    except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
        lines = _at(doubts.values(), place_of(error))
        if lines:
            return Guilt(dict.fromkeys(lines, CONSTANT))
        return _alone(analysis, doubts, {g.name for g in analysis.channels.groups}) or Guilt(
            dict.fromkeys(doubts, CONSTANT)
        )
    return Guilt()


def _alone(analysis: Analysis, doubts: Mapping[str, Node], names: set[str]) -> Guilt:
    """Groups without which the code does not run, tried one at a time: their doubtful lines, else they stay whole."""
    guilt = Guilt()
    for group in analysis.channels.groups:
        if group.name not in names:
            continue
        try:
            hollow(analysis.model, _trial_plan(analysis, [group])).run(analysis.inputs)
        except Exception as error:  # noqa: BLE001 (as above)
            place = place_of(error)
            lines = [name for name in _at(doubts.values(), place) if _touches(analysis.channels, doubts[name], group)]
            why = f"{COUNTED}: {told(error)}" + (f", {place}" if place else "")
            held = {} if lines else {producer.node.name: why for producer in group.producers}
            guilt |= Guilt(dict.fromkeys(lines, CONSTANT), held)
    return guilt


def _strays(analysis: Analysis, plan: Plan, doubts: Mapping[str, Node]) -> Guilt:
    """Operators of the smaller network that have another shape than predicted, or compute with another number."""
    try:
        after = hollow(analysis.model, plan).trace(analysis.inputs)
    except MergingError as error:
        return Guilt(dict.fromkeys(_at(doubts.values(), error.where) or doubts, CONSTANT))
    return _compared(analysis, after, staying(analysis.channels, kept_units(plan, analysis.channels)), doubts)


def _compared(analysis: Analysis, after: Graph, stays: Any, doubts: Mapping[str, Node]) -> Guilt:
    numbers: dict[str, str] = {}
    for node, new in zip(analysis.graph.nodes, after.nodes, strict=False):
        if node.op != new.op:
            return Guilt(dict.fromkeys(doubts, CONSTANT) if not numbers else numbers)
        if not node.several and new.shape != analysis.channels.new_shape(node.name, node.shape, stays):
            return Guilt(dict.fromkeys([node.name, *_at(doubts.values(), node.source)], CONSTANT) | numbers)
        if _numbers(node, every=not doubts) != _numbers(new, every=not doubts):
            numbers[node.name] = NUMBER
    return Guilt(numbers)


def _numbers(node: Node, every: bool) -> dict[str, object]:
    """Numbers that an operator computes with; whole ones may be positions and lengths, unless it is arithmetic."""
    kinds = (int, float) if every or row_of(node).rule is pointwise else (float,)
    return {k: v for k, v in node.args.items() if isinstance(v, kinds) and k not in ("groups", "num_groups")}


def _at(nodes: Iterable[Node], place: str) -> list[str]:
    """A line is guilty wherever it runs: in every block that repeats it."""
    line = place.split(": ")[0]
    return [node.name for node in nodes if line and node.source.split(": ")[0] == line]


def _trial_plan(analysis: Analysis, groups: Iterable[Group]) -> Plan:
    kept = {group.name: _without_one(group) for group in groups}
    return make_plan(analysis.model, analysis.graph, analysis.channels, kept)


def _without_one(group: Group) -> Units:
    """All units but one of each cell."""
    gone = []
    for cell in range(int(group.cells.max()) + 1):
        free = np.flatnonzero((group.cells == cell) & ~group.locked)
        if len(free) == 0 or (group.cells == cell).sum() < 2:
            return np.arange(group.size)
        gone.append(free[-1])
    return np.setdiff1d(np.arange(group.size), gone)


def kept_units(plan: Plan, channels: Channels) -> dict[str, Units]:
    """The plan's choices, if the network has the plan's groups."""
    sizes = {group.name: group.size for group in channels.groups}
    for choice in plan.groups:
        if sizes.get(choice.name) != choice.size:
            found = f"{sizes[choice.name]} channels" if choice.name in sizes else "no such group"
            raise MergingError(
                f"the plan does not fit this network: it has {found}, the plan {choice.size}",
                where=choice.name,
                fix="Give the network that the plan was made for, with the same sizes.",
            )
    return {choice.name: np.array(choice.kept) for choice in plan.groups}
