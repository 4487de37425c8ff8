"""Does the model's own code cope with fewer channels?

A captured graph shows sizes as numbers; it cannot tell `x.view(b, 4, 16)` from `x.view(b, 4, x.shape[1] // 4)`.
So where a size is in doubt, one channel of every group is removed on trial, from a network without values, whose
code runs in no time. What does not run, takes another shape than predicted, or computes with another number
refuses the channels that reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.find import find_channels, find_heads
from neuron_merging.channels.groups import Channels, Group
from neuron_merging.channels.labels import Mask, Units
from neuron_merging.channels.masks import staying
from neuron_merging.channels.operators.elementwise import pointwise
from neuron_merging.channels.operators.table import row_of
from neuron_merging.cutting.astray import astray, followed_from, straightened
from neuron_merging.cutting.following import Failure, failure_of, followed, network_of, plan_of
from neuron_merging.cutting.numbers import Number, changed, numbers_in
from neuron_merging.cutting.plan import Plan
from neuron_merging.cutting.surgery import hollow
from neuron_merging.cutting.vetting import check_indices
from neuron_merging.errors import MergingError, VerificationError, told
from neuron_merging.files.opening import is_file, open_file
from neuron_merging.graph.baking import baked, computed
from neuron_merging.graph.capture import capture, check_model
from neuron_merging.graph.quiet import alone
from neuron_merging.graph.trees import as_inputs, copied
from neuron_merging.graph.usercode import place_of
from neuron_merging.graph.values import Graph, Node, Shape

CONSTANT = (
    "takes a size from a constant of the model's code, or from a tensor that does not shrink along "
    '(the graph can be cut there: output="graph", --output graph)'
)
NUMBER = "computes with the number of channels"
COUNTED = "has channels that the model's code counts on"
Choice = Mapping[str, Units]
"""By name, the units that groups keep."""
EXPORTS = 2
"""Trial cuts that are exported; what is still in doubt then is refused."""
EXPORTS_OF_HEADS = 1
"""The same for whole heads."""


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


def analyse(model: nn.Module | Analysis | str | Path, example_inputs: Any = None) -> Analysis:
    """Capture a network and find its channels, once for every later call.

    Parameters
    ----------
    model
        The network; the path of an ONNX file; or an analysis, which comes back as it is.
    example_inputs
        A tensor, a tuple of the network's positional inputs, or a dict of its inputs by name, as a tokenizer gives it;
        left out for a file.

    Returns
    -------
    Analysis
        What `compress`, `inspect`, `apply` and the report take in place of a model.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        A model comes without example inputs, or an analysis with them.

    Examples
    --------
    >>> import torch
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
    if is_file(model):
        return analyse(*open_file(model, None if example_inputs is None else as_inputs(example_inputs)))
    if example_inputs is None:
        what = "a model needs example inputs to be captured with"
        raise MergingError(what, where="example_inputs", fix="Give a tensor or a tuple of tensors.")
    with alone():
        inputs = copied(as_inputs(example_inputs, model))  # what inference mode made cannot be used outside of it
        check_model(model)
        assert isinstance(model, nn.Module)
        plain = baked(model)
        graph = capture(plain, inputs)
        found = Analysis(plain, inputs, graph, find_channels(graph), baked=computed(model))
        return with_heads(uncounted(_settled(_runnable(found))))


def _runnable(analysis: Analysis) -> Analysis:
    """The analysis with the way that its code has to go to run without values, if it runs only as in an export."""
    exported = replace(analysis, exported=True)
    stops = failure_of(analysis, {}) is not None
    return exported if stops and failure_of(exported, {}) is None else analysis


def with_heads(analysis: Analysis) -> Analysis:
    """The analysis with its groups of whole heads, tried on their own: what fixes their width may let them go."""
    heads = replace(analysis, channels=find_heads(analysis.graph), refused={}, held={}, search=find_heads)
    if heads.channels.groups:
        heads = uncounted(_settled(heads, EXPORTS_OF_HEADS))
    return analysis.beside(heads)


