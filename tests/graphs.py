"""A zoo of small networks: every operator once at least, with channels flowing through it.

A case says what has to come of it: `cut` names the weights whose output channels must shrink, `refused`
the layers that must stay whole and the word that the refusal has to give. Most cases are a layer `a`, the
operator in question, and a tail `b`, `c` that can always be pruned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]
IMAGE: tuple[Shape, ...] = ((2, 3, 8, 8),)
LINE: tuple[Shape, ...] = ((2, 3, 12),)
CUBE: tuple[Shape, ...] = ((2, 3, 6, 6, 6),)
FLAT: tuple[Shape, ...] = ((4, 6),)
TOKENS: tuple[Shape, ...] = ((2, 5, 6),)


@dataclass(frozen=True)
class Case:
    """One network, its example inputs, and what is expected of it."""

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[Shape, ...]
    cut: tuple[str, ...] = ("a.weight", "b.weight")
    refused: Mapping[str, str] = field(default_factory=dict)
    dead: bool = True  # zero in, zero out: a dead channel has no effect
    spans: bool = False  # a layer norm over the channels that go
    contracts: bool = False  # channels also end in a product of two activations
    reads: Mapping[str, int] = field(default_factory=dict)  # input dimension of weights that are no layer's own
    vocabulary: int = 0  # inputs are integers below this

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = self.make()
        randomise(model)
        return model

    def inputs(self, seed: int = 1) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary:
            return tuple(torch.randint(self.vocabulary, shape, generator=generator) for shape in self.shapes)
        return tuple(torch.randn(shape, generator=generator) for shape in self.shapes)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights that keep the signal's size; norms, statistics and biases that are not 0 or 1."""
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
        parameter.normal_(0, max(fan_in, 1) ** -0.5)
    for module in model.modules():
        if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)):
            _randomise_norm(module)


def _randomise_norm(module: nn.Module) -> None:
    if getattr(module, "weight", None) is not None:
        module.weight.uniform_(0.5, 1.5).mul_(torch.where(torch.rand_like(module.weight) < 0.2, -1.0, 1.0))
    if getattr(module, "running_mean", None) is not None:
        module.running_mean.normal_(0, 0.5)
        module.running_var.uniform_(0.5, 2.0)


