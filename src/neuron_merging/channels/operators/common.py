"""What many rules do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from neuron_merging.channels.labels import ANY, FIXED, Labels, Line, fixed, is_channel
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Node, Ref


def dim_of(node: Node, walk: Walk, name: str = "dim") -> int:
    return int(node.args.get(name, 0)) % max(len(walk.shape(node.args["self"])), 1)


def is_torch_layer(node: Node) -> bool:
    """Whether one of torch's own modules calls the operator: surgery knows which of its attributes are sizes."""
    return node.module_type.startswith("torch.nn.modules.")


def tie_across(walk: Walk, line: Line, blocks: int) -> None:
    rows = line.reshape(blocks, -1)
    for row in rows[1:]:
        walk.unite(rows[0], row)


def meet(
    walk: Walk,
    node: Node,
    operands: Sequence[tuple[Labels, Sequence[int]]],
    *,
    skip: Iterable[int] = (),
    shape: Sequence[int] | None = None,
) -> Labels:
    """Unite what stands at the same index; a dimension without labels fixes what it meets."""
    shape = node.shape if shape is None else shape
    result: Labels = {}
    for dim in set(range(len(shape))) - set(skip):
        lines: list[Line] = []
        for labels, size in operands:
            own = dim - (len(shape) - len(size))
            if own >= 0 and size[own] > 1:
                lines.append(labels.get(own, fixed(size[own])))
        if any((line != FIXED).any() for line in lines):
            result[dim] = _join(walk, node, lines)
    return result


def _join(walk: Walk, node: Node, lines: Sequence[Line]) -> Line:
    joined = lines[0].copy()
    for line in lines[1:]:
        walk.unite(joined, line)
        joined = np.where(is_channel(joined), joined, np.where(line == ANY, joined, line))
    return joined


def same(walk: Walk, node: Node) -> Labels:
    """One input, one output of the same layout."""
    return dict(walk.of(next(node.refs())))


def attach(walk: Walk, node: Node, labels: Labels, dim: int, ref: Any) -> None:
    if isinstance(ref, Ref) and (own := walk.of(ref).get(0)) is not None:
        walk.unite(own, labels.get(dim, fixed(len(own))))


def fresh(walk: Walk, node: Node) -> Labels:
    """A new tensor of fixed size, unrelated to its arguments' channels."""
    return {}


def unknown(walk: Walk, node: Node) -> Labels:
    for ref in node.refs():
        for line in walk.of(ref).values():
            walk.refuse(line, node, "is not known to act channel by channel")
    return {}
