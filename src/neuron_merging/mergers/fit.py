"""From regressions to merges: new columns, and a place for the mean that the fit restores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.capture import Graph, Node, Ref
from neuron_merging.channels import Axis
from neuron_merging.measure import Use
from neuron_merging.mergers.cosine import Cosine
from neuron_merging.regression import Joint, Solution, solve
from neuron_merging.task import Merge, Task


def fitted(
    task: Task, uses: Sequence[Use], found: Mapping[Axis, Sequence[Joint]], ridge: float, restore: bool
) -> list[Merge]:
    """Every use's merges; consumers whose weight is not stored are left pruned."""
    taken: set[str] = set()
    merges = []
    for use in progress.each(uses, "fitting layers"):
        merges += merges_of(task, use, solved(task, use, found[use.axis], ridge, restore, taken), taken)
    return merges


def solved(
    task: Task, use: Use, joints: Sequence[Joint], ridge: float, restore: bool, taken: set[str]
) -> list[Solution | None]:
    """The fit of each block; where no place takes all of the lost mean, the columns make up for it as well."""
    centred = _place(task.graph, use, taken) is not None and not _uneven(use)
    matrices = use.matrices(task.tensor(use.axis.tensor).double())
    return [
        solve(matrix[:, use.kept(block)], joint, ridge, restore, centred)
        for block, (matrix, joint) in enumerate(zip(matrices, joints, strict=True))
    ]


def _uneven(use: Use) -> bool:
    """Whether not every tap reaches every output, so that one offset cannot suit them all."""
    nodes = [c.node for _, c in use.consumers]
    padded = ("transpose" in node.op or node.args.get("padding", 0) not in (0, [0] * len(use.kernel)) for node in nodes)
    return use.one_tap and any(padded)


def by_weights(task: Task, uses: Sequence[Use]) -> list[Merge]:
    """The paper's method for layers whose input is unknown, or too wide for a fit."""
    why = {use.axis: "synthetic inputs do not run here" if use.fits else "too wide for a fit" for use in uses}
    merges = Cosine().merge(task) if uses else []
    return [replace(m, how=f"{m.how} ({why[m.consumer.axis]})") for m in merges if m.consumer.axis in why]


def not_stored(task: Task) -> list[Merge]:
    """Consumers whose weight is computed cannot be given new columns."""
    why = "pruned: the weight that reads it cannot be rewritten"
    pairs = ((site.group, c) for site in task.sites() for c in site.group.consumers)
    return [Merge(group.name, consumer, why) for group, consumer in pairs if consumer.axis is None]


def merges_of(task: Task, use: Use, parts: Sequence[Solution | None], taken: set[str]) -> list[Merge]:
    """One use's solutions, a part for each block, as merges of all its consumers."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return [Merge(name, c, "pruned: its statistics are singular") for name, c in use.consumers]
    weight = task.tensor(use.axis.tensor).double()
    offset = torch.cat([part.offset for part in found])
    offset = _at_once(task.graph, use, offset) if use.one_tap else offset
    (group, consumer), *others = use.consumers
    tensors, bias, said = _put(task.graph, _place(task.graph, use, taken), offset, taken)
    error = float(np.mean([part.error for part in found]))
    how = f"fitted, expected error {error:.0%}{said}"
    columns = use.columns([part.weight for part in found], weight)
    positions = torch.from_numpy(np.flatnonzero(use.stays))
    merge = Merge(group, consumer, how, columns, positions, tensors, bias, folded=int((~use.stays).sum()), error=error)
    return [merge, *(Merge(name, c, how, error=error) for name, c in others)]


def _at_once(graph: Graph, use: Use, offset: Tensor) -> Tensor:
    """Offsets of single taps as one per output: their mean over all places, of which not every tap reaches each."""
    consumer = use.consumers[0][1]
    node, kernel = consumer.node, graph.tensors[use.axis.tensor].shape[2:]
    taps = offset.view(-1, *kernel)
    if not node.op.startswith("conv"):
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


def _place(graph: Graph, use: Use, taken: set[str]) -> _Place | None:
    """What the network has for it, at every place where the weight is used and nowhere else."""
    nodes = list({c.node.name: c.node for _, c in use.consumers}.values())
    mean = _next_mean(graph, nodes)
    if mean is not None and mean not in taken:
        return _Place((mean,), -1)
    biases = [_bias(node) for node in nodes]
    stored = tuple(dict.fromkeys(graph.parameters[b.name] for b in biases if b and b.name in graph.parameters))
    if all(b and b.name in graph.parameters for b in biases):
        alone = all(_readers(graph, name) <= {node.name for node in nodes} for name in stored)
        return _Place(stored) if alone and not taken & set(stored) else None
    return _Place() if not any(biases) and all(_can_have_bias(node, use.axis.tensor) for node in nodes) else None


def _put(
    graph: Graph, place: _Place | None, offset: Tensor, taken: set[str]
) -> tuple[dict[str, Tensor], Tensor | None, str]:
    if place is None:
        return {}, None, ", mean not restored"
    if not place.names:
        return {}, offset, ", bias added"
    taken |= set(place.names)
    return {name: graph.tensors[name].double() + place.sign * offset for name in place.names}, None, ""


def _next_mean(graph: Graph, nodes: Sequence[Node]) -> str | None:
    """The running mean of the batch norm that alone reads this layer, and nothing else."""
    users = graph.users(nodes[0].name) if len(nodes) == 1 else []
    mean = users[0].args.get("running_mean") if len(users) == 1 and users[0].op == "batch_norm" else None
    name = graph.parameters.get(mean.name) if isinstance(mean, Ref) else None
    return name if name is not None and _readers(graph, name) == {users[0].name} else None


def _bias(node: Node) -> Ref | None:
    plain = node.args.get("beta", 1) == 1 and node.args.get("alpha", 1) == 1
    bias = node.args.get("self") if node.op == "addmm" and plain else node.args.get("bias")
    return bias if isinstance(bias, Ref) else None


def _readers(graph: Graph, name: str) -> set[str]:
    """The nodes that read a stored tensor, under any of the names that it has in the graph."""
    return {node.name for node in graph.nodes if any(graph.parameters.get(r.name) == name for r in node.refs())}


def _can_have_bias(node: Node, weight: str) -> bool:
    """One of torch's own layers, with this very weight as its own: a tied one may be stored elsewhere."""
    own = weight == f"{node.module.split('@')[0]}.weight"
    return own and "bias" in _arguments(node) and node.module_type.startswith("torch.nn.modules")


def _arguments(node: Node) -> list[str]:
    schema: Any = getattr(node.fn, "_schema", None)
    return [a.name for a in schema.arguments] if schema else []
