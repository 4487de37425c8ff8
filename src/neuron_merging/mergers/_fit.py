"""From regressions to merges: new columns, and a place for the mean that the fit restores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Selection
from neuron_merging.graph.values import Graph, Node, Ref
from neuron_merging.mergers.cosine import Cosine
from neuron_merging.mergers.interface import Kind, Mean, Merge, Merged, Reason, Why
from neuron_merging.statistics.regression import Known, Solution, solve
from neuron_merging.statistics.uses import Use


def fitted(
    selection: Selection,
    uses: Sequence[Use],
    found: Iterable[tuple[Axis, Sequence[Known]]],
    ridge: float,
    restore: bool,
) -> Merged:
    """The merges of every use of which something is known; what is given out one by one need not be held together."""
    taken: set[str] = set()
    merged: dict[Axis, Merged] = {}
    own = {use.axis: use for use in uses}
    for axis, joints in found:
        progress.tell("fitting layers", len(merged), len(uses))
        parts = solved(selection, own[axis], joints, ridge, restore, taken)
        merged[axis] = merges_of(selection, own[axis], parts, taken)
    progress.tell("fitting layers", len(uses), len(uses))
    return sum((merged[axis] for axis in own if axis in merged), Merged(()))


def solved(
    selection: Selection, use: Use, joints: Sequence[Known], ridge: float, restore: bool, taken: set[str]
) -> list[Solution | None]:
    """The fit of each block; where no place takes all of the lost mean, the columns make up for it as well."""
    centred = _place(selection, use, taken) is not None and not _uneven(use)
    matrices = use.matrices(selection.tensor(use.axis.tensor))
    return [
        solve(matrix[:, use.kept(block)], joint, ridge, restore, centred)
        for block, (matrix, joint) in enumerate(zip(matrices, joints, strict=True))
    ]


def _uneven(use: Use) -> bool:
    """Whether not every tap reaches every output, so that one offset cannot suit them all."""
    nodes = [c.node for _, c in use.consumers]
    none = (0, [0] * len(use.kernel))
    padded = (row_of(node).layer == "transposed" or node.args.get("padding", 0) not in none for node in nodes)
    return use.one_tap and any(padded)


def by_weights(selection: Selection, uses: Sequence[Use], unknown: Reason | None = None) -> Merged:
    """The paper's method for layers whose input is unknown, for the reason that is given, or too wide for a fit."""
    unknown = unknown or Reason(Why.NO_INPUTS)
    why = {use.axis: unknown if use.fits else Reason(Why.TOO_WIDE) for use in uses}
    merges = Cosine().merge(selection).merges if uses else ()
    return Merged(
        tuple(
            replace(m, reason=m.reason or why[m.consumer.axis])
            for m in merges
            if m.consumer.axis is not None and m.consumer.axis in why
        )
    )


def not_stored(selection: Selection) -> Merged:
    """Consumers whose weight is computed cannot be given new columns."""
    why = Reason(Why.NOT_STORED)
    pairs = ((site, c) for site in selection.sites() for c in site.group.consumers)
    return Merged(
        tuple(
            Merge(site.group.name, consumer, Kind.PRUNED, why, removed=len(site.removed))
            for site, consumer in pairs
            if consumer.axis is None
        )
    )


def merges_of(selection: Selection, use: Use, parts: Sequence[Solution | None], taken: set[str]) -> Merged:
    """One use's solutions, a part for each block, as merges of all its consumers."""
    found = [part for part in parts if part is not None]
    gone = int((~use.stays).sum())
    if len(found) < len(parts):
        why = Reason(Why.SINGULAR)
        return Merged(tuple(Merge(name, c, Kind.PRUNED, why, removed=gone) for name, c in use.consumers))
    weight = selection.graph.tensors[use.axis.tensor]
    offset = torch.cat([part.offset for part in found])
    offset = _at_once(selection.graph, use, offset) if use.one_tap else offset
    (group, consumer), *others = use.consumers
    tensors, bias, mean = _moved(selection.graph, _place(selection, use, taken), offset, taken)
    merge = Merge(
        group,
        consumer,
        Kind.FITTED,
        columns=use.columns([part.weight.to(weight.dtype) for part in found], weight),
        positions=torch.from_numpy(np.flatnonzero(use.stays)),
        bias=bias,
        folded=gone,
        removed=gone,
        mean=mean,
        error=_mean_error(found),
        moved=tuple(tensors),
    )
    rest = (replace(merge, group=name, consumer=c, columns=None, bias=None) for name, c in others)
    return Merged((merge, *rest), tensors)


