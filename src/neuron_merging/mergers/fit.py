"""From regressions to merges: new columns, and a place for the mean that the fit restores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.capture import Graph, Node, Ref
from neuron_merging.channels import Axis, Consumer
from neuron_merging.measure import Use
from neuron_merging.regression import Joint, Solution, solve
from neuron_merging.task import Merge, Task


def fitted(
    task: Task, uses: Sequence[Use], found: Mapping[Axis, Sequence[Joint]], ridge: float, restore: bool
) -> list[Merge]:
    """Every use's merges; consumers whose weight is not stored are left pruned."""
    taken: set[str] = set()
    merges = []
    for use in uses:
        matrices = use.matrices(task.tensor(use.axis.tensor).double())
        parts = [
            solve(matrix[:, use.kept(block)], joint, ridge, restore)
            for block, (matrix, joint) in enumerate(zip(matrices, found[use.axis], strict=True))
        ]
        merges += merges_of(task, use, parts, taken)
    return merges


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
    offset = offset if use.taps > 1 else offset.view(-1, weight.shape[2:].numel()).sum(1)
    (group, consumer), *others = use.consumers
    tensors, bias, said = _place(task.graph, consumer, _next_norm(task.graph, use), offset, taken)
    error = float(np.mean([part.error for part in found]))
    how = f"fitted, expected error {error:.0%}{said}"
    columns = use.columns([part.weight for part in found], weight)
    positions = torch.from_numpy(np.flatnonzero(use.stays))
    merge = Merge(group, consumer, how, columns, positions, tensors, bias, folded=int((~use.stays).sum()), error=error)
    return [merge, *(Merge(name, c, how, error=error) for name, c in others)]


def _next_norm(graph: Graph, use: Use) -> Node | None:
    """The batch norm that alone reads this layer, and nothing else."""
    if len(use.inputs) != 1:
        return None
    users = graph.users(next(iter(use.inputs)))
    stored = len(users) == 1 and users[0].op == "batch_norm" and isinstance(users[0].args.get("running_mean"), Ref)
    return users[0] if stored else None


def _place(
    graph: Graph, consumer: Consumer, norm: Node | None, offset: Tensor, taken: set[str]
) -> tuple[dict[str, Tensor], Tensor | None, str]:
    """Put the lost mean where the network has a place for it."""
    if norm is not None:
        mean = graph.parameters[norm.args["running_mean"].name]
        if mean not in taken:
            taken.add(mean)
            return {mean: graph.tensors[mean].double() - offset}, None, ""
    bias = consumer.node.args.get("bias")
    if isinstance(bias, Ref) and (name := graph.parameters.get(bias.name)) and name not in taken:
        taken.add(name)
        return {name: graph.tensors[name].double() + offset}, None, ""
    if (
        bias is None
        and "bias" in _arguments(consumer.node)
        and consumer.node.module_type.startswith("torch.nn.modules")
    ):
        return {}, offset, ", bias added"
    return {}, None, ", mean not restored"


def _arguments(node: Node) -> list[str]:
    schema: Any = getattr(node.fn, "_schema", None)
    return [a.name for a in schema.arguments] if schema else []
