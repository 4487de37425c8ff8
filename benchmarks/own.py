"""Train six kinds of small networks on FashionMNIST, to compare mergers on other networks than the paper's.

    python benchmarks/own.py [--cache FOLDER] [--networks norm-relu,plain-gelu,…]

Trains what the cache lacks (about a minute each on one core) and prints the accuracies. From Python:
`load("norm-relu")` gives the network, an example input and the test images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from neuron_merging import data, evaluation
from neuron_merging.reproduction import datasets
from neuron_merging.reproduction.networks import make_convolution
from neuron_merging.reproduction.training.train import train
from neuron_merging.reproduction.training.training_recipe import TrainingRecipe

CACHE = Path(__file__).parent / "cache"


class ConvNet(nn.Sequential):
    """Four 3x3 convolutions, two of them with stride 2, with or without batch norm."""

    def __init__(self, activation: Callable[[], nn.Module], *, norm: bool) -> None:
        super().__init__()
        inputs = 1
        for i, (outputs, stride) in enumerate([(24, 2), (48, 2), (64, 1), (64, 1)], start=1):
            self.add_module(f"conv{i}", make_convolution(inputs, outputs, kernel=3, stride=stride, bias=not norm))
            if norm:
                self.add_module(f"norm{i}", nn.BatchNorm2d(outputs))
            self.add_module(f"act{i}", activation())
            inputs = outputs
        self.add_module("pool", nn.AvgPool2d(2))
        self.add_module("flatten", nn.Flatten())
        self.add_module("fc", nn.Linear(64 * 9, 10))


class Separable(nn.Sequential):
    """A depthwise and a pointwise convolution, each with batch norm and ReLU6."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.add_module("depthwise", nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False))
        self.add_module("norm1", nn.BatchNorm2d(inputs))
        self.add_module("act1", nn.ReLU6())
        self.add_module("pointwise", nn.Conv2d(inputs, outputs, 1, bias=False))
        self.add_module("norm2", nn.BatchNorm2d(outputs))
        self.add_module("act2", nn.ReLU6())


class SeparableNet(nn.Sequential):
    """A small MobileNet: a strided stem and four separable convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("stem", nn.Conv2d(1, 24, 3, stride=2, padding=1, bias=False))
        self.add_module("norm", nn.BatchNorm2d(24))
        self.add_module("act", nn.ReLU6())
        for i, (inputs, outputs, stride) in enumerate([(24, 48, 1), (48, 96, 2), (96, 160, 1), (160, 192, 1)]):
            self.add_module(f"block{i + 1}", Separable(inputs, outputs, stride))
        self.add_module("pool", nn.AvgPool2d(7))
        self.add_module("flatten", nn.Flatten())
        self.add_module("fc", nn.Linear(192, 10))


class TanhNet(nn.Sequential):
    """Three hidden layers with tanh and no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("flatten", nn.Flatten())
        for i, (inputs, outputs) in enumerate([(784, 256), (256, 128), (128, 64)], start=1):
            self.add_module(f"fc{i}", nn.Linear(inputs, outputs))
            self.add_module(f"act{i}", nn.Tanh())
        self.add_module("fc4", nn.Linear(64, 10))


class Own(NamedTuple):
    build: Callable[[], nn.Module]
    recipe: TrainingRecipe


_NORM = TrainingRecipe(epochs=5, milestones=(3, 4), crop=0)
_PLAIN = TrainingRecipe(epochs=5, milestones=(3, 4), lr=0.05, weight_decay=1e-4, crop=0)

OWN = {
    "norm-relu": Own(lambda: ConvNet(nn.ReLU, norm=True), _NORM),
    "plain-relu": Own(lambda: ConvNet(nn.ReLU, norm=False), _PLAIN),
    "norm-silu": Own(lambda: ConvNet(nn.SiLU, norm=True), _NORM),
    "plain-gelu": Own(lambda: ConvNet(nn.GELU, norm=False), _PLAIN),
    "separable-relu6": Own(SeparableNet, _NORM),
    "mlp-tanh": Own(TanhNet, TrainingRecipe(epochs=20, milestones=(10, 15), lr=0.05, crop=0, flip=False)),
}


def load(name: str, cache: Path = CACHE) -> tuple[nn.Module, Tensor, data.Images]:
    """Return the trained network, an example input and the test images; train if the weights are not cached."""
    own, test = OWN[name], datasets.load_dataset("fashion-mnist", "test")
    torch.manual_seed(own.recipe.seed)
    images = datasets.load_dataset("fashion-mnist", "train")
    done = train(own.build(), images, own.recipe, test=test, out=cache / name, resume=True, about={"network": name})
    return done.model, next(iter(test.batches(1)))[0], test


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=CACHE, help="where trained weights are kept")
    parser.add_argument("--networks", default=",".join(OWN))
    options = parser.parse_args()
    table = Table("network", "parameters", "accuracy %", title="FashionMNIST, 10,000 test images", title_justify="left")
    for name in options.networks.split(","):
        model, _, test = load(name, options.cache)
        score = evaluation.accuracy(*evaluation.predict(model, test.batches(250)))
        table.add_row(name, f"{evaluation.count_parameters(model):,}", f"{score:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