def _settled(analysis: Analysis, left: int = EXPORTS) -> Analysis:
    """Every size that the code may count on tried, with at most so many exports."""
    while analysis.channels.groups:
        doubts, kept = _doubts(analysis), _without_one_each(analysis)
        failure = _telling_failure(analysis, kept)
        if failure is not None:
            further = followed(analysis, kept, failure)
            further = further or followed_from(analysis, kept, failure, list(doubts.values()))
            if further is not None:
                analysis = further
                continue
            guilt = _guilty(analysis, failure, doubts, kept)
        elif not doubts:
            return analysis
        elif (further := straightened(analysis, kept, list(doubts.values()))) is not None:
            analysis = further
            continue
        elif left:
            left -= 1
            guilt = _strays(analysis, plan_of(analysis, kept), doubts)
        else:
            guilt = Guilt(dict.fromkeys(doubts, CONSTANT))
        fresh = guilt.beyond(analysis)
        if not fresh:
            return analysis
        analysis = _without(analysis, fresh)
    return analysis


def _telling_failure(analysis: Analysis, kept: Choice) -> Failure | None:
    """What stops the network that keeps this, unless the whole one does not run without values either."""
    failure = failure_of(analysis, kept)
    return None if failure is None or failure_of(analysis, {}) is not None else failure


def uncounted(analysis: Analysis) -> Analysis:
    """The analysis less the channels whose number the code computes with."""
    cut = _numbers_with(analysis, _without_one_each(analysis))
    whole = _numbers_with(analysis, {}) if any(number.values for number in cut) else []
    while changed(whole, cut) and analysis.channels.groups:
        fewer = _less(analysis, _counting(analysis, whole, _without_one_each(analysis)))
        if fewer is None:
            break
        analysis, cut = fewer, _numbers_with(fewer, _without_one_each(fewer))
    return analysis


def _counting(analysis: Analysis, whole: list[Number], kept: Choice) -> Guilt:
    """Operators that are given another number where channels are missing, or groups whose number it is."""
    guilt = Guilt()
    for group in analysis.channels.groups:
        used = _used(analysis, whole, {group.name: kept[group.name]})
        nodes = [node for number in used for node in _calls(analysis, number)]
        near = {node.name: NUMBER for node in nodes if _touches(analysis.channels, node, group)}
        far = f"{NUMBER}: {used[0].op}, {', '.join(used[0].places[:1])}" if used and not near else ""
        guilt |= Guilt(near, {producer.node.name: far for producer in group.producers if far})
    return guilt


def _used(analysis: Analysis, whole: list[Number], kept: Choice) -> list[Number]:
    """The numbers that are others in the network that keeps this; none if it does not run, which is another matter."""
    return changed(whole, _numbers_with(analysis, kept))


def _numbers_with(analysis: Analysis, kept: Choice) -> list[Number]:
    """The numbers in the network that keeps this, as far as its code runs on shapes alone."""
    try:
        return numbers_in(network_of(analysis, kept), analysis.inputs)
    except Exception:  # noqa: BLE001 (code that looks at values, or that a trial cut breaks: both show elsewhere)
        return []


def _calls(analysis: Analysis, number: Number) -> list[Node]:
    """The operators of the graph that a call may be."""
    lines = {node.name for place in number.places for node in _nodes_at(analysis.graph.nodes, place)}
    there = [node for node in analysis.graph.nodes if node.name in lines]
    return [node for node in there if node.op == number.op.rstrip("_")] or there


def narrowed(analysis: Analysis, plan: Plan, wrong: Callable[[Choice], Exception | None]) -> Analysis | None:
    """The analysis of a network that a cut has broken, less what broke it; None if nothing can be found.

    `wrong` carries out a part of the cut and says what is wrong with it. It is asked where the code of the smaller
    network runs and does nothing that would tell: a group may break what lies far behind it.
    """
    kept = kept_units(plan, analysis.channels)
    if fewer := _less(analysis, _alone(analysis, {}, kept)):
        return fewer
    strays = _strays(analysis, plan, {})
    if CONSTANT in strays.refused.values() and (fewer := _less(analysis, strays)):
        return fewer
    numbers = [node for node in analysis.graph.nodes if node.name in strays.refused]
    return _less(analysis, _blamed(analysis, _culprits(kept, wrong), numbers))


