"""Least squares: the consumer's new weights, from the statistics of what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.capture import Graph, Node, Ref
from neuron_merging.channels import Axis, Consumer
from neuron_merging.measure import Gram, Reader, readers
from neuron_merging.mergers.base import Merge, Task

LIMIT = 4.0


@dataclass(frozen=True)
class Solution:
    """New weights (outputs × kept columns), the mean that they lose, and each output's error.

    `variance` is each output's variance, `error` the part of it that the fit does not explain.
    """

    weight: Tensor
    offset: Tensor
    variance: Tensor
    error: Tensor


def solve(
    weight: Tensor, mean: Tensor, covariance: Tensor, kept: Tensor, ridge: float, restore: bool
) -> Solution | None:
    """V'_K = V_K + [(C_KK + ridge·diag)⁻¹ C_KR V_Rᵀ]ᵀ: the best linear stand-in, or None.

    `restore` scales each output around its mean to the variance that it had.
    """
    stays = torch.zeros(weight.shape[1], dtype=torch.bool, device=weight.device)
    stays[kept] = True
    removed = torch.nonzero(~stays)[:, 0]
    left = weight[:, removed]
    system = covariance[kept][:, kept]
    target = covariance[kept][:, removed] @ left.T
    factor = _cholesky(system, ridge)
    if factor is None:
        return None
    change = torch.cholesky_solve(target, factor).T
    new = weight[:, kept] + change
    lost = ((left @ covariance[removed][:, removed]) * left).sum(1)
    error = lost - 2 * (change * target.T).sum(1) + ((change @ system) * change).sum(1)
    variance = ((weight @ covariance) * weight).sum(1)
    if restore:
        ratio = variance / ((new @ system) * new).sum(1).clamp(min=1e-30)
        new = new * torch.nan_to_num(ratio, nan=1.0).clamp(1 / LIMIT, LIMIT).sqrt()[:, None]
    if not bool(torch.isfinite(new).all()):
        return None
    return Solution(new, weight @ mean - new @ mean[kept], variance, error.clamp(min=0))


def _cholesky(system: Tensor, ridge: float) -> Tensor | None:
    """Factor with the ridge, and with more of it where the statistics are singular."""
    diagonal = system.diagonal()
    scale = diagonal.mean().clamp(min=1e-30)
    for extra in (1e-8, 1e-6, 1e-4, 1e-2, 1.0):
        loaded = system + torch.diag(ridge * diagonal + extra * scale)
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(loaded)
        if int(info) == 0:
            return factor
    return None


@dataclass(frozen=True)
class _Use:
    """One weight that reads removed channels: its consumers by group, and what it keeps."""

    reader: Reader
    consumers: tuple[tuple[str, Consumer], ...]
    stays: np.ndarray


def uses(task: Task) -> list[_Use]:
    """Every stored weight that reads a removed channel, once, with all groups that it reads."""
    by_axis: dict[Axis, list[tuple[str, Consumer]]] = {}
    stays: dict[Axis, np.ndarray] = {}
    for site in task.sites():
        for consumer in site.group.consumers:
            if consumer.axis is not None:
                by_axis.setdefault(consumer.axis, []).append((site.group.name, consumer))
                gone = np.isin(site.group.cuts[consumer.axis], site.removed)
                stays[consumer.axis] = stays.get(consumer.axis, np.ones(len(gone), bool)) & ~gone
    found = readers(task.graph, [consumer for pairs in by_axis.values() for _, consumer in pairs])
    return [_Use(reader, tuple(by_axis[reader.axis]), stays[reader.axis]) for reader in found]


def fitted(task: Task, grams: Mapping[Axis, Sequence[Gram]], ridge: float, restore: bool) -> list[Merge]:
    """Every use's new weights, offset and variance correction."""
    taken: set[str] = set()
    merges = []
    for use in uses(task):
        merges += _fit(task, use, grams[use.reader.axis], ridge, restore, taken)
    readable = {id(c) for use in uses(task) for _, c in use.consumers}
    for site in task.sites():
        for consumer in site.group.consumers:
            if consumer.axis is None or id(consumer) not in readable:
                merges.append(Merge(site.group.name, consumer, "pruned: its weight is computed, not stored"))
    return merges


def _fit(task: Task, use: _Use, grams: Sequence[Gram], ridge: float, restore: bool, taken: set[str]) -> list[Merge]:
    axis, taps = use.reader.axis, use.reader.taps
    weight = task.tensor(axis.tensor).double()
    blocks = list(weight.chunk(axis.blocks, 0))
    found = []
    for block, gram, stay in zip(blocks, grams, np.split(use.stays, axis.blocks), strict=True):
        part = solve(_matrix(block, axis, taps), gram.mean, gram.covariance, _columns(stay, taps), ridge, restore)
        if part is None:
            return [Merge(name, c, "pruned: its statistics are singular") for name, c in use.consumers]
        found.append(part)
    shapes = zip(found, blocks, strict=True)
    columns = torch.cat([_unmatrix(part.weight, block, axis, taps) for part, block in shapes], axis.dim)
    offset = torch.cat([part.offset for part in found])
    offset = offset if taps > 1 else offset.view(-1, weight.shape[2:].numel()).sum(1)
    error, variance = (torch.cat([getattr(part, name) for part in found]).sum() for name in ("error", "variance"))
    (group, consumer), *others = use.consumers
    tensors, bias, said = _place(task.graph, consumer, _next_norm(task.graph, use.reader.nodes), offset, taken)
    how = f"fitted, expected error {float(error / variance.clamp(min=1e-30)):.0%}{said}"
    positions = torch.from_numpy(np.flatnonzero(use.stays))
    merge = Merge(group, consumer, how, columns, positions, tensors, bias, folded=int((~use.stays).sum()))
    return [merge, *(Merge(name, c, how) for name, c in others)]


def _matrix(block: Tensor, axis: Axis, taps: int) -> Tensor:
    """Outputs × (channels · taps); with one tap, the kernel's positions are further outputs."""
    if taps > 1:
        return block.flatten(1)
    return block.movedim(axis.dim, -1).reshape(-1, block.shape[axis.dim])


def _unmatrix(matrix: Tensor, block: Tensor, axis: Axis, taps: int) -> Tensor:
    if taps > 1:
        return matrix.view(block.shape[0], -1, *block.shape[2:])
    shape = [s for d, s in enumerate(block.shape) if d != axis.dim]
    return matrix.view(*shape, -1).movedim(-1, axis.dim)


def _columns(stay: np.ndarray, taps: int) -> Tensor:
    return torch.from_numpy(np.flatnonzero(np.repeat(stay, taps)))


def _next_norm(graph: Graph, nodes: Sequence[Node]) -> Node | None:
    """The batch norm that alone reads this layer, and nothing else."""
    if len(nodes) != 1:
        return None
    users = graph.users(nodes[0].name)
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
