"""networks: the paper's networks by name, and others by where they come from.

>>> model = build("resnet-56")
>>> model = build("vgg-16", classes=100)
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from torch import nn

from .digits import DigitNet
from .lenet import LeNet300100
from .resnet import ResNet, resnet34_imagenet
from .vgg import VGG, vgg16_imagenet
from .wideresnet import WideResNet

__all__ = ["NETWORKS", "NetworkSpec", "build", "find"]


@dataclass(frozen=True)
class NetworkSpec:
    """How to build a network, and which images it is made for.

    Examples
    --------
    >>> NETWORKS["resnet-56"].input_shape, NETWORKS["resnet-56"].data
    ((3, 32, 32), 'cifar-10')
    """

    build: Callable[..., nn.Module]
    """Called with the keyword `classes`; the weights are random."""
    input_shape: tuple[int, ...]
    """The shape of one image, without the batch."""
    classes: int
    data: str


CIFAR = (3, 32, 32)
"""The shape of an image of CIFAR-10 and CIFAR-100."""


def _cifar(build: Callable[..., nn.Module]) -> NetworkSpec:
    return NetworkSpec(build, CIFAR, 10, "cifar-10")


def _imagenet(build: Callable[..., nn.Module]) -> NetworkSpec:
    return NetworkSpec(build, (3, 224, 224), 1000, "imagenet")


NETWORKS: dict[str, NetworkSpec] = {
    "digit-net": NetworkSpec(DigitNet, (1, 8, 8), 10, "digits"),
    "lenet-300-100": NetworkSpec(LeNet300100, (1, 28, 28), 10, "fashion-mnist"),
    **{f"vgg-{depth}": _cifar(partial(VGG, depth)) for depth in (11, 13, 16, 19)},
    **{f"resnet-{depth}": _cifar(partial(ResNet, depth)) for depth in (20, 32, 44, 56, 110)},
    **{
        f"wideresnet-{depth}-{width}": _cifar(partial(WideResNet, depth, width))
        for depth, width in ((40, 4), (16, 2), (28, 10))
    },
    "vgg-16-imagenet": _imagenet(vgg16_imagenet),
    "resnet-34-imagenet": _imagenet(resnet34_imagenet),
}


def find(name: str) -> NetworkSpec:
    """The network of that name.

    Parameters
    ----------
    name
        One of `NETWORKS`, or any "wideresnet-D-K" with D = 6n + 4.

    Returns
    -------
    NetworkSpec
        How to build it.

    Raises
    ------
    ValueError
        There is none; the message has the nearest names.

    Examples
    --------
    >>> find("wideresnet-22-8").input_shape
    (3, 32, 32)
    """
    if name in NETWORKS:
        return NETWORKS[name]
    wide = re.fullmatch(r"wideresnet-(\d{2,3})-([1-9]\d?)", name)  # larger ones fit into no memory
    if wide and int(wide[1]) >= 10 and int(wide[1]) % 6 == 4:
        return _cifar(partial(WideResNet, int(wide[1]), int(wide[2])))
    nearest = get_close_matches(name.lower(), NETWORKS, cutoff=0.4) or list(NETWORKS)
    raise ValueError(
        f"there is no network {name!r}; the nearest names are {', '.join(nearest)} "
        "(and any wideresnet-D-K with D = 6n + 4)"
    )


def build(name: str, classes: int | None = None) -> nn.Module:
    """A network with random weights.

    Parameters
    ----------
    name
        As for `find`.
    classes
        The number of outputs; left out, as many as the network's own data has.

    Returns
    -------
    nn.Module
        The network, in training mode as torch makes it.

    Raises
    ------
    ValueError
        There is none of that name.

    Examples
    --------
    >>> build("lenet-300-100").ip3
    Linear(in_features=100, out_features=10, bias=True)
    """
    spec = find(name)
    return spec.build(classes=spec.classes if classes is None else classes)
