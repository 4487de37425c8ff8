"""The registry of test cases, and the networks that most of them consist of.

A case states its expected result: `cut` names the weights whose output channels must shrink, `refused` maps layers that
must not be pruned to a word of the reason. Most cases are a layer `a`, the tested operator, and two layers `b` and `c`
that can always be pruned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
IMAGE: tuple[Shape, ...] = ((2, 3, 8, 8),)
LINE: tuple[Shape, ...] = ((2, 3, 12),)
CUBE: tuple[Shape, ...] = ((2, 3, 6, 6, 6),)
FLAT: tuple[Shape, ...] = ((4, 6),)
TOKENS: tuple[Shape, ...] = ((2, 5, 6),)


@dataclass(frozen=True)
class Case:
    """One network, its example inputs, and the expected result of pruning it."""

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[Shape, ...]
    cut: tuple[str, ...] = ("a.weight", "b.weight")
    refused: Mapping[str, str] = field(default_factory=dict)
    dead: bool = True  # whether the operator maps zero to zero, so that a channel of zeros has no effect
    spans: bool = False  # whether a layer norm runs over the removed channels
    contracts: bool = False  # whether channels also end in a product of two activations
    reads: Mapping[str, int] = field(
        default_factory=dict
    )  # by weight that belongs to no layer module, its input dimension
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
    """Draw weights that preserve the signal's variance, and norm parameters and statistics other than 0 and 1."""
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
    """A function as a layer, renamed to `forward`: torch.export records source lines of no other functions."""

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
    """Register a case: the operator that `make` builds, between the layers `a` and `b`."""
    sizes = {key: expected.pop(key) for key in ("mid", "out") if key in expected}
    add(name, lambda: AROUND[shapes](make(), **sizes), shapes, **expected)


def refuse(name: str, make: Callable[[], Any], word: str, shapes: tuple[Shape, ...] = IMAGE, **expected: Any) -> None:
    """Register a case whose operator makes `a` not prunable; the reason must contain `word`."""
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


def conv_norm(c_in: int, c_out: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(c_in, c_out, 3, stride, padding=1, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(c_out))
