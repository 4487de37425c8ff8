"""Account for every parameter: prunable, not prunable (with the reason), or unused. Also merge refusals that repeat in
layers whose names differ only by a number.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Axis, Channels, Group, Mask, Refusal, is_unit
from neuron_merging.graph.graph import Shape

MAX_REASON_LENGTH = 90
"""Letters of a reason where it must fit in one line."""


@dataclass(frozen=True)
class KeptParameters:
    """Parameters that cannot be removed for one reason, and the layers that they belong to."""

    why: str
    parameters: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class ParameterCoverage:
    """How many parameters of a network are prunable; the other counts add up to `parameters`.

    Attributes
    ----------
    parameters
        All parameters, shared ones once.
    internal
        Parameters that are removed with a group outside residual streams.
    residual
        Further parameters that are removed with a residual stream, which needs `scope="all"`.
    refused
        Parameters that are not prunable, by reason, the largest share first.
    unused
        Parameters that no operator reads.

    Examples
    --------
    >>> print(nm.inspect(net, torch.zeros(1, 4)).account)
    prunable 96.6%, not prunable 3.4%, unused 0.0% of 58 parameters
      not prunable 3.4%: output is what the network returns (2)
    """

    parameters: int
    internal: int
    residual: int
    refused: tuple[KeptParameters, ...]
    unused: KeptParameters

    def share(self, count: int) -> float:
        """Return a number of parameters as a share of all."""
        return count / self.parameters if self.parameters else 0.0

    @property
    def reachable(self) -> tuple[float, float]:
        """The shares that can be removed with `scope="internal"` and with `scope="all"`."""
        return self.share(self.internal), self.share(self.internal + self.residual)

    @property
    def lines(self) -> tuple[tuple[str, int, str], ...]:
        """Rows of a table: the category, its number of parameters, and an explanation. The numbers add up to all."""
        rows = [("prunable", self.internal, "in groups of channels")]
        rows += [("prunable", self.residual, 'in residual streams: with scope="all"')] if self.residual else []
        rows += [
            ("not prunable", part.parameters, f"{part.why} ({_list_first_layers(part.layers)})")
            for part in self.refused
        ]
        return (*rows, ("unused", self.unused.parameters, _list_first_layers(self.unused.layers)))

    @property
    def headline(self) -> str:
        """The shares in one line."""
        stays = sum(part.parameters for part in self.refused)
        sums = (
            ("prunable", self.internal + self.residual),
            ("not prunable", stays),
            ("unused", self.unused.parameters),
        )
        shares = ", ".join(f"{name} {self.share(count):.1%}" for name, count in sums)
        return f"{shares} of {self.parameters:,} parameters"

    def __str__(self) -> str:
        lines = self.lines if self.residual else self.lines[1:]
        rows = [f"  {name} {self.share(count):.1%}: {text}" for name, count, text in lines if count]
        return "\n".join([self.headline, *rows])


def compute_parameter_coverage(analysis: Analysis) -> ParameterCoverage:
    """Count the prunable, not prunable and unused parameters of a network."""
    channels, names = analysis.channels, [name for name, _ in analysis.model.named_parameters()]
    shapes = {name: tuple(analysis.graph.tensors[name].shape) for name in names}
    read = {name for name in names if analysis.graph.nodes_reading(name)}
    inner = _count_removable_entries([group for group in channels.groups if not group.residual], shapes)
    every = _count_removable_entries(channels.groups, shapes)
    left = {name: math.prod(shapes[name]) - every[name] for name in names}
    unread = {name: count for name, count in left.items() if name not in read}
    return ParameterCoverage(
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        internal=sum(inner.values()),
        residual=sum(every.values()) - sum(inner.values()),
        refused=_group_by_reason(channels, {name: count for name, count in left.items() if count and name in read}),
        unused=KeptParameters(
            "no operator reads them", sum(unread.values()), generalise_layer_names(map(_get_owner, unread))
        ),
    )


def _group_by_reason(channels: Channels, left: Mapping[str, int]) -> tuple[KeptParameters, ...]:
    """Group parameters that are not prunable by reason, the most parameters first."""
    counts: dict[str, int] = defaultdict(int)
    layers: dict[str, list[str]] = defaultdict(list)
    for name, count in left.items():
        refusal = channels.reasons[name]
        why = f"{refusal.operator} {refusal.why}".strip()
        counts[why] += count
        layers[why].append(_get_owner(name))
    reasons = [KeptParameters(why, count, generalise_layer_names(layers[why])) for why, count in counts.items()]
    return tuple(sorted(reasons, key=lambda part: -part.parameters))


def _count_removable_entries(groups: Iterable[Group], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Count, for each parameter, the entries that belong to a removable unit of these groups."""
    masks: dict[str, dict[Axis, Mask]] = defaultdict(dict)
    for group in groups:
        for axis, units in group.cuts.items():
            # NO_UNIT is -1 and would index from the end; such entries are dropped by the first term.
            free = is_unit(units) & ~group.locked[np.maximum(units, 0)]
            known = masks[axis.tensor].get(axis)
            masks[axis.tensor][axis] = free if known is None else known | free
    # An entry is removable if any of its axes can be cut there, so count the complement: no axis can.
    return {
        name: math.prod(shape) - _count_unmarked_entries(shape, masks.get(name, {})) for name, shape in shapes.items()
    }