class Fn(nn.Module):
    """A function as a layer; torch.export records source lines of functions with the name `forward` alone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        function.__code__ = function.__code__.replace(co_name="forward")
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def layer(op: nn.Module | Callable[..., Any]) -> nn.Module:
    return op if isinstance(op, nn.Module) else Fn(op)


def chain(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def around_flat(op: Any, mid: int = 8, out: int = 8) -> nn.Module:
    return chain(a=nn.Linear(6, mid), op=layer(op), b=nn.Linear(out, 6), end=nn.ReLU(), c=nn.Linear(6, 3))


def around_line(op: Any, mid: int = 8, out: int = 8) -> nn.Module:
    a, b = nn.Conv1d(3, mid, 3, padding=1), nn.Conv1d(out, 6, 3, padding=1)
    return chain(a=a, op=layer(op), b=b, end=nn.ReLU(), c=nn.Conv1d(6, 4, 1))


def around_image(op: Any, mid: int = 8, out: int = 8) -> nn.Module:
    a, b = nn.Conv2d(3, mid, 3, padding=1), nn.Conv2d(out, 6, 3, padding=1)
    return chain(a=a, op=layer(op), b=b, end=nn.ReLU(), c=nn.Conv2d(6, 4, 1))


def around_cube(op: Any, mid: int = 8, out: int = 8) -> nn.Module:
    a, b = nn.Conv3d(3, mid, 3, padding=1), nn.Conv3d(out, 6, 3, padding=1)
    return chain(a=a, op=layer(op), b=b, end=nn.ReLU(), c=nn.Conv3d(6, 4, 1))


def image_to_flat(op: Any, out: int, mid: int = 8) -> nn.Module:
    """The operator turns an image into features for a linear layer."""
    a = nn.Conv2d(3, mid, 3, padding=1)
    return chain(a=a, op=layer(op), b=nn.Linear(out, 6), end=nn.ReLU(), c=nn.Linear(6, 3))


def on_the_input(first: nn.Module) -> nn.Module:
    return chain(a=first, act=nn.ReLU(), b=nn.Conv2d(12, 6, 1), end=nn.ReLU(), c=nn.Conv2d(6, 3, 1))


AROUND = {FLAT: around_flat, LINE: around_line, IMAGE: around_image, CUBE: around_cube}
CASES: dict[str, Case] = {}


def add(name: str, make: Callable[[], nn.Module], shapes: tuple[Shape, ...], **expected: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, make, shapes, **expected)


def op(name: str, make: Callable[[], Any], shapes: tuple[Shape, ...] = IMAGE, **expected: Any) -> None:
    """The operator that `make` builds, between the layers `a` and `b`."""
    sizes = {key: expected.pop(key) for key in ("mid", "out") if key in expected}
    add(name, lambda: AROUND[shapes](make(), **sizes), shapes, **expected)


def refuse(name: str, make: Callable[[], Any], word: str, shapes: tuple[Shape, ...] = IMAGE, **expected: Any) -> None:
    """The same for an operator that fixes the channels of `a`, which the refusal has to say with this word."""
    op(name, make, shapes, cut=("b.weight",), refused={"a": word}, **expected)


def flat(name: str, make: Callable[[], Any], out: int, **expected: Any) -> None:
    sizes = {key: expected.pop(key) for key in ("mid",) if key in expected}
    add(name, lambda: image_to_flat(make(), out, **sizes), IMAGE, **expected)


def case(name: str, shapes: tuple[Shape, ...] = IMAGE, **expected: Any) -> Callable[[type], type]:
    """Register a module class as a case."""

    def register(kind: type) -> type:
        add(name, kind, shapes, **expected)
        return kind

    return register


# Linear layers and convolutions

op("linear", nn.ReLU, FLAT)
op("linear without bias", lambda: nn.Sequential(nn.ReLU(), nn.Linear(8, 8, bias=False)), FLAT)
add("linear on tokens", lambda: around_flat(nn.ReLU()), TOKENS)
add("linear unbatched", lambda: around_flat(nn.ReLU()), ((6,),))
op("conv1d", lambda: nn.Sequential(nn.ReLU(), nn.Conv1d(8, 8, 3, stride=2)), LINE, cut=("a.weight", "op.1.weight"))
op("conv2d", lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, dilation=2)), cut=("a.weight", "op.1.weight"))
op("conv3d", lambda: nn.Sequential(nn.ReLU(), nn.Conv3d(8, 8, 3)), CUBE, cut=("a.weight", "op.1.weight"))
add("conv2d unbatched", lambda: around_image(nn.ReLU()), ((3, 8, 8),))
op("conv2d same", lambda: nn.Conv2d(8, 8, 3, padding="same"), cut=("a.weight", "op.weight"))
op("conv2d circular", lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), cut=("a.weight", "op.weight"))
op("conv2d reflect", lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), cut=("a.weight", "op.weight"))
op("transposed 1d", lambda: nn.ConvTranspose1d(8, 10, 3, stride=2), LINE, out=10, cut=("a.weight", "op.weight"))
op("transposed 2d", lambda: nn.ConvTranspose2d(8, 10, 4, stride=2), out=10, cut=("a.weight", "op.weight"))
op("transposed 3d", lambda: nn.ConvTranspose3d(8, 10, 2, stride=2), CUBE, out=10, cut=("a.weight", "op.weight"))
op("grouped", lambda: nn.Conv2d(8, 12, 3, groups=2), out=12, cut=("a.weight", "op.weight"))
op("grouped 1d", lambda: nn.Conv1d(8, 12, 3, groups=4), LINE, out=12, cut=("a.weight", "op.weight"))
op("grouped transposed", lambda: nn.ConvTranspose2d(8, 12, 3, groups=2), out=12, cut=("a.weight", "op.weight"))
op("grouped transposed 1d", lambda: nn.ConvTranspose1d(8, 8, 3, groups=4), LINE, cut=("a.weight", "op.weight"))
op("grouped transposed 3d", lambda: nn.ConvTranspose3d(8, 4, 2, groups=2), CUBE, out=4, cut=("a.weight", "op.weight"))
op(
    "groups of two sizes",
    lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=4)),
    out=16,
    cut=("a.weight", "op.0.weight", "op.3.weight"),
)
op("depthwise", lambda: nn.Conv2d(8, 8, 3, groups=8), cut=("a.weight", "op.weight"))
op("depthwise times two", lambda: nn.Conv2d(8, 16, 3, groups=8), out=16, cut=("a.weight", "op.weight"))
op("depthwise times three", lambda: nn.Conv2d(8, 24, 3, groups=8), out=24, cut=("a.weight", "op.weight"))
op("depthwise twice", lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1, groups=8)), out=16)
op("grouped, one channel out of each", lambda: nn.Conv2d(8, 4, 3, groups=4), out=4)
add("depthwise on the input", lambda: on_the_input(nn.Conv2d(3, 12, 3, groups=3)), IMAGE, cut=("b.weight",))
add("grouped on the input", lambda: on_the_input(nn.Conv2d(4, 12, 3, groups=2)), ((2, 4, 8, 8),))
op("depthwise 1d", lambda: nn.Conv1d(8, 8, 3, groups=8), LINE, cut=("a.weight", "op.weight"))
op("depthwise 3d", lambda: nn.Conv3d(8, 16, 3, groups=8), CUBE, out=16, cut=("a.weight", "op.weight"))
op("depthwise transposed", lambda: nn.ConvTranspose2d(8, 8, 2, stride=2, groups=8), cut=("a.weight", "op.bias"))
op("depthwise transposed times two", lambda: nn.ConvTranspose2d(8, 16, 2, groups=8), out=16, cut=("a.weight",))

# Norms

op("batch norm 1d flat", lambda: nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), FLAT)
op("batch norm 1d", lambda: nn.Sequential(nn.BatchNorm1d(8), nn.ReLU()), LINE)
op("batch norm 2d", lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
op("batch norm 3d", lambda: nn.Sequential(nn.BatchNorm3d(8), nn.ReLU()), CUBE)
op("batch norm after", lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(8)))
op("batch norm plain", lambda: nn.Sequential(nn.BatchNorm2d(8, affine=False), nn.ReLU()), dead=False)
op("batch norm of the batch", lambda: nn.Sequential(nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()))
op("group norm", lambda: nn.Sequential(nn.GroupNorm(4, 8), nn.ReLU()))
op("group norm of singles", lambda: nn.Sequential(nn.GroupNorm(8, 8), nn.ReLU()))
op("group norm plain", lambda: nn.GroupNorm(4, 8, affine=False), LINE)
op("group norm then grouped", lambda: nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 1, groups=2)), mid=16)
op("instance norm", lambda: nn.InstanceNorm2d(8, affine=True))
op("instance norm plain", lambda: nn.InstanceNorm2d(8))
op("instance norm tracked", lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
op("instance norm 1d", lambda: nn.InstanceNorm1d(8, affine=True), LINE)
op("instance norm 3d", lambda: nn.InstanceNorm3d(8, affine=True), CUBE)
op("layer norm over channels", lambda: nn.LayerNorm(8), FLAT, spans=True, dead=False)
op("layer norm over all", lambda: nn.LayerNorm([8, 8, 8]), cut=("b.weight",), spans=True, dead=False)
op("layer norm over space", lambda: nn.LayerNorm([8, 8]), dead=False)
op("layer norm over length", lambda: nn.LayerNorm(12, elementwise_affine=False), LINE)
op("rms norm over space", lambda: nn.RMSNorm([8, 8]))
op("local response norm", lambda: nn.LocalResponseNorm(3), cut=("b.weight",), dead=False)
op("normalise over space", lambda: lambda x: F.normalize(x, dim=2), LINE)
refuse("normalise over channels", lambda: lambda x: F.normalize(x, dim=1), "F.normalize(x, dim=1)", dead=False)

# Activations

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

# Pooling and resampling

op("max pool 1d", lambda: nn.MaxPool1d(2), LINE)
op("max pool 2d", lambda: nn.MaxPool2d(3, stride=2, padding=1))
op("max pool 3d", lambda: nn.MaxPool3d(2), CUBE)
op("average pool 1d", lambda: nn.AvgPool1d(3, padding=1), LINE)
op("average pool 2d", lambda: nn.AvgPool2d(3, padding=1, ceil_mode=True))
op("average pool 3d", lambda: nn.AvgPool3d(2), CUBE)
op("adaptive average pool 1d", lambda: nn.AdaptiveAvgPool1d(5), LINE)
op("adaptive average pool 2d", lambda: nn.AdaptiveAvgPool2d((3, None)))
op("adaptive average pool 3d", lambda: nn.AdaptiveAvgPool3d(4), CUBE)
op("adaptive max pool 1d", lambda: nn.AdaptiveMaxPool1d(5), LINE)
op("adaptive max pool 2d", lambda: nn.AdaptiveMaxPool2d(4))
op("adaptive max pool 3d", lambda: nn.AdaptiveMaxPool3d(4), CUBE)
op("lp pool 1d", lambda: nn.LPPool1d(2, 2), LINE)
op("lp pool 2d", lambda: nn.LPPool2d(2, 2))
op("lp pool 3d", lambda: nn.LPPool3d(2, 2), CUBE)
op(
    "max pool and back",
    lambda: lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    cut=("b.weight",),
)
flat("global pool", lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), 8)
for _mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
    op(f"interpolate {_mode}", lambda mode=_mode: lambda x: F.interpolate(x, scale_factor=2, mode=mode))
op("interpolate linear", lambda: nn.Upsample(size=15, mode="linear"), LINE)
op("interpolate nearest 1d", lambda: nn.Upsample(scale_factor=2), LINE)
op("interpolate aligned", lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True))
op("interpolate antialiased", lambda: lambda x: F.interpolate(x, size=5, mode="bilinear", antialias=True))
op("interpolate trilinear", lambda: nn.Upsample(scale_factor=2, mode="trilinear"), CUBE)
op("interpolate nearest 3d", lambda: nn.Upsample(scale_factor=2), CUBE)
op("pixel shuffle", lambda: nn.PixelShuffle(2), mid=16, out=4)
op("pixel shuffle into grouped", lambda: nn.Sequential(nn.PixelShuffle(2), nn.Conv2d(4, 4, 1, groups=2)), mid=16, out=4)
op("pixel unshuffle", lambda: nn.PixelUnshuffle(2), out=32)
op("channel shuffle", lambda: nn.ChannelShuffle(2))
op("channel shuffle between groups", lambda: shuffled(2), cut=("a.weight", "op.0.weight", "op.2.weight"))


def shuffled(groups: int) -> nn.Module:
    convolutions = [nn.Conv2d(8, 8, 1, groups=groups) for _ in range(2)]
    return nn.Sequential(convolutions[0], nn.ChannelShuffle(groups), convolutions[1])


def shuffle_by_hand(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


def shuffle_in_fours(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, 4, c // 4, h, w).transpose(1, 2).reshape(b, c, h, w)


op("channel shuffle by hand", lambda: shuffle_by_hand)
op("channel shuffle by hand in fours", lambda: shuffle_in_fours, mid=16, out=16)
op("channel shuffle by hand in many", lambda: shuffle_in_fours)

# Moving data

op("flip channels", lambda: lambda x: x.flip(1))
op("slice space", lambda: lambda x: x[:, :, 1:6, ::2])
op("select space", lambda: lambda x: x[:, :, 0].unsqueeze(2) + x[..., :1])
op("narrow space", lambda: lambda x: x.narrow(2, 1, 4))
op("index space", lambda: lambda x: x[:, :, [0, 2, 5]])
op("index select space", lambda: lambda x: x.index_select(3, torch.tensor([6, 0])))
op("roll space", lambda: lambda x: x.roll((1, 2), dims=(2, 3)))
op("roll channels", lambda: lambda x: x.roll(1, dims=1), cut=("b.weight",))
op("unfold space", lambda: lambda x: x.unfold(2, 3, 1).mean(-1), LINE, cut=("b.weight",))
flat("flatten", lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), 512)
flat("flatten then batch norm", lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(512), nn.ReLU()), 512)
flat("half of the flattened", lambda: lambda x: x.flatten(1).chunk(2, 1)[0], 256)
flat("flatten pooled", lambda: nn.Sequential(nn.MaxPool2d(4), nn.Flatten()), 32)
flat("view", lambda: lambda x: x.view(x.size(0), -1), 512)
flat("reshape", lambda: lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3]), 512)
flat("permute then flatten", lambda: lambda x: x.permute(0, 2, 3, 1).flatten(1), 512)
flat("squeeze", lambda: lambda x: x.amax((2, 3), keepdim=True).squeeze(3).squeeze(-1), 8)
flat("mean", lambda: lambda x: x.mean((2, 3)), 8)
flat("sum", lambda: lambda x: x.sum(3).sum(2), 8)
flat("amax", lambda: lambda x: x.amax((-1, -2)), 8)
flat("amin and std", lambda: lambda x: x.amin((2, 3)) + x.std((2, 3)), 8)
flat("norm over space", lambda: lambda x: x.flatten(2).norm(dim=2), 8)
flat("logsumexp over space", lambda: lambda x: x.flatten(2).logsumexp(2), 8, dead=False)
flat("max over space", lambda: lambda x: x.flatten(2).max(2).values, 8)
op("cumsum over space", lambda: lambda x: x.cumsum(2))
op("mean as broadcast", lambda: lambda x: x - x.mean((2, 3), keepdim=True))
op("expand", lambda: lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 6, 6))
op("expand as", lambda: lambda x: x * x.amax(3, keepdim=True).expand_as(x))
op("repeat space", lambda: lambda x: x.repeat(1, 1, 2, 1))
op("repeat channels", lambda: lambda x: x.repeat(1, 2, 1, 1), out=16)
op("repeat channels one by one", lambda: lambda x: x.repeat_interleave(2, 1), out=16)
op("pad zeros", lambda: lambda x: F.pad(x, (1, 2, 0, 1)))
op("pad ones", lambda: lambda x: F.pad(x, (1, 1), value=1.0), dead=False)
for _mode in ("reflect", "replicate", "circular"):
    op(f"pad {_mode}", lambda mode=_mode: lambda x: F.pad(x, (1, 1, 2, 0), mode=mode))
op("transpose", lambda: lambda x: x.transpose(1, 2).contiguous().transpose(2, 1).transpose(2, 3))
op("channels last", lambda: channels_last(), cut=("a.weight", "op.1.weight", "b.weight"))
op("unflatten", lambda: lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))
op("split halves", lambda: lambda x: torch.cat(torch.split(x, x.shape[1] // 2, 1)[::-1], 1))
op("chunk", lambda: lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(), mid=16)
op("chunk into four", lambda: lambda x: torch.cat(x.chunk(4, 1)[::-1], 1))
op("chunk unevenly", lambda: lambda x: torch.cat(x.chunk(3, 1)[::-1], 1), cut=("b.weight",))
op("tensor split", lambda: lambda x: torch.cat(x.tensor_split(2, 1)[::-1], 1))
op("slice by shape", lambda: lambda x: x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :].relu(), mid=16)
op("one half goes on", lambda: lambda x: x[:, : x.shape[1] // 2], mid=16)
op("stack", lambda: lambda x: torch.stack([x, x.relu()], 2).flatten(1, 2), out=16)
op("stack space", lambda: lambda x: torch.stack([x, -x], -1).sum(-1) + x)
op("einsum over space", lambda: lambda x: torch.einsum("bchw,bcvw->bchv", x, x), cut=("b.weight",))
flat("unfold patches", lambda: lambda x: F.unfold(x, 8).flatten(1), 512, cut=("b.weight",))

op("batch and channels in one", lambda: lambda x: x.flatten(0, 1).unsqueeze(1).tanh().view(x.shape))
op("channels twice", lambda: lambda x: x + x.flip(1))
op("channels in a ring", lambda: lambda x: x + x.roll(1, dims=1), cut=("b.weight",))
op("channels meet space", lambda: lambda x: x + x.transpose(1, 2), cut=("b.weight",))
op("multiplied by ones", lambda: lambda x: x * torch.ones_like(x))
op("added to zeros", lambda: lambda x: x + torch.zeros(x.shape), cut=("b.weight",))
op("in place on a half", lambda: lambda x: half_in_place(x.clone()), cut=("b.weight",))
op("written into zeros", lambda: lambda x: written_into_zeros(x), out=16, cut=("b.weight",))
op("convolution along channels", lambda: ChannelsAsSpace(3), cut=("b.weight",))
op("convolution along channels, one wide", lambda: ChannelsAsSpace(1), cut=("b.weight",))
flat("products of channels", lambda: lambda x: torch.bmm(x[:, :, 0], x[:, :, 1].mT).flatten(1), 64, cut=("b.weight",))
flat("two consumers", lambda: lambda x: torch.cat([x.flatten(1), x.permute(0, 2, 3, 1).flatten(1)], 1), 1024)
flat("blocks of space", lambda: lambda x: x.view(x.shape[0], -1, 4).amax(2).flatten(1), 128)


def channels_last() -> nn.Module:
    there, back = Fn(lambda x: x.permute(0, 2, 3, 1)), Fn(lambda x: x.permute(0, 3, 1, 2))
    return nn.Sequential(there, nn.Linear(8, 8), nn.ReLU(), back)


def half_in_place(x: Tensor) -> Tensor:
    x[:, : x.shape[1] // 2].mul_(2.0)
    return x


def written_into_zeros(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    wide = x.new_zeros(b, 2 * c, h, w)
    wide[:, :c] = x
    wide[:, c:] = x.relu()
    return wide


class ChannelsAsSpace(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.along = nn.Conv3d(1, 1, (kernel, 1, 1), padding=(kernel // 2, 0, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.along(x.unsqueeze(1)).squeeze(1)


# Constants in the code that fix channels

refuse("slice literal", lambda: lambda x: x[:, :4], "x[:, :4]", out=4)
refuse("slice literals", lambda: lambda x: x[:, :4] + x[:, 4:], "x[:, :4] + x[:, 4:]", out=4)
refuse("select literal", lambda: lambda x: x * x[:, 5:6], "x * x[:, 5:6]")
refuse("narrow literal", lambda: lambda x: x.narrow(1, 2, 4), "x.narrow(1, 2, 4)", out=4)
refuse("split literal", lambda: lambda x: x.split(4, 1)[1], "x.split(4, 1)[1]", out=4)
refuse("split literals", lambda: lambda x: x.split([3, 5], 1)[1], "x.split([3, 5], 1)[1]", out=5)
refuse("index literal", lambda: lambda x: x[:, [7, 1, 4]], "x[:, [7, 1, 4]]", out=3)
refuse("every other channel", lambda: lambda x: x[:, ::2], "x[:, ::2]", out=4)
refuse("every channel but one", lambda: lambda x: x[:, 1:], "x[:, 1:]", out=7)
refuse("view literal", lambda: lambda x: x.view(2, 8, -1, 4), "x.view(2, 8, -1, 4)")
refuse("view literal halves", lambda: lambda x: x.view(-1, 4, 8, 8), "x.view(-1, 4, 8, 8)", out=4)
refuse("unflatten literal", lambda: lambda x: x.unflatten(1, (2, 4)).flatten(1, 2), "x.unflatten(1, (2, 4))")
refuse("mean over channels", lambda: lambda x: x - x.mean(1, keepdim=True), "x.mean(1, keepdim=True)")
refuse("sum over channels", lambda: lambda x: x * x.sum(1, keepdim=True), "x.sum(1, keepdim=True)")
refuse("cumsum over channels", lambda: lambda x: x.cumsum(1), "x.cumsum(1)")
refuse("sort over channels", lambda: lambda x: x.sort(1).values, "x.sort(1)")
refuse("max over channels", lambda: lambda x: x - x.max(1, keepdim=True).values, "x.max(1, keepdim=True)")
refuse("pool over channels", lambda: lambda x: F.max_pool1d(x.mT, 2).mT, "F.max_pool1d(x.mT, 2)", LINE, out=4)
refuse("one channel alone", lambda: lambda x: x[:, 2].unsqueeze(1) * x[:, :1], "x[:, 2]", out=1)
refuse("flatten all", lambda: lambda x: x.flatten().view(2, 8, 8, 8), "view", dead=False)
refuse("scaled by the size", lambda: lambda x: x * x.shape[1] ** -0.5, "x.shape[1] ** -0.5")
refuse("channel as a number", lambda: lambda x: x + torch.arange(x.shape[1]).view(-1, 1, 1), "torch.arange")


@case("index by a buffer", cut=("b.weight",), refused={"a": "x[:, self.order]"})
class IndexByBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.c(self.b(x[:, self.order]).relu())


# Several tensors meet


class Meet(nn.Module):
    """Two branches, the operator where they meet, and the usual tail."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], out: int = 8, second: int = 8) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, second, 3, padding=1)
        self.b, self.c = nn.Conv2d(out, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.function(self.a(x).relu(), self.d(x))).relu())


