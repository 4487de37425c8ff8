"""Four classes of stripes, and a network that learns them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from neuron_merging.data import Images
from neuron_merging.reproduction.training import run_state
from neuron_merging.reproduction.training.training_recipe import TrainingRecipe

SHORT = TrainingRecipe(epochs=4, milestones=(2, 3), lr=0.05, batch=16, crop=1)


def stripes(count: int, seed: int = 0, name: str = "stripes") -> Images:
    """Noise with a bright bar at one of four heights, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 4
    x = torch.randint(0, 120, (count, 1, 8, 8), generator=generator)
    for i, label in enumerate(y.tolist()):
        x[i, 0, 2 * label : 2 * label + 2] += 120
    return Images(x.to(torch.uint8), y, (0.4,), (0.3,), name, 4)


class Net(nn.Sequential):
    """All that could break a resumed run: batch norm's buffers, dropout's chance."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 4),
        )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _stop_after(monkeypatch: pytest.MonkeyPatch, epochs: int) -> None:
    save = run_state.save_training_state

    def saving(folder: Path, state: run_state.TrainingState) -> None:
        save(folder, state)
        if len(state.log) == epochs:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_state, "save_training_state", saving)
