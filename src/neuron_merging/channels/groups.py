"""Groups of coupled channels, with the layers that produce and consume them, and refusals with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from neuron_merging.channels.labels import Mask, Positions, Units, is_unit
from neuron_merging.errors import deprecated_members
from neuron_merging.graph.graph import Node, Shape

HEADS_SUFFIX = ":heads"
"""What the name of a group of whole heads ends with; a number may follow."""


@deprecated_members(expose="join_blocks", restore="split_blocks")
@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter or buffer.

    Parameters
    ----------
    tensor
        Its dotted name.
    dim
        Which dimension.
    blocks
        Above 1 the axis is that of a grouped convolution's weight, seen as if the input channels of all groups lay
        one after the other.

    Examples
    --------
    >>> import torch
    >>> Axis("conv.weight", 1, blocks=2).join_blocks(torch.zeros(4, 3, 1, 1)).shape
    torch.Size([2, 6, 1, 1])
    """

    tensor: str
    dim: int
    blocks: int = 1

    def join_blocks(self, weight: Tensor) -> Tensor:
        """The weight with the channels of all blocks side by side along `dim`."""
        if self.blocks == 1:
            return weight
        rows, inside, *kernel = weight.shape
        split = weight.reshape(self.blocks, rows // self.blocks, inside, *kernel)
        return split.transpose(0, 1).reshape(rows // self.blocks, self.blocks * inside, *kernel)

    def split_blocks(self, wide: Tensor) -> Tensor:
        """The inverse of `join_blocks`, for any number of channels that the blocks share equally."""
        if self.blocks == 1:
            return wide
        rows, channels, *kernel = wide.shape
        split = wide.reshape(rows, self.blocks, channels // self.blocks, *kernel)
        return split.transpose(0, 1).reshape(rows * self.blocks, channels // self.blocks, *kernel)


@dataclass(frozen=True)
class Producer:
    """A layer whose output channels belong to a group.

    Attributes
    ----------
    node
        The operator.
    axis
        The dimension of its weight along which its channels lie.
    bias
        The name of its bias, if it has one.
    rows
        `rows[u]` are unit u's places on the axis (see `labels.is_place`).
    stored
        Whether the layer's filters are those of the stored tensor, not computed from it.

    Examples
    --------
    >>> nm.analyse(net, torch.zeros(1, 4)).channels.groups[0].producers[0].axis
    Axis(tensor='0.weight', dim=0, blocks=1)
    """

    node: Node
    axis: Axis
    bias: str | None
    rows: Positions = field(repr=False)
    stored: bool = True


@dataclass(frozen=True)
class Consumer:
    """A layer that sums over the channels of a group.

    Attributes
    ----------
    node
        The operator.
    input
        The value that it reads, by name.
    axis
        The dimension of its weight that reads the channels; None where the weight cannot be rewritten: it is
        computed from others, or it is also the weight that makes these channels.
    columns
        `columns[u]` are unit u's places on the axis (see `labels.is_place`).
    blocks
        A grouped layer reads its channels in that many separate blocks.

    Examples
    --------
    >>> nm.analyse(net, torch.zeros(1, 4)).channels.groups[0].consumers[0].axis
    Axis(tensor='2.weight', dim=1, blocks=1)
    """

    node: Node
    input: str
    axis: Axis | None
    columns: Positions = field(repr=False)
    blocks: int = 1


@dataclass(frozen=True)
class Refusal:
    """Channels that cannot be removed, and the operator that says so."""

    layer: str
    channels: int
    why: str
    operator: str
    place: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.operator} {self.why}" + (f" ({self.place})" if self.place else "")


@deprecated_members(cells="balance_cells", mixing="norms_across_channels")
@dataclass(frozen=True)
class Group:
    """Channels that one decision covers: units to keep or to remove.

    Attributes
    ----------
    name
        That of its first layer.
    start
        Units are numbered through the whole network; this group's are `start … start + size - 1`.
    size
        How many units it has.
    producers
        The layers that make its channels.
    consumers
        The layers that read them.
    cuts
        `cuts[axis][i]` is the unit at index i of that axis (see `labels.is_unit`).
    balance_cells
        Each unit's cell: every cell must keep equally many.
    locked
        Units that always stay.
    residual
        Whether it is a stream that passes by layers which read it, and is added to what they make of it.
    norms_across_channels
        Norms whose statistics run over these channels.
    heads
        Whether its units are whole heads of an attention.

    Examples
    --------
    >>> (group,) = nm.analyse(net, torch.zeros(1, 4)).channels.groups
    >>> group.size, [(axis.tensor, axis.dim) for axis in group.cuts]
    (8, [('0.weight', 0), ('0.bias', 0), ('2.weight', 1)])
    """

    name: str
    start: int
    size: int
    producers: tuple[Producer, ...]
    consumers: tuple[Consumer, ...]
    cuts: Mapping[Axis, Units] = field(repr=False)
    balance_cells: Units = field(repr=False)
    locked: Mask = field(repr=False)
    residual: bool = False
    norms_across_channels: tuple[Node, ...] = ()
    heads: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(get_layer_name(p.node, p.axis) for p in self.producers))


@deprecated_members(lines="iter_axis_units", doubts="uncertain_sizes", beside="add_heads")
@dataclass(frozen=True)
class Channels:
    """The channels of one graph: groups, refusals, and the units that every value carries.

    Attributes
    ----------
    groups
        What can be removed.
    refusals
        What cannot, and why.
    uncertain_sizes
        Operators whose sizes may be constants of the model's own code.
    units
        `units[value][dim]` gives the unit at each index (see `labels.is_unit`).
    layers
        All layers that make channels.
    reasons
        By stored tensor, why entries of it that belong to no group have to stay.
    heads
        The same as `units` for groups of whole heads, which lie across the others: an index stays if both let it.

    Examples
    --------
    >>> channels = nm.analyse(net, torch.zeros(1, 4)).channels
    >>> len(channels.groups), str(channels.refusals[0])
    (1, '2: output is what the network returns')
    """

    groups: tuple[Group, ...]
    refusals: tuple[Refusal, ...]
    uncertain_sizes: tuple[Node, ...]
    units: Mapping[str, Mapping[int, Units]] = field(repr=False)
    layers: tuple[str, ...] = ()
    reasons: Mapping[str, Refusal] = field(default_factory=dict, repr=False)
    heads: Mapping[str, Mapping[int, Units]] = field(default_factory=dict, repr=False)

    def iter_axis_units(self, value: str) -> Iterator[tuple[int, Units]]:
        """The dimensions of a value along which units stand, with the unit at each index; one may come twice."""
        yield from self.units.get(value, {}).items()
        yield from self.heads.get(value, {}).items()

    def get_kept_indices(self, value: str, kept: Mask) -> dict[int, Mask]:
        """By dimension of a value, the indices that stay while only the units with `kept[unit]` remain."""
        found: dict[int, Mask] = {}
        for dim, units in self.iter_axis_units(value):
            stay = select_kept_indices(kept, units)
            found[dim] = found[dim] & stay if dim in found else stay
        return found

    def add_heads(self, heads: Channels) -> Channels:
        """These channels and whole heads, whose groups are numbered after them.

        What stands in the way of a layer's single channels is not worth a word where its heads can go, or where
        there is more to say of them.
        """
        first = sum(group.size for group in self.groups)
        moved = tuple(replace(group, start=group.start + first) for group in heads.groups)
        told = {layer for group in moved for layer in group.layers} | {refusal.layer for refusal in heads.refusals}
        return Channels(
            groups=(*self.groups, *moved),
            refusals=(*(refusal for refusal in self.refusals if refusal.layer not in told), *heads.refusals),
            uncertain_sizes=tuple(
                {node.name: node for node in (*self.uncertain_sizes, *heads.uncertain_sizes)}.values()
            ),
            units=self.units,
            layers=self.layers,
            reasons=self.reasons,
            heads={value: _shift_units(lines, first) for value, lines in heads.units.items()},
        )

    def carries(self, value: str, group: Group) -> bool:
        """Whether channels of the group stand in a value."""
        return group.start in self._groups_by_value.get(value, ())

    def touches_node(self, node: Node) -> bool:
        """Whether an operator reads or returns channels of any group."""
        return any(self._groups_by_value.get(name) for name in (node.name, *(ref.name for ref in node.refs())))

    def shape_after_pruning(self, value: str, shape: Shape, kept: Mask) -> Shape:
        """The shape of a value once only the units with `kept[unit]` remain."""
        stay = self.get_kept_indices(value, kept)
        return tuple(int(stay[dim].sum()) if dim in stay else size for dim, size in enumerate(shape))

    @cached_property
    def _groups_by_value(self) -> dict[str, frozenset[int]]:
        """By value, the groups that it carries, each known by its first unit."""
        starts = np.array([group.start for group in self.groups])
        values = {**self.units, **self.heads}
        return {
            value: frozenset(_find_group_starts((line for _, line in self.iter_axis_units(value)), starts))
            for value in values
        }


def _find_group_starts(lines: Iterable[Units], starts: Units) -> Iterator[int]:
    """The first units of the groups to which the units of these lines belong."""
    for units in lines:
        found = starts[np.searchsorted(starts, units[is_unit(units)], side="right") - 1]
        yield from set(found.tolist())


def _shift_units(lines: Mapping[int, Units], by: int) -> dict[int, Units]:
    return {dim: np.where(is_unit(units), units + by, units) for dim, units in lines.items()}


def select_kept_indices(kept: Mask, units: Units) -> Mask:
    """Which indices of a dimension stay: those of kept units, and those at which no unit stands."""
    return kept[units] | ~is_unit(units)


def format_unit_count(group: str, number: object) -> str:
    """How many units a group has, in words.

    >>> format_unit_count("attention.qkv:heads", 8), format_unit_count("conv", 64)
    ('8 heads', '64 channels')
    """
    return f"{number} {'heads' if HEADS_SUFFIX in group else 'channels'}"


def get_layer_name(node: Node, axis: Axis) -> str:
    """The dotted path of the layer: its module, or its weight where it is called as a function."""
    owner = axis.tensor.rpartition(".")[0]
    standard = axis.tensor.endswith(".weight")
    return owner if standard and owner else (axis.tensor if not standard else node.module or axis.tensor)
