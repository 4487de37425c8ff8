"""The paper's experiments as data: networks, layers, criteria, ratios, t, λ, and the merging methods to compare."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_merging.config import load_batches_to_memory
from neuron_merging.config.text_values import parse_merger
from neuron_merging.data.open_data import open_dataset
from neuron_merging.errors import MergingError
from neuron_merging.graph.digests import compute_file_sha256
from neuron_merging.merging.protocol import uses_data

if TYPE_CHECKING:
    from neuron_merging.merging.protocol import Merger

PAPER_CRITERIA = ("l1", "l2", "l2-gm")
PAPER_METHODS = ("none", "cosine")
"""The paper's two columns, Prune and Merge."""
PAPER_BALANCES = {"vgg cifar-100": 0.7, "wideresnet cifar-10": 0.8}
"""λ where it is not 0.85 (section 4)."""
WEIGHT_FILES = {
    "lenet-300-100": ("paper_lenet_300_100_fashionmnist.safetensors",),
    "vgg-16": ("paper_vgg16_cifar10.safetensors",),
    "vgg-16-cifar-100": ("paper_vgg16_cifar100.safetensors",),
    "resnet-56": ("paper_resnet56_cifar10.safetensors",),
    "wideresnet-40-4": ("paper_wideresnet40_4_cifar10.safetensors",),
    "vgg-16-imagenet": ("vgg16_bn-6c64b313.pth",),
    "resnet-34-imagenet": ("resnet34-b627a593.pth",),
}
"""File names of the weights by network; those for ImageNet are torchvision's."""


@dataclass(frozen=True)
class NetworkFamily:
    """Settings that all networks of one architecture share."""

    title: str
    cut: tuple[str, ...]
    """Patterns of the layers that the paper prunes: in residual networks those inside a block."""
    maps: str = ""
    """The layer whose output is pooled and classified; figure 4 shows its maps."""
    threshold: float = 0.1
    grain: tuple[tuple[str, int], ...] = ()
    """Patterns of layers with their width before widening, of which the authors' program rounds the kept channels."""


NETWORK_FAMILIES = {
    "lenet": NetworkFamily("LeNet", ("*",), threshold=0.45),
    "vgg": NetworkFamily("VGG", ("feature",), maps="feature"),
    "vgg-imagenet": NetworkFamily("VGG", ("features",), maps="features"),
    "resnet": NetworkFamily("ResNet", ("layer*.conv1",), maps="layer3"),
    "resnet-imagenet": NetworkFamily("ResNet", ("layer*",), maps="layer4"),
    "wideresnet": NetworkFamily(
        "WideResNet", ("block*",), maps="bn1", grain=(("block1", 16), ("block2", 32), ("block3", 64))
    ),
}
DATASET_TITLES = {
    "fashion-mnist": "FashionMNIST",
    "cifar-10": "CIFAR-10",
    "cifar-100": "CIFAR-100",
    "imagenet": "ImageNet",
}


@dataclass(frozen=True)
class PaperNetwork:
    """An architecture on a data set, with the paper's hyperparameters for it."""

    name: str
    architecture: str
    data: str
    family: str
    threshold: float
    """t: channels with a lower similarity are not merged."""
    balance: float
    """λ: the weight of the cosine against the bias distance."""

    @property
    def title(self) -> str:
        size = re.search(r"\d+(-\d+)*", self.architecture)
        return f"{NETWORK_FAMILIES[self.family].title}{'-' + size[0] if size else ''} on {DATASET_TITLES[self.data]}"

    @property
    def files(self) -> tuple[str, ...]:
        """The file names to search for weights."""
        return (*WEIGHT_FILES.get(self.name, ()), f"{self.name}.safetensors")


