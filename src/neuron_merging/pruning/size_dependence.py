"""Find what in the model's own code depends on the number of channels. The code runs on a fake module (shapes
without values), once as it is and once with fewer channels. Three things are found. (1) Scalars: an operator
argument that changes was computed from a channel count, as in `x / x.shape[1]`. (2) Size attributes: where the
smaller network fails, as in `x.view(*x.shape[:-1], self.nf)`, integer attributes of the failing module are set
to the new sizes, and those that let the code run further are recorded. (3) Shape mismatches: `x.view(batch, -1,
self.heads, self.width)` also runs with fewer heads but returns a wrong shape; the attributes that correct the
shape are recorded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from neuron_merging.channels.analysis import Analysis, SizeAttribute
from neuron_merging.channels.labels import Units
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.channels.rules.table import OPERATORS, lookup_operator
from neuron_merging.graph.fake_module import FakeModule
from neuron_merging.graph.graph import Node, Shape
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.graph.user_code import find_failing_object, iter_active_modules, list_active_user_lines
from neuron_merging.pruning.plan import Plan, make_plan
from neuron_merging.pruning.surgery import build_fake_module


@dataclass(frozen=True)
class TracedCall:
    """An operator's call: its name, the numbers that it was given, and the lines of the user's code that led to it."""

    op: str
    values: tuple[tuple[str, float], ...]
    places: tuple[str, ...]


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[TracedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = func.overloadpacket.__name__
        given = any(isinstance(value, (int, float)) for value in (*args, *(kwargs or {}).values()))
        values = tuple(_collect_scalars(op, func, args, kwargs or {})) if given else ()
        self.calls.append(TracedCall(op, values, list_active_user_lines() if values else ()))
        return func(*args, **(kwargs or {}))


def _collect_scalars(op: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Fractions anywhere; whole numbers are positions and lengths, unless the operator is arithmetic."""
    row = OPERATORS.get(op.rstrip("_"))
    kinds = (int, float) if row is not None and row.scalar_operands else (float,)
    named = {**{a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    return [(k, float(v)) for k, v in named.items() if isinstance(v, kinds) and not isinstance(v, bool)]


def trace_scalars(network: FakeModule, inputs: tuple[Any, ...]) -> list[TracedCall]:
    """Every call of an operator, in order."""
    tape = _CallRecorder()
    network.run(inputs, tape)
    return tape.calls


def find_changed_scalars(before: list[TracedCall], after: list[TracedCall]) -> list[TracedCall]:
    """The calls that were given other numbers, as long as both go the same way."""
    found = []
    for old, new in zip(before, after, strict=False):
        if old.op != new.op:
            break
        if old.values != new.values:
            found.append(old)
    return found


KeptUnits = Mapping[str, Units]
MAX_CANDIDATES = 12
"""Attributes, or sets of them, that are tried at one place."""


@dataclass(frozen=True)
class ForwardFailure:
    """What the model's code raises in a smaller network, in which module, and how many operators came before."""

    error: Exception
    module: str
    steps: int


RAN_TO_END = math.inf
"""Operators that come before the code stops where it does not."""
DimLocator = tuple[int, int, int]
"""The same code in another module: the number of an operator in it, of the operator's input or none, a dimension."""
OPERATOR_OUTPUT = -1
"""In roles: what the operator computes, in place of an input."""


@dataclass(frozen=True)
class ShrinkingDim:
    """A dimension that shrinks: its role in its module, its size before, the groups whose channels stand along it."""

    locator: DimLocator
    old: int
    groups: frozenset[str]


ShrinkingDims = tuple[ShrinkingDim, ...]


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def make_trial_plan(analysis: Analysis, kept: KeptUnits) -> Plan:
    """How the network that keeps this is made."""
    return make_plan(analysis.model, analysis.graph, analysis.channels, kept, followers=analysis.size_attributes)


def build_trial_network(analysis: Analysis, kept: KeptUnits) -> FakeModule:
    """The network that keeps this, without values."""
    return build_fake_module(analysis.model, make_trial_plan(analysis, kept), analysis.needs_export_flag)


def find_forward_failure(analysis: Analysis, kept: KeptUnits) -> ForwardFailure | None:
    """What stops the network that keeps this, if anything does."""
    steps, network = _OperatorCounter(), None
    try:
        network = build_trial_network(analysis, kept)
        network.run(analysis.inputs, steps)
    except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
        owner = find_failing_object(error)
        paths = [path for path, module in network.model.named_modules() if module is owner] if network else []
        return ForwardFailure(error, paths[0] if paths else "", steps.count)
    return None


def find_size_attributes(analysis: Analysis, kept: KeptUnits, failure: ForwardFailure) -> Analysis | None:
    """The analysis with attributes that get the code further than it came, and nowhere less far; None if none do."""
    around = dict.fromkeys((failure.module, failure.module.rpartition(".")[0]))  # it may be noticed further in
    found = (find_size_attributes_in_module(analysis, kept, failure, path) for path in around)
    return next((further for further in found if further is not None), None)


def find_size_attributes_in_module(
    analysis: Analysis, kept: KeptUnits, failure: ForwardFailure, path: str
) -> Analysis | None:
    """The analysis with such attributes of this module, and of others of its class."""
    places = find_shrinking_dims(analysis, kept, path)
    best: Mapping[str, DimLocator] | None = None
    steps: float = failure.steps
    for names in list_attribute_candidates(analysis, places, path):
        if (
            steps < RAN_TO_END
            and (reached := _count_operators_reached(analysis, kept, places, path, names, steps + 1)) > steps
        ):
            best, steps = names, reached
    if best is None:
        return None
    return add_size_attributes(
        analysis,
        path,
        drop_unneeded_attributes(
            best, lambda fewer: _count_operators_reached(analysis, kept, places, path, fewer, steps) >= steps
        ),
    )


def add_size_attributes(analysis: Analysis, path: str, names: Mapping[str, DimLocator]) -> Analysis:
    """The analysis with these attributes of a module, and of others of its class, as followers."""
    return replace(analysis, size_attributes=(*analysis.size_attributes, *bind_size_attributes(analysis, path, names)))


def drop_unneeded_attributes(
    names: Mapping[str, DimLocator], works: Callable[[Mapping[str, DimLocator]], bool]
) -> Mapping[str, DimLocator]:
    """Those of several attributes without which it does not work: others may be the same number by chance."""
    for name in names:
        fewer = {other: role for other, role in names.items() if other != name}
        names = fewer if fewer and works(fewer) else names
    return names


def _count_operators_reached(
    analysis: Analysis, kept: KeptUnits, places: ShrinkingDims, path: str, names: Mapping[str, DimLocator], least: float
) -> float:
    """How many operators the code gets to with these attributes; none if as many as asked for, with harm elsewhere."""
    trial = add_size_attributes(analysis, path, names)
    stopped = find_forward_failure(trial, kept)
    steps = RAN_TO_END if stopped is None else stopped.steps
    return steps if steps < least or _is_harmless_to_forward(analysis, trial, kept, places, names) else 0


def _is_harmless_to_forward(
    before: Analysis, after: Analysis, kept: KeptUnits, places: ShrinkingDims, names: Mapping[str, DimLocator]
) -> bool:
    """Whether the code comes as far as before with any one of the groups that may be meant; a single one is."""
    meant = find_matching_groups(before, places, names)
    for part in [{name: kept[name]} for name in meant] if len(meant) > 1 else []:
        old, new = find_forward_failure(before, part), find_forward_failure(after, part)
        if new is not None and (old is None or new.steps < old.steps):
            return False
    return True


def find_matching_groups(analysis: Analysis, places: ShrinkingDims, names: Mapping[str, DimLocator]) -> list[str]:
    """The groups along whose channels something has the size that one of these attributes has."""
    values = _collect_attribute_values(analysis, names)
    return sorted({group for place in places if place.old in values for group in place.groups})


def _collect_attribute_values(analysis: Analysis, names: Mapping[str, DimLocator]) -> set[int]:
    return {
        value
        for module in analysis.model.modules()
        for name, value in _list_integer_attributes(module)
        if name in names
    }


def list_attribute_candidates(analysis: Analysis, places: ShrinkingDims, path: str) -> list[dict[str, DimLocator]]:
    """Attributes of a module to set, each with the role of the size to take: alone, all, and in pairs."""
    taken = {follower.attribute for follower in analysis.size_attributes if follower.module == path}
    held = [
        (name, value)
        for name, value in _list_integer_attributes(analysis.model.get_submodule(path))
        if name not in taken
    ]
    fitting = {name: [place for place in places if place.old == value] for name, value in held}
    found = {name: there for name, there in fitting.items() if there}
    single = [{name: place.locator} for name, there in found.items() for place in there]
    groups = sorted({group for there in found.values() for place in there for group in place.groups})
    counts = [count for count in (len(found), 2) if 1 < count <= len(found)]
    sets = [names for count in counts for names in combinations(found, count)]
    several = [{name: _choose_locator(found[name], group) for name in names} for names in sets for group in groups]
    return [*single, *(names for i, names in enumerate(several) if names not in several[:i])][:MAX_CANDIDATES]


def _choose_locator(places: Sequence[ShrinkingDim], group: str) -> DimLocator:
    """Of places of the same size, the first with channels of a group, if there is one."""
    return next((place.locator for place in places if group in place.groups), places[0].locator)


def bind_size_attributes(analysis: Analysis, path: str, names: Mapping[str, DimLocator]) -> Iterator[SizeAttribute]:
    """The same attributes of all modules of a class, bound to what has their size and their role there."""
    kind = type(analysis.model.get_submodule(path))
    for other in [other for other, module in analysis.model.named_modules() if type(module) is kind]:
        values, inside = (
            dict(_list_integer_attributes(analysis.model.get_submodule(other))),
            _list_nodes_in_module(analysis, other),
        )
        for name, role in names.items():
            value = _find_located_value(inside, role)
            if value is not None and analysis.graph.shapes[value][role[-1] :][:1] == (values.get(name),):
                yield SizeAttribute(other, name, value, role[-1])


def _find_located_value(inside: Sequence[Node], role: DimLocator) -> str | None:
    """The value that has a role in a module, if the module is built like the one that the role is from."""
    number, which, _ = role
    if number >= len(inside):
        return None
    names = (
        [inside[number].name]
        if which == OPERATOR_OUTPUT
        else [ref.name for ref in inside[number].refs()][which : which + 1]
    )
    return names[0] if names else None


def _list_integer_attributes(module: nn.Module) -> list[tuple[str, int]]:
    """The whole numbers that a module keeps as attributes of its own, alone or several as one."""
    held = vars(module).items()
    several = [(f"{name}[{place}]", part) for name, value in held for place, part in _list_elements(value)]
    return [(name, value) for name, value in (*held, *several) if type(value) is int and value > 1]


def _list_elements(value: Any) -> Iterable[tuple[object, Any]]:
    """The parts of what holds several values, by place, or by name if all of them are whole numbers."""
    if type(value) in (tuple, list):
        return enumerate(value)
    named = type(value) is dict and all(type(part) is int and str(name).isidentifier() for name, part in value.items())
    return value.items() if named else ()


def find_shrinking_dims(analysis: Analysis, kept: KeptUnits, path: str) -> ShrinkingDims:
    """The sizes that change in what a module computes, and then in what it reads; one of each kind."""
    graph, stays = analysis.graph, build_keep_mask(analysis.channels, kept)
    inside = list(enumerate(_list_nodes_in_module(analysis, path)))
    values = [(node.name, number, OPERATOR_OUTPUT) for number, node in inside]
    values += [(ref.name, number, which) for number, node in inside for which, ref in enumerate(node.refs())]
    found: dict[tuple[object, ...], ShrinkingDim] = {}
    for value, number, which in values:
        old = graph.shapes.get(value, ())
        for dim, (size, left) in enumerate(
            zip(old, analysis.channels.shape_after_pruning(value, old, stays), strict=True)
        ):
            if size != left:
                place = ShrinkingDim((number, which, dim), size, _find_groups_along_dim(analysis, kept, value, dim))
                found.setdefault((size, left, place.groups), place)
    return tuple(found.values())


def _list_nodes_in_module(analysis: Analysis, path: str) -> list[Node]:
    """The operators that a module and those in it call, in order."""
    own = ((node, node.module.split("@")[0]) for node in analysis.graph.nodes)
    return [node for node, module in own if not path or module == path or module.startswith(f"{path}.")]


def _find_groups_along_dim(analysis: Analysis, kept: KeptUnits, value: str, dim: int) -> frozenset[str]:
    """The groups whose channels stand along a dimension."""
    channels, shape = analysis.channels, analysis.graph.shapes[value]
    near = [group.name for group in channels.groups if group.name in kept and channels.carries(value, group)]
    alone = {
        name: channels.shape_after_pruning(value, shape, build_keep_mask(channels, {name: kept[name]})) for name in near
    }
    return frozenset(name for name, new in alone.items() if new[dim] != shape[dim])


class _ShapeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """By module and line of the user's code, the shapes that operators returned there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[tuple[int, str], set[Shape]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        shapes = {tuple(value.shape) for value in flatten_inputs(found) if isinstance(value, Tensor)}
        for place in list_active_user_lines()[:1]:
            for module in iter_active_modules():
                self.seen[id(module), place] |= shapes
        return found


def find_shape_mismatches(analysis: Analysis, kept: KeptUnits, nodes: Sequence[Node]) -> list[str]:
    """Of these operators, those that the code of the network that keeps this reached, and whose shape is another."""
    shapes, modules = _ShapeRecorder(), dict[str, nn.Module]()
    try:
        network = build_trial_network(analysis, kept)
        modules = dict(network.model.named_modules(remove_duplicate=False))
        network.run(analysis.inputs, shapes)
    except Exception:  # noqa: BLE001 (that the code stops is why it is asked)
        pass
    places = {node.name: (id(modules.get(_get_module_path(node))), node.source.split(": ")[0]) for node in nodes}
    seen = {name: shapes.seen.get(place) for name, place in places.items()}
    return [
        node.name for node in nodes if (there := seen[node.name]) and not _predict_shapes(analysis, kept, node) <= there
    ]


def _get_module_path(node: Node) -> str:
    """The module that calls an operator."""
    return node.module.split("@")[0]


def _predict_shapes(analysis: Analysis, kept: KeptUnits, node: Node) -> set[Shape]:
    """The shapes that an operator has to return; those of several results are what they are when taken out."""
    stays = build_keep_mask(analysis.channels, kept)
    parts = (
        [user for user in analysis.graph.users(node.name) if lookup_operator(user).picks]
        if node.has_several_outputs
        else [node]
    )
    return {analysis.channels.shape_after_pruning(part.name, part.shape, stays) for part in parts}


def fix_shape_mismatches(analysis: Analysis, kept: KeptUnits, nodes: Sequence[Node]) -> Analysis | None:
    """The analysis with attributes that give fewer of these operators a wrong shape; None if none do.

    The first that is wrong is where the code goes astray; the others may only pass it on.
    """
    wrong = find_shape_mismatches(analysis, kept, nodes)
    if not wrong:
        return None
    path = _get_module_path(next(node for node in nodes if node.name == wrong[0]))
    places = find_shrinking_dims(analysis, kept, path)

    def left(names: Mapping[str, DimLocator]) -> int:
        """How many are wrong with these attributes; as many as before where they do harm."""
        trial = add_size_attributes(analysis, path, names)
        count = (
            len(find_shape_mismatches(trial, kept, nodes)) if find_forward_failure(trial, kept) is None else len(wrong)
        )
        fine = count < len(wrong) and _is_harmless_to_shapes(
            analysis, trial, kept, nodes, find_matching_groups(analysis, places, names)
        )
        return count if fine else len(wrong)

    counts = [
        (left(names), number, names) for number, names in enumerate(list_attribute_candidates(analysis, places, path))
    ]
    fewest, _, best = min(counts, default=(len(wrong), 0, {}))
    return (
        add_size_attributes(analysis, path, drop_unneeded_attributes(best, lambda fewer: left(fewer) <= fewest))
        if fewest < len(wrong)
        else None
    )


def find_size_attributes_at_mismatch(
    analysis: Analysis, kept: KeptUnits, failure: ForwardFailure, nodes: Sequence[Node]
) -> Analysis | None:
    """The analysis with attributes that get the code further, of the module in which the first of these goes astray."""
    wrong = find_shape_mismatches(analysis, kept, nodes)
    paths = dict.fromkeys(_get_module_path(node) for node in nodes if node.name in wrong[:1])
    return next((find_size_attributes_in_module(analysis, kept, failure, path) for path in paths), None)


def _is_harmless_to_shapes(
    before: Analysis, after: Analysis, kept: KeptUnits, nodes: Sequence[Node], meant: Sequence[str]
) -> bool:
    """Whether no more operators go wrong with any one of the groups that may be meant; a single one is."""
    for part in [{name: kept[name]} for name in meant] if len(meant) > 1 else []:
        if find_forward_failure(after, part) is not None or len(find_shape_mismatches(after, part, nodes)) > len(
            find_shape_mismatches(before, part, nodes)
        ):
            return False
    return True