BOTH = ("a.weight", "d.weight", "b.weight")


def meet(name: str, function: Callable[[Tensor, Tensor], Tensor], **expected: Any) -> None:
    sizes = {key: expected.pop(key) for key in ("out", "second") if key in expected}
    add(name, lambda: Meet(function, **sizes), IMAGE, **({"cut": BOTH} | expected))


meet("add", lambda x, y: x + y)
meet("add scaled", lambda x, y: torch.add(x, y, alpha=0.5))
meet("add in place", lambda x, y: y.add_(x))
meet("mul", lambda x, y: x * y)
meet("sub", lambda x, y: x - y)
meet("div", lambda x, y: x / (y.abs() + 1))
meet("maximum", lambda x, y: torch.maximum(x, y))
meet("where of two", lambda x, y: torch.where(y > 0, x, y))
meet("addcmul", lambda x, y: torch.addcmul(x, x, y, value=0.3))
meet("lerp", lambda x, y: torch.lerp(x, y, 0.25))
meet("cat", lambda x, y: torch.cat([x, y], 1), out=14, second=6)
meet("cat of one twice", lambda x, y: torch.cat([x, y, x], 1), out=22, second=6)
meet("cat then norm of the space", lambda x, y: F.instance_norm(torch.cat([x, y], 1)), out=16)
meet("stack and sum", lambda x, y: torch.stack([x, y]).sum(0))
meet("stack of branches", lambda x, y: torch.stack([x, y], 1).flatten(1, 2), out=16)
meet("add a map of one channel", lambda x, y: x + y, second=1, cut=("a.weight", "b.weight"), dead=False)
meet("multiply by a map of one channel", lambda x, y: x * y.sigmoid(), second=1, cut=("a.weight", "b.weight"))
meet("mean of the other", lambda x, y: x * y.mean((2, 3), keepdim=True))
meet("cat along space", lambda x, y: torch.cat([x, y], 2))


