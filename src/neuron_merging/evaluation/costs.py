"""MACs and parameters of a network as a function of the channels that each group keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Axis, Channels, Group
from neuron_merging.channels.labels import Units, is_unit, make_empty_units
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.capture import parse_einsum_letters
from neuron_merging.graph.graph import Graph, Node, Ref, Shape
from neuron_merging.graph.macs import count_macs, count_node_macs

__all__ = ["Costs", "count_macs", "count_parameters"]

UnitCounts = NDArray[np.int64]
KeptPerGroup = Mapping[str, int | Sequence[int] | Units]
"""By the group's name, how many units it keeps, or which."""


def count_parameters(model: nn.Module) -> int:
    """Trainable and frozen parameters, shared ones once.

    Parameters
    ----------
    model
        The network.

    Returns
    -------
    int
        How many numbers its parameters hold.

    Examples
    --------
    >>> count_parameters(nn.Linear(4, 2))
    10
    """
    return sum(p.numel() for p in model.parameters())


class Costs:
    """Multiply-accumulates and parameters of a network as a function of what each group keeps.

    Built once; then each question is a few operations on arrays. Of each group either a number of units is given
    or the units themselves. Numbers are exact unless units of one cell differ in what hangs on them, as those of a
    residual stream do of which some layers make only a part. Biases that a merger adds are not counted.

    >>> import torch
    >>> from neuron_merging.pruning.trial_prune import analyse
    >>> costs = Costs(analyse(net, torch.zeros(1, 4)))
    >>> costs.macs({}), costs.macs({"0": 4}), costs.parameters({"0": [0, 1, 5, 7]})
    (48, 24, 30)
    """

    def __init__(self, analysis: Analysis) -> None:
        graph, channels = analysis.graph, analysis.channels
        spent = {name: macs for name, macs in count_node_macs(graph).items() if macs}
        working = [node for node in graph.nodes if node.name in spent]
        self._groups = {group.name: group for group in channels.groups}
        self._unit_classes = _UnitClasses(channels.groups, _list_cost_dims(working, channels))
        work = _MacTerms(graph, channels, self._unit_classes)
        self._macs = _CostSum([product for node in working for product in work.of(node, spent[node.name])])
        self._parameters = _CostSum(list(_make_parameter_terms(graph, channels.groups, self._unit_classes)))

    @cached_property
    def uneven_groups(self) -> frozenset[str]:
        """Groups whose units do not all cost the same: for them a number of units says too little."""
        own = {
            name: self._unit_classes.of[group.start : group.start + group.size] for name, group in self._groups.items()
        }
        return frozenset(name for name, strands in own.items() if strands.min() != strands.max())

    def macs(self, kept: KeptPerGroup) -> int:
        """Multiply-accumulates of one forward pass with `kept[group name]`; other groups are whole."""
        return self._macs(self._counts(kept))

    def parameters(self, kept: KeptPerGroup) -> int:
        """Entries of all parameters with `kept[group name]`; other groups are whole."""
        return self._parameters(self._counts(kept))

    def _counts(self, kept: KeptPerGroup) -> UnitCounts:
        """How many units every strand keeps."""
        sizes = self._unit_classes.sizes
        counts = sizes.copy()
        for name, given in kept.items():
            group = self._groups[name]
            own = self._unit_classes.of[group.start : group.start + group.size]
            strands = np.arange(own.min(), own.max() + 1)
            if isinstance(given, int):
                counts[strands] = sizes[strands] * given // group.size
            else:
                counts[strands] = np.bincount(own[np.asarray(given, int)] - own.min(), minlength=len(strands))
        return counts


@dataclass(frozen=True)
class DimExtent:
    """The size of a dimension: what is fixed, and of strands of units, how many places each unit has."""

    fixed: int
    places: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class CostTerm:
    """A number of multiplications or entries: the extents of all dimensions multiplied, times `factor` / `divisor`."""

    extents: tuple[DimExtent, ...]
    factor: int = 1
    divisor: int = 1

    def __mul__(self, other: CostTerm) -> CostTerm:
        return CostTerm((*self.extents, *other.extents), self.factor * other.factor, self.divisor * other.divisor)


