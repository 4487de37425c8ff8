"""Compute ONNX operators with torch.

`OpCall` is one call of an operator: its inputs, its attributes, and the sizes that replace those of the file after
pruning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuron_merging.graph.graph_module import SizeOverrides, build_size_key, override_sizes

OnnxValue = Tensor | NDArray[Any] | None
"""An input or output of a step: a tensor, an array that is known while tracing, or None for an omitted input."""
OpHandler = Callable[["OpCall"], Any]
"""Computes one operator; returns a value, or a sequence of values for several outputs."""
Shapes = Sequence[Sequence[int]]
MacFormula = Callable[[Shapes, Sequence[int]], int]
"""Returns the MACs of a node from the shapes of its inputs and the shape of its first output."""


class UnsupportedUsage(Exception):
    """An operator is used in a way that torch does not support; onnxruntime runs it instead."""


@dataclass(frozen=True)
class OnnxOperator:
    """One row of the operator table."""

    handler: OpHandler | None = None
    """Computes the operator with torch. None: onnxruntime computes it."""
    macs: MacFormula | None = None
    """Counts the MACs of a node that onnxruntime computes; torch counts the others."""
    layer: bool = False
    """Whether constant inputs can be the weight of a layer."""
    small_weights: bool = False
    """Whether a constant with a single entry is still a weight."""
    numeric_inputs: tuple[int, ...] = ()
    """Inputs that are arguments such as the bounds of Clip, never weights."""
    statistics_inputs: tuple[int, ...] = ()
    """Inputs that are running statistics or selections of channels: buffers, not parameters."""
    data_dependent: bool = False
    """Whether shapes or dtypes of the outputs depend on input values. Such nodes and all behind them are skipped."""


@dataclass(frozen=True)
class OpCall:
    """One call of an operator."""

    path: str
    """The dotted path of the step's module; with a kind, the key of `new_sizes`."""
    inputs: Sequence[OnnxValue]
    attributes: Mapping[str, Any]
    version: int
    """The opset version of the file."""
    output_count: int
    new_sizes: Mapping[str, SizeOverrides]
    """Sizes after pruning, by path and kind."""

    def has_input(self, i: int) -> bool:
        return i < len(self.inputs) and self.inputs[i] is not None

    def get_attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute, decoded to `str` if it is text."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def get_tensor(self, i: int) -> Tensor:
        """Return an input as a tensor."""
        value = self.inputs[i]
        if isinstance(value, Tensor):
            return value
        if value is None:
            raise UnsupportedUsage
        return torch.from_numpy(np.array(value))

    def get_optional_tensor(self, i: int) -> Tensor | None:
        return self.get_tensor(i) if self.has_input(i) else None

    def get_operand(self, i: int) -> Tensor | float:
        """Return an operand of an elementwise operator: a Python number for a known scalar, else a tensor."""
        value = self.inputs[i]
        # An array of one entry with the highest rank of all operands decides the rank of the result: not a number then.
        highest_rank = max(v.ndim for v in self.inputs if v is not None)
        if isinstance(value, np.ndarray) and value.size == 1 and (value.ndim < highest_rank or highest_rank == 0):
            number: float = value.reshape(()).item()
            return number
        return self.get_tensor(i)

    def get_known_array(self, i: int) -> NDArray[Any]:
        """Return an input whose values are known while tracing; raise `UnsupportedUsage` if they are computed."""
        value = self.inputs[i]
        if not isinstance(value, np.ndarray):
            raise UnsupportedUsage
        return value

    def get_number(self, i: int, name: str, default: float) -> float:
        """Return a number that newer opsets pass as an input and older ones as an attribute."""
        if self.has_input(i):
            return float(self.get_known_array(i).reshape(()).item())
        return float(self.get_attribute(name, default))

    def get_integers(self, i: int, name: str) -> list[int] | None:
        """Return integers that newer opsets pass as an input and older ones as an attribute; None if omitted."""
        if self.has_input(i):
            return [int(n) for n in self.get_known_array(i).ravel()]
        values = self.get_attribute(name)
        return None if values is None else [int(n) for n in values]

    def apply_new_sizes(self, kind: str, sizes: Sequence[int]) -> list[int]:
        """Replace the file's sizes by those after pruning, where there are any."""
        return override_sizes(sizes, self.new_sizes.get(build_size_key(self.path, kind)))