def find_paper_network(name: str) -> PaperNetwork:
    """Return the network of a name: an architecture, followed by a data set if it is not the default one.

    >>> found = find_paper_network("vgg-16-cifar-100")
    >>> found.architecture, found.data, found.threshold, found.balance
    ('vgg-16', 'cifar-100', 0.1, 0.7)
    """
    from neuron_merging import models
    from neuron_merging.reproduction.networks import CIFAR_INPUT_SHAPE

    other = next((data for data in ("cifar-100", "cifar-10") if name.endswith(f"-{data}")), "")
    architecture = name.removesuffix(f"-{other}") if other else name
    try:
        spec = models.find_network(architecture)
    except ValueError as error:
        raise MergingError(str(error), where="--weights", fix="Write NETWORK=FILE.") from error
    if other and spec.input_shape != CIFAR_INPUT_SHAPE:
        what = f"{architecture} takes images of {spec.input_shape}, not those of {DATASET_TITLES[other]}"
        raise MergingError(what, where=f"--weights {name}", fix="Leave the data set's name out.")
    usual = spec.data
    data = other or usual
    name = architecture if data == usual else name
    family = architecture.partition("-")[0] + ("-imagenet" if data == "imagenet" else "")
    balance = PAPER_BALANCES.get(f"{family} {data}", 0.85)
    return PaperNetwork(name, architecture, data, family, NETWORK_FAMILIES[family].threshold, balance)


@dataclass(frozen=True)
class PaperPanel:
    """One network of a table or figure, with its pruned layers and ratios."""

    network: str
    ratios: tuple[float, ...]
    cut: tuple[str | int, ...] = ()
    """Patterns of layers, or indices of convolutions; empty for those of the network's family."""
    substitute_families: tuple[str, ...] = ()
    """Families of networks that the user may give instead."""


@dataclass(frozen=True)
class PaperTarget:
    """A table or figure of the paper."""

    name: str
    title: str
    metrics: tuple[str, ...]
    panels: tuple[PaperPanel, ...]
    criteria: tuple[str, ...] = PAPER_CRITERIA
    thresholds: tuple[float, ...] = ()
    """Values of t, for the figure of accuracy against t."""


FIRST_AND_LAST_SIX = (0, -6, -5, -4, -3, -2, -1)
FIRST_AND_LAST_FOUR = (0, -4, -3, -2, -1)
"""Section 4.1 says the last three layers, but table 2's 8.4 M parameters result from the last four."""
RESIDUAL_RATIOS = (0.2, 0.3, 0.4, 0.5)
CONVOLUTIONAL_FAMILIES = ("resnet", "wideresnet", "vgg", "resnet-imagenet", "vgg-imagenet")
_VGG_PANEL = PaperPanel("vgg-16", (0.5,), FIRST_AND_LAST_SIX, ("vgg",))
_RESNET_PANEL = PaperPanel("resnet-56", RESIDUAL_RATIOS, substitute_families=("resnet",))
_WIDERESNET_PANEL = PaperPanel("wideresnet-40-4", RESIDUAL_RATIOS, substitute_families=("wideresnet",))

PAPER_TARGETS = {
    target.name: target
    for target in (
        PaperTarget(
            "table1",
            "Table 1: accuracy of LeNet-300-100 on FashionMNIST, pruned and merged",
            ("accuracy",),
            (PaperPanel("lenet-300-100", (0.5, 0.6, 0.7, 0.8), substitute_families=("lenet",)),),
        ),
        PaperTarget(
            "table2",
            "Table 2: accuracy of VGG-16 on CIFAR-10 and CIFAR-100",
            ("accuracy", "parameters"),
            (_VGG_PANEL, PaperPanel("vgg-16-cifar-100", (0.5,), FIRST_AND_LAST_FOUR, ("vgg",))),
        ),
        PaperTarget("table3", "Table 3: WARE on CIFAR-10", ("ware",), (_VGG_PANEL, _RESNET_PANEL, _WIDERESNET_PANEL)),
        PaperTarget(
            "table4",
            "Table 4: top-1 and top-5 accuracy on ImageNet",
            ("accuracy", "top5", "parameters"),
            (
                PaperPanel("vgg-16-imagenet", (0.5, 0.6, 0.7), (-1,), ("vgg-imagenet",)),
                PaperPanel("resnet-34-imagenet", (0.1, 0.2, 0.3), substitute_families=("resnet-imagenet",)),
            ),
        ),
        PaperTarget(
            "figure3",
            "Figure 3: accuracy against pruning ratio on CIFAR-10",
            ("accuracy", "parameters"),
            (_RESNET_PANEL, _WIDERESNET_PANEL),
        ),
        PaperTarget(
            "figure4",
            "Figure 4: feature maps of the original, pruned and merged network",
            ("correlation", "error"),
            (PaperPanel("wideresnet-40-4", (0.5,), substitute_families=CONVOLUTIONAL_FAMILIES),),
            criteria=("l1",),
        ),
        PaperTarget(
            "figure5",
            "Figure 5: similarity of filters, and accuracy against the threshold t",
            ("accuracy",),
            (PaperPanel("resnet-56", (0.3, 0.4, 0.5), substitute_families=("lenet", *CONVOLUTIONAL_FAMILIES)),),
            criteria=("l1",),
            thresholds=(0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4),
        ),
    )
}