class _CostSum:
    """A sum of products, as a function of how many units each strand keeps."""

    def __init__(self, products: Sequence[CostTerm]) -> None:
        extents = list(dict.fromkeys(extent for product in products for extent in product.extents))
        number = {extent: i for i, extent in enumerate(extents)}
        width = max((len(product.extents) for product in products), default=0)
        rows = [[number[extent] for extent in product.extents] for product in products]
        entries = [(i, strand, each) for i, extent in enumerate(extents) for strand, each in extent.places]
        self._fixed = np.array([*(extent.fixed for extent in extents), 1], np.int64)
        self._extent, self._unit_class, self._each = np.array(entries, np.int64).reshape(-1, 3).T
        self._factors = np.array([row + [len(extents)] * (width - len(row)) for row in rows], np.int64)
        self._scale = np.array([(product.factor, product.divisor) for product in products], np.int64).reshape(-1, 2).T

    def __call__(self, counts: UnitCounts) -> int:
        extents = self._fixed.copy()
        np.add.at(extents, self._extent, self._each * counts[self._unit_class])
        factor, divisor = self._scale
        return int((extents[self._factors].prod(1) * factor // divisor).sum()) if len(self._factors) else 0


class _UnitClasses:
    """The units of all groups, in strands of units that stand equally often in every line."""

    def __init__(self, groups: Sequence[Group], lines: Iterable[Units]) -> None:
        starts = np.array([group.start for group in groups], np.int64)
        patterns: list[list[UnitCounts]] = [[group.balance_cells] for group in groups]
        for line in lines:
            units = line[is_unit(line)]
            owner = np.searchsorted(starts, units, side="right") - 1
            for i in np.unique(owner).tolist():
                patterns[i].append(np.bincount(units[owner == i] - groups[i].start, minlength=groups[i].size))
        self.of = np.zeros(sum(group.size for group in groups), np.int64)
        """By unit, the number of its strand."""
        count = 0
        for group, pattern in zip(groups, patterns, strict=True):
            strand = _number_equal_columns(pattern)
            self.of[group.start : group.start + group.size] = count + strand
            count += int(strand.max()) + 1
        self.sizes = np.bincount(self.of, minlength=count)

    def make_extent(self, line: Units) -> DimExtent:
        """The size of a dimension along which these units stand."""
        units = line[is_unit(line)]
        strands, places = np.unique(self.of[units], return_counts=True)
        each = places // self.sizes[strands]
        return DimExtent(len(line) - len(units), tuple(zip(strands.tolist(), each.tolist(), strict=True)))

    def along(self, lines: Sequence[Units], size: int) -> CostTerm:
        """The size of a dimension along which heads and their channels may stand across each other."""
        extents = [self.make_extent(line) for line in lines] or [DimExtent(size)]
        found = CostTerm((extents[0],))
        for extent in extents[1:]:
            common = math.gcd(extent.fixed, *(each for _, each in extent.places))
            places = tuple((strand, each // common) for strand, each in extent.places)
            found *= CostTerm((DimExtent(extent.fixed // common, places),), 1, size // common)
        return found

    def whole(self, product: CostTerm) -> int:
        """A product while nothing is removed."""
        extents = (
            extent.fixed + sum(each * int(self.sizes[strand]) for strand, each in extent.places)
            for extent in product.extents
        )
        return math.prod(extents) * product.factor // product.divisor


def _number_equal_columns(pattern: Sequence[UnitCounts]) -> UnitCounts:
    """Numbers for the columns of a table, the same for equal columns."""
    different = [row for row in pattern if (row != row[0]).any()]
    if not different:
        return np.zeros_like(pattern[0])
    numbers: UnitCounts = np.unique(different, axis=1, return_inverse=True)[1].ravel()
    return numbers


def _list_cost_dims(nodes: Iterable[Node], channels: Channels) -> Iterator[Units]:
    """Every dimension that costs run over: of values around these operators, and of stored tensors."""
    values = dict.fromkeys(name for node in nodes for name in (node.name, *(ref.name for ref in node.refs())))
    for value in values:
        yield from (line for _, line in channels.iter_axis_units(value))
    for group in channels.groups:
        for units in group.cuts.values():
            yield np.where(is_unit(units), units + group.start, units)


class _MacTerms:
    """The multiply-accumulates of operators as products of the dimensions that they run over."""

    def __init__(self, graph: Graph, channels: Channels, strands: _UnitClasses) -> None:
        self.graph, self.channels, self.strands = graph, channels, strands

    def of(self, node: Node, spent: int) -> list[CostTerm]:
        """What was counted, as products; as it is where no channel that could go takes part."""
        products = list(self._make_node_terms(node)) if self.channels.touches_node(node) else []
        return products if sum(self.strands.whole(product) for product in products) == spent else [CostTerm((), spent)]

    def _make_node_terms(self, node: Node) -> Iterator[CostTerm]:
        row = lookup_operator(node)
        if row.layer == "linear":
            yield self._make_matmul_term(node, node.args["input"], -1)
        elif row.layer == "product":
            left, right = node.args.get("mat1", node.args.get("self")), node.args.get("mat2", node.args.get("other"))
            stored = left.name in self.graph.parameters
            yield self._make_matmul_term(node, right, -2) if stored else self._make_matmul_term(node, left, -1)
        elif row.contraction == "einsum":
            yield self._make_einsum_term(node)
        elif row.convolves:
            yield self._make_convolution_term(node, transposed=row.layer == "transposed")
        elif row.contraction == "attention":
            *outer, queries, _ = self._list_dim_terms(node.args["query"])
            keys, width = self._list_dim_terms(node.args["key"])[-2:]
            yield _multiply_terms([*outer, queries, keys, width])
            yield _multiply_terms([*outer, queries, keys, self._list_dim_terms(node.args["value"])[-1]])

    def _make_einsum_term(self, node: Node) -> CostTerm:
        """Every letter of an einsum is one dimension; the one that channels are known to lie along speaks for it."""
        operands = node.args["tensors"]
        terms, result = parse_einsum_letters(
            node.args["equation"], [len(self.graph.shapes[ref.name]) for ref in operands]
        )
        sizes: dict[str, CostTerm] = {}
        for ref, term in zip([Ref(node.name), *operands], [result, *terms], strict=True):
            known = self.channels.units.get(ref.name, {})
            for dim, (letter, extent) in enumerate(zip(term, self._list_dim_terms(ref), strict=True)):
                if letter not in sizes or dim in known:
                    sizes[letter] = extent
        return _multiply_terms(sizes.values())

    def _make_matmul_term(self, node: Node, operand: Ref, dim: int) -> CostTerm:
        """Every output is a sum over one dimension of an operand."""
        return _multiply_terms([*self._list_dim_terms(Ref(node.name)), self._list_dim_terms(operand)[dim]])

    def _make_convolution_term(self, node: Node, transposed: bool) -> CostTerm:
        x, kernel = node.args["input"], self.graph.shapes[node.args["weight"].name][2:]
        every, summed = (x, Ref(node.name)) if transposed else (Ref(node.name), x)
        dim, groups = len(node.shape) - len(kernel) - 1, int(node.args.get("groups", 1))
        if groups > 1 and groups == self.graph.shapes[x.name][dim]:  # each channel has filters of its own
            times = math.prod(kernel) * self.graph.shapes[summed.name][dim] // groups
            return _multiply_terms([*self._list_dim_terms(every), CostTerm((), times)])
        return _multiply_terms(
            [*self._list_dim_terms(every), self._list_dim_terms(summed)[dim], CostTerm((), math.prod(kernel), groups)]
        )

    def _list_dim_terms(self, ref: Ref) -> list[CostTerm]:
        """The sizes of a value's dimensions."""
        shape: Shape = self.graph.shapes[ref.name]
        lines: list[list[Units]] = [[] for _ in shape]
        for dim, line in self.channels.iter_axis_units(ref.name):
            lines[dim].append(line)
        return [self.strands.along(lines[dim], size) for dim, size in enumerate(shape)]


def _multiply_terms(products: Iterable[CostTerm]) -> CostTerm:
    return math.prod(products, start=CostTerm(()))  # type: ignore[call-overload, no-any-return]


def _make_parameter_terms(graph: Graph, groups: Iterable[Group], strands: _UnitClasses) -> Iterator[CostTerm]:
    """The entries of every parameter."""
    cuts: dict[str, dict[Axis, dict[bool, Units]]] = {}
    for group in groups:
        for axis, units in group.cuts.items():
            own = cuts.setdefault(axis.tensor, {}).setdefault(axis, {})
            before = own.get(group.heads, make_empty_units(len(units)))
            own[group.heads] = np.where(is_unit(units), units + group.start, before)
    for name, tensor in graph.tensors.items():
        if isinstance(tensor, nn.Parameter):
            found = {
                a: strands.along([*own.values()], len(next(iter(own.values()))))
                for a, own in cuts.get(name, {}).items()
            }
            yield _make_cut_parameter_term(tuple(tensor.shape), found)


def _make_cut_parameter_term(shape: Shape, cuts: Mapping[Axis, CostTerm]) -> CostTerm:
    sizes = {dim: CostTerm((DimExtent(size),)) for dim, size in enumerate(shape)}
    sizes |= {axis.dim: size for axis, size in cuts.items()}
    return _multiply_terms([*sizes.values(), CostTerm((), 1, math.prod(axis.blocks for axis in cuts))])
