"""Tensors with one value everywhere, as zeros that a mask starts from: they have the channels that they meet."""

from __future__ import annotations

from neuron_merging.channels.labels import Labels, Line
from neuron_merging.channels.walk import Walk


def resolve(walk: Walk) -> None:
    """Give every such tensor channels of its own, united with all that it has met, once that is known."""
    lines = {id(filling): walk.number(filling.size) for filling in walk.fillings}
    for filling in walk.fillings:
        own = lines[id(filling)]
        for node, met in filling.met:
            walk.at = node
            walk.unite(own, _resolved(walk, met, lines))
        for node, why in filling.refused:
            walk.refuse(own, node, why)
    for name, labels in walk.labels.items():
        several = [_labels(walk, part, lines) for part in (labels if isinstance(labels, list) else [labels])]
        walk.labels[name] = several if isinstance(labels, list) else several[0]


def _labels(walk: Walk, labels: Labels, lines: dict[int, Line]) -> Labels:
    return {dim: _resolved(walk, line, lines) for dim, line in labels.items()}


def _resolved(walk: Walk, line: Line, lines: dict[int, Line]) -> Line:
    """A line with the channels of the tensors that stand in it; as it is where it is not the whole of one."""
    for filling in walk.fillings_in(line):
        if len(line) == filling.size and (line == line[0]).all():
            return lines[id(filling)]
    return line