@case("several inputs", ((2, 3, 8, 8), (2, 5, 8, 8)), cut=("a.weight", "d.weight", "b.weight"))
class SeveralInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 1), nn.Conv2d(5, 8, 1)
        self.b, self.c = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.c(self.b((self.a(x) + self.d(y)).relu()).relu())


@case("an input added to channels", ((2, 3, 8, 8), (2, 8, 8, 8)), cut=("b.weight",), refused={"a": "input"})
class InputMeetsChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.c(self.b((self.a(x) + y).relu()).relu())


@case("dict output", refused={"c": "return", "d": "return"}, cut=("a.weight", "b.weight"))
class DictOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.c, self.d = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.a(x).relu()
        y = self.b(x).relu()
        return {"classes": self.c(y), "boxes": (self.d(x), [self.c(y).amax((2, 3))]), "loss": None, "steps": 3}


@case("tuple output with features", cut=("b.weight",), refused={"a": "return"})
class TupleOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.a(x)
        return self.c(self.b(features.relu()).relu()), features


# Weights, buffers and modules used in other ways


@case("shared module", cut=("a.weight", "s.weight", "b.weight"))
class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.s = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.b, self.c = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.s(self.s(self.a(x).relu()).relu()).relu()
        return self.c(self.b(x).relu())


