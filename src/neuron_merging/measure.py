"""measure: means and covariances of what a layer reads, from batches run through the graph.

Nothing here keeps a batch: every layer's statistics are sums that grow with its width only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuron_merging.capture import Graph, Node, Ref
from neuron_merging.channels import Axis, Consumer
from neuron_merging.errors import MergingError

WIDEST = 6144
ROWS = 8


@dataclass
class Gram:
    """A running mean and covariance of rows that arrive in batches."""

    count: int = 0
    shift: Tensor | None = None
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    product: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, rows: Tensor) -> None:
        rows = rows if rows.dtype == torch.float64 else rows.float()
        if self.shift is None:
            self.shift = rows.mean(0)
        rows = rows - self.shift
        self.count += len(rows)
        self.total = self.total.to(rows) + rows.sum(0)
        self.product = self.product.to(rows) + rows.T @ rows

    @property
    def mean(self) -> Tensor:
        assert self.shift is not None
        return (self.shift + self.total / self.count).double()

    @property
    def covariance(self) -> Tensor:
        mean = self.total.double() / self.count
        return self.product.double() / self.count - torch.outer(mean, mean)


@dataclass(frozen=True)
class Reader:
    """How one weight reads its input: rows of `channels × taps` entries for each of its blocks.

    `kernel` is the window that is fitted tap by tap; (1, 1) stands for one factor per channel.
    """

    axis: Axis
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    kernel: tuple[int, ...]

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    def rows(self, node: Node, value: Tensor, pick: torch.Generator) -> list[Tensor]:
        """A sample of positions, one matrix per block, channels major and taps minor."""
        if not node.op.startswith("conv"):
            dim = self._dim(node, value)
            flat = value.movedim(dim, -1).reshape(-1, value.shape[dim])
            return [_sample(flat, pick)]
        batched = value if value.ndim == len(self.kernel) + 2 else value.unsqueeze(0)
        if self.taps == 1:
            points = _sample(batched.movedim(1, -1).reshape(-1, batched.shape[1]), pick)
            return list(points.chunk(self.axis.blocks, 1))
        patches = _patches(node, batched, self.kernel, pick)
        return [part.flatten(1) for part in patches.chunk(self.axis.blocks, 1)]

    def _dim(self, node: Node, value: Tensor) -> int:
        """A weight on the left of a product reads the rows of its input, otherwise the columns."""
        left = node.args.get("self")
        weight_first = node.op in ("matmul", "mm") and isinstance(left, Ref) and left.name not in self.inputs
        return value.ndim - 2 if weight_first else value.ndim - 1


def readers(graph: Graph, consumers: Iterable[Consumer]) -> list[Reader]:
    """One reader per stored weight; a layer that is called twice reads twice."""
    by_axis: dict[Axis, dict[str, Consumer]] = {}
    for consumer in consumers:
        if consumer.axis is not None:
            by_axis.setdefault(consumer.axis, {})[consumer.node.name] = consumer
    return [
        Reader(
            axis,
            tuple(c.node for c in same.values()),
            tuple(c.input for c in same.values()),
            _window(graph, axis, same),
        )
        for axis, same in by_axis.items()
    ]


def _window(graph: Graph, axis: Axis, consumers: Mapping[str, Consumer]) -> tuple[int, ...]:
    """All taps of the kernel, or one factor per channel where that would be too wide to solve."""
    shape = graph.tensors[axis.tensor].shape
    kernel = tuple(int(k) for k in shape[2:])
    simple = all(
        c.node.op.startswith("conv")
        and "transpose" not in c.node.op
        and not isinstance(c.node.args.get("padding"), str)
        for c in consumers.values()
    )
    return kernel if simple and int(shape[1]) * math.prod(kernel) <= WIDEST else (1,) * len(kernel)


def measure(
    graph: Graph,
    wanted: Sequence[Reader],
    batches: Iterable[Sequence[Any]],
    *,
    renormalise: bool = False,
    seed: int = 0,
) -> dict[Axis, list[Gram]]:
    """Run batches through the graph and collect what every reader sees.

    `renormalise` lets batch norms use the batch's own statistics, so that every pre-activation has
    exactly the mean and variance that the network was trained to, whatever the batch looks like.
    """
    grams = {reader.axis: [Gram() for _ in range(reader.axis.blocks)] for reader in wanted}
    by_node = {
        node.name: (reader, ref) for reader in wanted for node, ref in zip(reader.nodes, reader.inputs, strict=True)
    }
    pick = torch.Generator().manual_seed(seed)

    def call(node: Node, args: dict[str, Any]) -> Any:
        if node.name in by_node:
            reader, ref = by_node[node.name]
            value = next(args[k] for k, v in node.args.items() if isinstance(v, Ref) and v.name == ref)
            for gram, rows in zip(grams[reader.axis], reader.rows(node, value, pick), strict=True):
                gram.add(rows)
        if renormalise and node.op == "batch_norm" and args["input"].numel() > args["input"].shape[1]:
            return F.batch_norm(args["input"], None, None, args["weight"], args["bias"], True, 0.0, args["eps"])
        return node.compute(args)

    seen = 0
    with torch.no_grad():
        for batch in batches:
            graph.run(list(batch), graph.tensors, call)
            seen += 1
    if not seen:
        raise MergingError("there is no calibration batch", where="calibration=", fix="Give at least one batch.")
    return grams


def _sample(rows: Tensor, pick: torch.Generator) -> Tensor:
    """As many rows as the statistics need, spread at random."""
    limit = max(4096, ROWS * rows.shape[1])
    if len(rows) <= limit:
        return rows
    return rows[torch.randperm(len(rows), generator=pick)[:limit].to(rows.device)]


def _patches(node: Node, value: Tensor, kernel: Sequence[int], pick: torch.Generator) -> Tensor:
    """(samples, channels, taps) of a convolution's windows at random positions."""
    spatial = len(kernel)
    stride, dilation = (_each(node.args.get(name), spatial, 1) for name in ("stride", "dilation"))
    padding = _each(node.args.get("padding"), spatial, 0)
    windows = F.pad(value, [amount for size in reversed(padding) for amount in (size, size)])
    for i in range(spatial):
        windows = windows.unfold(2 + i, dilation[i] * (kernel[i] - 1) + 1, stride[i])
    steps: list[Any] = [slice(None, None, step) for step in dilation]
    windows = windows[(..., *steps)]
    grid = windows.shape[2 : 2 + spatial]
    limit = max(4096, ROWS * value.shape[1] * math.prod(kernel))
    each = max(1, min(grid.numel(), limit // len(value)))
    at = torch.randperm(grid.numel(), generator=pick)[:each].to(value.device)
    index: list[Any] = [slice(None), slice(None), *torch.unravel_index(at, grid)]
    taken = windows[tuple(index)]
    return taken.flatten(3).transpose(1, 2).flatten(0, 1)


def _each(value: Any, count: int, default: int) -> list[int]:
    listed = [default] if value is None else [value] if isinstance(value, int) else list(value)
    return [int(v) for v in (listed * count if len(listed) == 1 else listed)]
