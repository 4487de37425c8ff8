"""Merge after the activation, without data: least squares on statistics that the network implies.

Where a closed form reaches (`statistics.gaussian`: vectors, from a prior on the input or from a layer norm), that is
the source. Feature maps are measured on synthetic inputs instead. Those alone would not do: deep in
a network their statistics drift away from those of real data. What a trained network carries pins
them down: a batch norm knows the mean and variance of its output, so it is fed the batch's own
statistics; a layer norm behind inputs that cannot be made up (tokens) is replaced by noise of the mean
and variance that its parameters state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_merging.channels.groups import Axis
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Selection
from neuron_merging.errors import MergingError
from neuron_merging.graph.macs import node_macs
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Graph, Node, Ref
from neuron_merging.mergers._fit import by_weights, fitted, not_stored
from neuron_merging.mergers.interface import Merged, merger
from neuron_merging.statistics import gaussian, synthetic
from neuron_merging.statistics.regression import Joint
from neuron_merging.statistics.sampled import sampled
from neuron_merging.statistics.uses import Use, find_uses

LEAST = 128
DEAD = 1e-10
WORK = 2**34
"""Multiply-accumulates that may be spent on more than the least number of synthetic inputs."""


@merger("moments")
@dataclass(frozen=True)
class Moments:
    """Fit what each consumer reads, by least squares over all kept channels and taps.

    `ridge` is the share of each channel's variance that counts as noise; `smoothness` the distance,
    in pixels, over which signals are taken to be correlated; `restore_variance` undoes the shrinking
    that comes with every fit. `samples` synthetic inputs are used where inputs must be made up; None
    takes as many as the narrowest layer needs for its fit, within a budget of work.
    """

    ridge: float = 0.01
    smoothness: float = 1.0
    restore_variance: bool = True
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("ridge", 0.0), ("smoothness", 1e-6)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise MergingError(f"{name} {value!r} is not a number of at least {least}", where=f"Moments({name}=)")

    def merge(self, selection: Selection) -> Merged:
        uses = find_uses(selection)
        found = self.statistics(selection, uses)
        known = [use for use in uses if use.axis in found]
        merges = fitted(selection, known, found, self.ridge, self.restore_variance)
        return merges + by_weights(selection, [use for use in uses if use.axis not in found]) + not_stored(selection)

    def statistics(self, selection: Selection, uses: Sequence[Use]) -> dict[Axis, list[Joint]]:
        """What each of these layers reads, as far as it can be known without data."""
        usable = [use for use in uses if use.fits]
        found = self._closed(selection, usable)
        rest = [use for use in usable if use.axis not in found]
        return {**found, **(self._sampled(selection, rest) if rest else {})}

    def _closed(self, selection: Selection, uses: Sequence[Use]) -> dict[Axis, list[Joint]]:
        """Layers whose input has statistics in closed form."""
        inputs = zip(selection.graph.inputs, flat(selection.inputs), strict=True)
        tensors = {name: value for name, value in inputs if name is not None and isinstance(value, Tensor)}
        single = [use for use in uses if len(use.consumers) == 1 and row_of(use.consumers[0][1].node).layer == "linear"]
        vectors = [use for use in single if not _from_maps(selection.graph, use.consumers[0][1].input)]
        if not vectors:
            return {}
        priors = {name: gaussian.prior(value, self.smoothness) for name, value in tensors.items() if value.ndim}
        reached = gaussian.propagate(
            selection.graph,
            {name: prior for name, prior in priors.items() if prior is not None},
            [use.consumers[0][1].input for use in vectors],
        )
        return {use.axis: [joint] for use in vectors if (joint := _joint(selection, use, reached)) is not None}

    def _sampled(self, selection: Selection, uses: Sequence[Use]) -> dict[Axis, list[Joint]]:
        tokens = _tokens(selection.graph)
        numbers = any(synthetic.is_numeric(value) for value in flat(selection.inputs))
        if not numbers and not tokens and not any(row_of(node).norm == "layer" for node in selection.graph.nodes):
            return {}
        norms = _Norms(self.seed, made_up=numbers)
        samples = _samples(selection, uses) if self.samples is None else self.samples
        try:
            batches = synthetic.probes(selection.inputs, samples, self.seed, tokens)
            return sampled(selection, uses, batches, norm=norms.compute, seed=self.seed)
        except (RuntimeError, IndexError, ValueError, MergingError):
            # An input without a batch dimension, or one whose values must obey rules of their own.
            return {}


def _tokens(graph: Graph) -> dict[int, int]:
    """The inputs that only choose rows of tables, by number, and how many rows there are to choose from."""
    found = {}
    for i, name in enumerate(graph.inputs):
        readers = _reading(graph, name) if name is not None else []
        tables = [node.args.get("weight") for node in readers if row_of(node).layer == "table"]
        if readers and len(tables) == len(readers):
            found[i] = min(graph.shapes[table.name][0] for table in tables if isinstance(table, Ref))
    return found


def _reading(graph: Graph, name: str) -> list[Node]:
    """What reads a value, through views of it."""
    found = ((_reading(graph, node.name) if row_of(node).view else [node]) for node in graph.users(name))
    return [node for nodes in found for node in nodes]


def _from_maps(graph: Graph, name: str) -> bool:
    """Whether a value is computed from feature maps; a layer norm on the way states its output anyhow."""
    seen, ahead = {name}, [name]
    while ahead:
        node = graph.node(ahead.pop())
        if node is None or row_of(node).spans:
            continue
        if row_of(node).convolves:
            return True
        new = {ref.name for ref in node.refs()} - seen
        seen |= new
        ahead += new
    return False


def _joint(selection: Selection, use: Use, reached: dict[str, gaussian.Statistics]) -> Joint | None:
    known = reached.get(use.consumers[0][1].input)
    if known is None or known.mean.ndim != 1:
        return None
    weight = selection.tensor(use.axis.tensor).to(known.mean)
    return Joint.of(known.mean, known.cov, weight, use.kept(0).to(known.mean.device))


def _samples(selection: Selection, uses: Sequence[Use]) -> int:
    """Enough inputs for eight rows per fitted weight in every layer, as long as they are cheap."""
    batch = synthetic.batch_size(selection.inputs)
    wanted = LEAST
    for use in uses:
        shape = next(iter(use.consumers))[1].node.shape
        outputs = selection.graph.tensors[use.axis.tensor].shape[1 if use.axis.dim == 0 else 0]
        positions = max(1, math.prod(shape) // max(1, outputs * batch))
        wanted = max(wanted, 8 * len(use.kept(0)) // positions)
    return min(wanted, max(LEAST, WORK * batch // max(1, sum(node_macs(selection.graph).values()))))


def _with_own_statistics(node: Node, args: dict[str, Any]) -> Tensor:
    """A batch norm of the batch's mean and variance; channels that are constant take the stored ones.

    Rounding would be blown up to the scale of a signal, and what a constant comes to be is in the parameters.
    """
    value, eps, usual = args["input"], args["eps"], args["running_var"]
    own, mean, gain = torch.native_batch_norm(value, args["weight"], args["bias"], None, None, True, 0.0, eps)
    if usual is None:
        return own
    dead = gain.double() ** -2 - eps <= DEAD * (mean.double().square() + usual.double()) + 1e-6 * eps
    shape = [-1, *(1 for _ in value.shape[2:])]
    return torch.where(dead.view(shape), node.compute(args), own) if bool(dead.any()) else own


class _Norms:
    """Normalisation layers whose output follows their parameters, not the synthetic input."""

    def __init__(self, seed: int, made_up: bool) -> None:
        self.pick, self.made_up = torch.Generator().manual_seed(seed), made_up

    def compute(self, node: Node, args: dict[str, Any]) -> Any:
        if row_of(node).norm == "batch" and args["input"].numel() > args["input"].shape[1]:
            return _with_own_statistics(node, args)
        if row_of(node).norm == "layer" and not self.made_up:
            return self._noise(args["input"], args.get("weight"), args.get("bias"))
        return node.compute(args)

    def _noise(self, like: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        value = torch.randn(like.shape, generator=self.pick).to(like)
        value = value * weight if weight is not None else value
        return value + bias if bias is not None else value
