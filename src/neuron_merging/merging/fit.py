"""Fit the kept columns of consumer weights by least squares.

Solutions become merges (`build_merges`), and merges become edits of the full-size network (`build_graph_edits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.calibration.layer_stats import ConsumerWeight
from neuron_merging.calibration.regression import FitSolution, FitStatistics, solve_fit
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.masked_run import GraphEdits, MergedColumns
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.merging.cosine import Cosine
from neuron_merging.merging.protocol import MeanHandling, Merge, MergeKind, MergeResult, Reason, ReasonCode

ROBUST_RIDGE = 0.1
"""Ridge of fits that must hold for inputs of another kind than those of the fit, relative to each variance."""


def build_graph_edits(graph: Graph, merged: MergeResult, zeroed: Mapping[Axis, Tensor] | None = None) -> GraphEdits:
    """Return the changes that merges make to the original, in the precision in which the smaller network stores them.

    `zeroed` maps axes of weights to positions that become zero. A run needs them only where it does not mask the
    channels that are read there.
    """
    tensors = {name: _cast_like(graph.tensors[name], tensor) for name, tensor in merged.tensors.items()}
    biases: dict[str, Tensor] = {}
    columns: dict[str, list[MergedColumns]] = {}
    for read, positions in (zeroed or {}).items():
        columns.setdefault(read.tensor, []).append(_make_zero_columns(graph, read, positions))
    for merge in merged.merges:
        axis = merge.consumer.axis
        if axis is None:
            continue
        stored = graph.tensors[axis.tensor]
        # Of several layers that share a weight, only the first merge carries its columns.
        if merge.columns is not None:
            own = MergedColumns(axis, merge.positions, _cast_like(stored, merge.columns))
            columns.setdefault(axis.tensor, []).append(own)
        if merge.bias is not None:
            biases[axis.tensor] = _cast_like(stored, merge.bias)
    return GraphEdits(tensors, biases, columns)


def _make_zero_columns(graph: Graph, axis: Axis, positions: Tensor) -> MergedColumns:
    shape = list(axis.join_blocks(graph.tensors[axis.tensor]).shape)
    shape[axis.dim] = len(positions)
    return MergedColumns(axis, positions, graph.tensors[axis.tensor].new_zeros(shape))


def _cast_like(old: Tensor, new: Tensor) -> Tensor:
    return new.detach().to(old.device, old.dtype)


def fit_merges(
    selection: Selection,
    consumer_weights: Sequence[ConsumerWeight],
    found: Iterable[tuple[Axis, Sequence[FitStatistics]]],
    ridge: float,
    restore: bool,
) -> MergeResult:
    """Fit every consumer weight that has statistics. They come one by one, to save memory."""
    return fit_variants(selection, consumer_weights, found, [FitOptions(ridge, restore)])[0]


@dataclass(frozen=True)
class FitOptions:
    """How a fit is solved: the ridge, and whether outputs are scaled back to their original variance."""

    ridge: float
    restore: bool


def fit_variants(
    selection: Selection,
    consumer_weights: Sequence[ConsumerWeight],
    found: Iterable[tuple[Axis, Sequence[FitStatistics]]],
    variants: Sequence[FitOptions],
) -> list[MergeResult]:
    """Fit every consumer weight in several ways to the same statistics, which come one by one."""
    used_tensors: list[set[str]] = [set() for _ in variants]
    merged: list[dict[Axis, MergeResult]] = [{} for _ in variants]
    own = {consumer_weight.axis: consumer_weight for consumer_weight in consumer_weights}
    for done, (axis, statistics) in enumerate(found):
        progress.report_progress("fitting layers", done, len(consumer_weights))
        for options, used, results in zip(variants, used_tensors, merged, strict=True):
            parts = solve_blocks(selection, own[axis], statistics, options.ridge, options.restore, used)
            results[axis] = build_merges(selection, own[axis], parts, used)
    progress.report_progress("fitting layers", len(consumer_weights), len(consumer_weights))
    # In the order of the weights, not of the statistics: the result is the same whichever source came first.
    return [sum((results[axis] for axis in own if axis in results), MergeResult(())) for results in merged]


def solve_blocks(
    selection: Selection,
    consumer_weight: ConsumerWeight,
    statistics: Sequence[FitStatistics],
    ridge: float,
    restore: bool,
    used_tensors: set[str],
) -> list[FitSolution | None]:
    """Solve the fit of each block of a weight.

    Where no bias or running mean can take the lost mean, the columns are fitted to reproduce it too (not `centred`).
    """
    centred = _find_offset_target(selection, consumer_weight, used_tensors) is not None and not _has_uneven_taps(
        consumer_weight
    )
    matrices = consumer_weight.to_matrices(selection.tensor(consumer_weight.axis.tensor))
    solutions = []  # None for a block with singular statistics
    for block, (matrix, stats) in enumerate(zip(matrices, statistics, strict=True)):
        solutions.append(solve_fit(matrix[:, consumer_weight.kept_columns(block)], stats, ridge, restore, centred))
    return solutions


def _has_uneven_taps(consumer_weight: ConsumerWeight) -> bool:
    """Return whether padding hides some taps at the border, so that one offset per output is not exact.

    A fit of one factor per pair of channels has an offset for each tap, and a bias can hold only their sum.
    """
    nodes = [c.node for _, c in consumer_weight.consumers]
    none = (0, [0] * len(consumer_weight.kernel))
    padded = (lookup_operator(node).layer == "transposed" or node.args.get("padding", 0) not in none for node in nodes)
    return consumer_weight.one_tap and any(padded)


def merge_by_weights(
    selection: Selection, consumer_weights: Sequence[ConsumerWeight], unknown: Reason | None = None
) -> MergeResult:
    """Merge layers without statistics by the paper's method, with the reason: `unknown`, or too wide for a fit."""
    unknown = unknown or Reason(ReasonCode.NO_INPUTS)
    why = {
        consumer_weight.axis: unknown if consumer_weight.is_fittable else Reason(ReasonCode.TOO_WIDE)
        for consumer_weight in consumer_weights
    }
    # The paper's method merges all weights of a group; only the merges of these weights are taken.
    merges = Cosine().merge(selection).merges if consumer_weights else ()
    return MergeResult(
        tuple(
            replace(m, reason=m.reason or why[m.consumer.axis])
            for m in merges
            if m.consumer.axis is not None and m.consumer.axis in why
        )
    )


