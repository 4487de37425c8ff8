"""How torch computes each ONNX operator. `OpCall` is one call of an operator: its inputs, its attributes, and the
sizes that replace its own after pruning.
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
"""What a step reads and makes: a tensor, known numbers, or nothing at all."""
OpHandler = Callable[["OpCall"], Any]
Shapes = Sequence[Sequence[int]]
MacFormula = Callable[[Shapes, Sequence[int]], int]
"""Multiply-accumulates of a node, by the shapes of its inputs and that of its first output."""


class UnsupportedUsage(Exception):
    """A way of using an operator that torch does not have."""


@dataclass(frozen=True)
class OnnxOperator:
    """One row of the table: all that is known of one operator."""

    handler: OpHandler | None = None
    """Computes it with torch; without one, onnxruntime does."""
    macs: MacFormula | None = None
    """Its cost where onnxruntime computes it."""
    layer: bool = False
    """Its constants may be the weights of a layer."""
    small_weights: bool = False
    """Its constants are weights, however few entries they have."""
    numeric_inputs: tuple[int, ...] = ()
    """Inputs that are numbers to compute with, not weights."""
    statistics_inputs: tuple[int, ...] = ()
    """Inputs that are statistics, not parameters."""
    data_dependent: bool = False
    """The sizes, or the kinds, of its results depend on the values that it is given."""


@dataclass(frozen=True)
class OpCall:
    """One call."""

    path: str
    inputs: Sequence[OnnxValue]
    attributes: Mapping[str, Any]
    version: int
    output_count: int
    new_sizes: Mapping[str, SizeOverrides]

    def has_input(self, i: int) -> bool:
        return i < len(self.inputs) and self.inputs[i] is not None

    def get_attribute(self, name: str, default: Any = None) -> Any:
        found = self.attributes.get(name, default)
        return found.decode() if isinstance(found, bytes) else found

    def get_tensor(self, i: int) -> Tensor:
        """An input as a tensor."""
        value = self.inputs[i]
        if isinstance(value, Tensor):
            return value
        if value is None:
            raise UnsupportedUsage
        return torch.from_numpy(np.array(value))

    def get_optional_tensor(self, i: int) -> Tensor | None:
        return self.get_tensor(i) if self.has_input(i) else None

    def get_operand(self, i: int) -> Tensor | float:
        """An input that meets others entry by entry; a single known number as a number."""
        value = self.inputs[i]
        most = max(v.ndim for v in self.inputs if v is not None)
        if isinstance(value, np.ndarray) and value.size == 1 and (value.ndim < most or most == 0):
            found: float = value.reshape(()).item()
            return found
        return self.get_tensor(i)

    def get_known_array(self, i: int) -> NDArray[Any]:
        """An input whose numbers are known."""
        value = self.inputs[i]
        if not isinstance(value, np.ndarray):
            raise UnsupportedUsage
        return value

    def get_number(self, i: int, name: str, default: float) -> float:
        """A number that newer versions take as an input and older ones as an attribute."""
        if self.has_input(i):
            return float(self.get_known_array(i).reshape(()).item())
        return float(self.get_attribute(name, default))

    def get_integers(self, i: int, name: str) -> list[int] | None:
        """The same for several whole ones."""
        if self.has_input(i):
            return [int(n) for n in self.get_known_array(i).ravel()]
        found = self.get_attribute(name)
        return None if found is None else [int(n) for n in found]

    def apply_new_sizes(self, kind: str, own: Sequence[int]) -> list[int]:
        """Sizes that the operator is given, or those that take their place."""
        return override_sizes(own, self.new_sizes.get(build_size_key(self.path, kind)))
