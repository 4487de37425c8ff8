"""demo: train a small network on real digits, then make it smaller in three ways.

    python -m neuron_merging.demo

Needs scikit-learn, whose wheel carries the digits; nothing is downloaded.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import data, metrics

EPOCHS = 12
RATIO = 0.5


class DigitNet(nn.Sequential):
    """Four convolutions with batch norm for 8 × 8 digits."""

    def __init__(self) -> None:
        super().__init__()
        for i, (width, pool) in enumerate([(32, False), (32, True), (64, False), (64, True)]):
            into = 1 if i == 0 else (32, 32, 64)[i - 1]
            self.add_module(f"conv{i + 1}", nn.Conv2d(into, width, 3, padding=1, bias=False))
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(width))
            self.add_module(f"relu{i + 1}", nn.ReLU())
            if pool:
                self.add_module(f"pool{i + 1}", nn.MaxPool2d(2))
        self.add_module("flatten", nn.Flatten())
        self.add_module("fc", nn.Linear(64 * 4, 10))


def train(model: nn.Module, images: data.Images, console: Console) -> None:
    """A minute of SGD with a one-cycle schedule."""
    x, y = (torch.cat(part) for part in zip(*images.batches(512), strict=True))
    steps = EPOCHS * -(-len(x) // 64)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=steps)
    model.train()
    for _ in track(range(EPOCHS), "training on digits", console=console):
        for batch in torch.randperm(len(x)).split(64):  # type: ignore[no-untyped-call]
            optimiser.zero_grad()
            F.cross_entropy(model(_jitter(x[batch])), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    model.eval()


def _jitter(x: Tensor) -> Tensor:
    """Shift by up to a pixel, so that the small network does not memorise."""
    dy, dx = torch.randint(-1, 2, (2,)).tolist()
    return x.roll((dy, dx), (2, 3))


def main() -> int:
    torch.manual_seed(0)
    messages, console = Console(stderr=True), Console()
    train_images, test = data.digits("train"), data.digits("test")
    model = DigitNet()
    train(model, train_images, messages)
    example = next(iter(test.batches(1)))[0]
    table = Table(title=f"Digits, {RATIO:.0%} of all channels removed, no data and no retraining")
    for name in ("network", "accuracy", "parameters", "MACs", "seconds"):
        table.add_column(name, justify="left" if name == "network" else "right")
    table.add_row("original", *_figures(model, test, example), "")
    methods: dict[str, str | nm.Cosine | None] = {
        "pruned": "none",
        "merged as in the paper": nm.Cosine(),
        "merged by moments (default)": None,
    }
    for name, merger in methods.items():
        start = time.perf_counter()
        small = nm.compress(model, example, ratio=RATIO, merger=merger)
        took = time.perf_counter() - start
        table.add_row(name, *_figures(small.model, test, example), f"{took:.1f}")
    console.print(table)
    console.print(
        "Your own model:\n  import neuron_merging as nm\n  small = nm.compress(model, example_inputs, ratio=0.5).model"
    )
    return 0


def _figures(model: nn.Module, test: data.Images, example: Tensor) -> tuple[str, str, str]:
    outputs, labels = metrics.predict(model, test.batches(256))
    score = f"{metrics.accuracy(outputs, labels):.1f} %"
    return score, f"{metrics.count_parameters(model):,}", f"{metrics.count_macs(model, example):,}"


if __name__ == "__main__":
    sys.exit(main())