def _less(analysis: Analysis, guilt: Guilt) -> Analysis | None:
    """The analysis without what is guilty, if that leaves less to remove."""
    fresh = guilt.beyond(analysis)
    fewer = _without(analysis, fresh) if fresh else analysis
    return _settled(fewer) if _removable(fewer.channels) < _removable(analysis.channels) else None


def _removable(channels: Channels) -> int:
    return sum(group.size - int(group.locked.sum()) for group in channels.groups)


def training_breaks(analysis: Analysis, plan: Plan) -> str:
    """What stops the smaller network in training mode, where it has parameters that evaluation does not use."""
    if all(analysis.graph.readers(name) for name, _ in analysis.model.named_parameters()):
        return ""
    whole = msgspec.structs.replace(plan, cuts=(), modules={}, sizes={})
    return "" if _in_training(analysis, whole) else _in_training(analysis, plan)


def _in_training(analysis: Analysis, plan: Plan) -> str:
    network = hollow(analysis.model, plan)
    network.model.train()
    try:
        network.run(analysis.inputs)
    except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
        return told(error) + (f", {place}" if (place := place_of(error)) else "")
    return ""


def _without(analysis: Analysis, guilt: Guilt) -> Analysis:
    return analysis.without(guilt.refused, guilt.held)


def _doubts(analysis: Analysis) -> dict[str, Node]:
    """The doubtful operators that channels which could be removed still reach."""
    nodes = [node for node in analysis.channels.doubts if node.name not in analysis.refused]
    return {node.name: node for node in nodes if analysis.channels.touched(node)}


def _touches(channels: Channels, node: Node, group: Group) -> bool:
    return any(channels.carries(name, group) for name in (node.name, *(ref.name for ref in node.refs())))


def _guilty(analysis: Analysis, failure: Failure, doubts: Mapping[str, Node], kept: Choice) -> Guilt:
    """What stops the code from running when one unit of every group is gone."""
    if lines := _at(doubts.values(), place_of(failure.error)):
        return Guilt(dict.fromkeys(lines, CONSTANT))
    if _failure(analysis, {}) is not None:
        return Guilt(dict.fromkeys(doubts, CONSTANT))  # the code looks at values: nothing can be tried
    return _alone(analysis, doubts, kept) or _held(analysis, _together(analysis, kept))


def _failure(analysis: Analysis, kept: Choice) -> Exception | None:
    """What the model's code raises in the network that keeps this."""
    found = failure_of(analysis, kept)
    return None if found is None else found.error


def _together(analysis: Analysis, kept: Choice) -> dict[str, Exception]:
    """The groups that do not go with those before them, where each could go alone."""
    chosen: dict[str, Units] = {}
    culprits = {}
    for name, units in kept.items():
        error = _failure(analysis, {**chosen, name: units})
        if error is None:
            chosen[name] = units
        else:
            culprits[name] = error
    return culprits


def _culprits(kept: Choice, wrong: Callable[[Choice], Exception | None]) -> dict[str, Exception]:
    """The groups that alone make a network wrong, by halving."""
    error = wrong(kept)
    if error is None:
        return {}
    if len(kept) == 1:
        return dict.fromkeys(kept, error)
    names = list(kept)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    first, second = (_culprits({name: kept[name] for name in half}, wrong) for half in halves)
    return {**first, **second}


def _alone(analysis: Analysis, doubts: Mapping[str, Node], kept: Choice) -> Guilt:
    """Groups without which the code does not run: the doubtful line at which it stops, else they stay whole."""
    channels, guilt = analysis.channels, Guilt()
    groups = {group.name: group for group in channels.groups}
    for name, error in _culprits(kept, lambda part: _failure(analysis, part)).items():
        near = [node for node in doubts.values() if _touches(channels, node, groups[name])]
        lines = _at(near, place_of(error)) or astray(analysis, {name: kept[name]}, near)
        guilt |= Guilt(dict.fromkeys(lines, CONSTANT)) if lines else _held(analysis, {name: error})
    return guilt


