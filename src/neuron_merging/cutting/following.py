"""following: sizes that a network's own modules keep as attributes, and that have to shrink with the channels.

`x.view(*x.shape[:-1], self.nf)` copes with fewer channels if `nf` does. Which attribute it is, is not asked: where the
code of a smaller network without values stops, whole numbers that its module holds are set to the new sizes of
what the module computes, and what gets the code further stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from neuron_merging.channels.analysis import Analysis, Follower
from neuron_merging.channels.labels import Units
from neuron_merging.channels.masks import staying
from neuron_merging.cutting.plan import Plan, make_plan
from neuron_merging.cutting.surgery import hollow
from neuron_merging.graph.hollow import Hollow
from neuron_merging.graph.usercode import owner_of
from neuron_merging.graph.values import Node

Kept = Mapping[str, Units]
MOST = 12
"""Attributes, or sets of them, that are tried at one place."""


@dataclass(frozen=True)
class Failure:
    """What the model's code raises in a smaller network, in which module, and how many operators came before."""

    error: Exception
    module: str
    steps: int


THROUGH = math.inf
"""Operators that come before the code stops where it does not."""
Role = tuple[int, int, int]
"""The same code in another module: the number of an operator in it, of the operator's input or none, a dimension."""
OWN = -1
"""In roles: what the operator computes, in place of an input."""


@dataclass(frozen=True)
class Place:
    """A dimension that shrinks: its role in its module, its size before, the groups whose channels stand along it."""

    role: Role
    old: int
    groups: frozenset[str]


Places = tuple[Place, ...]


class _Steps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def plan_of(analysis: Analysis, kept: Kept) -> Plan:
    """How the network that keeps this is made."""
    return make_plan(analysis.model, analysis.graph, analysis.channels, kept, followers=analysis.followers)


def network_of(analysis: Analysis, kept: Kept) -> Hollow:
    """The network that keeps this, without values."""
    return hollow(analysis.model, plan_of(analysis, kept), analysis.exported)


def failure_of(analysis: Analysis, kept: Kept) -> Failure | None:
    """What stops the network that keeps this, if anything does."""
    steps, network = _Steps(), None
    try:
        network = network_of(analysis, kept)
        network.run(analysis.inputs, steps)
    except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
        owner = owner_of(error)
        paths = [path for path, module in network.model.named_modules() if module is owner] if network else []
        return Failure(error, paths[0] if paths else "", steps.count)
    return None


def followed(analysis: Analysis, kept: Kept, failure: Failure) -> Analysis | None:
    """The analysis with attributes that get the code further than it came, and nowhere less far; None if none do."""
    around = dict.fromkeys((failure.module, failure.module.rpartition(".")[0]))  # it may be noticed further in
    found = (followed_in(analysis, kept, failure, path) for path in around)
    return next((further for further in found if further is not None), None)


def followed_in(analysis: Analysis, kept: Kept, failure: Failure, path: str) -> Analysis | None:
    """The analysis with such attributes of this module, and of others of its class."""
    places = places_in(analysis, kept, path)
    best: Mapping[str, Role] | None = None
    steps: float = failure.steps
    for names in tries(analysis, places, path):
        if steps < THROUGH and (reached := _reached(analysis, kept, places, path, names, steps + 1)) > steps:
            best, steps = names, reached
    if best is None:
        return None
    return following(
        analysis, path, needed(best, lambda fewer: _reached(analysis, kept, places, path, fewer, steps) >= steps)
    )


def following(analysis: Analysis, path: str, names: Mapping[str, Role]) -> Analysis:
    """The analysis with these attributes of a module, and of others of its class, as followers."""
    return replace(analysis, followers=(*analysis.followers, *bound(analysis, path, names)))


def needed(names: Mapping[str, Role], works: Callable[[Mapping[str, Role]], bool]) -> Mapping[str, Role]:
    """Those of several attributes without which it does not work: others may be the same number by chance."""
    for name in names:
        fewer = {other: role for other, role in names.items() if other != name}
        names = fewer if fewer and works(fewer) else names
    return names


def _reached(
    analysis: Analysis, kept: Kept, places: Places, path: str, names: Mapping[str, Role], least: float
) -> float:
    """How many operators the code gets to with these attributes; none if as many as asked for, with harm elsewhere."""
    trial = following(analysis, path, names)
    stopped = failure_of(trial, kept)
    steps = THROUGH if stopped is None else stopped.steps
    return steps if steps < least or _harmless(analysis, trial, kept, places, names) else 0


def _harmless(before: Analysis, after: Analysis, kept: Kept, places: Places, names: Mapping[str, Role]) -> bool:
    """Whether the code comes as far as before with any one of the groups that may be meant; a single one is."""
    meant = groups_meant(before, places, names)
    for part in [{name: kept[name]} for name in meant] if len(meant) > 1 else []:
        old, new = failure_of(before, part), failure_of(after, part)
        if new is not None and (old is None or new.steps < old.steps):
            return False
    return True


