"""Select channels by the error that is expected after removing them and fitting the rest.

This is backward elimination with the algebra of the optimal brain surgeon (Hassibi and Stork 1993). Let P be the
inverse covariance of a layer's inputs and M its weights. Removing the rows q and refitting the others adds the error
tr(M_qᵀ P_qq⁻¹ M_q). The cheapest unit is removed, M and P are updated, and so on.

Errors of layers become costs of cuts by one backward pass, in place of trial runs. Let a cut change the output of a
consumer layer by δ. Near the original, the divergence of the network's outputs is the quadratic form ½ δᵀ H δ, and
H = E[g gᵀ] for the gradients g that a random vector v at the outputs sends back, if E[v vᵀ] is the Hessian of the
divergence there. For class scores v is softmax − one-hot of a class drawn from the softmax (the Fisher information).
With H ≈ E|g|²/D · I over the D outputs of the layer, the cost of a cut is ½ · E|g|² / D · tr(ΔW C ΔWᵀ).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging import progress
from neuron_merging.calibration.layer_stats import ConsumerWeight, find_consumer_weights
from neuron_merging.calibration.output_divergence import find_logits_outputs, strip_output_activations
from neuron_merging.calibration.regression import FitStatistics, JointMoments, grow_ridge
from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.groups import Axis, Group, Scores, Units, is_position
from neuron_merging.graph.example_inputs import flatten_inputs, flatten_outputs, infer_batch_size, slice_samples
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.interpreter import Interpreter, run_graph
from neuron_merging.inputs.text import split_texts
from neuron_merging.merging.protocol import StatisticsSource
from neuron_merging.selection.budget import LossCurve

BLOCKWISE_FEATURES, ELIMINATION_BLOCKS = 1024, 32
"""Above 1024 features, units are eliminated in blocks of 1/32 of the remaining ones. The units of a block are chosen
one by one among twice as many cheap ones, then removed from the large system in one update: an update costs
O(features²), and one per unit would dominate the run time."""
MAX_WINDOW_FEATURES = 1024
"""Features up to which each tap of a window is a feature of its own. Wider windows are ordered by channels, all taps
alike: inverting the covariance of 512 channels in 3 × 3 windows takes seconds, that of 512 channels a hundredth."""
EXPECTED_ERROR = "expected-error"
"""Name of the criterion that this module implements."""
AUTO_CRITERION = "auto"
"""Name of the default: the expected error where statistics come from data, synthesised inputs or a closed form, else
l2 norms of filters."""


@dataclass(frozen=True)
class EliminationOrder:
    """Units in the order of their removal, and the accumulated error after each, relative to the consumers' outputs."""

    units: Units
    errors: Scores

    @property
    def scores(self) -> Scores:
        """One score per unit: its rank in the order of removal."""
        ranks = np.empty(len(self.units))
        ranks[self.units] = np.arange(len(self.units))
        return ranks


@dataclass
class _ConsumerSystem:
    """One consumer layer of a group.

    Attributes
    ----------
    weights
        M, features × outputs.
    inverse
        P, the inverse covariance of the features.
    features
        The features of each unit, units × features per unit.
    scale
        The total variance of the outputs.
    """

    weights: Tensor
    inverse: Tensor
    features: Tensor
    scale: float

    def compute_costs(self, units: Tensor) -> Tensor:
        """Return tr(M_qᵀ P_qq⁻¹ M_q) / scale of each unit, as if it alone were removed."""
        index = self.features[units]
        rows = self.weights[index]
        if index.shape[1] == 1:
            alone: Tensor = rows.square().sum((1, 2)) / self.inverse.diagonal()[index[:, 0]] / self.scale
            return alone
        blocks = self.inverse[index[:, :, None], index[:, None, :]]
        costs: Tensor = (rows * torch.linalg.solve(blocks, rows)).sum((1, 2)) / self.scale
        return costs

    def drop(self, units: Sequence[int]) -> None:
        """Remove these units and refit the others, by one step of block elimination."""
        index = self.features[list(units)].flatten()
        side = self.inverse[:, index]
        # M ← M − P_:q P_qq⁻¹ M_q and P ← P − P_:q P_qq⁻¹ P_q:. Removed rows become zero (up to rounding) and stay in
        # place.
        step = torch.linalg.solve(side[index], torch.cat([side.T, self.weights[index]], 1))
        self.weights.addmm_(side, step[:, len(side) :], alpha=-1)
        self.inverse.addmm_(side, step[:, : len(side)], alpha=-1)

    def restrict_to(self, units: Tensor) -> _ConsumerSystem:
        """Return the system of these units alone: costs and updates of P_qq and M_q involve no other rows."""
        index = self.features[units]
        flat = index.flatten()
        own = torch.arange(len(flat), device=flat.device).view_as(index)
        return _ConsumerSystem(self.weights[flat], self.inverse[flat][:, flat], own, self.scale)


