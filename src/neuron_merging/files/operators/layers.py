"""Layers with weights, and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from neuron_merging.files.operators.calls import Call, Unsupported

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def ints(call: Call, name: str, default: Sequence[int]) -> list[int]:
    return [int(n) for n in call.attribute(name, default)]


def window_pads(call: Call, x: Tensor, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """What a window is padded with before and after, also where the operator works that out itself."""
    count, way = len(kernel), call.attribute("auto_pad", "NOTSET")
    pads = ints(call, "pads", [0] * 2 * count)
    if way in ("NOTSET", "VALID"):
        return (pads[:count], pads[count:]) if way == "NOTSET" else ([0] * count, [0] * count)
    before, after = [], []
    strides, dilations = ints(call, "strides", [1] * count), ints(call, "dilations", [1] * count)
    for size, width, stride, dilation in zip(x.shape[-count:], kernel, strides, dilations, strict=True):
        reach = (width - 1) * dilation + 1
        missing = max((math.ceil(size / stride) - 1) * stride + reach - size, 0)
        small, large = missing // 2, missing - missing // 2
        before.append(small if way == "SAME_UPPER" else large)
        after.append(large if way == "SAME_UPPER" else small)
    return before, after


def spread(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Paddings in torch's order: the last dimension first."""
    return [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]


def conv(call: Call) -> Tensor:
    x, weight = call.tensor(0), call.tensor(1)
    count = weight.ndim - 2
    if count not in CONVOLVE:
        raise Unsupported
    before, after = window_pads(call, x, weight.shape[2:])
    padding: Any = before
    if before != after:
        x, padding = F.pad(x, spread(before, after)), 0
    (groups,) = call.sizes("groups", [int(call.attribute("group", 1))])
    strides, dilations = ints(call, "strides", [1] * count), ints(call, "dilations", [1] * count)
    return CONVOLVE[count](x, weight, call.optional(2), strides, padding, dilations, groups)


def conv_transpose(call: Call) -> Tensor:
    x, weight = call.tensor(0), call.tensor(1)
    count = weight.ndim - 2
    before, after = window_pads(call, x, weight.shape[2:])
    shaped = call.attribute("output_shape") is not None or call.attribute("auto_pad", "NOTSET") not in (
        "NOTSET",
        "VALID",
    )
    if count not in TRANSPOSED or before != after or shaped:
        raise Unsupported
    strides, dilations = ints(call, "strides", [1] * count), ints(call, "dilations", [1] * count)
    more = ints(call, "output_padding", [0] * count)
    (groups,) = call.sizes("groups", [int(call.attribute("group", 1))])
    return TRANSPOSED[count](x, weight, call.optional(2), strides, before, more, groups, dilations)


def gemm(call: Call) -> Tensor:
    x, weight = call.tensor(0), call.tensor(1)
    alpha, beta = float(call.attribute("alpha", 1.0)), float(call.attribute("beta", 1.0))
    x = x.t() if call.attribute("transA", 0) else x
    bias = call.optional(2)
    stored = weight if call.attribute("transB", 0) else weight.t()
    if alpha == 1.0 and (bias is None or (beta == 1.0 and bias.ndim == 1 and len(bias) == stored.shape[0])):
        return F.linear(x, stored, bias)
    product = F.linear(x, stored) * alpha
    return product if bias is None else product + bias * beta


def linear(call: Call) -> Tensor:
    return F.linear(call.tensor(0), call.tensor(1).t(), call.tensor(2))


def matmul(call: Call) -> Tensor:
    x, weight = call.tensor(0), call.tensor(1)
    return torch.matmul(x, weight)


def batch_norm(call: Call) -> Tensor:
    if call.results > 1 or call.attribute("training_mode", 0):
        raise Unsupported
    x, weight, bias, mean, variance = (call.tensor(i) for i in range(5))
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, float(call.attribute("epsilon", 1e-5)))


def instance_norm(call: Call) -> Tensor:
    x, weight, bias = (call.tensor(i) for i in range(3))
    return F.instance_norm(x, weight=weight, bias=bias, eps=float(call.attribute("epsilon", 1e-5)))


def layer_norm(call: Call) -> Tensor:
    x = call.tensor(0)
    axis = int(call.attribute("axis", -1)) % x.ndim
    if call.results > 1:
        raise Unsupported
    shape = list(x.shape[axis:])
    return F.layer_norm(x, shape, call.tensor(1), call.optional(2), float(call.attribute("epsilon", 1e-5)))


def group_norm(call: Call) -> Tensor:
    x, weight, bias = call.tensor(0), call.tensor(1).flatten(), call.tensor(2).flatten()
    (groups,) = call.sizes("groups", [int(call.attribute("num_groups"))])
    if weight.shape[0] != x.shape[1]:  # up to version 20 there was one number for each group
        raise Unsupported
    return F.group_norm(x, groups, weight, bias, float(call.attribute("epsilon", 1e-5)))


def gather(call: Call) -> Tensor:
    """A table is read, a position taken, or several are picked."""
    x, axis = call.tensor(0), int(call.attribute("axis", 0))
    axis %= x.ndim
    chosen = call.inputs[1]
    if isinstance(chosen, np.ndarray):
        index = np.where(chosen < 0, chosen + x.shape[axis], chosen)
        if index.ndim == 0:
            return torch.select(x, axis, int(index))
        if index.ndim == 1 and np.array_equal(index, np.arange(x.shape[axis])):
            return x
        found = torch.index_select(x, axis, torch.from_numpy(index.ravel().astype(np.int64)))
        return found if index.ndim == 1 else found.unflatten(axis, index.shape)  # type: ignore[no-untyped-call]
    index_tensor = call.tensor(1).long()
    if axis == 0 and x.ndim == 2:
        return F.embedding(index_tensor, x)
    if index_tensor.ndim == 1:
        return torch.index_select(x, axis, index_tensor)
    raise Unsupported
