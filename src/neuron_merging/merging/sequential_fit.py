"""Fit layer after layer, each to the inputs that it gets in the network merged so far.

The original and the merged network run side by side, node by node, at full size. At a layer that reads removed
channels, the features are its inputs in the merged network and the target is its output in the original. Where this
output is added to a residual stream that already carries an error, the target is corrected by that error, so a
residual network repairs itself block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.calibration.consumer_weights import ConsumerWeight, get_weight_input
from neuron_merging.calibration.distributed import ProcessGroup, check_all_have_batches, reduce_over_processes
from neuron_merging.calibration.layer_stats import collect_fit_statistics, make_position_sampler
from neuron_merging.calibration.output_divergence import Divergence, find_logits_outputs
from neuron_merging.calibration.regression import FitSolution, FitStatistics
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.labels import Mask
from neuron_merging.channels.masked_run import GraphEdits, MaskedGraph, build_keep_mask
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.errors import MergingError
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import Interpreter, bind_arguments
from neuron_merging.graph.precision import to_working_precision
from neuron_merging.graph.pytree import flatten_inputs, flatten_outputs
from neuron_merging.merging.fit import build_graph_edits, build_merges, solve_blocks
from neuron_merging.merging.protocol import MergeResult

NodeArguments = dict[str, Any]
ResidualStream = tuple[str, Tensor]
"""A value that a layer's output is added to, and the factor that brings it to the layer's scale."""


def fit_sequentially(
    selection: Selection,
    consumer_weights: Sequence[ConsumerWeight],
    batches: Iterable[Sequence[Any]],
    *,
    ridge: float,
    restore: bool,
    reestimate: bool = False,
    seed: int = 0,
    row_factor: float = 1,
    include_original: bool = False,
    given: Mapping[Axis, list[FitStatistics]] | None = None,
    processes: ProcessGroup | None = None,
) -> MergeResult:
    """The merges of all uses. Holds the values that are still needed of all batches at once.

    `reestimate` gives every batch norm the mean and variance that it sees in the merged network. `beside` fits to what
    the original network feeds a layer as well, row for row: half way to a fit at once, which is steadier. `given` are
    statistics that are known already. The processes of a `team` fit to what all of them see.
    """
    held = list(batches)
    check_all_have_batches(len(held), processes)
    if not held:
        raise MergingError("there is no calibration batch", where="calibration=", fix="Give at least one batch.")
    shared = [
        consumer_weight
        for consumer_weight in consumer_weights
        if len(consumer_weight.inputs) > 1 and consumer_weight.axis not in (given or {})
    ]
    # A weight that is used in several places has one fit for all of them, on the original's values.
    known = {
        **(given or {}),
        **(
            dict(collect_fit_statistics(selection, shared, held, seed=seed, row_factor=row_factor, processes=processes))
            if shared
            else {}
        ),
    }
    pair = _NetworkPair(selection, consumer_weights, held, reestimate, processes)
    for node in progress.track_progress(selection.graph.nodes, "fitting layer after layer"):
        consumer_weight = pair.uses.get(node.name)
        if consumer_weight is not None and consumer_weight.axis not in pair.fitted:
            statistics = known.get(consumer_weight.axis) or pair.collect_statistics(
                consumer_weight, node, make_position_sampler(seed, row_factor), include_original
            )
            pair.take(consumer_weight, solve_blocks(selection, consumer_weight, statistics, ridge, restore, pair.taken))
        pair.step(node)
    return pair.results()


def measure_divergences(
    selection: Selection,
    consumer_weights: Sequence[ConsumerWeight],
    ways: Sequence[MergeResult],
    batches: Iterable[Sequence[Any]],
    *,
    sure: bool = False,
) -> list[float]:
    """How far the answers of each merged network are from the original's.

    Where the original is `sure` of its answers, as it is of what it was trained on, their squared error counts: the
    divergence of classes that nobody doubts is next to nothing, whatever the scores are.
    """
    graph, stays = selection.graph, _build_needed_mask(selection)
    edits = [
        build_graph_edits(
            graph,
            merged,
            {consumer_weight.axis: consumer_weight.removed_positions for consumer_weight in consumer_weights},
        )
        for merged in ways
    ]
    written = [own.write_columns(graph) for own in edits]
    found: list[Divergence] = []
    for batch in progress.track_progress(list(batches), "comparing fits"):
        own = selection.analysis.graph_for(batch)
        masked, inputs = MaskedGraph(own, selection.channels), flatten_inputs(batch)
        original = flatten_outputs(Interpreter(own, inputs, graph.tensors).run())
        classes = find_logits_outputs(graph, [tuple(value.shape) for value in original])
        found = found or [Divergence(frozenset() if sure else classes) for _ in ways]
        for divergence, edit in zip(found, written, strict=True):
            divergence.add(original, flatten_outputs(masked.start(inputs, stays, edit).run()))
    return [divergence.value for divergence in found] or [math.inf for _ in ways]


def _build_needed_mask(selection: Selection) -> Mask:
    """The units that stay; all of them where columns of zeros are enough to hide what was removed."""
    groups = selection.channels.groups
    needed = any(group.norms_across_channels or any(c.axis is None for c in group.consumers) for group in groups)
    return build_keep_mask(selection.channels, selection.kept if needed else {})


class _NetworkPair:
    """The original and the merged network, in lockstep over all batches."""

    def __init__(
        self,
        selection: Selection,
        consumer_weights: Sequence[ConsumerWeight],
        batches: Sequence[Sequence[Any]],
        reestimate: bool,
        processes: ProcessGroup | None = None,
    ) -> None:
        self.selection, self.reestimate, self.team = selection, reestimate, processes
        self.uses = {name: consumer_weight for consumer_weight in consumer_weights for name in consumer_weight.inputs}
        self.stays, self.edits = _build_needed_mask(selection), GraphEdits()
        graphs = [(selection.analysis.graph_for(batch), flatten_inputs(batch)) for batch in batches]
        self.masked = [MaskedGraph(graph, selection.channels) for graph, _ in graphs]
        self.before = [Interpreter(graph, batch, selection.graph.tensors) for graph, batch in graphs]
        self.after = [
            own.start(batch, self.stays, self.edits) for own, (_, batch) in zip(self.masked, graphs, strict=True)
        ]
        self.nodes = [{node.name: node for node in graph.nodes} for graph, _ in graphs]
        self.more = [_find_extra_nodes(graph, selection.graph) for graph, _ in graphs]
        self.norms: dict[str, Tensor] = {}
        self.merged = MergeResult(())
        self.fitted: set[Axis] = set()
        self.taken: set[str] = set()
        self._run_extra_nodes("")

    def results(self) -> MergeResult:
        return self.merged + MergeResult((), self.norms)

    def step(self, node: Node) -> None:
        """Compute one node in both networks, for the batches whose graph has it."""
        own = {i: nodes[node.name] for i, nodes in enumerate(self.nodes) if node.name in nodes}
        for i in own:
            self.before[i].run_node(own[i])
        if self.reestimate and lookup_operator(node).norm == "batch" and node.args.get("running_mean") is not None:
            self._reestimate_norm(node, [self.after[i].arguments(own[i]) for i in own])
        for i in own:
            self.after[i].run_node(own[i])
        self._run_extra_nodes(node.name)

    def _run_extra_nodes(self, name: str) -> None:
        """Compute what only the graph of a batch has, behind the node that all have."""
        for before, after, more in zip(self.before, self.after, self.more, strict=True):
            for node in more.get(name, ()):
                before.run_node(node)
                after.run_node(node)

    def _reestimate_norm(self, node: Node, args: Sequence[NodeArguments]) -> None:
        seen = torch.cat([own["input"].movedim(1, 0).flatten(1) for own in args], 1).double()
        found = {}
        if seen.shape[1] > 1:
            for key, value in (("running_mean", seen.mean(1)), ("running_var", seen.var(1))):
                name = self.selection.graph.parameters.get(node.args[key].name)
                if name is not None:
                    found[name] = value
        self.norms |= found
        self._edit(MergeResult((), found))

    def _edit(self, own: MergeResult, zeroed: Mapping[Axis, Tensor] | None = None) -> None:
        """Let the merged network go on with what these merges change."""
        graph = self.selection.graph
        self.edits |= build_graph_edits(graph, own, zeroed).write_columns(graph)
        for masked, run in zip(self.masked, self.after, strict=True):
            masked.continue_with(run, self.stays, self.edits)

    def collect_statistics(
        self, consumer_weight: ConsumerWeight, node: Node, sample: Any, include_original: bool
    ) -> list[FitStatistics]:
        """Features from the merged network, and from the original `beside` them; targets from the original."""
        matrices = consumer_weight.to_matrices(self.selection.tensor(consumer_weight.axis.tensor))
        found = [consumer_weight.make_accumulator() for _ in matrices]
        stream = self._stream(consumer_weight, node)
        for old, new, nodes in zip(self.before, self.after, self.nodes, strict=True):
            own = nodes[node.name]
            value = get_weight_input(consumer_weight, own, old.arguments(own))
            layout = consumer_weight.get_row_layout(own)
            at = layout.sample_positions(value, sample)
            both = (
                layout.extract_rows(v, at) for v in (value, get_weight_input(consumer_weight, own, new.arguments(own)))
            )
            before, after = ([to_working_precision(rows) for rows in blocks] for blocks in both)
            errors = _compute_stream_errors(consumer_weight, own, old, new, stream, at) or [
                torch.zeros((), dtype=torch.float32, device=value.device)
            ] * len(matrices)
            for block, (matrix, regression) in enumerate(zip(matrices, found, strict=True)):
                kept = consumer_weight.kept_columns(block).to(value.device)
                features, output = after[block][:, kept], before[block] @ matrix.to(before[block]).T
                regression.add(features, output + errors[block] - features @ matrix[:, kept].to(features).T, output)
                if include_original:
                    features = before[block][:, kept]
                    regression.add(features, output - features @ matrix[:, kept].to(features).T, output)
        return [reduce_over_processes(own, self.team).to_fit_statistics() for own in found]

    def _stream(self, consumer_weight: ConsumerWeight, node: Node) -> ResidualStream | None:
        graph = self.selection.graph
        if consumer_weight.one_tap:
            return None
        end, factor = (
            node,
            torch.ones((), dtype=torch.float32, device=graph.tensors[consumer_weight.axis.tensor].device),
        )
        users = graph.users(end.name)
        if (
            len(users) == 1
            and lookup_operator(users[0]).norm == "batch"
            and isinstance(users[0].args.get("running_var"), Ref)
        ):
            end = users[0]
            factor = 1 / _compute_norm_gain(bind_arguments(end, {**self.before[0].values, node.name: None}))
            factor = factor.view(-1, *(1 for _ in node.shape[2:]))
            users = graph.users(end.name)
        others = [ref.name for ref in users[0].refs() if ref.name != end.name] if len(users) == 1 else []
        if len(others) != 1 or lookup_operator(users[0]).arithmetic != "add" or users[0].args.get("alpha", 1) != 1:
            return None
        ready = all(isinstance(run.values.get(others[0]), Tensor) for run in self.before)
        usable = ready and graph.shapes.get(others[0]) == node.shape and bool(factor.isfinite().all())
        return (others[0], factor) if usable else None

    def take(self, consumer_weight: ConsumerWeight, parts: Sequence[FitSolution | None]) -> None:
        """Put a fit into the merged network."""
        own = build_merges(self.selection, consumer_weight, parts, self.taken)
        self.merged += own
        self.fitted.add(consumer_weight.axis)
        self._edit(own, {consumer_weight.axis: consumer_weight.removed_positions})


def _find_extra_nodes(graph: Graph, example: Graph) -> dict[str, list[Node]]:
    """What a graph has more than the example's, by the last node before that both have."""
    found: dict[str, list[Node]] = {}
    last = ""
    for node in graph.nodes:
        if example.node(node.name) is not None:
            last = node.name
        else:
            found.setdefault(last, []).append(node)
    return found


def _compute_stream_errors(
    consumer_weight: ConsumerWeight,
    node: Node,
    old: Interpreter,
    new: Interpreter,
    stream: ResidualStream | None,
    at: Tensor,
) -> list[Tensor] | None:
    """What the stream lacks in the merged network, at the rows that are fitted."""
    if stream is None:
        return None
    name, factor = stream
    return consumer_weight.get_row_layout(node).extract_outputs(
        (old.values[name] - new.values[name]) * factor.to(old.values[name]), at
    )


def _compute_norm_gain(args: NodeArguments) -> Tensor:
    """What a batch norm multiplies each channel by."""
    gain: Tensor = (args["running_var"] + args["eps"]).rsqrt()
    return gain if args.get("weight") is None else gain * args["weight"]
