"""Elementwise operators and activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from neuron_merging.onnx.operators import OpCall, OpHandler, UnsupportedUsage


def make_unary(compute: Callable[[Tensor], Tensor]) -> OpHandler:
    """Make the handler of an operator with one operand."""
    return lambda call: compute(call.get_tensor(0))


def make_binary(compute: Callable[..., Tensor]) -> OpHandler:
    """Make the handler of an operator with two operands that broadcast."""

    def handler(call: OpCall) -> Tensor:
        a, b = call.get_operand(0), call.get_operand(1)
        return compute(a, b) if isinstance(a, Tensor) else compute(call.get_tensor(0), b)

    return handler


def make_commutative(compute: Callable[..., Tensor]) -> OpHandler:
    """Make the handler of a commutative operator; a number becomes the second operand, as torch requires."""

    def handler(call: OpCall) -> Tensor:
        a, b = call.get_operand(0), call.get_operand(1)
        return compute(a, b) if isinstance(a, Tensor) else compute(b, a)

    return handler


def make_variadic(compute: Callable[[Tensor, Tensor], Tensor]) -> OpHandler:
    """Make the handler of an operator with any number of operands."""
    return lambda call: reduce(compute, (call.get_tensor(i) for i in range(len(call.inputs))))


def run_div(call: OpCall) -> Tensor:
    a, b = call.get_operand(0), call.get_operand(1)
    integral = not (call.get_tensor(0).is_floating_point() or call.get_tensor(1).is_floating_point())
    first = a if isinstance(a, Tensor) else call.get_tensor(0)
    # ONNX divides integers like C, rounding towards zero; torch.div would return floats.
    return torch.div(first, b, rounding_mode="trunc") if integral else torch.div(first, b)


def run_sub(call: OpCall) -> Tensor:
    a, b = call.get_operand(0), call.get_operand(1)
    return torch.sub(a, b) if isinstance(a, Tensor) else torch.rsub(call.get_tensor(1), a)


def run_pow(call: OpCall) -> Tensor:
    b = call.get_operand(1)
    if isinstance(b, float) and b == 2.0:  # cheaper than pow
        return torch.square(call.get_tensor(0))
    return torch.pow(call.get_tensor(0), b)


def run_mean(call: OpCall) -> Tensor:
    return reduce(torch.add, (call.get_tensor(i) for i in range(len(call.inputs)))) / len(call.inputs)


def run_clip(call: OpCall) -> Tensor:
    x = call.get_tensor(0)
    low, high = _read_bound(call, 1, "min"), _read_bound(call, 2, "max")
    if low == 0.0 and high is None:  # Clip(0, ∞) is a ReLU
        return F.relu(x)
    return x if low is None and high is None else torch.clamp(x, low, high)


def _read_bound(call: OpCall, slot: int, name: str) -> float | None:
    """Return a bound of Clip, or None where there is none: exporters write the largest float for "no bound"."""
    if call.has_input(slot):
        bound: float = call.get_known_array(slot).reshape(()).item()
    elif name in call.attributes:
        bound = float(call.get_attribute(name))
    else:
        return None
    return bound if abs(bound) < np.finfo(np.float32).max else None


def run_hard_sigmoid(call: OpCall) -> Tensor:
    alpha, beta = float(call.get_attribute("alpha", 0.2)), float(call.get_attribute("beta", 0.5))
    x = call.get_tensor(0)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0.0, 1.0)


def run_gelu(call: OpCall) -> Tensor:
    return F.gelu(call.get_tensor(0), approximate=call.get_attribute("approximate", "none"))


def run_leaky_relu(call: OpCall) -> Tensor:
    return F.leaky_relu(call.get_tensor(0), float(call.get_attribute("alpha", 0.01)))


def run_elu(call: OpCall) -> Tensor:
    return F.elu(call.get_tensor(0), float(call.get_attribute("alpha", 1.0)))


def run_selu(call: OpCall) -> Tensor:
    if not math.isclose(float(call.get_attribute("alpha", 1.6732632)), 1.6732632, rel_tol=1e-4):
        raise UnsupportedUsage
    return F.selu(call.get_tensor(0))


def run_celu(call: OpCall) -> Tensor:
    return F.celu(call.get_tensor(0), float(call.get_attribute("alpha", 1.0)))


def run_thresholded_relu(call: OpCall) -> Tensor:
    return F.threshold(call.get_tensor(0), float(call.get_attribute("alpha", 1.0)), 0.0)


def run_prelu(call: OpCall) -> Tensor:
    """Compute max(x, 0) + slope · min(x, 0), which broadcasts a slope per tensor or per channel."""
    x, slope = call.get_tensor(0), call.get_tensor(1)
    return torch.clamp_min(x, 0.0) + slope * torch.clamp_max(x, 0.0)


def run_softsign(call: OpCall) -> Tensor:
    x = call.get_tensor(0)
    return x / (1 + x.abs())


def run_swish(call: OpCall) -> Tensor:
    x = call.get_tensor(0)
    return x * torch.sigmoid(x * float(call.get_attribute("alpha", 1.0)))


def run_mod(call: OpCall) -> Tensor:
    compute: Any = torch.fmod if call.get_attribute("fmod", 0) else torch.remainder
    remainder: Tensor = compute(call.get_tensor(0), call.get_operand(1))
    return remainder


def run_shrink(call: OpCall) -> Tensor:
    if float(call.get_attribute("bias", 0.0)) != 0.0:
        raise UnsupportedUsage
    return F.hardshrink(call.get_tensor(0), float(call.get_attribute("lambd", 0.5)))


def run_einsum(call: OpCall) -> Tensor:
    return torch.einsum(call.get_attribute("equation"), *(call.get_tensor(i) for i in range(len(call.inputs))))
