"""Compress a checkpoint of your own to half of its multiply-accumulates, and load the result again.

    pip install scikit-learn

The checkpoint is made here in seconds: a small network, trained on scikit-learn's handwritten digits.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import neuron_merging as nm


def build() -> nn.Module:
    """Your network's class or factory."""
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
    )  # fmt: skip


def train(file: Path) -> None:
    """Train for some epochs and write a state dict, as your training script does."""
    torch.manual_seed(0)
    model, (x, y) = build(), read_digits()[0]
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(8):
        for batch in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    torch.save(model.state_dict(), file)


def read_digits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return images and labels for training, and others for the test."""
    pixels, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    x, y = pixels.float().view(-1, 1, 8, 8) / 16, labels.long()
    test = torch.arange(len(x)) % 4 == 0
    return [(x[~test], y[~test]), (x[test], y[test])]


def accuracy(model: nn.Module) -> float:
    x, y = read_digits()[1]
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def main() -> tuple[float, float]:
    file = Path("digits.pt")
    if not file.exists():
        train(file)

    model = build()
    model.load_state_dict(torch.load(file))

    small = nm.compress(model, torch.zeros(1, 1, 8, 8), budget={"macs": 0.5})
    print(small.summary)
    small.save("small-digits", overwrite=True)

    again = nm.load("small-digits", build=build)  # anywhere else, without the original weights
    before, after = accuracy(model), accuracy(again)
    print(f"accuracy {before:.1%} → {after:.1%} with half of the multiply-accumulates; no data was used")
    return before, after


if __name__ == "__main__":
    main()