@case("shared head", ((2, 3, 8, 8), (2, 3, 6, 6)), cut=("a.weight", "d.weight", "b.weight"))
class SharedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.b, self.c = nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.c(self.b(self.a(x).relu()).relu()), self.c(self.b(self.d(y).tanh()).relu())


@case(
    "functional",
    FLAT,
    cut=("w", "v", "u", "y"),
    reads={"w": 1, "v": 0, "u": 1, "y": 1, "z": 0},
)
class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"w": (8, 6), "v": (8, 10), "u": (8, 10), "y": (6, 8), "z": (6, 3)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.bias, self.last = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.w, self.bias).relu()
        x = (x @ self.v).relu()
        x = torch.matmul(x, self.u.t()).relu()
        x = x.mm(self.y.T).relu()
        return torch.addmm(self.last, x, self.z)


@case("functional convolution", cut=("a", "b"), reads={"a": 1, "b": 1, "c": 1})
class FunctionalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(8, 3, 3, 3)), nn.Parameter(torch.empty(6, 8, 3, 3))
        self.c = nn.Parameter(torch.empty(4, 6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(F.relu(F.conv2d(x, self.a)), self.b)), self.c)


@case("functional einsum", TOKENS, cut=("b.weight",), reads={"w": 0})
class FunctionalEinsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(6, 8), nn.Parameter(torch.empty(8, 5))
        self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("btc,cd->btd", self.a(x).relu(), self.w).relu()
        return self.c(self.b(x).relu())


