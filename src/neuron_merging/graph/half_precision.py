"""Compute convolutions and matrix products of half precision in float32 on a CPU, and round their results.

torch's own CPU kernels for float16 and bfloat16 take up to a hundred times as long, unless the processor multiplies
bfloat16 numbers by itself. They sum in float32, too, so that results agree up to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HALF_DTYPES = (torch.float16, torch.bfloat16)
SLOW_OPERATORS = frozenset(
    (
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"),
    )
)
"""Names of the operators that are slow in half precision."""


@cache
def has_native_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 numbers by itself."""
    # PyTorch has no public way to ask.
    return any(getattr(torch.cpu, f"_is_{name}_supported", lambda: False)() for name in ("avx512_bf16", "amx_tile"))


def is_bfloat16_fast(tensors: Iterable[Tensor]) -> bool:
    """Return whether these are float32 weights on a CPU that multiplies bfloat16 numbers by itself."""
    floats = (tensor for tensor in tensors if tensor.is_floating_point())
    is_float32 = all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in floats)
    return is_float32 and has_native_bfloat16()


def is_slow_in_half(value: Any) -> bool:
    """Return whether a value is a tensor in half precision on a CPU that does not compute in it."""
    if not isinstance(value, Tensor) or value.dtype not in HALF_DTYPES:
        return False
    native = value.dtype == torch.bfloat16 and has_native_bfloat16()
    return value.device.type == "cpu" and not native and not isinstance(value, FakeTensor)


def compute_in_float32(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with halves as float32, and round its result to the dtype of the first half."""
    dtype = next((value.dtype for value in tree_leaves((args, kwargs)) if is_slow_in_half(value)), None)
    if dtype is None:
        return function(*args, **kwargs)
    args, kwargs = tree_map(lambda value: value.float() if is_slow_in_half(value) else value, (args, kwargs))
    result = function(*args, **kwargs)
    return tree_map(lambda value: value.to(dtype) if isinstance(value, Tensor) else value, result)


def compute_fast(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function: in float32 if it is one of torch's operators that are slow in half precision."""
    packet = getattr(function, "overloadpacket", None)
    if packet is not None and packet.__name__ in SLOW_OPERATORS:
        return compute_in_float32(function, args, kwargs)
    return function(*args, **kwargs)


class _HalfInFloat32Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes the slow operators of a network's own code in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute_fast(func, args, kwargs or {})


@contextmanager
def fast_half_precision(tensors: Iterable[Any]) -> Iterator[None]:
    """Speed up computations inside the `with` block if one of these tensors is in half precision."""
    # A capture must see the operators of the network, not these casts.
    if torch.compiler.is_compiling() or not any(map(is_slow_in_half, tensors)):
        yield
        return
    with _HalfInFloat32Mode():  # type: ignore[no-untyped-call]
        yield
