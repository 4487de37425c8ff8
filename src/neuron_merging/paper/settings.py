"""settings: the paper's experiments as data: networks, layers, criteria, ratios, t and λ."""

from __future__ import annotations

import re
from dataclasses import dataclass

from neuron_merging.errors import MergingError

CRITERIA = ("l1", "l2", "l2-gm")
METHODS = ("none", "cosine")
"""The paper's two columns, Prune and Merge."""
BALANCES = {"vgg cifar-100": 0.7, "wideresnet cifar-10": 0.8}
"""λ where it is not 0.85 (section 4)."""
FILES = {
    "lenet-300-100": ("paper_lenet_300_100_fashionmnist.safetensors",),
    "vgg-16": ("paper_vgg16_cifar10.safetensors",),
    "vgg-16-cifar-100": ("paper_vgg16_cifar100.safetensors",),
    "resnet-56": ("paper_resnet56_cifar10.safetensors",),
    "wideresnet-40-4": ("paper_wideresnet40_4_cifar10.safetensors",),
    "vgg-16-imagenet": ("vgg16_bn-6c64b313.pth",),
    "resnet-34-imagenet": ("resnet34-b627a593.pth",),
}
"""Weights by network; those for ImageNet are the ones that torchvision publishes."""


@dataclass(frozen=True)
class Family:
    """What holds for all networks of one kind."""

    title: str
    cut: tuple[str, ...]
    """Patterns of the layers that the paper cuts: in residual networks those inside a block."""
    maps: str = ""
    """The layer whose output is pooled and classified, so that its maps can be shown."""
    threshold: float = 0.1
    grain: tuple[tuple[str, int], ...] = ()
    """Patterns with the width before widening, in which the authors' program rounds."""


FAMILIES = {
    "lenet": Family("LeNet", ("*",), threshold=0.45),
    "vgg": Family("VGG", ("feature",), maps="feature"),
    "vgg-imagenet": Family("VGG", ("features",), maps="features"),
    "resnet": Family("ResNet", ("layer*.conv1",), maps="layer3"),
    "resnet-imagenet": Family("ResNet", ("layer*",), maps="layer4"),
    "wideresnet": Family("WideResNet", ("block*",), maps="bn1", grain=(("block1", 16), ("block2", 32), ("block3", 64))),
}
DATA = {"fashion-mnist": "FashionMNIST", "cifar-10": "CIFAR-10", "cifar-100": "CIFAR-100", "imagenet": "ImageNet"}


@dataclass(frozen=True)
class Network:
    """An architecture on a data set, with the paper's hyperparameters for it."""

    name: str
    architecture: str
    data: str
    family: str
    threshold: float
    """t: less similar channels are not merged."""
    balance: float
    """λ between cosine and bias distance."""

    @property
    def title(self) -> str:
        size = re.search(r"\d+(-\d+)*", self.architecture)
        return f"{FAMILIES[self.family].title}{'-' + size[0] if size else ''} on {DATA[self.data]}"

    @property
    def files(self) -> tuple[str, ...]:
        """The names under which weights are looked for."""
        return (*FILES.get(self.name, ()), f"{self.name}.safetensors")


def network(name: str) -> Network:
    """The network of a name: an architecture, with a data set behind it where it is not the usual one.

    >>> found = network("vgg-16-cifar-100")
    >>> found.architecture, found.data, found.threshold, found.balance
    ('vgg-16', 'cifar-100', 0.1, 0.7)
    """
    from neuron_merging import networks

    other = next((data for data in ("cifar-100", "cifar-10") if name.endswith(f"-{data}")), "")
    architecture = name.removesuffix(f"-{other}") if other else name
    try:
        spec = networks.find(architecture)
    except ValueError as error:
        raise MergingError(str(error), where="--weights", fix="Write NETWORK=FILE.") from error
    if other and spec.input_shape != networks.CIFAR:
        what = f"{architecture} takes images of {spec.input_shape}, not those of {DATA[other]}"
        raise MergingError(what, where=f"--weights {name}", fix="Leave the data set's name out.")
    usual = spec.data
    data = other or usual
    name = architecture if data == usual else name
    family = architecture.partition("-")[0] + ("-imagenet" if data == "imagenet" else "")
    balance = BALANCES.get(f"{family} {data}", 0.85)
    return Network(name, architecture, data, family, FAMILIES[family].threshold, balance)


