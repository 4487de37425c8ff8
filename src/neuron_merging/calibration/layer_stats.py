"""Collect statistics of what consumer layers read, by running batches through the original network.

`ConsumerWeight` is a weight that reads removed channels. A row is what it reads for one output position: a vector, or a
window over all channels (im2col). A fit needs a few rows per weight, so rows are sampled.

`collect_fit_statistics` serves one fixed choice of channels. `collect_layer_stats` serves any choice: it stores the
mean and covariance of all features, or the rows themselves where there are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
from neuron_merging.channels.groups import Axis, Consumer
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.batch_size import get_forward_error
from neuron_merging.graph.copying import to_working_precision
from neuron_merging.graph.example_inputs import flatten_inputs, infer_batch_size
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import Interpreter, run_graph, run_until

ROWS_PER_WEIGHT, MIN_ROWS = 4, 4096
"""Rows sampled per batch for each fitted weight, and their least number. The excess error of
least squares is about unknowns / rows of the residual, and the rows of all batches add up."""
PositionSampler = Callable[[int, int], Tensor]
"""Takes the number of available positions and a limit; returns at most so many positions."""


@dataclass(frozen=True)
class VectorRows:
    """Rows of a layer that reads vectors along one dimension, counted from the end."""

    dim_from_end: int

    def sample_positions(self, value: Tensor, sample: PositionSampler) -> Tensor:
        """Sample positions over the batch and all other dimensions."""
        width = value.shape[-self.dim_from_end]
        return sample(value.numel() // max(1, width), max(MIN_ROWS, ROWS_PER_WEIGHT * width))

    def extract_rows(self, value: Tensor, at: Tensor) -> list[Tensor]:
        """Return the vectors that the layer reads at these positions, as one matrix."""
        flat = value.movedim(-self.dim_from_end, -1).reshape(-1, value.shape[-self.dim_from_end])
        return [flat[at.to(value.device)]]

    extract_outputs = extract_rows
    """The output vectors lie along the same dimension."""


@dataclass(frozen=True)
class WindowRows:
    """Rows of a convolution with `blocks` groups of channels: the window at each output position.

    Without call arguments windows have stride 1 and no padding; `with_call_arguments` takes those of a layer.
    """

    kernel: tuple[int, ...]
    blocks: int
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()

    def with_call_arguments(self, args: Mapping[str, Any]) -> WindowRows:
        """Return the layout with the stride, dilation and padding of a call."""
        count = len(self.kernel)
        dilation = _expand_to_tuple(args.get("dilation"), count, 1)
        padding = _expand_padding(args.get("padding"), self.kernel, dilation)
        return replace(self, stride=_expand_to_tuple(args.get("stride"), count, 1), dilation=dilation, padding=padding)

    def sample_positions(self, value: Tensor, sample: PositionSampler) -> Tensor:
        """Sample output positions, the same ones in every sample of the batch."""
        batched = self._add_batch_dim(value)
        # Every sample contributes the same positions, so each needs only its share of the rows.
        enough = max(MIN_ROWS, ROWS_PER_WEIGHT * prod(self.kernel) * batched.shape[1])
        return sample(prod(self._get_grid(self._get_padded_sizes(batched))), max(1, enough // len(batched)))

    def extract_rows(self, value: Tensor, at: Tensor) -> list[Tensor]:
        """Return the windows that the layer reads at these positions, one matrix per block."""
        batched = self._add_batch_dim(value)
        padded = F.pad(batched, list(self.padding)) if self.padding else batched
        index = self._index_windows(padded.shape[2:], at).to(value.device)
        # One flat index per position and tap: much faster than indexing a view of overlapping windows.
        taken = padded.flatten(2).index_select(2, index.flatten()).view(*padded.shape[:2], *index.shape)
        # To rows of channels · taps; the blocks of a grouped layer are ranges of channels.
        return [part.flatten(1) for part in taken.transpose(1, 2).flatten(0, 1).chunk(self.blocks, 1)]

    def extract_outputs(self, value: Tensor, at: Tensor) -> list[Tensor]:
        """Return the outputs at these positions, one matrix per block."""
        taken = self._add_batch_dim(value).flatten(2).index_select(2, at.to(value.device))
        return list(taken.transpose(1, 2).flatten(0, 1).chunk(self.blocks, 1))

    def _add_batch_dim(self, value: Tensor) -> Tensor:
        return value if value.ndim == len(self.kernel) + 2 else value.unsqueeze(0)

    def _get_padded_sizes(self, value: Tensor) -> list[int]:
        # F.pad lists the last dimension first, with two numbers for each.
        pairs = [self.padding[i : i + 2] for i in range(0, len(self.padding), 2)][::-1] or [(0, 0)] * len(self.kernel)
        return [size + sum(pair) for size, pair in zip(value.shape[2:], pairs, strict=True)]

    def _get_grid(self, sizes: Sequence[int]) -> list[int]:
        """Return the number of windows along each dimension of a padded map."""
        steps = zip(sizes, self.kernel, *self._get_steps(), strict=True)
        return [(size - dilation * (taps - 1) - 1) // stride + 1 for size, taps, stride, dilation in steps]

    def _get_steps(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ones = (1,) * len(self.kernel)
        return self.stride or ones, self.dilation or ones

    def _index_windows(self, sizes: Sequence[int], at: Tensor) -> Tensor:
        """Return flat indices into a padded map, positions × taps, for positions in the grid of windows."""
        taps = torch.unravel_index(torch.arange(prod(self.kernel), device="cpu"), self.kernel)
        starts = torch.unravel_index(at.cpu(), self._get_grid(sizes))
        index = torch.zeros((len(at), prod(self.kernel)), dtype=torch.int64, device="cpu")
        for size, start, tap, stride, dilation in zip(sizes, starts, taps, *self._get_steps(), strict=True):
            index = index * size + (stride * start[:, None] + dilation * tap)
        return index


def _expand_padding(value: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Return the padding before and after each dimension, last dimension first, as `F.pad` takes it."""
    if value == "same":
        # As torch does it: an odd number leaves the larger part behind.
        total = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return tuple(amount for size in reversed(total) for amount in (size // 2, size - size // 2))
    sizes = (
        [0 if value in (None, "valid") else value] if value is None or isinstance(value, (int, str)) else list(value)
    )
    sizes = sizes * len(kernel) if len(sizes) == 1 else sizes
    return tuple(int(amount) for size in reversed(sizes) for amount in (size, size))


def _expand_to_tuple(value: Any, count: int, default: int) -> tuple[int, ...]:
    listed = [default] if value is None else [value] if isinstance(value, int) else list(value)
    return tuple(int(v) for v in (listed * count if len(listed) == 1 else listed))


MAX_COVARIANCE_FEATURES = 6144
"""Features up to which a covariance is collected: 6144² float32 values take 144 MiB. Wider layers store rows
(`regression.RowAccumulator`)."""
MAX_FIT_FEATURES = 2**15
"""Features up to which a layer is fitted at all, from rows. Wider layers fall back to the paper's method."""


@dataclass(frozen=True)
class ConsumerWeight:
    """A stored weight that reads removed channels: its calls, and the channels that it keeps.

    Attributes
    ----------
    axis
        The axis of the weight along which it reads channels.
    consumers
        Every layer that uses the weight, with the name of the group that it reads.
    stays
        For each position along the axis, whether it is kept.
    kernel
        The window that is fitted tap by tap.
    one_tap
        Whether `kernel` is all ones although the layer has more taps. The fit then finds one factor per pair of
        channels, because all taps would be too wide to solve, or the layer is no plain convolution.
    """

    axis: Axis
    consumers: tuple[tuple[str, Consumer], ...]
    stays: np.ndarray
    kernel: tuple[int, ...]
    one_tap: bool = False

    @property
    def is_fittable(self) -> bool:
        """Whether the layer is narrow enough for a fit."""
        return self.width <= MAX_FIT_FEATURES

    @property
    def width(self) -> int:
        """The number of kept features of the widest block."""
        return max(len(self.kept_columns(block)) for block in range(self.blocks))

    def make_accumulator(self, rows: int | None = None) -> MomentAccumulator | RowAccumulator:
        """Return an accumulator for one block: of rows where these are smaller than a covariance, else of moments."""
        few = rows is not None and rows <= min(self.width, MAX_ROWS)
        return RowAccumulator() if few or self.width > MAX_COVARIANCE_FEATURES else MomentAccumulator()

    def to_one_tap(self) -> ConsumerWeight:
        """Return the weight with one factor per pair of channels, in place of one for each tap of its window."""
        return self if self.taps == 1 else replace(self, kernel=(1,) * len(self.kernel), one_tap=True)

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def blocks(self) -> int:
        return self.consumers[0][1].blocks

    @property
    def inputs(self) -> dict[str, str]:
        """The name of each layer's node, and of the value that it reads."""
        return {consumer.node.name: consumer.input for _, consumer in self.consumers}

    def kept_columns(self, block: int) -> Tensor:
        """Return the columns of one block's weight matrix that stay."""
        stays = np.split(self.stays, self.blocks)[block]
        return torch.from_numpy(np.flatnonzero(np.repeat(stays, self.taps)))

    def removed_columns(self, block: int) -> Tensor:
        """Return the columns of one block's weight matrix that are removed."""
        stays = np.split(self.stays, self.blocks)[block]
        return torch.from_numpy(np.flatnonzero(np.repeat(~stays, self.taps)))

    @property
    def removed_positions(self) -> Tensor:
        """Removed positions along the axis, over all blocks."""
        return torch.from_numpy(np.flatnonzero(~self.stays))

    def to_matrices(self, weight: Tensor) -> list[Tensor]:
        """Return each block as a matrix, outputs × (channels · taps).

        With `one_tap`, each tap of an output is a row of the matrix: all taps share the factors of a pair of channels.
        """
        blocks = weight.chunk(self.blocks, 0)
        if self.taps > 1:
            return [block.flatten(1) for block in blocks]
        return [block.movedim(self.axis.dim, -1).reshape(-1, block.shape[self.axis.dim]) for block in blocks]

    def join_columns(self, matrices: Sequence[Tensor], weight: Tensor) -> Tensor:
        """Join the kept columns of all blocks, in the shape of the weight."""
        blocks = weight.chunk(self.blocks, 0)
        if self.taps > 1:
            parts = [m.view(b.shape[0], -1, *b.shape[2:]) for m, b in zip(matrices, blocks, strict=True)]
        else:
            rest = [s for d, s in enumerate(blocks[0].shape) if d != self.axis.dim]
            parts = [m.view(*rest, -1).movedim(-1, self.axis.dim) for m in matrices]
        return torch.cat(parts, self.axis.dim)

    def get_row_layout(self, node: Node) -> VectorRows | WindowRows:
        """Return how rows are taken from what this call of the weight reads and outputs."""
        if not lookup_operator(node).convolves:
            return VectorRows(dim_from_end=2 if self._is_weight_first(node) else 1)
        plain = WindowRows(self.kernel, self.blocks)
        return plain if self.one_tap else plain.with_call_arguments(node.args)

    def _is_weight_first(self, node: Node) -> bool:
        left = node.args.get("mat1", node.args.get("self"))
        return (
            lookup_operator(node).layer == "product" and isinstance(left, Ref) and left.name != self.inputs[node.name]
        )


def find_consumer_weights(selection: Selection) -> list[ConsumerWeight]:
    """Return every stored weight that reads a removed channel, once, with all groups that it reads."""
    consumers_by_axis: dict[Axis, list[tuple[str, Consumer]]] = {}
    stays: dict[Axis, np.ndarray] = {}
    for site in selection.sites():
        for consumer in site.group.consumers:
            if consumer.axis is not None:
                consumers_by_axis.setdefault(consumer.axis, []).append((site.group.name, consumer))
                # One weight may read several groups, for instance behind a concatenation: it loses what any of them
                # loses.
                removed = np.isin(site.group.cuts[consumer.axis], site.removed)
                stays[consumer.axis] = stays.get(consumer.axis, np.ones(len(removed), bool)) & ~removed
    return [
        ConsumerWeight(axis, tuple(pairs), stays[axis], *_choose_kernel(selection.graph, axis, pairs))
        for axis, pairs in consumers_by_axis.items()
    ]


def _choose_kernel(graph: Graph, axis: Axis, consumers: Sequence[tuple[str, Consumer]]) -> tuple[tuple[int, ...], bool]:
    """Return the window that is fitted, and whether one tap stands for a larger window."""
    shape = graph.tensors[axis.tensor].shape
    kernel = tuple(int(k) for k in shape[2:])
    plain = all(lookup_operator(c.node).layer == "convolution" for _, c in consumers)
    # Taps multiply the unknowns of the fit, and a covariance has their square.
    if plain and int(shape[1]) * math.prod(kernel) <= MAX_COVARIANCE_FEATURES:
        return kernel, False
    return (1,) * len(kernel), bool(kernel)


def get_weight_input(consumer_weight: ConsumerWeight, node: Node, args: Mapping[str, Any]) -> Tensor:
    """Return the value that a layer reads, from its bound arguments."""
    wanted = consumer_weight.inputs[node.name]
    value: Tensor = next(args[k] for k, v in node.args.items() if isinstance(v, Ref) and v.name == wanted)
    return value


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
    runs: dict[int, Interpreter] = {}
    for part in parts:
        accumulators = {
            weight.axis: [weight.make_accumulator((rows or {}).get(weight.axis)) for _ in range(weight.blocks)]
            for weight in part
        }
        sample = make_position_sampler(seed, row_factor * selection.analysis.row_share)
        seen = _accumulate_batches(selection, part, batches, norm, sample, accumulators, runs)
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


def count_output_positions(graph: Graph, weight: ConsumerWeight, samples: int) -> int:
    """Count the output positions of a layer in one sample of the example, which has so many samples."""
    shape = next(iter(weight.consumers))[1].node.shape
    outputs = graph.tensors[weight.axis.tensor].shape[1 if weight.axis.dim == 0 else 0]
    # Entries of the output that are neither channels nor samples are positions.
    return max(1, math.prod(shape) // max(1, outputs * samples))


def count_rows(
    selection: Selection, weights: Sequence[ConsumerWeight], batches: Sequence[Sequence[Any]]
) -> dict[Axis, int]:
    """Count the rows that these batches have for each weight that one layer reads. Sampling may take fewer."""
    samples, example = sum(map(infer_batch_size, batches)), infer_batch_size(selection.inputs)
    return {
        weight.axis: samples * count_output_positions(selection.graph, weight, example)
        for weight in weights
        if len(weight.inputs) == 1
    }


MAX_STATISTICS_BYTES = 2**27
"""Bytes of sums that are held at once, or a quarter of the weights if that is more. Layers are handled in parts, so
that the peak does not grow with the depth of the network."""
MAX_HELD_BYTES = 2**27
"""Bytes up to which the values of all batches between two parts are held. Beyond it, each part runs from the start."""


def split_by_memory(selection: Selection, weights: Sequence[ConsumerWeight]) -> list[list[ConsumerWeight]]:
    """Split weights into parts whose sums take at most `MAX_STATISTICS_BYTES` together, in float32."""
    stored = sum(tensor.numel() * tensor.element_size() for tensor in selection.graph.tensors.values())
    most, used = max(MAX_STATISTICS_BYTES, stored // 4), 0
    parts: list[list[ConsumerWeight]] = [[]]
    for weight in weights:
        size = 4 * weight.blocks * weight.width**2
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
    runs: dict[int, Interpreter],
) -> int:
    """Run batches through the original and add what these weights read; return the number of batches.

    `runs` holds the runs of the part before, by the number of the batch. They are continued, and replaced.
    """
    by_node = {name: weight for weight in weights for name in weight.inputs}

    def call(node: Node, args: dict[str, Any]) -> Any:
        if node.name in by_node:
            weight = by_node[node.name]
            value = get_weight_input(weight, node, args)
            accumulate_batch(selection, weight, node, value, accumulators[weight.axis], sample)
        return norm(node, args) if lookup_operator(node).norm else node.compute(args)

    known, seen = len(batches) if isinstance(batches, Sequence) else 0, 0
    for seen, batch in enumerate(batches, 1):
        run = runs.pop(seen, None)
        if run is None or any(node.name in by_node for node in run.graph.nodes[: run.position]):
            graph = selection.analysis.graph_for(batch)
            run = Interpreter(graph, flatten_inputs(batch), selection.graph.tensors)
        run.hook = call
        run_until(run, by_node)
        if known * run.count_held_bytes() <= MAX_HELD_BYTES and known:
            runs[seen] = run
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