@case("reshaped weight", cut=("d.weight", "a.weight", "b.weight"))
class ReshapedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d, self.a = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.d(x).relu().mean((2, 3))
        return self.c(self.b(F.linear(x, self.a.weight.flatten(1), self.a.bias).relu()).relu())


@case("standardised weight", cut=("b.weight",), dead=False)
class StandardisedWeight(nn.Module):
    """Fewer input channels would change the statistics of the filters of `d`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
        self.b, self.c = nn.Conv2d(6, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.d.weight - self.d.weight.mean((1, 2, 3), keepdim=True)
        x = F.conv2d(self.a(x).relu(), weight / weight.std((1, 2, 3), keepdim=True), self.d.bias)
        return self.c(self.b(x.relu()).relu())


class SizedConv(nn.Conv2d):
    """A layer whose forward uses the size that it keeps as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.view(y.shape[0], self.out_channels, -1).view(y.shape)


add("layer that reads its own size", lambda: nn.Sequential(OrderedDict(a=SizedConv(3, 8, 3), **usual_tail())), IMAGE)


def usual_tail() -> dict[str, nn.Module]:
    return {"act": nn.ReLU(), "b": nn.Conv2d(8, 6, 3), "end": nn.ReLU(), "c": nn.Conv2d(6, 4, 1)}


@case("per-channel buffers", dead=False)
class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.register_buffer("scale", torch.rand(8, 1, 1) + 0.5)
        self.register_buffer("shift", torch.randn(1, 8, 1, 1), persistent=False)
        self.register_buffer("floor", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.a(x) * self.scale + self.shift).relu()
        x = torch.maximum(self.b(x), self.floor[None, :, None, None])
        return self.c(x)


@case("parameters with space", cut=("a.weight", "scale", "shift"), dead=False)
class SpatialParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.scale, self.shift = nn.Parameter(torch.empty(8, 6, 6)), nn.Parameter(torch.empty(1, 8, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x) * self.scale + self.shift).relu())


@case("tensor that is no buffer", cut=("b.weight",), refused={"a": "self.a(x) * self.scale"})
class PlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.scale = torch.linspace(0.5, 1.5, 8).view(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x) * self.scale).relu())


