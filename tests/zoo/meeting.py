"""Operators that combine several tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import IMAGE, add


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