@dataclass(frozen=True)
class Panel:
    """One network of a table or figure: which layers are cut, and at which ratios."""

    network: str
    ratios: tuple[float, ...]
    cut: tuple[str | int, ...] = ()
    """Patterns of layers, or numbers of convolutions; empty for those of the network's family."""
    stands_for: tuple[str, ...] = ()
    """Families that may take its place."""


@dataclass(frozen=True)
class Target:
    """A table or figure."""

    name: str
    title: str
    metrics: tuple[str, ...]
    panels: tuple[Panel, ...]
    criteria: tuple[str, ...] = CRITERIA
    thresholds: tuple[float, ...] = ()
    """Values of t to go through, where the figure shows accuracy against t."""


FIRST_AND_LAST_SIX = (0, -6, -5, -4, -3, -2, -1)
FIRST_AND_LAST_FOUR = (0, -4, -3, -2, -1)
"""Section 4.1 says the last three, but the 8.4 M parameters of table 2 are those of the last four."""
RESIDUAL_RATIOS = (0.2, 0.3, 0.4, 0.5)
CONVOLUTIONAL = ("resnet", "wideresnet", "vgg", "resnet-imagenet", "vgg-imagenet")
_VGG = Panel("vgg-16", (0.5,), FIRST_AND_LAST_SIX, ("vgg",))
_RESNET = Panel("resnet-56", RESIDUAL_RATIOS, stands_for=("resnet",))
_WIDE = Panel("wideresnet-40-4", RESIDUAL_RATIOS, stands_for=("wideresnet",))

TARGETS = {
    target.name: target
    for target in (
        Target(
            "table1",
            "Table 1: accuracy of LeNet-300-100 on FashionMNIST, pruned and merged",
            ("accuracy",),
            (Panel("lenet-300-100", (0.5, 0.6, 0.7, 0.8), stands_for=("lenet",)),),
        ),
        Target(
            "table2",
            "Table 2: accuracy of VGG-16 on CIFAR-10 and CIFAR-100",
            ("accuracy", "parameters"),
            (_VGG, Panel("vgg-16-cifar-100", (0.5,), FIRST_AND_LAST_FOUR, ("vgg",))),
        ),
        Target("table3", "Table 3: WARE on CIFAR-10", ("ware",), (_VGG, _RESNET, _WIDE)),
        Target(
            "table4",
            "Table 4: top-1 and top-5 accuracy on ImageNet",
            ("accuracy", "top5", "parameters"),
            (
                Panel("vgg-16-imagenet", (0.5, 0.6, 0.7), (-1,), ("vgg-imagenet",)),
                Panel("resnet-34-imagenet", (0.1, 0.2, 0.3), stands_for=("resnet-imagenet",)),
            ),
        ),
        Target(
            "figure3",
            "Figure 3: accuracy against pruning ratio on CIFAR-10",
            ("accuracy", "parameters"),
            (_RESNET, _WIDE),
        ),
        Target(
            "figure4",
            "Figure 4: feature maps of the original, pruned and merged network",
            ("correlation", "error"),
            (Panel("wideresnet-40-4", (0.5,), stands_for=CONVOLUTIONAL),),
            criteria=("l1",),
        ),
        Target(
            "figure5",
            "Figure 5: similarity of filters, and accuracy against the threshold t",
            ("accuracy",),
            (Panel("resnet-56", (0.3, 0.4, 0.5), stands_for=("lenet", *CONVOLUTIONAL)),),
            criteria=("l1",),
            thresholds=(0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4),
        ),
    )
}