def _mean_error(parts: Sequence[Solution]) -> float | None:
    """Of the parts whose output varies at all."""
    errors = [part.error for part in parts if part.error is not None]
    return float(np.mean(errors)) if errors else None


def _at_once(graph: Graph, use: Use, offset: Tensor) -> Tensor:
    """Offsets of single taps as one per output: their mean over all places, of which not every tap reaches each."""
    consumer = use.consumers[0][1]
    node, kernel = consumer.node, graph.tensors[use.axis.tensor].shape[2:]
    taps = offset.view(-1, *kernel)
    if not row_of(node).convolves:
        return taps.flatten(1).sum(1)
    space = graph.shapes[consumer.input][-len(kernel) :]
    weight = taps.unsqueeze(use.axis.dim)
    args = {**node.args, "input": offset.new_ones(1, 1, *space), "weight": weight, "bias": None, "groups": 1}
    means: Tensor = node.compute(args).flatten(2).mean(2)[0]
    return means


@dataclass(frozen=True)
class _Place:
    """Where a lost mean goes: into stored tensors, with a sign, or into a bias that is made."""

    names: tuple[str, ...] = ()
    sign: int = 1


def _place(selection: Selection, use: Use, taken: set[str]) -> _Place | None:
    """What the network has for it, at every place where the weight is used and nowhere else."""
    graph = selection.graph
    nodes = list({c.node.name: c.node for _, c in use.consumers}.values())
    mean = _next_mean(graph, nodes)
    if mean is not None and mean not in taken:
        return _Place((mean,), sign=-1)
    biases = [_bias(node) for node in nodes]
    if not any(biases):
        can = selection.new_biases and all(_can_have_bias(node, use.axis.tensor) for node in nodes)
        return _Place() if can else None
    names = [graph.parameters.get(bias.name) if bias else None for bias in biases]
    stored = tuple(dict.fromkeys(name for name in names if name is not None))
    free = None not in names and not taken & set(stored) and _read_by_these_alone(graph, stored, nodes)
    return _Place(stored) if free else None


def _read_by_these_alone(graph: Graph, tensors: Iterable[str], nodes: Sequence[Node]) -> bool:
    names = {node.name for node in nodes}
    return all(graph.readers(tensor) <= names for tensor in tensors)


def _moved(
    graph: Graph, place: _Place | None, offset: Tensor, taken: set[str]
) -> tuple[dict[str, Tensor], Tensor | None, Mean]:
    """New values of stored tensors, a bias to be made, and where the mean went."""
    if place is None:
        return {}, None, Mean.LOST
    if not place.names:
        return {}, offset, Mean.NEW_BIAS
    taken |= set(place.names)
    return {name: graph.tensors[name].double() + place.sign * offset for name in place.names}, None, Mean.KEPT


def _next_mean(graph: Graph, nodes: Sequence[Node]) -> str | None:
    """The running mean of the batch norm that alone reads this layer, and nothing else."""
    users = graph.users(nodes[0].name) if len(nodes) == 1 else []
    mean = users[0].args.get("running_mean") if len(users) == 1 and row_of(users[0]).norm == "batch" else None
    name = graph.parameters.get(mean.name) if isinstance(mean, Ref) else None
    return name if name is not None and graph.readers(name) == {users[0].name} else None


def _bias(node: Node) -> Ref | None:
    plain = node.args.get("beta", 1) == 1 and node.args.get("alpha", 1) == 1
    bias = node.args.get("self") if "mat1" in node.args and plain else node.args.get("bias")
    return bias if isinstance(bias, Ref) else None


def _can_have_bias(node: Node, weight: str) -> bool:
    """One of torch's own layers, with this very weight as its own: a tied one may be stored elsewhere."""
    own = weight == f"{node.module.split('@')[0]}.weight"
    return own and "bias" in _arguments(node) and node.module_type.startswith("torch.nn.modules")


def _arguments(node: Node) -> list[str]:
    schema: Any = getattr(node.fn, "_schema", None)
    return [a.name for a in schema.arguments] if schema else []
