"""Find what in the model's own code depends on the number of channels. The code runs on a fake module (shapes
without values), once with all channels and once with fewer. Three things are found. (1) Scalars: an operator
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
from neuron_merging.channels.groups import Units
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.channels.rules.table import OPERATORS, lookup_operator
from neuron_merging.graph.example_inputs import flatten_inputs
from neuron_merging.graph.fake_module import FakeModule
from neuron_merging.graph.graph import Node, Shape
from neuron_merging.graph.user_code import find_failing_object, iter_active_modules, list_active_user_lines
from neuron_merging.pruning.plan import Plan, make_plan
from neuron_merging.pruning.surgery import build_fake_module


@dataclass(frozen=True)
class TracedCall:
    """One call of an operator: its name, its scalar arguments, and the lines of the user's code that led to it."""

    op: str
    values: tuple[tuple[str, float], ...]
    places: tuple[str, ...]


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator call as a `TracedCall`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[TracedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = func.overloadpacket.__name__
        # Reading the schema and the stack is slow, so calls without scalars skip both.
        has_scalars = any(isinstance(value, (int, float)) for value in (*args, *(kwargs or {}).values()))
        values = tuple(_collect_scalars(op, func, args, kwargs or {})) if has_scalars else ()
        self.calls.append(TracedCall(op, values, list_active_user_lines() if values else ()))
        return func(*args, **(kwargs or {}))


def _collect_scalars(op: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the scalar arguments to compare: all floats, and integers of arithmetic operators.

    Integers of other operators are positions and lengths, which may change with the channels.
    """
    row = OPERATORS.get(op.rstrip("_"))
    kinds = (int, float) if row is not None and row.scalar_operands else (float,)
    named = {**{a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    return [(k, float(v)) for k, v in named.items() if isinstance(v, kinds) and not isinstance(v, bool)]


def trace_scalars(network: FakeModule, inputs: tuple[Any, ...]) -> list[TracedCall]:
    """Run a fake network and return its operator calls, in order."""
    recorder = _CallRecorder()
    network.run(inputs, recorder)
    return recorder.calls


def find_changed_scalars(before: list[TracedCall], after: list[TracedCall]) -> list[TracedCall]:
    """Return the calls whose scalars differ, up to the first call at which the two runs diverge."""
    changed = []
    for old, new in zip(before, after, strict=False):
        if old.op != new.op:
            break
        if old.values != new.values:
            changed.append(old)
    return changed


KeptUnits = Mapping[str, Units]
MAX_CANDIDATES = 12
"""Attributes, or sets of them, that are tried in one module: each try runs the network on shapes."""


@dataclass(frozen=True)
class ForwardFailure:
    """An exception of the model's code in a smaller network: the module that raised it, and the operators before it."""

    error: Exception
    module: str
    steps: int


RAN_TO_END = math.inf
"""Number of operators reached by a forward pass that does not fail: more than any number at which one can fail."""
DimLocator = tuple[int, int, int]
"""A dimension inside a module, valid for every module of the same class: the operator's number in the module, the
number of its input (or `OPERATOR_OUTPUT`), and the dimension.
"""
OPERATOR_OUTPUT = -1
"""In a `DimLocator`: the operator's output instead of an input."""


@dataclass(frozen=True)
class ShrinkingDim:
    """A dimension that shrinks: its locator, its size before, and the groups whose channels lie along it."""

    locator: DimLocator
    old: int
    groups: frozenset[str]


ShrinkingDims = tuple[ShrinkingDim, ...]


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operator calls: how far a forward pass gets before it fails."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def make_trial_plan(analysis: Analysis, kept: KeptUnits) -> Plan:
    """Make the plan of the network in which groups keep the units `kept`."""
    return make_plan(analysis.model, analysis.graph, analysis.channels, kept, size_attributes=analysis.size_attributes)


def build_trial_network(analysis: Analysis, kept: KeptUnits) -> FakeModule:
    """Build the network in which groups keep the units `kept`, as a fake module."""
    return build_fake_module(analysis.model, make_trial_plan(analysis, kept), analysis.needs_export_flag)


def find_forward_failure(analysis: Analysis, kept: KeptUnits) -> ForwardFailure | None:
    """Run the network in which groups keep the units `kept`, and return its failure; None if it runs."""
    steps, network = _OperatorCounter(), None
    try:
        network = build_trial_network(analysis, kept)
        network.run(analysis.inputs, steps)
    except Exception as error:  # noqa: BLE001 (any exception of the user's code is the result)
        owner = find_failing_object(error)
        paths = [path for path, module in network.model.named_modules() if module is owner] if network else []
        return ForwardFailure(error, paths[0] if paths else "", steps.count)
    return None


def find_size_attributes(analysis: Analysis, kept: KeptUnits, failure: ForwardFailure) -> Analysis | None:
    """Return the analysis with size attributes that let the code run further than before; None if there are none.

    Attributes that make the code fail earlier for another group are not accepted.
    """
    # The attribute may belong to the parent: a wrong size often fails only inside a child module.
    paths = dict.fromkeys((failure.module, failure.module.rpartition(".")[0]))
    extended = (find_size_attributes_in_module(analysis, kept, failure, path) for path in paths)
    return next((better for better in extended if better is not None), None)


def find_size_attributes_in_module(
    analysis: Analysis, kept: KeptUnits, failure: ForwardFailure, path: str
) -> Analysis | None:
    """Look for size attributes in one module, and add them for all modules of its class; None if there are none."""
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
    """Return the analysis with these size attributes of a module, and of all other modules of its class."""
    return replace(analysis, size_attributes=(*analysis.size_attributes, *bind_size_attributes(analysis, path, names)))


def drop_unneeded_attributes(
    names: Mapping[str, DimLocator], works: Callable[[Mapping[str, DimLocator]], bool]
) -> Mapping[str, DimLocator]:
    """Drop attributes without which the code `works` as well: they may have the same value by chance."""
    for name in names:
        fewer = {other: locator for other, locator in names.items() if other != name}
        names = fewer if fewer and works(fewer) else names
    return names


def _count_operators_reached(
    analysis: Analysis, kept: KeptUnits, places: ShrinkingDims, path: str, names: Mapping[str, DimLocator], least: float
) -> float:
    """Count the operators that run with these attributes; 0 if at least `least` run but another group is harmed."""
    trial = add_size_attributes(analysis, path, names)
    failure = find_forward_failure(trial, kept)
    steps = RAN_TO_END if failure is None else failure.steps
    # The check for harm runs several networks, so it is made only for candidates that would be accepted.
    return steps if steps < least or _is_harmless_to_forward(analysis, trial, kept, places, names) else 0


def _is_harmless_to_forward(
    before: Analysis, after: Analysis, kept: KeptUnits, places: ShrinkingDims, names: Mapping[str, DimLocator]
) -> bool:
    """Whether the code runs as far as before when each group that the attributes may describe is cut alone.

    With a single such group there is no ambiguity, and nothing to check.
    """
    groups = find_matching_groups(before, places, names)
    for part in [{name: kept[name]} for name in groups] if len(groups) > 1 else []:
        old, new = find_forward_failure(before, part), find_forward_failure(after, part)
        if new is not None and (old is None or new.steps < old.steps):
            return False
    return True


def find_matching_groups(analysis: Analysis, places: ShrinkingDims, names: Mapping[str, DimLocator]) -> list[str]:
    """Return the groups whose shrinking dimensions have the value of one of these attributes."""
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
    """List sets of attributes of a module to try, each attribute with the dimension that gives its new size.

    Single attributes come first, then all together, then pairs.
    """
    taken = {known.attribute for known in analysis.size_attributes if known.module == path}
    attributes = [
        (name, value)
        for name, value in _list_integer_attributes(analysis.model.get_submodule(path))
        if name not in taken
    ]
    # An attribute can only be the size of a dimension that has the attribute's value.
    matches = {name: [place for place in places if place.old == value] for name, value in attributes}
    matches = {name: dims for name, dims in matches.items() if dims}
    single = [{name: place.locator} for name, dims in matches.items() for place in dims]
    groups = sorted({group for dims in matches.values() for place in dims for group in place.groups})
    counts = [count for count in (len(matches), 2) if 1 < count <= len(matches)]
    sets = [names for count in counts for names in combinations(matches, count)]
    # Attributes that are set together take their sizes from the same group wherever possible.
    several = [{name: _choose_locator(matches[name], group) for name in names} for names in sets for group in groups]
    return [*single, *(names for i, names in enumerate(several) if names not in several[:i])][:MAX_CANDIDATES]


def _choose_locator(places: Sequence[ShrinkingDim], group: str) -> DimLocator:
    """Return the first of these dimensions with channels of the group, or else the first of all."""
    return next((place.locator for place in places if group in place.groups), places[0].locator)


def bind_size_attributes(analysis: Analysis, path: str, names: Mapping[str, DimLocator]) -> Iterator[SizeAttribute]:
    """Bind attributes in every module of the same class to the value at the same locator, if its size agrees."""
    kind = type(analysis.model.get_submodule(path))
    for other in [other for other, module in analysis.model.named_modules() if type(module) is kind]:
        attributes = dict(_list_integer_attributes(analysis.model.get_submodule(other)))
        nodes = _list_nodes_in_module(analysis, other)
        for name, locator in names.items():
            value, dim = _find_located_value(nodes, locator), locator[-1]
            if value is not None and analysis.graph.shapes[value][dim:][:1] == (attributes.get(name),):
                yield SizeAttribute(other, name, value, dim)


def _find_located_value(nodes: Sequence[Node], locator: DimLocator) -> str | None:
    """Return the value at a locator in a module; None if the module has no such operator or input."""
    number, which, _ = locator
    if number >= len(nodes):
        return None
    names = (
        [nodes[number].name]
        if which == OPERATOR_OUTPUT
        else [ref.name for ref in nodes[number].refs()][which : which + 1]
    )
    return names[0] if names else None


def _list_integer_attributes(module: nn.Module) -> list[tuple[str, int]]:
    """List the integer attributes of a module, and the integers in its tuples, lists and dicts as `name[index]`.

    Ones are left out: every tensor has dimensions of size 1.
    """
    # By exact type below, because True is an integer, too.
    attributes = vars(module).items()
    elements = [(f"{name}[{index}]", part) for name, value in attributes for index, part in _list_elements(value)]
    return [(name, value) for name, value in (*attributes, *elements) if type(value) is int and value > 1]


def _list_elements(value: Any) -> Iterable[tuple[object, Any]]:
    """List the elements of a tuple or list by index, and of a dict by key if all its values are integers."""
    if type(value) in (tuple, list):
        return enumerate(value)
    named = type(value) is dict and all(type(part) is int and str(name).isidentifier() for name, part in value.items())
    return value.items() if named else ()


def find_shrinking_dims(analysis: Analysis, kept: KeptUnits, path: str) -> ShrinkingDims:
    """Return the dimensions that shrink in a module: of operators' outputs first, then of their inputs.

    Of dimensions with the same sizes and the same groups only the first is returned.
    """
    graph, stays = analysis.graph, build_keep_mask(analysis.channels, kept)
    nodes = list(enumerate(_list_nodes_in_module(analysis, path)))
    values = [(node.name, number, OPERATOR_OUTPUT) for number, node in nodes]
    values += [(ref.name, number, which) for number, node in nodes for which, ref in enumerate(node.refs())]
    found: dict[tuple[object, ...], ShrinkingDim] = {}
    for value, number, which in values:
        old = graph.shapes.get(value, ())
        for dim, (size, new_size) in enumerate(
            zip(old, analysis.channels.shape_after_pruning(value, old, stays), strict=True)
        ):
            if size != new_size:
                place = ShrinkingDim((number, which, dim), size, _find_groups_along_dim(analysis, kept, value, dim))
                found.setdefault((size, new_size, place.groups), place)
    return tuple(found.values())


def _list_nodes_in_module(analysis: Analysis, path: str) -> list[Node]:
    """List the operators that a module and its children call, in order."""
    callers = ((node, _get_module_path(node)) for node in analysis.graph.nodes)
    return [node for node, module in callers if not path or module == path or module.startswith(f"{path}.")]


def _find_groups_along_dim(analysis: Analysis, kept: KeptUnits, value: str, dim: int) -> frozenset[str]:
    """Return the groups that shrink a dimension when each is cut alone."""
    channels, shape = analysis.channels, analysis.graph.shapes[value]
    near = [group.name for group in channels.groups if group.name in kept and channels.carries(value, group)]
    alone = {
        name: channels.shape_after_pruning(value, shape, build_keep_mask(channels, {name: kept[name]})) for name in near
    }
    return frozenset(name for name, new in alone.items() if new[dim] != shape[dim])


class _ShapeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the shapes that operators return, by module and line of the user's code."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[tuple[int, str], set[Shape]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        shapes = {tuple(value.shape) for value in flatten_inputs(outputs) if isinstance(value, Tensor)}
        for place in list_active_user_lines()[:1]:
            for module in iter_active_modules():
                self.seen[id(module), place] |= shapes
        return outputs


def find_shape_mismatches(analysis: Analysis, kept: KeptUnits, nodes: Sequence[Node]) -> list[str]:
    """Return the operators, out of `nodes`, that run in the pruned network with another shape than predicted."""
    shapes, modules = _ShapeRecorder(), dict[str, nn.Module]()
    try:
        network = build_trial_network(analysis, kept)
        modules = dict(network.model.named_modules(remove_duplicate=False))
        network.run(analysis.inputs, shapes)
    except Exception:  # noqa: BLE001 (a failing network is examined too: up to the operator that fails)
        pass
    # Operators are matched by module and source line: there is no graph of the pruned network to compare with.
    places = {node.name: (id(modules.get(_get_module_path(node))), node.source.split(": ")[0]) for node in nodes}
    seen = {name: shapes.seen.get(place) for name, place in places.items()}
    return [
        node.name for node in nodes if (there := seen[node.name]) and not _predict_shapes(analysis, kept, node) <= there
    ]


def _get_module_path(node: Node) -> str:
    """Return the path of the module that calls an operator, without the number of the call."""
    return node.module.split("@")[0]


def _predict_shapes(analysis: Analysis, kept: KeptUnits, node: Node) -> set[Shape]:
    """Return the shapes that an operator must return; of several outputs, those of the nodes that pick them."""
    stays = build_keep_mask(analysis.channels, kept)
    parts = (
        [user for user in analysis.graph.users(node.name) if lookup_operator(user).picks]
        if node.has_several_outputs
        else [node]
    )
    return {analysis.channels.shape_after_pruning(part.name, part.shape, stays) for part in parts}


def fix_shape_mismatches(analysis: Analysis, kept: KeptUnits, nodes: Sequence[Node]) -> Analysis | None:
    """Return the analysis with size attributes that leave fewer of these operators with a wrong shape, or None.

    Attributes are searched in the module of the first wrong operator; later ones may only pass the error on.
    """
    wrong = find_shape_mismatches(analysis, kept, nodes)
    if not wrong:
        return None
    path = _get_module_path(next(node for node in nodes if node.name == wrong[0]))
    places = find_shrinking_dims(analysis, kept, path)

    def count_remaining(names: Mapping[str, DimLocator]) -> int:
        """Count the wrong operators with these attributes; as many as before if another group is harmed."""
        trial = add_size_attributes(analysis, path, names)
        count = (
            len(find_shape_mismatches(trial, kept, nodes)) if find_forward_failure(trial, kept) is None else len(wrong)
        )
        improves = count < len(wrong) and _is_harmless_to_shapes(
            analysis, trial, kept, nodes, find_matching_groups(analysis, places, names)
        )
        return count if improves else len(wrong)

    counts = [
        (count_remaining(names), number, names)
        for number, names in enumerate(list_attribute_candidates(analysis, places, path))
    ]  # the number breaks ties in favour of earlier candidates, before the mappings are compared
    fewest, _, best = min(counts, default=(len(wrong), 0, {}))
    return (
        add_size_attributes(
            analysis, path, drop_unneeded_attributes(best, lambda fewer: count_remaining(fewer) <= fewest)
        )
        if fewest < len(wrong)
        else None
    )


def find_size_attributes_at_mismatch(
    analysis: Analysis, kept: KeptUnits, failure: ForwardFailure, nodes: Sequence[Node]
) -> Analysis | None:
    """Look for size attributes in the module of the first operator with a wrong shape.

    The code may fail far behind that operator, in another module.
    """
    wrong = find_shape_mismatches(analysis, kept, nodes)
    paths = dict.fromkeys(_get_module_path(node) for node in nodes if node.name in wrong[:1])
    return next((find_size_attributes_in_module(analysis, kept, failure, path) for path in paths), None)


def _is_harmless_to_shapes(
    before: Analysis, after: Analysis, kept: KeptUnits, nodes: Sequence[Node], groups: Sequence[str]
) -> bool:
    """Whether no more operators have a wrong shape than before when each group is cut alone.

    With a single group there is no ambiguity, and nothing to check.
    """
    for part in [{name: kept[name]} for name in groups] if len(groups) > 1 else []:
        if find_forward_failure(after, part) is not None or len(find_shape_mismatches(after, part, nodes)) > len(
            find_shape_mismatches(before, part, nodes)
        ):
            return False
    return True
