"""Lines that gave another shape than was predicted, before the code of a smaller network stopped elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.masks import staying
from neuron_merging.cutting.following import Kept, network_of
from neuron_merging.graph.trees import flat
from neuron_merging.graph.usercode import places_now
from neuron_merging.graph.values import Node, Shape


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """By line of the user's code, the shapes that operators returned there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, set[Shape]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for place in places_now()[:1]:
            self.seen[place] |= {tuple(value.shape) for value in flat(found) if isinstance(value, Tensor)}
        return found


def astray(analysis: Analysis, kept: Kept, nodes: Sequence[Node]) -> list[str]:
    """Of these operators, those that the code of the network that keeps this reached, and whose shape is another."""
    shapes = _Shapes()
    try:
        network_of(analysis, kept).run(analysis.inputs, shapes)
    except Exception:  # noqa: BLE001 (that the code stops is why it is asked)
        pass
    seen = {node.name: shapes.seen.get(node.source.split(": ")[0]) for node in nodes}
    return [node.name for node in nodes if (there := seen[node.name]) and not _wanted(analysis, kept, node) <= there]


def _wanted(analysis: Analysis, kept: Kept, node: Node) -> set[Shape]:
    """The shapes that an operator has to return; those of several results are what they are when taken out."""
    stays = staying(analysis.channels, kept)
    parts = [user for user in analysis.graph.users(node.name) if user.op == "getitem"] if node.several else [node]
    return {analysis.channels.new_shape(part.name, part.shape, stays) for part in parts}