def _count_unmarked_entries(shape: Shape, masks: Mapping[Axis, Mask]) -> int:
    """Count the entries that are not marked along any axis: the product over axes of their unmarked indices.

    A grouped convolution has other channels in each block of rows, so the product is taken block by block.
    """
    stays = [np.ones((1, size), int) for size in shape]
    for axis, mask in masks.items():
        stays[axis.dim] = stays[axis.dim] * ~mask.reshape(axis.blocks, -1)
    blocks = max((axis.blocks for axis in masks), default=1)
    if blocks > 1:
        stays[0] = stays[0].reshape(blocks, -1)
    return int(math.prod(part.sum(1) for part in stays).sum()) if stays else 1


def _get_owner(tensor: str) -> str:
    return tensor.rpartition(".")[0] or tensor


# Refusals and names that repeat


def merge_similar_refusals(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """Merge refusals with the same reason at the same line, of layers whose names differ only by a number.

    >>> both = [Refusal(f"layer.{i}.a", 8, "mixes", "softmax", f"layer.{i}, net.py:3: x.softmax(1)") for i in (0, 1)]
    >>> [str(refusal) for refusal in merge_similar_refusals(both)]
    ['layer.*.a (2 layers): softmax mixes (layer.*, net.py:3: x.softmax(1))']
    """
    found: dict[tuple[str, ...], list[Refusal]] = defaultdict(list)
    for refusal in refusals:
        found[
            _generalise_name(refusal.layer), refusal.operator, _mask_numbers(refusal.why), _generalise_place(refusal)
        ].append(refusal)
    return tuple(_merge_refusals(parts) for parts in found.values())


@dataclass(frozen=True)
class ReasonCount:
    """How many channels of how many layers cannot be removed for one reason, which is cut to one line."""

    why: str
    channels: int
    layers: int

    @property
    def size(self) -> str:
        return f"{self.channels:,} channels of {self.layers:,} {'layer' if self.layers == 1 else 'layers'}"


def count_refusals_by_reason(refusals: Iterable[Refusal]) -> tuple[ReasonCount, ...]:
    """Count the channels that cannot be removed by reason, the most frequent reason first.

    >>> both = [Refusal(layer, 8, "mixes", "softmax", "") for layer in ("a", "b")]
    >>> count_refusals_by_reason([Refusal("c", 2, "is returned", "output", ""), *both])[0]
    ReasonCount(why='softmax mixes', channels=16, layers=2)
    """
    found: dict[tuple[str, str], list[Refusal]] = defaultdict(list)
    for refusal in refusals:
        found[refusal.operator, _mask_numbers(refusal.why)].append(refusal)
    counts = [
        ReasonCount(
            textwrap.shorten(f"{parts[0].operator} {parts[0].why}", MAX_REASON_LENGTH, placeholder=" …"),
            sum(part.channels for part in parts),
            len({part.layer for part in parts}),
        )
        for parts in found.values()
    ]
    return tuple(sorted(counts, key=lambda count: -count.channels))


def _merge_refusals(parts: list[Refusal]) -> Refusal:
    first = parts[0]
    if len(parts) == 1:
        return first
    layer = f"{_generalise_name(first.layer)} ({len(parts)} layers)"
    return replace(first, layer=layer, channels=sum(part.channels for part in parts), place=_generalise_place(first))


def _generalise_place(refusal: Refusal) -> str:
    module, comma, line = refusal.place.partition(", ")
    return _generalise_name(module) + comma + line


def _generalise_name(layer: str) -> str:
    """Replace the numbers in a layer's path by `*`. A name that is only a number, as in ONNX files, is kept."""
    return layer if layer.isdecimal() else re.sub(r"(?<![^.])\d+(?![^.#])", "*", layer)


def _mask_numbers(why: str) -> str:
    """Replace numbers in a reason by `*`: sizes in another library's message differ from layer to layer."""
    return re.sub(r"\d+", "*", why)


def generalise_layer_names(layers: Iterable[str]) -> tuple[str, ...]:
    """Return the names of layers, with names that differ only by a number as one pattern."""
    named: dict[str, list[str]] = defaultdict(list)
    for layer in dict.fromkeys(layers):
        named[_generalise_name(layer)].append(layer)
    return tuple(pattern if len(same) > 1 else same[0] for pattern, same in named.items())


def _list_first_layers(layers: tuple[str, ...]) -> str:
    return ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
