"""The summary lists groups that the ratio should cut and that were not cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import neuron_merging as nm


def test_rounding_that_leaves_a_layer_whole_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    summary = nm.compress(model, torch.randn(1, 6), ratio=0.3, round_to=16).summary
    assert [(left.name, left.channels) for left in summary.left] == [("0", 32)]
    assert "not pruned 0: 32 channels, round_to=16 leaves no smaller number" in str(summary)


def test_a_ratio_below_one_channel_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    summary = nm.compress(model, torch.randn(1, 6), ratio={"0": 0.2, "2": 0.5}, round_to=2).summary
    assert [left.name for left in summary.left] == ["0"]


def test_weights_of_zero_are_not_called_a_success() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    summary = nm.compress(model, torch.randn(1, 6)).summary
    assert all(reader.error is None for group in summary.groups for reader in group.readers)
    assert "expected error" not in str(summary) and summary.verified is not None and summary.verified.power == 0
    assert "hide what was cut" in str(summary)


class Helped(nn.Module):
    """A second head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x).relu()
        z = self.c(self.b(y).relu())
        return (z, self.head(y)) if self.training else (z,)


def test_a_head_that_only_training_uses_is_named() -> None:
    summary = nm.compress(Helped(), torch.randn(2, 6)).summary
    assert any("does not run in training mode" in note and "self.head(y)" in note for note in summary.notes)
    whole = nm.compress(Helped(), torch.randn(2, 6), ratio={"b": 0.5}).summary
    assert not any("training" in note for note in whole.notes)
