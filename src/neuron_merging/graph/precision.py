"""Numerical precision: the dtype that merging computes in, and a mode that runs a network in float64 even where
its code names another dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from neuron_merging.graph.copying import copy_without_hooks, iter_module_tensors


def to_working_precision(tensor: Tensor) -> Tensor:
    """float64 stays, half precision is computed in float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64: Apple's GPUs do not."""
    return device.type != "mps"


WIDER_DTYPES = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


class Float64Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator reads, makes and returns doubles in place of narrower floats."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # a note of the exporter on the precision that it saw
        if kwargs or not all(_needs_no_widening(value) for value in args):
            args, kwargs = tree_map(to_float64, (args, kwargs or {}))
        found = func(*args, **(kwargs or {}))
        return found if _needs_no_widening(found) else tree_map(to_float64, found)


def _needs_no_widening(value: Any) -> bool:
    """Whether nothing about a value has to change; of what holds others, that is not looked into."""
    if isinstance(value, Tensor):
        return value.dtype not in WIDER_DTYPES
    return value is None or isinstance(value, (int, float, str))


def to_float64(value: Any) -> Any:
    """A tensor, or a precision that is asked for, as a double; anything else as it is."""
    if isinstance(value, torch.dtype):
        return WIDER_DTYPES.get(value, value)
    return value.to(WIDER_DTYPES[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDER_DTYPES else value


def copy_to_float64(model: nn.Module, *, weights: bool = True) -> nn.Module:
    """The module with doubles in place of its floats; without `weights`, in place of vectors alone.

    A convolution wants input and bias alike before it asks us; all else becomes doubles as it is used.
    """
    chosen = [tensor for tensor in iter_module_tensors(model) if weights or tensor.ndim < 2]
    return copy_without_hooks(model, {id(tensor): _clone_as_float64(tensor) for tensor in chosen})


def _clone_as_float64(tensor: Tensor) -> Tensor:
    new = to_float64(tensor.detach()).clone()
    return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
