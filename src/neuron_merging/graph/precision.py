"""Numerical precision: the dtype that merging computes in, and a mode that runs a network in float64, even if its code
names another dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from neuron_merging.graph.copying import copy_without_hooks, iter_module_tensors


def to_working_precision(tensor: Tensor) -> Tensor:
    """Return a float32 or float64 tensor unchanged, any other as float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64. Apple's GPUs do not."""
    return device.type != "mps"


WIDER_DTYPES = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
"""The dtypes that `Float64Mode` replaces, and by what."""


class Float64Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make every operator read, create and return float64 in place of narrower floats."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # the exporter's check of a cast's dtype, which no longer holds
        if kwargs or not all(_needs_no_widening(value) for value in args):
            args, kwargs = tree_map(to_float64, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        return result if _needs_no_widening(result) else tree_map(to_float64, result)


def _needs_no_widening(value: Any) -> bool:
    """Return whether a value is known to stay. Containers are not looked into, so they count as unknown."""
    # A quick test that covers most arguments: tree_map is slow beside small operators.
    if isinstance(value, Tensor):
        return value.dtype not in WIDER_DTYPES
    return value is None or isinstance(value, (int, float, str))


def to_float64(value: Any) -> Any:
    """Widen a tensor, or a dtype argument, to float64. Return anything else unchanged."""
    if isinstance(value, torch.dtype):
        return WIDER_DTYPES.get(value, value)
    return value.to(WIDER_DTYPES[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDER_DTYPES else value


def copy_to_float64(model: nn.Module, *, weights: bool = True) -> nn.Module:
    """Return a copy of the module with float64 tensors; without `weights`, only vectors are widened.

    A convolution compares the dtypes of input and bias before `Float64Mode` sees the call. Other tensors can be widened
    by the mode when they are read.
    """
    chosen = [tensor for tensor in iter_module_tensors(model) if weights or tensor.ndim < 2]
    return copy_without_hooks(model, {id(tensor): _clone_as_float64(tensor) for tensor in chosen})


def _clone_as_float64(tensor: Tensor) -> Tensor:
    new = to_float64(tensor.detach()).clone()
    return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
