"""The registry of named networks. Other packages add networks with `register_networks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from neuron_merging.errors import make_deprecated_getattr
from neuron_merging.graph.user_code import load_plugins

__all__ = ["NETWORKS", "NetworkSpec", "create_network", "find_network", "register_networks"]


@dataclass(frozen=True)
class NetworkSpec:
    """How to build a network, and the images that it is designed for.

    Examples
    --------
    >>> find_network("resnet-56").input_shape, find_network("resnet-56").data
    ((3, 32, 32), 'cifar-10')
    """

    build: Callable[..., nn.Module]
    """Builds the network with random weights; called with the keyword `classes`."""
    input_shape: tuple[int, ...]
    """Shape of one image, without the batch dimension."""
    classes: int
    """Number of classes of `data`."""
    data: str
    """Name of the data set that the network is trained on."""


NETWORKS: dict[str, NetworkSpec] = {}
"""Registered networks, by name."""
_PATTERNS: dict[str, Callable[[str], NetworkSpec | None]] = {}
"""Registered families of networks: the pattern of their names, and a function that finds a member by name."""


def register_networks(
    specs: Mapping[str, NetworkSpec], patterns: Mapping[str, Callable[[str], NetworkSpec | None]] | None = None
) -> None:
    """Register networks by name; `patterns` maps families of names to functions that return a member or None."""
    NETWORKS.update(specs)
    _PATTERNS.update(patterns or {})


def find_network(name: str) -> NetworkSpec:
    """Find a registered network by name.

    Parameters
    ----------
    name
        One of `NETWORKS`, or any "wideresnet-D-K" with D = 6n + 4.

    Returns
    -------
    NetworkSpec
        How to build the network.

    Raises
    ------
    ValueError
        No network has that name; the message lists the nearest names.

    Examples
    --------
    >>> find_network("wideresnet-22-8").input_shape
    (3, 32, 32)
    """
    load_plugins()
    if name in NETWORKS:
        return NETWORKS[name]
    member = next((spec for match in _PATTERNS.values() if (spec := match(name))), None)
    if member is not None:
        return member
    nearest = get_close_matches(name.lower(), NETWORKS, cutoff=0.4) or list(NETWORKS)
    families = "".join(f" (and any {pattern})" for pattern in _PATTERNS)
    raise ValueError(f"there is no network {name!r}; the nearest names are {', '.join(nearest)}{families}")


def create_network(name: str, classes: int | None = None) -> nn.Module:
    """Build a registered network with random weights.

    Parameters
    ----------
    name
        As for `find_network`.
    classes
        The number of outputs; by default the number of classes of the network's data set.

    Returns
    -------
    nn.Module
        The network, in training mode.

    Raises
    ------
    ValueError
        No network has that name.

    Examples
    --------
    >>> create_network("lenet-300-100").ip3
    Linear(in_features=100, out_features=10, bias=True)
    """
    spec = find_network(name)
    return spec.build(classes=spec.classes if classes is None else classes)


__getattr__ = make_deprecated_getattr(
    __name__,
    {"build": "neuron_merging.models:create_network", "find": "neuron_merging.models:find_network"},
)
