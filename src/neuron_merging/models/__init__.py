"""The registry of named networks. Other packages add theirs with `register_networks`."""

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
    """How to build a network, and which images it is made for.

    Examples
    --------
    >>> find_network("resnet-56").input_shape, find_network("resnet-56").data
    ((3, 32, 32), 'cifar-10')
    """

    build: Callable[..., nn.Module]
    """Called with the keyword `classes`; the weights are random."""
    input_shape: tuple[int, ...]
    """The shape of one image, without the batch."""
    classes: int
    data: str


NETWORKS: dict[str, NetworkSpec] = {}
"""Registered networks, by name."""
_PATTERNS: dict[str, Callable[[str], NetworkSpec | None]] = {}


def register_networks(
    specs: Mapping[str, NetworkSpec], patterns: Mapping[str, Callable[[str], NetworkSpec | None]] | None = None
) -> None:
    """Add networks by name; `patterns` describe families of names, each with a function that finds a member."""
    NETWORKS.update(specs)
    _PATTERNS.update(patterns or {})


def find_network(name: str) -> NetworkSpec:
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
    >>> find_network("wideresnet-22-8").input_shape
    (3, 32, 32)
    """
    load_plugins()
    if name in NETWORKS:
        return NETWORKS[name]
    found = next((spec for match in _PATTERNS.values() if (spec := match(name))), None)
    if found is not None:
        return found
    nearest = get_close_matches(name.lower(), NETWORKS, cutoff=0.4) or list(NETWORKS)
    families = "".join(f" (and any {pattern})" for pattern in _PATTERNS)
    raise ValueError(f"there is no network {name!r}; the nearest names are {', '.join(nearest)}{families}")


def create_network(name: str, classes: int | None = None) -> nn.Module:
    """A network with random weights.

    Parameters
    ----------
    name
        As for `find_network`.
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
    >>> create_network("lenet-300-100").ip3
    Linear(in_features=100, out_features=10, bias=True)
    """
    spec = find_network(name)
    return spec.build(classes=spec.classes if classes is None else classes)


__getattr__ = make_deprecated_getattr(
    __name__,
    {"build": "neuron_merging.models:create_network", "find": "neuron_merging.models:find_network"},
)
