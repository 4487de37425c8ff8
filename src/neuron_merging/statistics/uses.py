"""Uses: stored weights that read removed channels, and what they read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.groups import Axis, Consumer
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Selection
from neuron_merging.graph.values import Graph, Node, Ref
from neuron_merging.statistics.places import Vectors, Windows
from neuron_merging.statistics.regression import MOST_ROWS, Regression, Rows

WIDEST = 6144
"""Features whose covariances are gathered; beyond that rows themselves are (`regression.Rows`)."""
MOST = 2**15
"""Features that a fit by rows takes."""


@dataclass(frozen=True)
class Use:
    """One stored weight that reads removed channels: where it is called, and what it keeps.

    `kernel` is the window that is fitted tap by tap. With `one_tap`, it is all ones and stands for one
    factor per channel, where a fit of all taps would be too wide to solve or the layer is not a plain
    convolution.
    """

    axis: Axis
    consumers: tuple[tuple[str, Consumer], ...]
    stays: np.ndarray
    kernel: tuple[int, ...]
    one_tap: bool = False

    @property
    def fits(self) -> bool:
        """Whether the system that is to be solved is still worth its time and memory."""
        return self.width <= MOST

    @property
    def width(self) -> int:
        """Features of the widest block that stay."""
        return max(len(self.kept(block)) for block in range(self.blocks))

    def gatherer(self, rows: int | None = None) -> Regression | Rows:
        """What the statistics of one block are gathered in; few rows are less than covariances of many features."""
        few = rows is not None and rows <= min(self.width, MOST_ROWS)
        return Rows() if few or self.width > WIDEST else Regression()

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def blocks(self) -> int:
        return self.consumers[0][1].blocks

    @property
    def inputs(self) -> dict[str, str]:
        """Node → the value that it reads."""
        return {consumer.node.name: consumer.input for _, consumer in self.consumers}

    def kept(self, block: int) -> Tensor:
        """Columns of the weight matrix that stay, in one block of a grouped convolution."""
        stays = np.split(self.stays, self.blocks)[block]
        return torch.from_numpy(np.flatnonzero(np.repeat(stays, self.taps)))

    def gone(self, block: int) -> Tensor:
        """The others."""
        stays = np.split(self.stays, self.blocks)[block]
        return torch.from_numpy(np.flatnonzero(np.repeat(~stays, self.taps)))

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """Each block as outputs × (channels · taps); with one tap, kernel positions are outputs."""
        blocks = weight.chunk(self.blocks, 0)
        if self.taps > 1:
            return [block.flatten(1) for block in blocks]
        return [block.movedim(self.axis.dim, -1).reshape(-1, block.shape[self.axis.dim]) for block in blocks]

    def columns(self, matrices: Sequence[Tensor], weight: Tensor) -> Tensor:
        """Kept columns of all blocks side by side, in the shape of the (exposed) weight."""
        blocks = weight.chunk(self.blocks, 0)
        if self.taps > 1:
            parts = [m.view(b.shape[0], -1, *b.shape[2:]) for m, b in zip(matrices, blocks, strict=True)]
        else:
            rest = [s for d, s in enumerate(blocks[0].shape) if d != self.axis.dim]
            parts = [m.view(*rest, -1).movedim(-1, self.axis.dim) for m in matrices]
        return torch.cat(parts, self.axis.dim)

    def places(self, node: Node) -> Vectors | Windows:
        """Where, in what this call of the weight reads and puts out, rows are taken."""
        if not row_of(node).convolves:
            return Vectors(from_end=2 if self._weight_first(node) else 1)
        plain = Windows(self.kernel, self.blocks)
        return plain if self.one_tap else plain.as_called(node.args)

    def _weight_first(self, node: Node) -> bool:
        left = node.args.get("mat1", node.args.get("self"))
        return row_of(node).layer == "product" and isinstance(left, Ref) and left.name != self.inputs[node.name]


def find_uses(selection: Selection) -> list[Use]:
    """Every stored weight that reads a removed channel, once, with all groups that it reads."""
    readers: dict[Axis, list[tuple[str, Consumer]]] = {}
    stays: dict[Axis, np.ndarray] = {}
    for site in selection.sites():
        for consumer in site.group.consumers:
            if consumer.axis is not None:
                readers.setdefault(consumer.axis, []).append((site.group.name, consumer))
                gone = np.isin(site.group.cuts[consumer.axis], site.removed)
                stays[consumer.axis] = stays.get(consumer.axis, np.ones(len(gone), bool)) & ~gone
    return [
        Use(axis, tuple(pairs), stays[axis], *_window(selection.graph, axis, pairs)) for axis, pairs in readers.items()
    ]


def _window(graph: Graph, axis: Axis, consumers: Sequence[tuple[str, Consumer]]) -> tuple[tuple[int, ...], bool]:
    """The window that is fitted, and whether it stands for a larger one."""
    shape = graph.tensors[axis.tensor].shape
    kernel = tuple(int(k) for k in shape[2:])
    plain = all(row_of(c.node).layer == "convolution" for _, c in consumers)
    if plain and int(shape[1]) * math.prod(kernel) <= WIDEST:
        return kernel, False
    return (1,) * len(kernel), bool(kernel)


def read(use: Use, node: Node, args: Mapping[str, Any]) -> Tensor:
    """The value that a layer reads, from its bound arguments."""
    wanted = use.inputs[node.name]
    value: Tensor = next(args[k] for k, v in node.args.items() if isinstance(v, Ref) and v.name == wanted)
    return value
