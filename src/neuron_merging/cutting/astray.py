"""Lines that give another shape than was predicted, in the code of a smaller network that stops elsewhere or nowhere.

`x.view(batch, -1, self.heads, self.width)` runs with fewer heads, too: it takes their channels for fewer places. So
where no error tells which attribute has to shrink, the shapes do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.masks import staying
from neuron_merging.cutting.following import (
    Failure,
    Kept,
    Role,
    failure_of,
    followed_in,
    following,
    groups_meant,
    needed,
    network_of,
    places_in,
    tries,
)
from neuron_merging.graph.trees import flat
from neuron_merging.graph.usercode import callers_now, places_now
from neuron_merging.graph.values import Node, Shape


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """By module and line of the user's code, the shapes that operators returned there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[tuple[int, str], set[Shape]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        shapes = {tuple(value.shape) for value in flat(found) if isinstance(value, Tensor)}
        for place in places_now()[:1]:
            for module in callers_now():
                self.seen[id(module), place] |= shapes
        return found


def astray(analysis: Analysis, kept: Kept, nodes: Sequence[Node]) -> list[str]:
    """Of these operators, those that the code of the network that keeps this reached, and whose shape is another."""
    shapes, modules = _Shapes(), dict[str, nn.Module]()
    try:
        network = network_of(analysis, kept)
        modules = dict(network.model.named_modules(remove_duplicate=False))
        network.run(analysis.inputs, shapes)
    except Exception:  # noqa: BLE001 (that the code stops is why it is asked)
        pass
    places = {node.name: (id(modules.get(_path(node))), node.source.split(": ")[0]) for node in nodes}
    seen = {name: shapes.seen.get(place) for name, place in places.items()}
    return [node.name for node in nodes if (there := seen[node.name]) and not _wanted(analysis, kept, node) <= there]


def _path(node: Node) -> str:
    """The module that calls an operator."""
    return node.module.split("@")[0]


def _wanted(analysis: Analysis, kept: Kept, node: Node) -> set[Shape]:
    """The shapes that an operator has to return; those of several results are what they are when taken out."""
    stays = staying(analysis.channels, kept)
    parts = [user for user in analysis.graph.users(node.name) if user.op == "getitem"] if node.several else [node]
    return {analysis.channels.new_shape(part.name, part.shape, stays) for part in parts}


def straightened(analysis: Analysis, kept: Kept, nodes: Sequence[Node]) -> Analysis | None:
    """The analysis with attributes that give fewer of these operators a wrong shape; None if none do.

    The first that is wrong is where the code goes astray; the others may only pass it on.
    """
    wrong = astray(analysis, kept, nodes)
    if not wrong:
        return None
    path = _path(next(node for node in nodes if node.name == wrong[0]))
    places = places_in(analysis, kept, path)

    def left(names: Mapping[str, Role]) -> int:
        """How many are wrong with these attributes; as many as before where they do harm."""
        trial = following(analysis, path, names)
        count = len(astray(trial, kept, nodes)) if failure_of(trial, kept) is None else len(wrong)
        fine = count < len(wrong) and _harmless(analysis, trial, kept, nodes, groups_meant(analysis, places, names))
        return count if fine else len(wrong)

    counts = [(left(names), number, names) for number, names in enumerate(tries(analysis, places, path))]
    fewest, _, best = min(counts, default=(len(wrong), 0, {}))
    return following(analysis, path, needed(best, lambda fewer: left(fewer) <= fewest)) if fewest < len(wrong) else None


def followed_from(analysis: Analysis, kept: Kept, failure: Failure, nodes: Sequence[Node]) -> Analysis | None:
    """The analysis with attributes that get the code further, of the module in which the first of these goes astray."""
    wrong = astray(analysis, kept, nodes)
    paths = dict.fromkeys(_path(node) for node in nodes if node.name in wrong[:1])
    return next((followed_in(analysis, kept, failure, path) for path in paths), None)


def _harmless(before: Analysis, after: Analysis, kept: Kept, nodes: Sequence[Node], meant: Sequence[str]) -> bool:
    """Whether no more operators go wrong with any one of the groups that may be meant; a single one is."""
    for part in [{name: kept[name]} for name in meant] if len(meant) > 1 else []:
        if failure_of(after, part) is not None or len(astray(after, part, nodes)) > len(astray(before, part, nodes)):
            return False
    return True
