"""Networks in double precision, also where their code names another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from neuron_merging.graph.copying import bare_copy, own_tensors

WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


class Doubled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator reads, makes and returns doubles in place of narrower floats."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # a note of the exporter on the precision that it saw
        if kwargs or not all(_is_wide(value) for value in args):
            args, kwargs = tree_map(wide, (args, kwargs or {}))
        found = func(*args, **(kwargs or {}))
        return found if _is_wide(found) else tree_map(wide, found)


def _is_wide(value: Any) -> bool:
    """Whether nothing about a value has to change; of what holds others, that is not looked into."""
    if isinstance(value, Tensor):
        return value.dtype not in WIDER
    return value is None or isinstance(value, (int, float, str))


def wide(value: Any) -> Any:
    """A tensor, or a precision that is asked for, as a double; anything else as it is."""
    if isinstance(value, torch.dtype):
        return WIDER.get(value, value)
    return value.to(WIDER[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDER else value


def double_copy(model: nn.Module, *, weights: bool = True) -> nn.Module:
    """The module with doubles in place of its floats; without `weights`, in place of vectors alone.

    A convolution wants input and bias alike before it asks us; all else becomes doubles as it is used.
    """
    chosen = [tensor for tensor in own_tensors(model) if weights or tensor.ndim < 2]
    return bare_copy(model, {id(tensor): _wide_like(tensor) for tensor in chosen})


def _wide_like(tensor: Tensor) -> Tensor:
    new = wide(tensor.detach()).clone()
    return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
