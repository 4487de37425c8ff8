"""Labels of single channels, and groups of coupled channels with their producers, consumers and refusals.

Every index of every axis of every parameter has a label, a number above `FIXED`. The labels of a value give the channel
at each index of its channel dimensions. Labels that are coupled form a unit, and the units of a layer form a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuron_merging.errors import deprecated_members
from neuron_merging.graph.graph import Node, Shape

FIXED = 0
"""The label of an index that can never be removed."""
ANY = -1
"""The label of a broadcast dimension, which takes any size. Lower labels mark axes of constant tensors."""
NO_UNIT = -1
"""In arrays of units: the index belongs to no removable unit."""
NO_POSITION = -1
"""In tables of positions: fills the row of a unit that has fewer positions than the table has columns."""

AxisLabels = NDArray[np.int64]
"""The labels along one dimension; variables of this type are called `line`."""
Labels = dict[int, AxisLabels]
"""Maps dimensions to the labels along them. Dimensions without channels are left out."""
Units = NDArray[np.int64]
"""Numbers of units: those that are kept, or the unit at each index of a dimension."""
Positions = NDArray[np.int64]
"""One row per unit: its indices along an axis."""
Mask = NDArray[np.bool_]
"""A truth value for each unit or index."""
Scores = NDArray[np.float64]
"""The importance of each unit."""


def is_channel(line: AxisLabels) -> Mask:
    """Return which labels name a channel: neither fixed nor a broadcast.

    >>> is_channel(np.array([ANY, FIXED, 1])).tolist()
    [False, False, True]
    """
    return line > FIXED


def is_broadcast(line: AxisLabels) -> Mask:
    """Return which labels are broadcasts: they adapt to the labels that they are combined with.

    >>> is_broadcast(np.array([ANY - 1, ANY, FIXED, 1])).tolist()
    [True, True, False, False]
    """
    return line < FIXED


def select_channels(line: AxisLabels) -> AxisLabels:
    """Return the labels that name channels."""
    return line[is_channel(line)]


def make_fixed_labels(size: int) -> AxisLabels:
    """Return labels of an axis of which nothing can be removed."""
    return np.full(size, FIXED)


def fix_broadcasts(line: AxisLabels) -> AxisLabels:
    """Return the labels with broadcasts turned into fixed labels."""
    return np.where(is_broadcast(line), FIXED, line)


def is_unit(units: Units) -> Mask:
    """Return the indices that belong to a unit, as a mask.

    >>> is_unit(np.array([0, NO_UNIT, 3])).tolist()
    [True, False, True]
    """
    mask: Mask = units != NO_UNIT
    return mask


def make_empty_units(size: int) -> Units:
    """Return an axis of this size without units."""
    return np.full(size, NO_UNIT)


def is_position(positions: Positions) -> Mask:
    """Return which entries of a table of positions are indices, as opposed to padding."""
    mask: Mask = positions != NO_POSITION
    return mask


def build_position_table(units: Units, places: AxisLabels, size: int) -> Positions:
    """Return one row per unit with its positions, padded with `NO_POSITION`. `units[i]` is the unit at `places[i]`.

    >>> build_position_table(np.array([1, 0, 1]), np.array([4, 5, 6]), 2).tolist()
    [[5, -1], [4, 6]]
    """
    # Stable, so that the positions of a unit stay in order.
    order = np.argsort(units, kind="stable")
    ordered = units[order]
    counts = np.bincount(ordered, minlength=size)
    table = np.full((size, int(counts.max(initial=0))), NO_POSITION)
    # The column of an entry is its rank among the entries of its unit.
    table[ordered, np.arange(len(ordered)) - (np.cumsum(counts) - counts)[ordered]] = places[order]
    return table


def find_connected_components(count: int, edges: Sequence[tuple[AxisLabels, AxisLabels]]) -> AxisLabels:
    """Return the smallest label of each label's connected component.

    Vectorised hooking and pointer jumping (Shiloach and Vishkin, 1982): a Python loop over edges would be slow on wide
    networks.
    """
    root = np.arange(count)
    if not edges:
        return root
    a = np.concatenate([edge[0] for edge in edges])
    b = np.concatenate([edge[1] for edge in edges])
    while True:
        low, high = np.minimum(root[a], root[b]), np.maximum(root[a], root[b])
        if (low == high).all():
            return root
        np.minimum.at(root, high, low)  # hooking: attach the larger root to the smaller
        while (root[root] != root).any():  # pointer jumping: flatten every tree to depth one
            root = root[root]


HEADS_SUFFIX = ":heads"
"""Suffix of the name of a group whose units are attention heads; `#2` and so on may follow."""


@deprecated_members(expose="join_blocks", restore="split_blocks")
@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter or buffer.

    Parameters
    ----------
    tensor
        The tensor's dotted name.
    dim
        The dimension.
    blocks
        The number of groups if this is the input axis of a grouped convolution's weight, else 1. The axis then counts
        the input channels of all groups one after the other.

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
        """Return the weight with the channels of all blocks side by side along `dim`."""
        if self.blocks == 1:
            return weight
        # torch stores a grouped weight as (outputs, inputs / groups, …): the blocks lie one below the other.
        rows, per_block, *kernel = weight.shape
        split = weight.reshape(self.blocks, rows // self.blocks, per_block, *kernel)
        return split.transpose(0, 1).reshape(rows // self.blocks, self.blocks * per_block, *kernel)

    def split_blocks(self, wide: Tensor) -> Tensor:
        """Invert `join_blocks`. The number of channels may have changed, if it is still a multiple of `blocks`."""
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
        `rows[u]` are the indices of unit u on the axis (see `is_position`).
    stored
        Whether the layer reads its filters directly from the stored tensor, as opposed to computing them from it.

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
        The name of the value that it reads.
    axis
        The dimension of its weight that reads the channels. None if the weight cannot be rewritten: it is computed
        from other tensors, or it also produces channels.
    columns
        `columns[u]` are the indices of unit u on the axis (see `is_position`).
    blocks
        The number of groups of a grouped layer, each of which reads its own channels.

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
    """Channels that are not prunable, with the operator and the reason."""

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
        The name of its first layer.
    start
        Units are numbered through the network; those of this group are `start … start + size - 1`.
    size
        The number of units.
    producers
        The layers that produce its channels.
    consumers
        The layers that read them.
    cuts
        `cuts[axis][i]` is the unit at index i of that axis (see `is_unit`).
    balance_cells
        The cell of each unit. All cells must keep equally many units.
    locked
        Units that must stay.
    residual
        Whether it is a residual stream: layers read it, and their output is added to it.
    norms_across_channels
        Norms whose statistics run over these channels.
    heads
        Whether its units are attention heads.

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
        """The names of its producers, each once."""
        return tuple(dict.fromkeys(get_layer_name(p.node, p.axis) for p in self.producers))


@deprecated_members(lines="iter_axis_units", doubts="uncertain_sizes", beside="add_heads")
@dataclass(frozen=True)
class Channels:
    """The channels of one graph: groups, refusals, and the units that every value carries.

    Attributes
    ----------
    groups
        Groups of channels that can be removed.
    refusals
        Channels that cannot be removed, with reasons.
    uncertain_sizes
        Operators whose sizes may be constants of the model's code, so that a trial cut has to test them.
    units
        `units[value][dim]` gives the unit at each index (see `is_unit`).
    layers
        All layers that produce channels.
    reasons
        For each stored tensor, why entries that belong to no group must stay.
    heads
        The same as `units` for groups of attention heads. Such groups overlap with others: an index stays if the units
        of both stay.

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
        """Yield the dimensions of a value that carry units, with the unit at each index. Heads may repeat one."""
        yield from self.units.get(value, {}).items()
        yield from self.heads.get(value, {}).items()

    def get_kept_indices(self, value: str, kept: Mask) -> dict[int, Mask]:
        """Return, by dimension of a value, the indices that stay if only the units with `kept[unit]` remain."""
        masks: dict[int, Mask] = {}
        for dim, units in self.iter_axis_units(value):
            stay = select_kept_indices(kept, units)
            masks[dim] = masks[dim] & stay if dim in masks else stay
        return masks

    def add_heads(self, heads: Channels) -> Channels:
        """Return these channels and groups of heads, whose units are numbered after the present ones.

        Refusals of a layer's single channels are dropped if its heads can be removed, or have a refusal of their own.
        """
        first = sum(group.size for group in self.groups)
        head_groups = tuple(replace(group, start=group.start + first) for group in heads.groups)
        explained = {layer for group in head_groups for layer in group.layers} | {
            refusal.layer for refusal in heads.refusals
        }
        return Channels(
            groups=(*self.groups, *head_groups),
            refusals=(*(refusal for refusal in self.refusals if refusal.layer not in explained), *heads.refusals),
            uncertain_sizes=tuple(
                {node.name: node for node in (*self.uncertain_sizes, *heads.uncertain_sizes)}.values()
            ),
            units=self.units,
            layers=self.layers,
            reasons=self.reasons,
            heads={value: _shift_units(lines, first) for value, lines in heads.units.items()},
        )

    def carries(self, value: str, group: Group) -> bool:
        """Return whether a value has channels of the group."""
        return group.start in self._groups_by_value.get(value, ())

    def touches_node(self, node: Node) -> bool:
        """Return whether an operator reads or returns channels of any group."""
        return any(self._groups_by_value.get(name) for name in (node.name, *(ref.name for ref in node.refs())))

    def shape_after_pruning(self, value: str, shape: Shape, kept: Mask) -> Shape:
        """Return the shape of a value if only the units with `kept[unit]` remain."""
        stay = self.get_kept_indices(value, kept)
        return tuple(int(stay[dim].sum()) if dim in stay else size for dim, size in enumerate(shape))

    @cached_property
    def _groups_by_value(self) -> dict[str, frozenset[int]]:
        """For each value, the groups that it carries, each identified by its first unit."""
        starts = np.array([group.start for group in self.groups])
        values = {**self.units, **self.heads}
        return {
            value: frozenset(_find_group_starts((line for _, line in self.iter_axis_units(value)), starts))
            for value in values
        }