def prune_computed_weights(selection: Selection) -> MergeResult:
    """Return plain pruning for consumers whose weight is computed: there is no stored tensor to rewrite."""
    why = Reason(ReasonCode.NOT_STORED)
    pairs = ((site, c) for site in selection.sites() for c in site.group.consumers)
    return MergeResult(
        tuple(
            Merge(site.group.name, consumer, MergeKind.PRUNED, why, removed=len(site.removed))
            for site, consumer in pairs
            if consumer.axis is None
        )
    )


def build_merges(
    selection: Selection, consumer_weight: ConsumerWeight, parts: Sequence[FitSolution | None], used_tensors: set[str]
) -> MergeResult:
    """Turn the solutions of one weight, one per block, into merges of all its consumers.

    `used_tensors` collects the tensors that took an offset, so that none takes two.
    """
    found = [part for part in parts if part is not None]
    removed = int((~consumer_weight.stays).sum())
    if len(found) < len(parts):  # one tensor holds all blocks: prune all of them if one cannot be solved
        why = Reason(ReasonCode.SINGULAR)
        return MergeResult(
            tuple(Merge(name, c, MergeKind.PRUNED, why, removed=removed) for name, c in consumer_weight.consumers)
        )
    weight = selection.graph.tensors[consumer_weight.axis.tensor]
    # Blocks have disjoint outputs, so their offsets lie side by side.
    offset = torch.cat([part.offset for part in found])
    offset = _combine_tap_offsets(selection.graph, consumer_weight, offset) if consumer_weight.one_tap else offset
    (group, consumer), *others = consumer_weight.consumers
    tensors, bias, mean = _apply_offset(
        selection.graph, _find_offset_target(selection, consumer_weight, used_tensors), offset, used_tensors
    )
    merge = Merge(
        group,
        consumer,
        MergeKind.FITTED,
        columns=consumer_weight.join_columns([part.weight.to(weight.dtype) for part in found], weight),
        positions=torch.from_numpy(np.flatnonzero(consumer_weight.stays)),
        bias=bias,
        folded=removed,
        removed=removed,
        mean=mean,
        error=_average_error(found),
        offset_tensors=tuple(tensors),
    )
    # These layers share one stored weight: the first merge carries its columns, the others only report the outcome.
    rest = (replace(merge, group=name, consumer=c, columns=None, bias=None) for name, c in others)
    return MergeResult((merge, *rest), tensors)


def _average_error(parts: Sequence[FitSolution]) -> float | None:
    """Average the relative errors of the parts whose output has any variance."""
    errors = [part.error for part in parts if part.error is not None]
    return float(np.mean(errors)) if errors else None


def _combine_tap_offsets(graph: Graph, consumer_weight: ConsumerWeight, offset: Tensor) -> Tensor:
    """Combine the offsets of single taps into one per output: their mean over all output positions."""
    consumer = consumer_weight.consumers[0][1]
    node, kernel = consumer.node, graph.tensors[consumer_weight.axis.tensor].shape[2:]
    taps = offset.view(-1, *kernel)
    if not lookup_operator(node).convolves:
        return taps.flatten(1).sum(1)
    space = graph.shapes[consumer.input][-len(kernel) :]
    # Convolve an image of ones with the offsets: at the border, padding drops the taps that fall outside.
    weight = taps.unsqueeze(consumer_weight.axis.dim)
    args = {**node.args, "input": offset.new_ones(1, 1, *space), "weight": weight, "bias": None, "groups": 1}
    means: Tensor = node.compute(args).flatten(2).mean(2)[0]
    return means


