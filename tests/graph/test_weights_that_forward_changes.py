"""Networks that rewrite their own weights while they run, and devices that cannot be worked on: the user's is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.pruning import trial_prune


class Renormalised(nn.Module):
    """An embedding that shortens the rows that it looks up, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(self.table(x)).relu())
        return y


class Clamped(nn.Module):
    """Keeps its own weights small, and counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        self.calls += 1
        y: Tensor = self.b(self.a(x).relu())
        return y


NETWORKS = {
    "max_norm": lambda: (Renormalised(), torch.randint(20, (4, 5))),
    "clamp": lambda: (Clamped(), torch.randn(4, 6)),
}


@pytest.mark.parametrize(
    "asked", [{"ratio": 0.5}, {"budget": {"params": 0.7}}, {"ratio": 0.5, "output": "graph"}], ids=str
)
@pytest.mark.parametrize("kind", NETWORKS)
def test_the_users_weights_stay_as_they_are(kind: str, asked: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[kind]()
    before = copy.deepcopy(model.state_dict())
    nm.inspect(model, x)
    small = nm.compress(model, x, **asked).model
    small(x)  # nor do the two share a tensor that is written into
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_device_without_float64_is_worked_for_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such device here: the CPU stands for one, so that only the copies and the way back are seen."""
    monkeypatch.setattr(trial_prune, "has_float64", lambda device: False)
    model, x = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 6)
    analysis = nm.analyse(model, x)
    assert analysis.model is not model and analysis.user_device == torch.device("cpu")
    theirs = {tensor.data_ptr() for tensor in model.parameters()}
    assert not theirs & {tensor.data_ptr() for tensor in analysis.graph.tensors.values()}
    scored: list[nn.Module] = []

    def score(network: nn.Module) -> float:
        scored.append(network)
        return 1.0

    small = nm.compress(analysis, ratio=0.5, evaluate=score)
    assert scored and analysis.model not in scored  # each was a copy on the user's device
    monkeypatch.undo()
    plain = nm.compress(model, x, ratio=0.5).model.state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in small.model.state_dict().items())