def _blamed(analysis: Analysis, culprits: Mapping[str, Exception], numbers: Sequence[Node]) -> Guilt:
    """The operators that compute with a culprit's number of channels; where it does not reach one, it stays whole."""
    guilt = Guilt()
    for group in analysis.channels.groups:
        if group.name in culprits:
            reached = [node.name for node in numbers if _touches(analysis.channels, node, group)]
            far = f"{NUMBER}: {numbers[0].op}, {numbers[0].place}" if numbers else ""
            alone = {group.name: culprits[group.name]}
            guilt |= Guilt(dict.fromkeys(reached, NUMBER)) if reached else _held(analysis, alone, far)
    return guilt


def _held(analysis: Analysis, culprits: Mapping[str, Exception], why: str = "") -> Guilt:
    """Groups that stay whole."""
    groups = [group for group in analysis.channels.groups if group.name in culprits]
    return Guilt(held={p.node.name: why or _counted(culprits[group.name]) for group in groups for p in group.producers})


def _counted(error: Exception) -> str:
    if isinstance(error, VerificationError):
        return f"{COUNTED}: {error.what}"
    place = place_of(error)
    return f"{COUNTED}: {told(error)}" + (f", {place}" if place else "")


def _strays(analysis: Analysis, plan: Plan, doubts: Mapping[str, Node]) -> Guilt:
    """Operators of the smaller network that have another shape than predicted, or compute with another number."""
    try:
        after = hollow(analysis.model, plan).trace(analysis.inputs)
    except MergingError as error:
        return Guilt(dict.fromkeys(_at(doubts.values(), error.where) or doubts, CONSTANT))
    return _compared(analysis, after, staying(analysis.channels, kept_units(plan, analysis.channels)), doubts)


def _compared(analysis: Analysis, after: Graph, stays: Mask, doubts: Mapping[str, Node]) -> Guilt:
    numbers: dict[str, str] = {}
    for node, new in zip(analysis.graph.nodes, after.nodes, strict=False):
        if node.op != new.op:
            return Guilt(dict.fromkeys(doubts, CONSTANT) if not numbers else numbers)
        shape = analysis.channels.new_shape(node.name, node.shape, stays)
        if (not node.several and new.shape != shape) or not _scales(node, new, shape):
            return Guilt(dict.fromkeys([node.name, *_at(doubts.values(), node.source)], CONSTANT) | numbers)
        if _numbers(node, every=not doubts) != _numbers(new, every=not doubts):
            numbers[node.name] = NUMBER
    return Guilt(numbers)


def _scales(node: Node, new: Node, shape: Shape) -> bool:
    """Whether a group norm has as many groups as its channels call for: whole groups were removed, unless it is one."""
    if row_of(node).norm != "group" or int(new.args["num_groups"]) == int(node.args["num_groups"]) == 1:
        return True
    return int(new.args["num_groups"]) * node.shape[1] == int(node.args["num_groups"]) * shape[1]


def _numbers(node: Node, every: bool) -> dict[str, object]:
    """Numbers that an operator computes with; whole ones may be positions and lengths, unless it is arithmetic."""
    kinds = (int, float) if every or row_of(node).rule is pointwise else (float,)
    return {k: v for k, v in node.args.items() if isinstance(v, kinds) and k not in ("groups", "num_groups")}


def _at(nodes: Iterable[Node], place: str) -> list[str]:
    """A line is guilty wherever it runs: in every block that repeats it."""
    return [node.name for node in _nodes_at(nodes, place)]


def _nodes_at(nodes: Iterable[Node], place: str) -> list[Node]:
    line = place.split(": ")[0]
    return [node for node in nodes if line and node.source.split(": ")[0] == line]


def _without_one_each(analysis: Analysis) -> dict[str, Units]:
    return {group.name: _without_one(group) for group in analysis.channels.groups}


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
        check_indices(choice.kept, choice.size, choice.name)
    return {choice.name: np.array(choice.kept) for choice in plan.groups}
