"""Recurrences, by hand and by torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.registry import TOKENS, add, case


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