METHOD_TITLES = {"none": "pruned", "cosine": "merged"}
"""The paper's words for its two columns."""
CALIBRATION_IMAGES = 128
"""Training images for the methods that need data."""
ANY_NETWORK = PaperNetwork("", "", "", "", 0.1, 0.85)
"""A placeholder, to check methods independently of a network."""


@dataclass(frozen=True)
class MergeMethod:
    """A merger by name, with options."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The method as written on the command line."""
        return self.name + _format_options(dict(self.options))

    def text(self, network: PaperNetwork) -> str:
        """Return the value of `compress --merger` for a network; cosine gets the paper's t and λ by default.

        >>> from neuron_merging.reproduction.experiments import find_paper_network
        >>> parse_methods("cosine:bn=paper")[0].text(find_paper_network("wideresnet-40-4"))
        'cosine:threshold=0.1,balance=0.8,bn=paper'
        """
        options = dict(self.options)
        if self.name == "cosine":
            paper = {"threshold": str(network.threshold), "balance": str(network.balance), "bn": "released"}
            # Later operands win: what the user gave replaces the paper's values.
            options = paper | options
        return self.name + _format_options(options)

    @property
    def code(self) -> str:
        """The checksum of the source file of a user's merger; empty for built-in ones."""
        if ":" not in self.name:
            return ""
        file = inspect.getsourcefile(type(self.merger(ANY_NETWORK)))
        return compute_file_sha256(Path(file)) if file else ""

    def with_threshold(self, threshold: float) -> MergeMethod:
        """Return the paper's method at another t and, by default, with the cosine only (λ = 1)."""
        # Later operands win: the user's options over λ = 1, the swept t over both.
        options = {"balance": "1"} | dict(self.options) | {"threshold": str(threshold)}
        return replace(self, options=tuple(options.items()))

    def merger(self, network: PaperNetwork) -> Merger:
        """Create the merger, with checked options."""
        return parse_merger(self.text(network))

    @property
    def needs_images(self) -> bool:
        """Whether the method needs training images."""
        return uses_data(self.merger(ANY_NETWORK))

    def batches(self, network: PaperNetwork, data: str | None) -> list[Any] | None:
        """Load the calibration images, from the folder `data` if given; None if the method needs none."""
        source = network.data + (f":{data}" if data else "")
        return (
            load_batches_to_memory(open_dataset(source, "train").subsample(CALIBRATION_IMAGES))
            if self.needs_images
            else None
        )


def filter_runnable_methods(network: PaperNetwork, methods: Sequence[MergeMethod]) -> list[MergeMethod]:
    """Return the methods that can run on a network: ImageNet has no calibration images here."""
    return [method for method in methods if network.data != "imagenet" or not method.needs_images]


def _format_options(options: dict[str, str]) -> str:
    return ":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else ""


def parse_methods(text: str) -> tuple[MergeMethod, ...]:
    """Parse methods separated by commas; a part without a name before its "=" is a further option.

    >>> [method.label for method in parse_methods("none,cosine:bn=paper,threshold=0.2,moments")]
    ['none', 'cosine:bn=paper,threshold=0.2', 'moments']
    """
    methods: list[MergeMethod] = []
    for part in text.split(","):
        head, equals, value = part.strip().partition("=")
        name, _, key = head.rpartition(":")
        if equals and name and key:
            methods.append(MergeMethod(name, ((key, value),)))
        elif equals and methods and head == key:
            methods[-1] = replace(methods[-1], options=(*methods[-1].options, (key, value)))
        elif key and not equals and (name or head == key):
            methods.append(MergeMethod(head))
        else:
            fix = "For instance --methods none,cosine,moments or none,cosine:threshold=0.2,bn=paper."
            raise MergingError(f"{part!r} is not a method", where="--methods", fix=fix)
    _check_methods(methods)
    return tuple(dict.fromkeys(methods))


def _check_methods(methods: list[MergeMethod]) -> None:
    """Raise for unknown names and options before any work is done."""
    for method in methods:
        method.merger(ANY_NETWORK)
