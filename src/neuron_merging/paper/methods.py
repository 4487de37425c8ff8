"""methods: the mergers that stand side by side, with the paper's settings for each network."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_merging.data.opening import open_data
from neuron_merging.errors import MergingError
from neuron_merging.mergers.interface import uses_data
from neuron_merging.paper.settings import Network
from neuron_merging.settings import in_memory, merger_of

if TYPE_CHECKING:
    from neuron_merging.mergers.interface import Merger

TITLES = {"none": "pruned", "cosine": "merged"}
"""The paper's words for its two columns."""
CALIBRATION_IMAGES = 128
EXAMPLE = Network("", "", "", "", 0.1, 0.85)
"""Any network: what a method is does not depend on it."""


@dataclass(frozen=True)
class Method:
    """A merger by name, and the options that were asked for."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """As it is typed."""
        return self.name + _joined(dict(self.options))

    def text(self, network: Network) -> str:
        """The merger of `compress --merger` for a network; cosine is the paper's unless told otherwise.

        >>> from neuron_merging.paper.settings import network
        >>> parse("cosine:bn=paper")[0].text(network("wideresnet-40-4"))
        'cosine:threshold=0.1,balance=0.8,bn=paper'
        """
        options = dict(self.options)
        if self.name == "cosine":
            paper = {"threshold": str(network.threshold), "balance": str(network.balance), "bn": "released"}
            options = paper | options
        return self.name + _joined(options)

    @property
    def code(self) -> str:
        """The sum of the file that a merger from elsewhere is written in."""
        if ":" not in self.name:
            return ""
        file = inspect.getsourcefile(type(self.merger(EXAMPLE)))
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""

    def at(self, threshold: float) -> Method:
        """The paper's method at another t and, unless asked for otherwise, by cosine alone (λ = 1)."""
        options = {"balance": "1"} | dict(self.options) | {"threshold": str(threshold)}
        return replace(self, options=tuple(options.items()))

    def merger(self, network: Network) -> Merger:
        """The merger itself, its options checked."""
        return merger_of(self.text(network))

    @property
    def needs_images(self) -> bool:
        """Whether it looks at training images."""
        return uses_data(self.merger(EXAMPLE))

    def batches(self, network: Network, data: str | None) -> list[Any] | None:
        """The images that it looks at, from the folder `data` if that is given."""
        source = network.data + (f":{data}" if data else "")
        return in_memory(open_data(source, "train").some(CALIBRATION_IMAGES)) if self.needs_images else None


def runnable(network: Network, methods: Sequence[Method]) -> list[Method]:
    """The methods that can run on a network: of ImageNet there are no images to calibrate on."""
    return [method for method in methods if network.data != "imagenet" or not method.needs_images]


def _joined(options: dict[str, str]) -> str:
    return ":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else ""


def parse(text: str) -> tuple[Method, ...]:
    """Names with options, after commas; what has no name before its "=" is one more option.

    >>> [method.label for method in parse("none,cosine:bn=paper,threshold=0.2,moments")]
    ['none', 'cosine:bn=paper,threshold=0.2', 'moments']
    """
    found: list[Method] = []
    for part in text.split(","):
        head, equals, value = part.strip().partition("=")
        name, _, key = head.rpartition(":")
        if equals and name and key:
            found.append(Method(name, ((key, value),)))
        elif equals and found and head == key:
            found[-1] = replace(found[-1], options=(*found[-1].options, (key, value)))
        elif key and not equals and (name or head == key):
            found.append(Method(head))
        else:
            fix = "For instance --methods none,cosine,moments or none,cosine:threshold=0.2,bn=paper."
            raise MergingError(f"{part!r} is not a method", where="--methods", fix=fix)
    _check(found)
    return tuple(dict.fromkeys(found))


def _check(methods: list[Method]) -> None:
    """Unknown names and options are told before any work is done."""
    for method in methods:
        method.merger(EXAMPLE)