def compute_elimination_order(
    graph: Graph,
    group: Group,
    consumer_weights: Sequence[ConsumerWeight],
    found: Mapping[Axis, Sequence[FitStatistics]],
    ridge: float,
    share: float = 1.0,
    sensitivities: Mapping[Axis, float] | None = None,
) -> EliminationOrder | None:
    """Return the order in which a group's units are removed; None where no consumer layer has statistics.

    Only the first `share` of the units is eliminated step by step. The others will stay, so they follow in the order of
    their single costs. With `sensitivities` (`measure_sensitivities`), errors are divergences of the network's
    outputs, and None is returned unless all consumer layers are known.
    """
    systems = [
        r
        for consumer_weight in consumer_weights
        if consumer_weight.axis in found
        for r in _build_consumer_systems(
            graph, group, consumer_weight, found[consumer_weight.axis], ridge, sensitivities
        )
    ]
    if not systems or (sensitivities is not None and len(systems) < len(consumer_weights)):
        return None
    wide = max(len(system.weights) for system in systems) > BLOCKWISE_FEATURES
    left = torch.ones(group.size, dtype=torch.bool, device="cpu")
    order: list[int] = []
    errors: list[float] = []
    while bool(left.any()):
        units, total = left.nonzero()[:, 0], errors[-1] if errors else 0.0
        costs = _sum_costs(systems, units)
        ranks = costs.argsort()
        if len(order) >= share * group.size:
            order += units[ranks].tolist()
            errors += (total + costs[ranks].cumsum(0)).tolist()
            break
        count = max(1, len(units) // ELIMINATION_BLOCKS) if wide else 1
        near = units[ranks[: 2 * count]]
        # Costs of single units ignore that similar units replace each other, so choose within the block step by step.
        chosen, losses = (
            _take_cheapest([system.restrict_to(near) for system in systems], count)
            if count > 1
            else ([0], costs[ranks])
        )
        gone = [int(near[place]) for place in chosen]
        order += gone
        errors += [total + float(losses[: i + 1].sum()) for i in range(len(gone))]
        left[gone] = False
        for system in systems if bool(left.any()) else ():
            system.drop(gone)
    return EliminationOrder(np.array(order), np.array(errors))


def _sum_costs(systems: Sequence[_ConsumerSystem], units: Tensor) -> Tensor:
    return torch.stack([system.compute_costs(units).cpu() for system in systems]).sum(0)


def _take_cheapest(systems: Sequence[_ConsumerSystem], count: int) -> tuple[list[int], Tensor]:
    """Eliminate `count` units one by one; return their positions and their costs."""
    left = list(range(len(systems[0].features)))
    chosen: list[int] = []
    losses: list[float] = []
    for _ in range(count):
        costs = _sum_costs(systems, torch.tensor(left, device="cpu"))
        best = int(costs.argmin())
        losses.append(float(costs[best]))
        chosen.append(left.pop(best))
        for system in systems:
            system.drop(chosen[-1:])
    return chosen, torch.tensor(losses, dtype=torch.float64, device="cpu")


def _build_consumer_systems(
    graph: Graph,
    group: Group,
    consumer_weight: ConsumerWeight,
    statistics: Sequence[FitStatistics],
    ridge: float,
    sensitivities: Mapping[Axis, float] | None,
) -> list[_ConsumerSystem]:
    consumers = [c for name, c in consumer_weight.consumers if name == group.name]
    # A grouped layer is several systems, and a unit without one column of its own is in none. Other layers decide then.
    if consumer_weight.blocks != 1 or not consumers or not is_position(consumers[0].columns).all():
        return []
    (stats,) = statistics
    if not isinstance(stats, JointMoments):  # rows only: too wide for an inverse
        return []
    columns = torch.from_numpy(consumers[0].columns)
    features = (columns[:, :, None] * consumer_weight.taps + torch.arange(consumer_weight.taps, device="cpu")).flatten(
        1
    )
    diagonal = stats.xx.diagonal()
    if sensitivities is not None:
        ridge = grow_ridge(ridge, len(diagonal), stats.rows)
    # The ridge of the later fit. The second term keeps dead channels (variance 0) from making the matrix singular.
    loaded = stats.xx + torch.diag(ridge * diagonal + 1e-8 * diagonal.mean().clamp(min=1e-30))
    inverse = torch.linalg.inv(loaded)
    weights = consumer_weight.to_matrices(graph.tensors[consumer_weight.axis.tensor].detach().double())[0].T.clone()
    scale = float(stats.yy.sum().clamp(min=1e-30))
    if sensitivities is not None:
        scale = 1 / max(sensitivities[consumer_weight.axis], 1e-30)
    if weights.shape[1] > len(weights):
        # Costs depend on M Mᵀ alone. With M = RᵀQᵀ and Q orthogonal, Rᵀ takes the place of M and has fewer columns.
        weights = torch.linalg.qr(weights.T, mode="r").R.T.contiguous()
    usable = bool(inverse.isfinite().all() and weights.isfinite().all())
    return [_ConsumerSystem(weights, inverse, features.to(inverse.device), scale)] if usable else []


def compute_orders_by_group(
    selection: Selection,
    groups: Mapping[str, float],
    source: StatisticsSource,
    ridge: float = 0.01,
    sensitivities: Mapping[Axis, float] | None = None,
) -> dict[str, EliminationOrder]:
    """Return the elimination order of each group whose consumer layers have statistics.

    `groups` maps names to the share that will be removed; beyond it the order is approximate. `sensitivities` turn
    errors of consumer layers into divergences of the network's outputs.
    """
    chosen = [group for group in selection.channels.groups if group.name in groups]
    uncut = select_everything(selection, chosen)
    weights_by_group: dict[str, list[ConsumerWeight]] = {group.name: [] for group in chosen}
    for consumer_weight in find_consumer_weights(uncut):
        wide = consumer_weight.width > MAX_WINDOW_FEATURES
        for name in dict.fromkeys(name for name, _ in consumer_weight.consumers):
            weights_by_group[name].append(consumer_weight.to_one_tap() if wide else consumer_weight)
    wanted = {weight.axis: weight for weights in weights_by_group.values() for weight in weights}
    known = source.statistics(uncut, list(wanted.values()))
    orders: dict[str, EliminationOrder | None] = {}
    for group, found in _match_statistics(chosen, weights_by_group, known):
        progress.report_progress("choosing channels", len(orders), len(chosen))
        orders[group.name] = compute_elimination_order(
            selection.graph, group, weights_by_group[group.name], found, ridge, groups[group.name], sensitivities
        )
    return {name: order for name, order in orders.items() if order is not None}


def _match_statistics(
    groups: Sequence[Group],
    weights_by_group: Mapping[str, Sequence[ConsumerWeight]],
    known: Mapping[Axis, list[FitStatistics]] | Iterable[tuple[Axis, list[FitStatistics]]],
) -> Iterator[tuple[Group, dict[Axis, list[FitStatistics]]]]:
    """Yield each group with the statistics of its consumers, as soon as these have come; drop what is not needed."""
    waiting = {group.name: {weight.axis for weight in weights_by_group[group.name]} for group in groups}
    found: dict[Axis, list[FitStatistics]] = {}
    for axis, statistics in known.items() if isinstance(known, Mapping) else known:
        found[axis] = statistics
        for group in groups:
            if axis in waiting.get(group.name, ()) and waiting[group.name] <= found.keys():
                yield group, found
                del waiting[group.name]
        needed = set().union(*waiting.values())
        found = {own: value for own, value in found.items() if own in needed}
    # Some consumers of these have no statistics.
    yield from ((group, found) for group in groups if group.name in waiting)


def select_everything(selection: Selection, groups: Sequence[Group]) -> Selection:
    """Return the selection in which these groups keep all units, to collect statistics that serve any cut."""
    return replace(selection, kept={group.name: np.arange(group.size) for group in groups})


GRADIENT_BATCH_SIZE = 16
"""Samples of one backward pass: it holds the activations of all layers."""
MAX_CURVE_POINTS = 64
"""Points of a loss curve."""


@dataclass(frozen=True)
class OutputScale:
    """How one output enters the divergence: as class scores, or by the squared error relative to its variance."""

    is_logits: bool
    rows: int
    """Rows of class scores, or samples."""
    variance: float = 1.0
    """Mean over samples of the summed variance."""

    def draw_score(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a vector v with E[v vᵀ] = Hessian of the divergence, per row."""
        if not self.is_logits:
            # The relative squared error |δ|² / variance has the Hessian 2 / variance.
            deviation = math.sqrt(2 / (self.variance * self.rows))
            return torch.randn(output.shape, generator=generator, device="cpu").mul_(deviation).to(output)
        probabilities = output.float().softmax(-1)
        flat = torch.nan_to_num(probabilities.reshape(-1, output.shape[-1])).cpu()
        drawn = torch.multinomial(flat, 1, generator=generator)
        score = flat.scatter_add(1, drawn, -torch.ones_like(drawn, dtype=torch.float32))
        return score.div_(math.sqrt(self.rows)).view_as(output).to(output)


def measure_sensitivities(
    analysis: Analysis,
    consumer_weights: Sequence[ConsumerWeight],
    batches: Sequence[Sequence[Any]],
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[Axis, float]:
    """Return, for each consumer weight, the divergence per squared error at one position of its output.

    Parameters
    ----------
    analysis
        The network.
    consumer_weights
        Weights of consumer layers.
    batches
        Inputs, in any number of batches.
    temperature
        Temperature of the divergence of class scores, as in `Divergence`.
    seed
        Seeds the random vectors at the outputs.
    """
    parts = list(_split_batches(analysis, batches))
    scales = _measure_output_scales(analysis, parts)
    by_node = {name: weight for weight in consumer_weights for name in weight.inputs}
    squares = {weight.axis: 0.0 for weight in consumer_weights}
    generator = torch.Generator("cpu").manual_seed(seed)
    for batch in progress.track_progress(parts, "measuring gradients"):
        _add_squared_gradients(analysis, batch, by_node, squares, scales, temperature, generator)
    outputs = {weight.axis: _count_outputs(analysis.graph, weight) for weight in consumer_weights}
    return {axis: 0.5 * squares[axis] / outputs[axis] for axis in squares}


def _split_batches(analysis: Analysis, batches: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield smaller batches where the network takes any batch size."""
    for batch in batches:
        if analysis.fixed_batch_size is not None:
            yield from analysis.split_batch(batch)
            continue
        for part in split_texts(analysis, tuple(batch)):
            for start in range(0, infer_batch_size(part), GRADIENT_BATCH_SIZE):
                yield slice_samples(part, slice(start, start + GRADIENT_BATCH_SIZE))


def _count_outputs(graph: Graph, weight: ConsumerWeight) -> int:
    """Count the outputs of a layer at one position."""
    return max(1, sum(len(matrix) for matrix in weight.to_matrices(graph.tensors[weight.axis.tensor])))


@torch.no_grad()
def _measure_output_scales(analysis: Analysis, parts: Sequence[Sequence[Any]]) -> list[OutputScale]:
    """Return how each output enters the divergence. Variances need a pass; class scores do not."""
    graph = strip_output_activations(analysis.graph_for(parts[0]))
    shapes = [tuple(graph.shapes.get(ref.name, ())) for ref in graph.outputs]
    logits = find_logits_outputs(graph, shapes)
    samples = sum(map(infer_batch_size, parts))
    per_sample = [_count_rows(shape) // max(1, shape[0]) if shape else 1 for shape in shapes]
    if len(logits) == len(shapes):
        return [OutputScale(True, samples * rows) for rows in per_sample]
    found = [[value.flatten(1).double() for value in _run_outputs(analysis, batch)] for batch in parts]
    scales = []
    for i, values in enumerate(zip(*found, strict=True)):
        whole = torch.cat(values)
        variance = float((whole - whole.mean(0)).square().sum(1).mean().clamp(min=1e-30))
        scales.append(OutputScale(i in logits, samples * (per_sample[i] if i in logits else 1), variance))
    return scales


def _count_rows(shape: tuple[int, ...]) -> int:
    """Count the rows of class scores of a captured output."""
    return shape[0] * (shape[1] if len(shape) == 3 else 1)


def _run_outputs(analysis: Analysis, batch: Sequence[Any]) -> list[Tensor]:
    graph = strip_output_activations(analysis.graph_for(batch))
    return flatten_outputs(run_graph(graph, flatten_inputs(batch), graph.tensors))


def _add_squared_gradients(
    analysis: Analysis,
    batch: Sequence[Any],
    by_node: Mapping[str, ConsumerWeight],
    squares: dict[Axis, float],
    scales: Sequence[OutputScale],
    temperature: float,
    generator: torch.Generator,
) -> None:
    """Run one batch forwards and backwards; add the squared gradients at the outputs of consumer layers."""

    def compute_node(node: Node, args: dict[str, Any]) -> Any:
        value = node.compute(args)
        if node.name not in by_node:
            return value
        axis = by_node[node.name].axis
        # A copy, because operators behind it may write into it; its gradient is that of the layer's output.
        value = (value if value.requires_grad else value.detach().requires_grad_(True)).clone()

        def add(gradient: Tensor) -> None:
            squares[axis] += float(gradient.double().square().sum())

        value.register_hook(add)
        return value

    graph = strip_output_activations(analysis.graph_for(batch))
    tensors = {name: tensor.detach() for name, tensor in graph.tensors.items()}
    sections, outputs = _run_in_sections(Interpreter(graph, flatten_inputs(batch), tensors), by_node)
    gradients = _draw_output_gradients(graph, outputs, scales, temperature, generator)
    del outputs  # scores over a large vocabulary
    # The last section first. It is computed again, this time with gradients.
    while sections:
        run, end = sections.pop()
        run.hook = compute_node
        gradients = _run_backwards(run, end, gradients)


def _draw_output_gradients(
    graph: Graph,
    outputs: Sequence[Tensor],
    scales: Sequence[OutputScale],
    temperature: float,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Draw the random vector that is sent back from each output, by the output's name."""
    found: dict[str, Tensor] = {}
    for ref, output, scale in zip(graph.outputs, outputs, scales, strict=True):
        if output.is_floating_point():
            score = scale.draw_score(output / (temperature if scale.is_logits else 1.0), generator)
            found[ref.name] = found[ref.name] + score if ref.name in found else score
    return found


@torch.no_grad()
def _run_in_sections(
    run: Interpreter, by_node: Mapping[str, ConsumerWeight]
) -> tuple[list[tuple[Interpreter, int]], list[Tensor]]:
    """Run a graph to its end; return its sections, as the run before each and the position of its end, and the outputs.

    Sections end behind consumer layers. The activations of all layers at once, which a backward pass needs, would grow
    with the depth of the network; so only what lies between two sections is held.
    """
    nodes = run.graph.nodes
    writes = any(node.inplace for node in nodes)  # into a value that may belong to an earlier section
    sections = [(run.fork(), len(nodes))]
    for i, node in enumerate(nodes[:-1], 1):
        run.run_node(node)
        if node.name in by_node and not writes and not any(isinstance(v, (list, tuple)) for v in run.values.values()):
            sections[-1] = (sections[-1][0], i)
            sections.append((run.fork(), len(nodes)))
    return sections, flatten_outputs(run.run())


def _run_backwards(run: Interpreter, end: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a section, and send gradients back from its last values to its first ones."""
    stored = {*run.graph.parameters, *run.graph.constants}
    leaves = {
        name: value.detach().requires_grad_(True)
        for name, value in run.values.items()
        if name not in stored and isinstance(value, Tensor) and value.is_floating_point()
    }
    run.values |= leaves
    with torch.enable_grad():
        for node in run.graph.nodes[run.position : end]:
            run.run_node(node)
        ends = {name: run.values[name] for name in gradients if name in run.values}
        used = [name for name, value in ends.items() if value.requires_grad]
        if used:
            torch.autograd.backward([ends[name] for name in used], [gradients[name].to(ends[name]) for name in used])
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def build_loss_curve(order: EliminationOrder, least: int, step: int) -> LossCurve:
    """Turn the accumulated costs of an elimination order into a loss curve, down to `least` kept units.

    >>> import numpy as np
    >>> build_loss_curve(EliminationOrder(np.array([2, 0, 1]), np.array([0.1, 0.3, 0.9])), 1, 1)
    LossCurve(counts=(3, 2, 1), losses=(0.0, 0.1, 0.3), measured=())
    """
    size = len(order.units)
    apart = max(step, (size - least) // MAX_CURVE_POINTS // step * step)
    counts = sorted({size, least, *range(least, size, apart)}, reverse=True)
    losses = [0.0, *(float(order.errors[size - count - 1]) for count in counts[1:])]
    return LossCurve(tuple(counts), tuple(losses))
