"""Activations and other element-wise functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.registry import FLAT, LINE, op, refuse

ZERO_PRESERVING: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky relu": lambda: nn.LeakyReLU(0.2),
    "prelu": nn.PReLU,
    "prelu per channel": lambda: nn.PReLU(8),
    "rrelu": nn.RReLU,
    "elu": lambda: nn.ELU(0.7),
    "selu": nn.SELU,
    "celu": lambda: nn.CELU(0.7),
    "gelu": nn.GELU,
    "gelu tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "hardtanh": lambda: nn.Hardtanh(-0.5, 0.7),
    "softshrink": lambda: nn.Softshrink(0.1),
    "hardshrink": lambda: nn.Hardshrink(0.1),
    "tanh": nn.Tanh,
    "tanhshrink": nn.Tanhshrink,
    "softsign": nn.Softsign,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "leaky relu in place": lambda: nn.LeakyReLU(inplace=True),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "log sigmoid": nn.LogSigmoid,
    "hardsigmoid": nn.Hardsigmoid,
    "softplus": nn.Softplus,
    "threshold": lambda: nn.Threshold(0.1, -0.3),
}
for _name, _make in ZERO_PRESERVING.items():
    op(_name, _make)
for _name, _make in OTHERS.items():
    op(_name, _make, dead=False)
op("prelu per channel flat", lambda: nn.PReLU(8), FLAT)
op("glu", lambda: nn.GLU(1), mid=16)
op("glu flat", lambda: nn.GLU(-1), FLAT, mid=16)
op("glu over length", lambda: nn.GLU(2), LINE)
op("softmax over space", lambda: nn.Softmax(-1), LINE, dead=False)
op("log softmax over space", lambda: nn.LogSoftmax(-1), LINE, dead=False)
refuse("softmax over channels", lambda: nn.Softmax(1), "softmax", dead=False)
op("clamp", lambda: lambda x: x.clamp(-0.5, 0.5))
op("power", lambda: lambda x: x.abs().add(1e-2).sqrt().pow(3) - x.exp(), dead=False)
op("where", lambda: lambda x: torch.where(x > 0, x, 0.3 * x))
op("in place arithmetic", lambda: lambda x: F.relu_(x.mul_(2.0).add_(x)))
op("dropout", lambda: nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.3), nn.AlphaDropout(0.1)))
