"""Activations and other functions of single entries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..site import Block, Made, Site, function, kind, param

MODULES = {
    "relu": nn.ReLU,
    "relu_inplace": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "elu": nn.ELU,
    "celu": nn.CELU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu_inplace": lambda: nn.SiLU(inplace=True),
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "hardtanh": lambda: nn.Hardtanh(-0.5, 1.5),
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "logsigmoid": nn.LogSigmoid,
    "tanhshrink": nn.Tanhshrink,
    "softshrink": lambda: nn.Softshrink(0.1),
    "threshold": lambda: nn.Threshold(0.1, 0.3),
    "rrelu": nn.RReLU,
    "dropout": lambda: nn.Dropout(0.5),
    "feature_alpha_dropout": lambda: nn.AlphaDropout(0.5),
    "one_prelu": nn.PReLU,
    "identity": nn.Identity,
}
for _name, _make in MODULES.items():
    kind(name=_name)(lambda site, make=_make: (make(), site.width))

function("tanh", torch.tanh)
function("sigmoid", torch.sigmoid)
function("exp_small", lambda x: (x * 0.3).clamp(max=3).exp())
function("cos", torch.cos)
function("square", lambda x: x * x)
function("power", lambda x: x.abs().pow(1.5))
function("sqrt_abs", lambda x: (x.abs() + 1e-3).sqrt())
function("reciprocal", lambda x: 1 / (x.abs() + 1))
function("clamp", lambda x: x.clamp(-1, 1))
function("sign", torch.sign)
function("where", lambda x: torch.where(x > 0, x, 0.1 * x))
function("masked_fill", lambda x: x.masked_fill(x < -0.2, 0.0))
function("swish_by_hand", lambda x: x * torch.sigmoid(1.3 * x))
function("relu_squared", lambda x: F.relu(x).square())
function("affine_number", lambda x: 0.7 * x + 0.3)
function("reverse_subtraction", lambda x: 1 - x)
function("maximum_zero", lambda x: torch.maximum(x, torch.zeros_like(x)))
function("add_ones_like", lambda x: x + torch.ones_like(x))
function("there_and_back_dtype", lambda x: x.to(torch.float64).to(x.dtype))
function("detach_clone", lambda x: x.detach().clone().contiguous())
function("nan_to_num", torch.nan_to_num)
function("relu_functional_inplace", lambda x: F.relu(x + 0.1, inplace=True))
function("lerp", lambda x: torch.lerp(x, x.tanh(), 0.3))
function("addcmul", lambda x: torch.addcmul(x, x, x.sigmoid(), value=0.5))
function("hypot", lambda x: torch.hypot(x, x + 1))
function("remainder", lambda x: x.remainder(1.7))
function("round", lambda x: (4 * x).round() / 4)


@kind()
def prelu(site: Site) -> Made:
    if site.domain == "tokens":
        return None
    module = nn.PReLU(site.width)
    nn.init.uniform_(module.weight, -0.3, 0.9)
    return module, site.width


@kind()
def no_grad_block(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        with torch.no_grad():
            return b.f(x).relu()

    out = site.other()
    return Block(run, f=site.mix(site.width, out)), out


@kind()
def layer_scale(site: Site) -> Made:
    return Block(lambda b, x: x * b.scale, scale=site.per_channel(site.width)), site.width


@kind()
def channel_shift(site: Site) -> Made:
    return Block(lambda b, x: x + b.shift, shift=site.per_channel(site.width)), site.width


@kind()
def divided_by_parameter(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        return x / (b.scale.abs() + 0.5)

    return Block(run, scale=site.per_channel(site.width)), site.width


@kind()
def swish_with_slopes(site: Site) -> Made:
    return Block(lambda b, x: x * torch.sigmoid(b.slope * x), slope=site.per_channel(site.width)), site.width


@kind()
def learned_threshold(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        return torch.where(x > b.level, x, b.level.expand_as(x) * 0.1)

    return Block(run, level=site.per_channel(site.width)), site.width


@kind()
def maxout_with_parameter(site: Site) -> Made:
    return Block(lambda b, x: torch.maximum(x, b.level), level=site.per_channel(site.width)), site.width


@kind()
def scalar_parameter(site: Site) -> Made:
    return Block(lambda b, x: x * b.t + b.s[0], t=param(), s=param(3)), site.width


@kind()
def buffer_of_channels(site: Site) -> Made:
    scale = torch.rand(site.width, *[1] * site.spatial) + 0.5
    return Block(lambda b, x: x * b.scale, scale=scale), site.width


@kind()
def channel_mask(site: Site) -> Made:
    mask = torch.rand(site.width, *[1] * site.spatial) > 0.3
    return Block(lambda b, x: x * b.mask, mask=mask), site.width


@kind()
def masked_by_buffer(site: Site) -> Made:
    mask = torch.rand(site.width, *[1] * site.spatial) > 0.7
    return Block(lambda b, x: x.masked_fill(b.mask, 0.25), mask=mask), site.width


@kind()
def snake(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        return x + torch.sin(b.a * x).square() / (b.a.abs() + 1)

    return Block(run, a=site.per_channel(site.width)), site.width