def _find_group_starts(lines: Iterable[Units], starts: Units) -> Iterator[int]:
    """Yield the first unit of each group that has units along these dimensions."""
    for units in lines:
        # Groups are numbered in order, so a unit belongs to the last group that starts at or before it.
        group_starts = starts[np.searchsorted(starts, units[is_unit(units)], side="right") - 1]
        yield from set(group_starts.tolist())


def _shift_units(lines: Mapping[int, Units], by: int) -> dict[int, Units]:
    return {dim: np.where(is_unit(units), units + by, units) for dim, units in lines.items()}


def select_kept_indices(kept: Mask, units: Units) -> Mask:
    """Return which indices of a dimension stay: those of kept units, and those without a unit."""
    # NO_UNIT indexes the last entry of `kept`; the second term then keeps the index whatever that entry is.
    return kept[units] | ~is_unit(units)


def format_unit_count(group: str, number: object) -> str:
    """Return a number of units in words: heads or channels, by the group's name.

    >>> format_unit_count("attention.qkv:heads", 8), format_unit_count("conv", 64)
    ('8 heads', '64 channels')
    """
    return f"{number} {'heads' if HEADS_SUFFIX in group else 'channels'}"


def get_layer_name(node: Node, axis: Axis) -> str:
    """Return the dotted path of the layer: its module, or its weight if it is called as a function."""
    owner = axis.tensor.rpartition(".")[0]
    standard = axis.tensor.endswith(".weight")
    return owner if standard and owner else (axis.tensor if not standard else node.module or axis.tensor)
