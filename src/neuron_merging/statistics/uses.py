"""Uses: stored weights that read removed channels, and what they read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from neuron_merging.channels.groups import Axis, Consumer
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Selection
from neuron_merging.graph.values import Graph, Node, Ref

WIDEST = 6144


ROWS = 4


LEAST = 4096


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
        return max(len(self.kept(block)) for block in range(self.blocks)) <= WIDEST

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

    def pick(self, node: Node, value: Tensor, sample: Callable[[int, int], Tensor]) -> Tensor:
        """Positions, over space and for plain layers over the batch too, at which rows are taken."""
        width = int(math.prod(self.kernel)) * value.shape[self._dim(node, value)]
        enough = max(LEAST, ROWS * width)
        if not row_of(node).convolves:
            return sample(value.numel() // max(1, value.shape[self._dim(node, value)]), enough)
        batched = self._batched(node, value)
        return sample(self._windows(node, batched).shape[2 : -len(self.kernel)].numel(), max(1, enough // len(batched)))

    def rows(self, node: Node, value: Tensor, at: Tensor) -> list[Tensor]:
        """What the layer reads at these positions, a matrix for each block."""
        if not row_of(node).convolves:
            dim = self._dim(node, value)
            return [value.movedim(dim, -1).reshape(-1, value.shape[dim])[at.to(value.device)]]
        windows = self._windows(node, self._batched(node, value))
        taken = _at(windows, windows.shape[2 : -len(self.kernel)], at).flatten(3)
        return [part.flatten(1) for part in taken.transpose(1, 2).flatten(0, 1).chunk(self.blocks, 1)]

    def outputs(self, node: Node, value: Tensor, at: Tensor) -> list[Tensor]:
        """What the layer puts out at the same positions, a matrix for each block."""
        if not row_of(node).convolves:
            dim = self._dim(node, value)
            return [value.movedim(dim, -1).reshape(-1, value.shape[dim])[at.to(value.device)]]
        batched = self._batched(node, value)
        taken = _at(batched, batched.shape[2:], at)
        return list(taken.transpose(1, 2).flatten(0, 1).chunk(self.blocks, 1))

    def _dim(self, node: Node, value: Tensor) -> int:
        if row_of(node).convolves:
            return value.ndim - len(self.kernel) - 1
        return value.ndim - (2 if self._weight_first(node) else 1)

    def _batched(self, node: Node, value: Tensor) -> Tensor:
        return value if value.ndim == len(self.kernel) + 2 else value.unsqueeze(0)

    def _windows(self, node: Node, value: Tensor) -> Tensor:
        """(batch, channels, places …, taps …); without all taps, every position is a window."""
        args = {} if self.one_tap else node.args
        stride, dilation = (_each(args.get(name), len(self.kernel), 1) for name in ("stride", "dilation"))
        windows = F.pad(value, _padding(args.get("padding"), self.kernel, dilation))
        for i, size in enumerate(self.kernel):
            windows = windows.unfold(2 + i, dilation[i] * (size - 1) + 1, stride[i])
        steps: list[Any] = [slice(None, None, step) for step in dilation]
        return windows[(..., *steps)]

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


def _at(value: Tensor, grid: torch.Size, at: Tensor) -> Tensor:
    """(batch, channels, positions, …): the places of a grid that is flattened into numbers."""
    index: list[Any] = [slice(None), slice(None), *torch.unravel_index(at.to(value.device), grid)]
    return value[tuple(index)]


def _padding(value: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Zeros before and after each dimension, the last one first, as torch wants them."""
    if value == "same":
        total = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return [amount for size in reversed(total) for amount in (size // 2, size - size // 2)]
    sizes = _each(None if value == "valid" else value, len(kernel), 0)
    return [amount for size in reversed(sizes) for amount in (size, size)]


def _each(value: Any, count: int, default: int) -> list[int]:
    listed = [default] if value is None else [value] if isinstance(value, int) else list(value)
    return [int(v) for v in (listed * count if len(listed) == 1 else listed)]
