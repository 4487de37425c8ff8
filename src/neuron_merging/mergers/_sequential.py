"""Fit layer after layer, each to what the network that is already merged feeds it.

The original and the merged network run side by side, node by node, at full size. At a layer that
reads removed channels, the features are what it reads in the merged network and the target is what
it puts out in the original. Where its output is added to a stream that already carries an error, the
target is corrected by that error, so a residual network repairs itself block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.channels.classes import class_scores
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.masks import masks_of, over_kept, staying
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Selection
from neuron_merging.errors import MergingError
from neuron_merging.graph.execution import Execution, bound
from neuron_merging.graph.precision import working
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Graph, Node, Ref
from neuron_merging.mergers._fit import merges_of, solved
from neuron_merging.mergers.interface import Merged
from neuron_merging.statistics.divergence import Divergence
from neuron_merging.statistics.regression import Known, Solution
from neuron_merging.statistics.sampled import sampled, sampler
from neuron_merging.statistics.together import Team, check_batches_of_all, gathered
from neuron_merging.statistics.uses import Use, read

Arguments = dict[str, Any]
Stream = tuple[str, Tensor]
"""A value that a layer's output is added to, and the factor that brings it to the layer's scale."""


def fit_in_sequence(
    selection: Selection,
    uses: Sequence[Use],
    batches: Iterable[Sequence[Any]],
    *,
    ridge: float,
    restore: bool,
    reestimate: bool = False,
    seed: int = 0,
    plenty: float = 1,
    beside: bool = False,
    given: Mapping[Axis, list[Known]] | None = None,
    team: Team | None = None,
) -> Merged:
    """The merges of all uses. Holds the values that are still needed of all batches at once.

    `reestimate` gives every batch norm the mean and variance that it sees in the merged network. `beside` fits to what
    the original network feeds a layer as well, row for row: half way to a fit at once, which is steadier. `given` are
    statistics that are known already. The processes of a `team` fit to what all of them see.
    """
    held = list(batches)
    check_batches_of_all(len(held), team)
    if not held:
        raise MergingError("there is no calibration batch", where="calibration=", fix="Give at least one batch.")
    shared = [use for use in uses if len(use.inputs) > 1 and use.axis not in (given or {})]
    # A weight that is used in several places has one fit for all of them, on the original's values.
    known = {
        **(given or {}),
        **(dict(sampled(selection, shared, held, seed=seed, plenty=plenty, team=team)) if shared else {}),
    }
    pair = _Pair(selection, uses, held, reestimate, team)
    for node in progress.each(selection.graph.nodes, "fitting layer after layer"):
        use = pair.uses.get(node.name)
        if use is not None and use.axis not in pair.weights:
            joints = known.get(use.axis) or pair.observe(use, node, sampler(seed, plenty), beside)
            pair.take(use, solved(selection, use, joints, ridge, restore, pair.taken))
        pair.step(node)
    return pair.results()


def divergence(
    selection: Selection, uses: Sequence[Use], merged: Merged, batches: Iterable[Sequence[Any]], *, sure: bool = False
) -> float:
    """How far the merged network's answers are from the original's.

    Where the original is `sure` of its answers, as it is of what it was trained on, their squared error counts: the
    divergence of classes that nobody doubts is next to nothing, whatever the scores are.
    """
    pair = _Pair(selection, uses, list(batches), reestimate=False)
    for use in uses:
        pair.adopt(use, Merged(tuple(merge for merge in merged.merges if merge.consumer.axis == use.axis)))
    pair.tensors |= merged.tensors
    for node in progress.each(selection.graph.nodes, "comparing two fits"):
        pair.step(node)
    return pair.divergence(sure)


class _Pair:
    """The original and the merged network, in lockstep over all batches."""

    def __init__(
        self,
        selection: Selection,
        uses: Sequence[Use],
        batches: Sequence[Sequence[Any]],
        reestimate: bool,
        team: Team | None = None,
    ) -> None:
        self.selection, self.reestimate, self.team = selection, reestimate, team
        self.uses = {name: use for use in uses for name in use.inputs}
        graphs = [(selection.analysis.graph_for(batch), flat(batch)) for batch in batches]
        self.before = [Execution(graph, batch, selection.graph.tensors) for graph, batch in graphs]
        self.after = [Execution(graph, batch, selection.graph.tensors) for graph, batch in graphs]
        self.nodes = [{node.name: node for node in graph.nodes} for graph, _ in graphs]
        self.more = [_more(graph, selection.graph) for graph, _ in graphs]
        self.stays = staying(selection.channels, selection.kept)
        self.zeroed = any(g.mixing or any(c.axis is None for c in g.consumers) for g in selection.channels.groups)
        self.weights: dict[Axis, Tensor] = {}
        self.biases: dict[Axis, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.norms: dict[str, Tensor] = {}
        self.merged = Merged(())
        self.taken: set[str] = set()
        self._catch_up("")

    def results(self) -> Merged:
        return self.merged + Merged((), self.norms)

    def divergence(self, sure: bool) -> float:
        """Of what the merged network answers, over all batches."""
        found = None
        for old, new in zip(self.before, self.after, strict=True):
            answers = [[value for value in run.outputs() if isinstance(value, Tensor)] for run in (old, new)]
            if found is None:
                shapes = [tuple(value.shape) for value in answers[0]]
                found = Divergence(frozenset() if sure else class_scores(self.selection.graph, shapes))
            found.add(*answers)
        return math.inf if found is None else found.value

    def step(self, node: Node) -> None:
        """Compute one node in both networks, for the batches whose graph has it."""
        having = [i for i, nodes in enumerate(self.nodes) if node.name in nodes]
        own = {i: self.nodes[i][node.name] for i in having}
        for i in having:
            self.before[i].step(own[i], own[i].compute(self.before[i].arguments(own[i])))
        args = {i: self.after[i].arguments(own[i]) for i in having}
        if self.reestimate and row_of(node).norm == "batch" and node.args.get("running_mean") is not None:
            self._estimate(node, list(args.values()))
        for i in having:
            self.after[i].step(own[i], self._merged(own[i], args[i]))
        self._catch_up(node.name)

    def _catch_up(self, name: str) -> None:
        """Compute what only the graph of a batch has, behind the node that all have."""
        for before, after, more in zip(self.before, self.after, self.more, strict=True):
            for node in more.get(name, ()):
                before.step(node, node.compute(before.arguments(node)))
                after.step(node, self._merged(node, after.arguments(node)))

    def _merged(self, node: Node, args: Arguments) -> Any:
        use = self.uses.get(node.name)
        parameters = {
            k: self.selection.graph.parameters.get(v.name) for k, v in node.args.items() if isinstance(v, Ref)
        }
        for key, name in parameters.items():
            if name in self.tensors:
                args[key] = self.tensors[name].to(args[key])
            if use is not None and name == use.axis.tensor:
                args[key] = self.weights[use.axis]
        value = self._zeroed(node, args) if self.zeroed else node.compute(args)
        if use is None or use.axis not in self.biases:
            return value
        return value + _along(self.biases[use.axis].to(value), value, _output_dim(use, node, value))

    def _zeroed(self, node: Node, args: Arguments) -> Any:
        masks = masks_of(self.selection.channels, self.stays, node.name)
        value = over_kept(self.selection.channels, self.stays, node, args, masks)
        for dim, stay in masks.items():
            value = value * _along(torch.from_numpy(stay).to(value.device), value, dim)
        return value

    def _estimate(self, node: Node, args: Sequence[Arguments]) -> None:
        seen = torch.cat([own["input"].movedim(1, 0).flatten(1) for own in args], 1).double()
        if seen.shape[1] > 1:
            for key, value in (("running_mean", seen.mean(1)), ("running_var", seen.var(1))):
                name = self.selection.graph.parameters.get(node.args[key].name)
                if name is not None:
                    self.norms[name] = self.tensors[name] = value

    def observe(self, use: Use, node: Node, sample: Any, beside: bool) -> list[Known]:
        """Features from the merged network, and from the original `beside` them; targets from the original."""
        matrices = use.matrices(self.selection.tensor(use.axis.tensor))
        found = [use.gatherer() for _ in matrices]
        stream = self._stream(use, node)
        for old, new, nodes in zip(self.before, self.after, self.nodes, strict=True):
            own = nodes[node.name]
            value = read(use, own, old.arguments(own))
            places = use.places(own)
            at = places.pick(value, sample)
            both = (places.rows(v, at) for v in (value, read(use, own, new.arguments(own))))
            before, after = ([working(rows) for rows in blocks] for blocks in both)
            errors = _errors(use, own, old, new, stream, at) or [
                torch.zeros((), dtype=torch.float32, device=value.device)
            ] * len(matrices)
            for block, (matrix, regression) in enumerate(zip(matrices, found, strict=True)):
                kept = use.kept(block).to(value.device)
                features, output = after[block][:, kept], before[block] @ matrix.to(before[block]).T
                regression.add(features, output + errors[block] - features @ matrix[:, kept].to(features).T, output)
                if beside:
                    features = before[block][:, kept]
                    regression.add(features, output - features @ matrix[:, kept].to(features).T, output)
        return [gathered(own, self.team).joint() for own in found]

    def _stream(self, use: Use, node: Node) -> Stream | None:
        graph = self.selection.graph
        if use.one_tap:
            return None
        end, factor = node, torch.ones((), dtype=torch.float32, device=graph.tensors[use.axis.tensor].device)
        users = graph.users(end.name)
        if len(users) == 1 and row_of(users[0]).norm == "batch" and isinstance(users[0].args.get("running_var"), Ref):
            end = users[0]
            factor = 1 / _gain(bound(end, {**self.before[0].values, node.name: None}))
            factor = _along(factor, torch.empty(node.shape, device="meta"), 1)
            users = graph.users(end.name)
        others = [ref.name for ref in users[0].refs() if ref.name != end.name] if len(users) == 1 else []
        if len(others) != 1 or row_of(users[0]).arithmetic != "add" or users[0].args.get("alpha", 1) != 1:
            return None
        ready = all(isinstance(run.values.get(others[0]), Tensor) for run in self.before)
        usable = ready and graph.shapes.get(others[0]) == node.shape and bool(factor.isfinite().all())
        return (others[0], factor) if usable else None

    def take(self, use: Use, parts: Sequence[Solution | None]) -> None:
        """Put a fit into the merged network."""
        self.adopt(use, merges_of(self.selection, use, parts, self.taken))

    def adopt(self, use: Use, own: Merged) -> None:
        """Put a use's merges into the merged network; the first one has the columns."""
        self.merged += own
        first = own.merges[0]
        weight = use.axis.expose(self.selection.tensor(use.axis.tensor))
        stay = torch.from_numpy(use.stays).nonzero()[:, 0].to(weight.device)
        columns = first.columns
        if columns is None:
            columns = weight.index_select(use.axis.dim, stay)
        self.tensors |= own.tensors
        if first.bias is not None:
            self.biases[use.axis] = first.bias
        wide = torch.zeros_like(weight).index_copy_(use.axis.dim, stay, columns.to(weight))
        self.weights[use.axis] = use.axis.restore(wide).to(self.selection.graph.tensors[use.axis.tensor].dtype)