def groups_meant(analysis: Analysis, places: Places, names: Mapping[str, Role]) -> list[str]:
    """The groups along whose channels something has the size that one of these attributes has."""
    values = _values(analysis, names)
    return sorted({group for place in places if place.old in values for group in place.groups})


def _values(analysis: Analysis, names: Mapping[str, Role]) -> set[int]:
    return {value for module in analysis.model.modules() for name, value in _integers(module) if name in names}


def tries(analysis: Analysis, places: Places, path: str) -> list[dict[str, Role]]:
    """Attributes of a module to set, each with the role of the size to take: alone, all, and in pairs."""
    taken = {follower.attribute for follower in analysis.followers if follower.module == path}
    held = [(name, value) for name, value in _integers(analysis.model.get_submodule(path)) if name not in taken]
    fitting = {name: [place for place in places if place.old == value] for name, value in held}
    found = {name: there for name, there in fitting.items() if there}
    single = [{name: place.role} for name, there in found.items() for place in there]
    groups = sorted({group for there in found.values() for place in there for group in place.groups})
    counts = [count for count in (len(found), 2) if 1 < count <= len(found)]
    sets = [names for count in counts for names in combinations(found, count)]
    several = [{name: _role(found[name], group) for name in names} for names in sets for group in groups]
    return [*single, *(names for i, names in enumerate(several) if names not in several[:i])][:MOST]


def _role(places: Sequence[Place], group: str) -> Role:
    """Of places of the same size, the first with channels of a group, if there is one."""
    return next((place.role for place in places if group in place.groups), places[0].role)


def bound(analysis: Analysis, path: str, names: Mapping[str, Role]) -> Iterator[Follower]:
    """The same attributes of all modules of a class, bound to what has their size and their role there."""
    kind = type(analysis.model.get_submodule(path))
    for other in [other for other, module in analysis.model.named_modules() if type(module) is kind]:
        values, inside = dict(_integers(analysis.model.get_submodule(other))), _inside(analysis, other)
        for name, role in names.items():
            value = _playing(inside, role)
            if value is not None and analysis.graph.shapes[value][role[-1] :][:1] == (values.get(name),):
                yield Follower(other, name, value, role[-1])


def _playing(inside: Sequence[Node], role: Role) -> str | None:
    """The value that has a role in a module, if the module is built like the one that the role is from."""
    number, which, _ = role
    if number >= len(inside):
        return None
    names = [inside[number].name] if which == OWN else [ref.name for ref in inside[number].refs()][which : which + 1]
    return names[0] if names else None


def _integers(module: nn.Module) -> list[tuple[str, int]]:
    """The whole numbers that a module keeps as attributes of its own, alone or several as one."""
    held = vars(module).items()
    several = [(f"{name}[{place}]", part) for name, value in held for place, part in _parts(value)]
    return [(name, value) for name, value in (*held, *several) if type(value) is int and value > 1]


def _parts(value: Any) -> Iterable[tuple[object, Any]]:
    """The parts of what holds several values, by place, or by name if all of them are whole numbers."""
    if type(value) in (tuple, list):
        return enumerate(value)
    named = type(value) is dict and all(type(part) is int and str(name).isidentifier() for name, part in value.items())
    return value.items() if named else ()


def places_in(analysis: Analysis, kept: Kept, path: str) -> Places:
    """The sizes that change in what a module computes, and then in what it reads; one of each kind."""
    graph, stays = analysis.graph, staying(analysis.channels, kept)
    inside = list(enumerate(_inside(analysis, path)))
    values = [(node.name, number, OWN) for number, node in inside]
    values += [(ref.name, number, which) for number, node in inside for which, ref in enumerate(node.refs())]
    found: dict[tuple[object, ...], Place] = {}
    for value, number, which in values:
        old = graph.shapes.get(value, ())
        for dim, (size, left) in enumerate(zip(old, analysis.channels.new_shape(value, old, stays), strict=True)):
            if size != left:
                place = Place((number, which, dim), size, _groups_in(analysis, kept, value, dim))
                found.setdefault((size, left, place.groups), place)
    return tuple(found.values())


def _inside(analysis: Analysis, path: str) -> list[Node]:
    """The operators that a module and those in it call, in order."""
    own = ((node, node.module.split("@")[0]) for node in analysis.graph.nodes)
    return [node for node, module in own if not path or module == path or module.startswith(f"{path}.")]


def _groups_in(analysis: Analysis, kept: Kept, value: str, dim: int) -> frozenset[str]:
    """The groups whose channels stand along a dimension."""
    channels, shape = analysis.channels, analysis.graph.shapes[value]
    near = [group.name for group in channels.groups if group.name in kept and channels.carries(value, group)]
    alone = {name: channels.new_shape(value, shape, staying(channels, {name: kept[name]})) for name in near}
    return frozenset(name for name, new in alone.items() if new[dim] != shape[dim])