@dataclass(frozen=True)
class _OffsetTarget:
    """Tensors that take the lost mean, and its sign; without names, a new bias is made.

    A batch norm subtracts its running mean, so there the sign is −1.
    """

    names: tuple[str, ...] = ()
    sign: int = 1


def _find_offset_target(
    selection: Selection, consumer_weight: ConsumerWeight, used_tensors: set[str]
) -> _OffsetTarget | None:
    """Find a tensor that can take the lost mean: one read by all layers that use the weight, and by no other.

    In this order: the running mean of the next batch norm, a stored bias, a new bias.
    """
    graph = selection.graph
    nodes = list({c.node.name: c.node for _, c in consumer_weight.consumers}.values())
    mean = _find_next_running_mean(graph, nodes)
    # A running mean is preferred: it adds no parameter and takes the mean whether or not the layer has a bias.
    if mean is not None and mean not in used_tensors:
        return _OffsetTarget((mean,), sign=-1)
    biases = [_get_bias(node) for node in nodes]
    if not any(biases):
        can = selection.new_biases and all(_can_have_bias(node, consumer_weight.axis.tensor) for node in nodes)
        return _OffsetTarget() if can else None
    names = [graph.parameters.get(bias.name) if bias else None for bias in biases]
    stored = tuple(dict.fromkeys(name for name in names if name is not None))
    free = None not in names and not used_tensors & set(stored) and _is_read_only_by(graph, stored, nodes)
    return _OffsetTarget(stored) if free else None


def count_new_bias_entries(selection: Selection, consumer_weight: ConsumerWeight) -> int:
    """Count the entries of the bias that a fit of this weight makes; 0 if a stored tensor takes the mean."""
    target = _find_offset_target(selection, consumer_weight, set())
    if target is None or target.names:
        return 0
    shape = selection.graph.tensors[consumer_weight.axis.tensor].shape
    # A transposed convolution stores its outputs along the second axis, those of one block.
    return int(shape[0] if consumer_weight.axis.dim else shape[1] * consumer_weight.blocks)


def _is_read_only_by(graph: Graph, tensors: Iterable[str], nodes: Sequence[Node]) -> bool:
    names = {node.name for node in nodes}
    return all(graph.nodes_reading(tensor) <= names for tensor in tensors)


def _apply_offset(
    graph: Graph, target: _OffsetTarget | None, offset: Tensor, used_tensors: set[str]
) -> tuple[dict[str, Tensor], Tensor | None, MeanHandling]:
    """Return new values of stored tensors, the new bias if one is made, and how the mean was handled."""
    if target is None:
        return {}, None, MeanHandling.LOST
    if not target.names:
        return {}, offset, MeanHandling.NEW_BIAS
    # A second offset in the same tensor would spoil the mean that this one restores.
    used_tensors |= set(target.names)
    return {name: graph.tensors[name].double() + target.sign * offset for name in target.names}, None, MeanHandling.KEPT


def _find_next_running_mean(graph: Graph, nodes: Sequence[Node]) -> str | None:
    """Return the running mean of the batch norm that is the only consumer of a layer and reads only this layer."""
    # Another reader of the layer would miss the correction; another layer behind the same norm would get a wrong one.
    users = graph.users(nodes[0].name) if len(nodes) == 1 else []
    mean = users[0].args.get("running_mean") if len(users) == 1 and lookup_operator(users[0]).norm == "batch" else None
    name = graph.parameters.get(mean.name) if isinstance(mean, Ref) else None
    return name if name is not None and graph.nodes_reading(name) == {users[0].name} else None


def _get_bias(node: Node) -> Ref | None:
    # addmm(bias, mat1, mat2) is a linear layer only with beta = alpha = 1.
    plain = node.args.get("beta", 1) == 1 and node.args.get("alpha", 1) == 1
    bias = node.args.get("self") if "mat1" in node.args and plain else node.args.get("bias")
    return bias if isinstance(bias, Ref) else None


def _can_have_bias(node: Node, weight: str) -> bool:
    """Return whether the layer is of a torch class and owns this weight; a tied weight may be stored elsewhere."""
    own = weight == f"{node.module.split('@')[0]}.weight"
    return own and "bias" in _list_argument_names(node) and node.module_type.startswith("torch.nn.modules")


def _list_argument_names(node: Node) -> list[str]:
    schema: Any = getattr(node.fn, "_schema", None)
    return [a.name for a in schema.arguments] if schema else []
