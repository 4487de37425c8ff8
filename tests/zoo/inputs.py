"""Several inputs, and outputs of other kinds than one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.zoo.registry import case


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