@case("shared batch norm", cut=("a.weight", "d.weight"))
class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d, self.norm, self.c = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.c(self.norm(self.a(x)).relu()), self.c(self.norm(self.d(x)).relu())


@case("module under two names", cut=("a.weight", "b.weight"))
class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.stem = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.stem(x).relu()).relu())


@case("tied autoencoder", FLAT, cut=("a.bias",), reads={"a.weight": 0}, dead=False)
class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias = nn.Linear(6, 8), nn.Parameter(torch.empty(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x).relu(), self.a.weight.t(), self.bias)


@case("tied layers", FLAT, cut=("a.weight", "s.weight"))
class TiedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.s, self.t, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.t.weight = self.s.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.t(self.s(self.a(x).relu()).relu()).relu())


@case("tied embedding", ((2, 5),), cut=("b.weight",), vocabulary=11, reads={"e.weight": 1}, dead=False)
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.b, self.d, self.c = nn.Embedding(11, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 11)
        self.c.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.e(x)
        return self.c(x + self.d(self.b(x).relu()))


@case("embedding", ((2, 5),), cut=("e.weight", "b.weight"), vocabulary=11)
class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.b, self.c = nn.Embedding(11, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.e(x)).relu().mean(1))


@case("weight norm")
class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
        self.b, self.c = nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


@case("weight norm of the reader", cut=("a.weight", "b.weight", "c.weight"))
class WeightNormReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 8, 3), nn.Conv2d(6, 3, 1)
        self.b, self.c = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 6, 3)), nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).relu()).relu()).relu())


@case("spectral norm")
class SpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))
        self.b, self.c = nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


@case("bias that stands alone", FLAT, dead=False)
class LoneBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8, bias=False), nn.Linear(8, 6), nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b((self.a(x) + self.shift).sigmoid()).relu())


# Blocks


def conv_norm(c_in: int, c_out: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(c_in, c_out, 3, stride, padding=1, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(c_out))


@case("residual", cut=("stem.0.weight", "a.0.weight", "b.0.weight", "d.0.weight", "e.0.weight", "short.weight"))
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv_norm(3, 8), conv_norm(8, 12), conv_norm(12, 8)
        self.d, self.e, self.short = conv_norm(8, 10, 2), conv_norm(10, 16), nn.Conv2d(8, 16, 1, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (self.b(self.a(x).relu()) + x).relu()
        x = (self.e(self.d(x).relu()) + self.short(x)).relu()
        return self.head(x.mean((2, 3)))


@case("pre-activation", cut=("stem.weight", "a.weight", "b.weight"))
class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.n1, self.a = nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3, padding=1, bias=False)
        self.n2, self.b = nn.BatchNorm2d(12), nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.n3 = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.a(F.relu(self.n1(x), inplace=True))
        x = x + self.b(F.dropout(self.n2(y).relu(), 0.3, self.training))
        return self.head(F.adaptive_avg_pool2d(self.n3(x).relu(), 1).flatten(1))


@case("dense block", cut=("stem.weight", "a.weight", "b.weight", "d.weight"))
class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.n1, self.a = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)
        self.n2, self.b = nn.BatchNorm2d(12), nn.Conv2d(12, 4, 3, padding=1)
        self.n3, self.d, self.head = nn.BatchNorm2d(16), nn.Conv2d(16, 6, 1), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        features.append(self.a(self.n1(features[0]).relu()))
        features.append(self.b(self.n2(torch.cat(features, 1)).relu()))
        return self.head(self.d(self.n3(torch.cat(features, 1)).relu()))


class Gate(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


op("squeeze and excite", lambda: Gate(8, 4), cut=("a.weight", "op.down.weight", "op.up.weight", "b.weight"))


@case("linear gate", cut=("a.weight", "down.weight", "up.weight", "b.weight"))
class LinearGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1)
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        gate = self.up(self.down(x.mean((2, 3))).relu()).sigmoid()
        return self.c(self.b(x * gate.view(x.shape[0], x.shape[1], 1, 1)).relu())