def _more(graph: Graph, example: Graph) -> dict[str, list[Node]]:
    """What a graph has more than the example's, by the last node before that both have."""
    found: dict[str, list[Node]] = {}
    last = ""
    for node in graph.nodes:
        if example.node(node.name) is not None:
            last = node.name
        else:
            found.setdefault(last, []).append(node)
    return found


def _errors(
    use: Use, node: Node, old: Execution, new: Execution, stream: Stream | None, at: Tensor
) -> list[Tensor] | None:
    """What the stream lacks in the merged network, at the rows that are fitted."""
    if stream is None:
        return None
    name, factor = stream
    return use.places(node).outputs((old.values[name] - new.values[name]) * factor.to(old.values[name]), at)


def _gain(args: Arguments) -> Tensor:
    """What a batch norm multiplies each channel by."""
    gain: Tensor = (args["running_var"] + args["eps"]).rsqrt()
    return gain if args.get("weight") is None else gain * args["weight"]


def _along(vector: Tensor, like: Tensor, dim: int) -> Tensor:
    return vector.view(-1, *(1 for _ in range(like.ndim - 1 - dim)))


def _output_dim(use: Use, node: Node, value: Tensor) -> int:
    return value.ndim - len(use.kernel) - 1 if row_of(node).convolves else value.ndim - 1
