"""Collect statistics of what layers read, by running batches through the original network.

`collect_fit_statistics` serves one fixed choice of channels. `collect_layer_stats` serves any choice: it stores the
mean and covariance of all features, or the rows themselves where there are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from neuron_merging.calibration.consumer_weights import ConsumerWeight, get_weight_input
from neuron_merging.calibration.distributed import ProcessGroup, check_all_have_batches, reduce_over_processes
from neuron_merging.calibration.regression import (
    MAX_ROWS,
    CenteredRows,
    FitStatistics,
    JointMoments,
    MomentAccumulator,
    RowAccumulator,
    add_squares,
)
from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.batch_size import get_forward_error
from neuron_merging.graph.copying import to_working_precision
from neuron_merging.graph.example_inputs import flatten_inputs
from neuron_merging.graph.graph import Node
from neuron_merging.graph.interpreter import run_graph, run_until


def collect_fit_statistics(
    selection: Selection,
    consumer_weights: Sequence[ConsumerWeight],
    batches: Iterable[Sequence[Any]],
    *,
    norm: Callable[[Node, dict[str, Any]], Any] = Node.compute,
    seed: int = 0,
    row_factor: float = 1,
    processes: ProcessGroup | None = None,
    rows: Mapping[Axis, int] | None = None,
) -> Iterator[tuple[Axis, list[FitStatistics]]]:
    """Run batches through the original network; yield the statistics of each consumer weight, one by one.

    Parameters
    ----------
    selection
        The network and the units that stay.
    consumer_weights
        The weights to fit.
    batches
        Inputs of the network.
    norm
        Computes the normalisation layers; synthetic inputs need other statistics than the stored ones.
    seed
        Seeds the choice of positions that rows are taken from.
    row_factor
        Multiplies the number of rows per fitted weight.
    processes
        Processes that run different batches; each gets the statistics over all of them.
    rows
        The expected number of rows of a weight, where it is known: few rows are stored as they are.
    """
    parts = split_by_memory(selection, consumer_weights) if isinstance(batches, Sequence) else [consumer_weights]
    for part in parts:
        accumulators = {
            weight.axis: [weight.make_accumulator((rows or {}).get(weight.axis)) for _ in range(weight.blocks)]
            for weight in part
        }
        sample = make_position_sampler(seed, row_factor * selection.analysis.row_share)
        seen = _accumulate_batches(selection, part, batches, norm, sample, accumulators)
        if processes is not None:
            check_all_have_batches(seen, processes)
        if not seen:
            raise MergingError(
                "there is no calibration batch",
                where="calibration=",
                fix="Give at least one; a generator yields its batches only once.",
            )
        # Sums are released one by one: in double precision, those of all layers may not fit into memory.
        for weight in part:
            yield weight.axis, _finalize_fit_statistics(selection, weight, accumulators.pop(weight.axis), processes)


MAX_STATISTICS_BYTES = 2**28
"""Bytes of covariances that are held at once, or the size of the weights if that is more. Layers are handled in parts,
each with its own pass over the batches, so that the peak does not grow with the depth of the network."""


def split_by_memory(selection: Selection, weights: Sequence[ConsumerWeight]) -> list[list[ConsumerWeight]]:
    """Split weights into runs whose covariances take at most `MAX_STATISTICS_BYTES` together."""
    stored = sum(tensor.numel() * tensor.element_size() for tensor in selection.graph.tensors.values())
    most, used = max(MAX_STATISTICS_BYTES, stored), 0
    parts: list[list[ConsumerWeight]] = [[]]
    for weight in weights:
        # In float32 while rows are added, in float64 afterwards.
        size = 12 * weight.blocks * weight.width**2
        if parts[-1] and used + size > most:
            parts.append([])
            used = 0
        parts[-1].append(weight)
        used += size
    return parts


def _accumulate_batches(
    selection: Selection,
    weights: Sequence[ConsumerWeight],
    batches: Iterable[Sequence[Any]],
    norm: Callable[[Node, dict[str, Any]], Any],
    sample: Callable[[int, int], Tensor],
    accumulators: Mapping[Axis, Sequence[MomentAccumulator | RowAccumulator]],
) -> int:
    """Run batches through the original and add what these weights read; return the number of batches."""
    by_node = {name: weight for weight in weights for name in weight.inputs}

    def call(node: Node, args: dict[str, Any]) -> Any:
        if node.name in by_node:
            weight = by_node[node.name]
            value = get_weight_input(weight, node, args)
            accumulate_batch(selection, weight, node, value, accumulators[weight.axis], sample)
        return norm(node, args) if lookup_operator(node).norm else node.compute(args)

    seen = 0
    for batch in batches:
        graph = selection.analysis.graph_for(batch)
        run_until(graph, flatten_inputs(batch), selection.graph.tensors, call, by_node)
        seen += 1
    return seen


def _finalize_fit_statistics(
    selection: Selection,
    consumer_weight: ConsumerWeight,
    parts: Sequence[MomentAccumulator | RowAccumulator],
    processes: ProcessGroup | None,
) -> list[FitStatistics]:
    matrices = consumer_weight.to_matrices(selection.tensor(consumer_weight.axis.tensor))
    whole = parts if processes is None else [reduce_over_processes(part, processes) for part in parts]
    return [
        part.to_fit_statistics().with_output_variance(m[:, consumer_weight.kept_columns(i)])
        for i, (m, part) in enumerate(zip(matrices, whole, strict=True))
    ]


def explain_batch_failure(analysis: Analysis, batch: Sequence[Any]) -> str:
    """Return the error that the model or the capture of its graph raises for a batch; an empty text if it runs."""
    failure = get_forward_error(analysis.model, batch)
    if failure:
        return failure
    try:
        analysis.graph_for(batch)
    except Exception as error:  # noqa: BLE001 (a capture runs the user's code, which may raise anything)
        return describe_error(error)
    return ""


def accumulate_batch(
    selection: Selection,
    consumer_weight: ConsumerWeight,
    node: Node,
    value: Tensor,
    found: Sequence[MomentAccumulator | RowAccumulator],
    sample: Callable[[int, int], Tensor],
) -> None:
    """Add one batch: kept columns are the features, the contribution of the removed ones is the target."""
    weight = selection.tensor(consumer_weight.axis.tensor)
    layout = consumer_weight.get_row_layout(node)
    taken = (to_working_precision(rows) for rows in layout.extract_rows(value, layout.sample_positions(value, sample)))
    for block, (matrix, rows, regression) in enumerate(
        zip(consumer_weight.to_matrices(weight), taken, found, strict=True)
    ):
        kept, gone = (
            part(block).to(rows.device) for part in (consumer_weight.kept_columns, consumer_weight.removed_columns)
        )
        features, target = rows[:, kept], rows[:, gone] @ matrix[:, gone].to(rows).T
        regression.add(features, target)


def make_position_sampler(seed: int, row_factor: float = 1) -> Callable[[int, int], Tensor]:
    """Return a function that draws random positions, at most `row_factor` times the limit that it is called with."""
    pick = torch.Generator("cpu").manual_seed(seed)
    return lambda available, limit: torch.randperm(available, generator=pick, device="cpu")[
        : max(1, round(row_factor * limit))
    ]


MAX_DOUBLE_FEATURES = 1024
"""Features up to which covariances for any choice of channels are kept in float64."""


@dataclass(frozen=True)
class CovarianceStats:
    """Mean and covariance of what one block of a layer reads, and the number of rows that they were measured on."""

    mean: Tensor
    cov: Tensor
    rows: int

    def to_fit_statistics(self, matrix: Tensor, kept: Tensor) -> JointMoments:
        """Return the statistics for a fit of the columns `kept` of the weight matrix."""
        cov = self.cov.double()
        return replace(JointMoments.of(self.mean, cov, matrix.to(self.mean), kept.to(self.mean.device)), rows=self.rows)


@dataclass(frozen=True)
class RowStats:
    """Rows of what one block of a layer reads; fewer than its features, so smaller than a covariance."""

    rows: Tensor

    def to_fit_statistics(self, matrix: Tensor, kept: Tensor) -> CenteredRows:
        """Return the statistics for a fit of the columns `kept` of the weight matrix."""
        matrix, kept = matrix.to(self.rows), kept.to(self.rows.device)
        features, output = self.rows[:, kept], self.rows @ matrix.T
        return CenteredRows.of(features, output - features @ matrix[:, kept].T, output)


LayerStats = CovarianceStats | RowStats
"""Statistics of what one block of a layer reads, for any choice of kept channels."""


@dataclass
class _LayerStatsAccumulator:
    """Sums over rows, centred at the mean of the first ones; buffers the rows until there are more than features."""

    rows: int = 0
    buffered_rows: list[Tensor] = field(default_factory=list)
    centre: Tensor | None = None
    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))
    square: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))

    def add(self, rows: Tensor) -> None:
        self.rows += len(rows)
        self.buffered_rows.append(rows)
        if self.rows > min(rows.shape[1], MAX_ROWS):
            self._add_to_sums(torch.cat(self.buffered_rows))
            self.buffered_rows.clear()

    def _add_to_sums(self, rows: Tensor) -> None:
        if self.centre is None:
            # Any centre near the mean avoids the cancellation of E[x²] − E[x]²; it must only stay the same.
            self.centre = rows.mean(0)
        centred = rows - self.centre
        self.total = self.total.to(centred) + centred.sum(0)
        self.square = add_squares(self.square, centred)

    def finalize(self) -> LayerStats:
        """Return the statistics of all rows."""
        if self.centre is None:
            return RowStats(torch.cat(self.buffered_rows).float())
        mean = self.total.double() / self.rows
        cov = self.square.double() / self.rows - torch.outer(mean, mean)
        # Covariances of all layers are held at once, so those of wide layers are kept in float32.
        cov = cov if len(cov) <= MAX_DOUBLE_FEATURES else cov.float()
        return CovarianceStats(self.centre.double() + mean, cov, self.rows)


@torch.no_grad()
def collect_layer_stats(
    selection: Selection, consumer_weights: Sequence[ConsumerWeight], batches: Iterable[Sequence[Any]], seed: int = 0
) -> dict[Axis, list[LayerStats]]:
    """Run batches through the original network; return the statistics of each block of each consumer weight."""
    sums = {
        consumer_weight.axis: [_LayerStatsAccumulator() for _ in range(consumer_weight.blocks)]
        for consumer_weight in consumer_weights
    }
    by_node = {name: consumer_weight for consumer_weight in consumer_weights for name in consumer_weight.inputs}
    sample = make_position_sampler(seed, selection.analysis.row_share)

    def call(node: Node, args: dict[str, Any]) -> Any:
        if node.name in by_node:
            consumer_weight = by_node[node.name]
            value = get_weight_input(consumer_weight, node, args)
            layout = consumer_weight.get_row_layout(node)
            for own, rows in zip(
                sums[consumer_weight.axis],
                layout.extract_rows(value, layout.sample_positions(value, sample)),
                strict=True,
            ):
                own.add(to_working_precision(rows))
        return node.compute(args)

    for batch in batches:
        run_graph(selection.analysis.graph_for(batch), flatten_inputs(batch), selection.graph.tensors, call)
    return {axis: [own.finalize() for own in parts] for axis, parts in sums.items()}