@case("inverted bottleneck", cut=("stem.weight", "expand.0.weight", "depth.0.weight", "gate.down.weight"))
class Inverted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, 2, padding=1), nn.Conv2d(8, 5, 1)
        self.expand, self.depth, self.gate = conv_norm(8, 24), conv_norm(24, 24, groups=24), Gate(24, 6)
        self.out = nn.Sequential(nn.Conv2d(24, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu6(self.depth(F.relu6(self.expand(x))))
        return self.head(x + self.out(self.gate(y)))


@case("u-net", cut=("down1.0.weight", "down2.0.weight", "up.weight", "join.0.weight"))
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = conv_norm(3, 8), conv_norm(8, 12)
        self.up, self.join = nn.ConvTranspose2d(12, 6, 2, stride=2), conv_norm(14, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x).relu()
        low = self.down2(F.max_pool2d(skip, 2)).relu()
        return self.head(self.join(torch.cat([skip, self.up(low)], 1)).relu())


@case("inception", cut=("stem.weight", "one.weight", "three.weight", "wide.0.weight", "pool.weight", "b.weight"))
class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.three = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 6, 3, padding=1)
        self.wide = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, (1, 3), padding=(0, 1)))
        self.pool, self.b, self.c = nn.Conv2d(8, 3, 1), nn.Conv2d(18, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        pooled = self.pool(F.avg_pool2d(x, 3, 1, 1))
        x = torch.cat([self.one(x), self.three(x), self.wide(x), pooled], 1).relu()
        return self.c(self.b(x).relu())


class PaddedShortcut(nn.Module):
    """Option A of the CIFAR residual networks: the shortcut's missing channels are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv_norm(3, 8), conv_norm(8, 10, 2), conv_norm(10, 16)
        self.d, self.e, self.head = conv_norm(16, 12), conv_norm(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.b(self.a(x).relu())
        x = (y + self.shortcut(x, y)).relu()
        x = (self.e(self.d(x).relu()) + x).relu()
        return self.head(x.mean((2, 3)))

    def shortcut(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


@case("option A", cut=("a.0.weight", "d.0.weight"))
class OptionA(PaddedShortcut):
    def shortcut(self, x: Tensor, y: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))


@case("option A by shape", cut=("a.0.weight", "d.0.weight"))
class OptionAByShape(PaddedShortcut):
    def shortcut(self, x: Tensor, y: Tensor) -> Tensor:
        missing = (y.shape[1] - x.shape[1]) // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, missing, missing))


@case("option A by cat", cut=("a.0.weight", "d.0.weight"))
class OptionAByCat(PaddedShortcut):
    def shortcut(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 1, 2)
        return torch.cat([x, torch.zeros_like(x)], 1)


@case("half of a stream is fixed", FLAT, cut=("a.weight", "b.weight", "d.weight"))
class HalfFixed(nn.Module):
    """A sum over a concatenation of the input and a layer: the input's half has to stay."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.d, self.e, self.head = nn.Linear(12, 8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.b(self.a(x).relu())], 1)
        return self.head(x + self.e(self.d(x).relu()))


@case("layer scale", cut=("stem.weight", "depth.weight", "up.weight", "down.weight"), dead=False, spans=True)
class LayerScale(nn.Module):
    """A ConvNeXt block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up, self.down, self.gamma = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.empty(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((-2, -1)))


@case("layer scale without norm", cut=("stem.weight", "up.weight", "down.weight"))
class LayerScaleAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)
        self.gamma, self.head = nn.Parameter(torch.empty(8, 1, 1)), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.gamma * self.down(F.gelu(self.up(x))))


@case("shuffle unit", cut=("stem.weight", "a.0.weight", "b.weight"))
class ShuffleUnit(nn.Module):
    """ShuffleNet v2: one half goes through, the halves are interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = nn.Conv2d(3, 16, 3, padding=1), conv_norm(8, 8)
        self.b, self.c = nn.Conv2d(16, 6, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, x = self.stem(x).chunk(2, 1)
        x = shuffle_by_hand(torch.cat([kept, self.a(x).relu()], 1))
        return self.c(self.b(x).relu())


# Sequences


@case("transformer", ((2, 5, 16),), cut=("layer.linear1.weight",))
class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


@case("transformer in a wider stream", TOKENS, cut=("layer.linear1.weight",), dead=False, spans=True)
class WiderTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.a(x)).mean(1))


class Attention(nn.Module):
    """Queries, keys and values from three layers; `attend` says how they meet."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(self.q(x), self.k(x), self.v(x)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


@case("attention by bmm", TOKENS, cut=("v.weight",), contracts=True)
class BmmAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.35, -1), v)


@case("attention scaled by the size", TOKENS, cut=("v.weight",), contracts=True)
class ScaledAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


@case("attention by torch", TOKENS, cut=("v.weight",), contracts=True)
class TorchAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@case("attention with heads", TOKENS, cut=("a.weight",), contracts=True)
class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(6, 24), nn.Linear(8, 6), 2
        self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1)
        return self.c(self.a(self.out(y) + x).relu())


@case("mixer", ((2, 3, 8, 8),), cut=("token1.weight", "mix1.weight"), spans=True, dead=False)
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.n1, self.n2 = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.LayerNorm(8)
        self.token1, self.token2 = nn.Linear(4, 6), nn.Linear(6, 4)
        self.mix1, self.mix2, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.token2(F.gelu(self.token1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.mix2(F.gelu(self.mix1(self.n2(x))))
        return self.head(x.mean(1))


@case("recurrence by hand", TOKENS, cut=("w.weight", "u.weight"))
class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(self.w(x[:, 0])), []
        for t in range(x.shape[1]):
            state = torch.tanh(self.w(x[:, t]) + self.u(state))
            states.append(state)
        return self.c(torch.stack(states, 1))


@case("vision transformer", cut=("patch.weight", "token", "places", "up.weight"))
class VisionTransformer(nn.Module):
    """Its stem and one feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.empty(1, 1, 8))
        self.places, self.up = nn.Parameter(torch.empty(1, 5, 8)), nn.Linear(8, 16)
        self.down, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head((x + self.down(F.gelu(self.up(x))))[:, 0])


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.a, self.cell = nn.Linear(6, 8), cell
        self.d, self.b, self.c = nn.Linear(7, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.cell(self.a(x).relu())
        return self.c(self.b(self.d(x).relu()).relu())


for _cell in (nn.LSTM, nn.GRU, nn.RNN):
    add(
        f"recurrent {_cell.__name__}",
        lambda cell=_cell: Recurrent(cell(8, 7, batch_first=True)),
        TOKENS,
        cut=("d.weight", "b.weight"),
        refused={"a": _cell.__name__.lower()},
    )
