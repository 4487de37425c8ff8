"""Fit layers in sequence, each on the inputs that it gets from the layers merged before it.

The original and the merged network run side by side, node by node, at full size. At a layer that reads removed
channels, the features are its inputs in the merged network and the target is its output in the original. Where this
output is added to a residual stream that already carries an error, the target is corrected by that error, so that
later blocks compensate for the errors of earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.calibration.distributed import ProcessGroup, check_all_have_batches, reduce_over_processes
from neuron_merging.calibration.layer_stats import (
    ConsumerWeight,
    collect_fit_statistics,
    count_rows,
    get_weight_input,
    make_position_sampler,
)
from neuron_merging.calibration.output_divergence import Divergence, find_logits_outputs
from neuron_merging.calibration.regression import FitSolution, FitStatistics, average_statistics
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis, Mask
from neuron_merging.channels.masked_run import GraphEdits, MaskedGraph, build_keep_mask
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.errors import MergingError
from neuron_merging.graph.copying import to_working_precision
from neuron_merging.graph.example_inputs import flatten_inputs, flatten_outputs
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import Interpreter, bind_arguments
from neuron_merging.merging.fit import build_graph_edits, build_merges, solve_blocks
from neuron_merging.merging.protocol import MergeResult

NodeArguments = dict[str, Any]
ResidualStream = tuple[str, Tensor]
"""The name of the value that a layer's output is added to, and the factor that converts it to the layer's scale."""


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
    beside: Sequence[Sequence[Any]] = (),
) -> MergeResult:
    """Fit all weights in the order of the graph and return their merges.

    The values that all batches have at the layer to fit are held in memory at once.

    Parameters
    ----------
    selection
        The network and the units that stay.
    consumer_weights
        The weights to fit.
    batches
        Inputs of the network.
    ridge
        The share of each feature's variance that is added to the diagonal of its covariance.
    restore
        Whether outputs are scaled back to their original variance.
    reestimate
        Give every batch norm the mean and variance that it sees in the merged network.
    seed
        Seeds the choice of positions that rows are taken from.
    row_factor
        Multiplies the number of rows per fitted weight.
    include_original
        Fit on the layer's inputs in the original as well, row for row. This is half way to a fit of all layers at
        once, and less sensitive to few inputs.
    given
        Statistics that are known already.
    processes
        Processes that run different batches; all fit to the statistics over all of them.
    beside
        Inputs of another source, which have half of the say.
    """
    held = list(batches)
    if processes is not None:
        check_all_have_batches(len(held), processes)
    if not held:
        raise MergingError("there is no calibration batch", where="calibration=", fix="Give at least one batch.")
    shared = [
        consumer_weight
        for consumer_weight in consumer_weights
        if len(consumer_weight.inputs) > 1 and consumer_weight.axis not in (given or {})
    ]
    # A weight that several layers share needs one fit for all of them. The later ones have no merged inputs when the
    # first is fitted, so all use the original's values.
    known = {
        **(given or {}),
        **(
            dict(collect_fit_statistics(selection, shared, held, seed=seed, row_factor=row_factor, processes=processes))
            if shared
            else {}
        ),
    }
    pair = _NetworkPair(selection, consumer_weights, [*held, *beside], processes, len(beside))
    for node in progress.track_progress(selection.graph.nodes, "fitting layer after layer"):
        # What follows the last fit is not needed, and the scores of a large vocabulary would fill the memory.
        if not reestimate and len(pair.fitted) == len(consumer_weights):
            break
        consumer_weight = pair.weights_by_node.get(node.name)
        if consumer_weight is not None and consumer_weight.axis not in pair.fitted:
            pair.run_pending()
            statistics = known.get(consumer_weight.axis) or pair.collect_statistics(
                consumer_weight,
                node,
                make_position_sampler(seed, row_factor * selection.analysis.row_share),
                include_original,
            )
            pair.apply_fit(
                consumer_weight, solve_blocks(selection, consumer_weight, statistics, ridge, restore, pair.used_tensors)
            )
        if reestimate and lookup_operator(node).norm == "batch" and node.args.get("running_mean") is not None:
            pair.run_pending()
            pair.reestimate_norm(node)
        pair.pending.append(node.name)
    return pair.results()


def measure_divergences(
    selection: Selection,
    consumer_weights: Sequence[ConsumerWeight],
    candidates: Sequence[MergeResult],
    batches: Iterable[Sequence[Any]],
    *,
    confident: bool = False,
) -> list[float]:
    """Measure the divergence of each candidate's outputs from the original's.

    On real data the original is `confident`: probabilities are near 0 or 1, and their Kullback-Leibler divergence is
    almost zero whatever the scores are. Class scores are then compared by their squared error, too.
    """
    graph, stays = selection.graph, _build_needed_mask(selection)
    edits = [
        build_graph_edits(
            graph,
            merged,
            {consumer_weight.axis: consumer_weight.removed_positions for consumer_weight in consumer_weights},
        )
        for merged in candidates
    ]
    found: list[Divergence] = []
    for batch in progress.track_progress(list(batches), "comparing fits"):
        own = selection.analysis.graph_for(batch)
        masked, inputs = MaskedGraph(own, selection.channels), flatten_inputs(batch)
        original = selection.compute_original_outputs(batch)
        classes = find_logits_outputs(graph, [tuple(value.shape) for value in original])
        # Shapes of the outputs, and with them which are class scores, are known from the first batch on.
        found = found or [Divergence(frozenset() if confident else classes) for _ in candidates]
        for divergence, edit in zip(found, edits, strict=True):
            divergence.add(original, flatten_outputs(masked.start(inputs, stays, edit).run()))
    return [divergence.value for divergence in found] or [math.inf for _ in candidates]


def _build_needed_mask(selection: Selection) -> Mask:
    """Return the mask of kept units; of all units, where zero columns are enough to hide the removed ones."""
    groups = selection.channels.groups
    needed = any(group.norms_across_channels or any(c.axis is None for c in group.consumers) for group in groups)
    return build_keep_mask(selection.channels, selection.kept if needed else {})


class _NetworkPair:
    """Runs the original and the merged network side by side, node by node, over all batches."""

    def __init__(
        self,
        selection: Selection,
        consumer_weights: Sequence[ConsumerWeight],
        batches: Sequence[Sequence[Any]],
        processes: ProcessGroup | None = None,
        beside: int = 0,
    ) -> None:
        self.selection, self.team = selection, processes
        self.sources = [range(len(batches) - beside), range(len(batches) - beside, len(batches))][: 2 if beside else 1]
        self.weights_by_node = {
            name: consumer_weight for consumer_weight in consumer_weights for name in consumer_weight.inputs
        }
        # Statistics of several processes or sources are added up or averaged, which rows cannot be.
        joined = processes is not None or len(self.sources) > 1
        self.rows = {} if joined else count_rows(selection, consumer_weights, batches)
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
        self.used_tensors: set[str] = set()
        self.pending = [""]
        """Nodes that will run before the next fit. The empty name stands for the start."""

    def results(self) -> MergeResult:
        """Return all merges and the re-estimated statistics of batch norms."""
        return self.merged + MergeResult((), self.norms)

    def run_pending(self) -> None:
        """Compute the pending nodes in both networks, batch by batch: what lies between is held for one batch only.

        A batch of another size may have further nodes behind one of these.
        """
        for before, after, nodes, more in zip(self.before, self.after, self.nodes, self.more, strict=True):
            for name in self.pending:
                for node in (*([nodes[name]] if name in nodes else []), *more.get(name, ())):
                    before.run_node(node)
                    after.run_node(node)
        self.pending = []

    def reestimate_norm(self, node: Node) -> None:
        """Set the running mean and variance of a batch norm to those of the merged network's values."""
        pairs = [(run, own[node.name]) for run, own in zip(self.after, self.nodes, strict=True) if node.name in own]
        inputs = [run.arguments(own)["input"].movedim(1, 0).flatten(1) for run, own in pairs]
        seen = torch.cat(inputs, 1).double()
        found = {}
        # One value per channel has no variance.
        if seen.shape[1] > 1:
            for key, value in (("running_mean", seen.mean(1)), ("running_var", seen.var(1))):
                name = self.selection.graph.parameters.get(node.args[key].name)
                if name is not None:
                    found[name] = value
        self.norms |= found
        self._apply_edits(MergeResult((), found))

    def _apply_edits(self, own: MergeResult, zeroed: Mapping[Axis, Tensor] | None = None) -> None:
        """Apply the changes of these merges to the rest of the merged network's run."""
        graph, fitted = self.selection.graph, {axis.tensor for axis in self.fitted}
        # Weights whose only reader has run are not needed again: all of them would be a second copy of the network.
        needed = {
            name: value
            for name, value in self.edits.tensors.items()
            if name not in fitted or len(graph.nodes_reading(name)) > 1
        }
        self.edits = GraphEdits(needed, self.edits.biases) | build_graph_edits(graph, own, zeroed).write_columns(graph)
        for masked, run in zip(self.masked, self.after, strict=True):
            masked.continue_with(run, self.stays, self.edits)

    def collect_statistics(
        self, consumer_weight: ConsumerWeight, node: Node, sample: Any, include_original: bool
    ) -> list[FitStatistics]:
        """Collect features from the merged network, and from the original if asked; targets come from the original."""
        parts = [self._collect_part(consumer_weight, node, sample, include_original, own) for own in self.sources]
        return [reduce(average_statistics, blocks) for blocks in zip(*parts, strict=True)]

    def _collect_part(
        self, consumer_weight: ConsumerWeight, node: Node, sample: Any, include_original: bool, batches: range
    ) -> list[FitStatistics]:
        """Collect the statistics of the batches of one source."""
        matrices = consumer_weight.to_matrices(self.selection.tensor(consumer_weight.axis.tensor))
        rows = self.rows.get(consumer_weight.axis)
        expected = None if rows is None else rows * (2 if include_original else 1)
        found = [consumer_weight.make_accumulator(expected) for _ in matrices]
        stream = self._find_residual_stream(consumer_weight, node)
        for i in batches:
            old, new, own = self.before[i], self.after[i], self.nodes[i][node.name]
            value = get_weight_input(consumer_weight, own, old.arguments(own))
            layout = consumer_weight.get_row_layout(own)
            # The same positions in both networks and in the stream: rows of features and targets belong together.
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
                # The target is what the kept columns miss: original output, plus the error of the residual stream,
                # minus what the kept columns contribute with their old weights.
                regression.add(features, output + errors[block] - features @ matrix[:, kept].to(features).T, output)
                # The same rows as the original sees them, where the stream has no error yet.
                if include_original:
                    features = before[block][:, kept]
                    regression.add(features, output - features @ matrix[:, kept].to(features).T, output)
        whole = found if self.team is None else [reduce_over_processes(own, self.team) for own in found]
        return [own.to_fit_statistics() for own in whole]

    def _find_residual_stream(self, consumer_weight: ConsumerWeight, node: Node) -> ResidualStream | None:
        """Return the value that the layer's output is added to, directly or behind a batch norm, if there is one."""
        graph = self.selection.graph
        # Rows of such a fit are single taps, so the error of an output cannot be assigned to them.
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
            # The stream is added behind the norm; dividing by its gain γ/σ converts the error to the layer's output.
            factor = 1 / _compute_norm_gain(bind_arguments(end, {**self.before[0].values, node.name: None}))
            factor = factor.view(-1, *(1 for _ in node.shape[2:]))
            users = graph.users(end.name)
        others = [ref.name for ref in users[0].refs() if ref.name != end.name] if len(users) == 1 else []
        if len(others) != 1 or lookup_operator(users[0]).arithmetic != "add" or users[0].args.get("alpha", 1) != 1:
            return None
        # A shortcut has been computed by now; another branch may come later. A norm with gain 0 hides the layer.
        ready = all(isinstance(run.values.get(others[0]), Tensor) for run in self.before)
        usable = ready and graph.shapes.get(others[0]) == node.shape and bool(factor.isfinite().all())
        return (others[0], factor) if usable else None

    def apply_fit(self, consumer_weight: ConsumerWeight, parts: Sequence[FitSolution | None]) -> None:
        """Apply a fit to the merged network."""
        own = build_merges(self.selection, consumer_weight, parts, self.used_tensors)
        self.merged += own
        self._apply_edits(own, {consumer_weight.axis: consumer_weight.removed_positions})
        self.fitted.add(consumer_weight.axis)


def _find_extra_nodes(graph: Graph, example: Graph) -> dict[str, list[Node]]:
    """Return the nodes that the example's graph lacks, by the last shared node before them.

    A batch of another size may be captured with a few more nodes.
    """
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
    """Return the error of the residual stream in the merged network, at the rows that are fitted."""
    if stream is None:
        return None
    name, factor = stream
    return consumer_weight.get_row_layout(node).extract_outputs(
        (old.values[name] - new.values[name]) * factor.to(old.values[name]), at
    )


def _compute_norm_gain(args: NodeArguments) -> Tensor:
    """Return the factor γ / sqrt(variance + ε) of a batch norm."""
    gain: Tensor = (args["running_var"] + args["eps"]).rsqrt()
    return gain if args.get("weight") is None else gain * args["weight"]
