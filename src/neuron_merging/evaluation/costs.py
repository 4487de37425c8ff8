"""Compute MACs and parameters of a network as a function of the channels that each group keeps.

Each cost is a sum of terms, and each term a product of dimension sizes. Every size is linear in the number of units
that stay, so a cost is evaluated with a few array operations. Units that contribute equally to every size form a
class, and only the number of kept units of each class matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Axis, Channels, Group, Units, is_unit, make_empty_units
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.capture import parse_einsum_letters
from neuron_merging.graph.graph import Graph, Node, Ref, Shape
from neuron_merging.graph.macs import count_macs, count_node_macs

__all__ = ["Costs", "count_macs", "count_parameters"]

UnitCounts = NDArray[np.int64]
KeptPerGroup = Mapping[str, int | Sequence[int] | Units]
"""By group name, the number of units that stay, or the units themselves."""


def count_parameters(model: nn.Module) -> int:
    """Count trainable and frozen parameters, shared ones once.

    Parameters
    ----------
    model
        The network.

    Returns
    -------
    int
        The number of entries of all parameters.

    Examples
    --------
    >>> count_parameters(nn.Linear(4, 2))
    10
    """
    return sum(p.numel() for p in model.parameters())


class Costs:
    """MACs and parameters of a network as a function of the units that each group keeps.

    Build it once; then each query takes a few array operations. A query gives, for each group, the number of units
    that stay or the units themselves. Results are exact for units. For numbers they are exact unless the group's
    units differ in cost (`uneven_groups`), as in a residual stream that some layers write only in part. Biases that
    a merger adds are not counted.

    >>> import torch
    >>> from neuron_merging.pruning.trial_prune import analyse
    >>> costs = Costs(analyse(net, torch.zeros(1, 4)))
    >>> costs.macs({}), costs.macs({"0": 4}), costs.parameters({"0": [0, 1, 5, 7]})
    (48, 24, 30)
    """

    def __init__(self, analysis: Analysis) -> None:
        graph, channels = analysis.graph, analysis.channels
        node_macs = {name: macs for name, macs in count_node_macs(graph).items() if macs}
        costly = [node for node in graph.nodes if node.name in node_macs]
        self._groups = {group.name: group for group in channels.groups}
        self._unit_classes = _UnitClasses(channels.groups, _list_cost_dims(costly, channels))
        terms = _MacTerms(graph, channels, self._unit_classes)
        self._macs = _CostSum([term for node in costly for term in terms.list_terms(node, node_macs[node.name])])
        self._parameters = _CostSum(list(_make_parameter_terms(graph, channels.groups, self._unit_classes)))

    @cached_property
    def uneven_groups(self) -> frozenset[str]:
        """Groups whose units differ in cost: the number of kept units does not determine their cost."""
        classes = {
            name: self._unit_classes.of_unit[group.start : group.start + group.size]
            for name, group in self._groups.items()
        }
        return frozenset(name for name, numbers in classes.items() if numbers.min() != numbers.max())

    def macs(self, kept: KeptPerGroup) -> int:
        """Return the MACs of one forward pass when groups keep `kept[group name]`; other groups are not pruned."""
        return self._macs(self._count_kept_per_class(kept))

    def parameters(self, kept: KeptPerGroup) -> int:
        """Return the entries of all parameters when groups keep `kept[group name]`; other groups are not pruned."""
        return self._parameters(self._count_kept_per_class(kept))

    def _count_kept_per_class(self, kept: KeptPerGroup) -> UnitCounts:
        """Count the kept units of every class."""
        sizes = self._unit_classes.sizes
        counts = sizes.copy()
        for name, given in kept.items():
            group = self._groups[name]
            numbers = self._unit_classes.of_unit[group.start : group.start + group.size]
            classes = np.arange(numbers.min(), numbers.max() + 1)  # the classes of one group are consecutive
            if isinstance(given, int):  # assume that all classes shrink in proportion
                counts[classes] = sizes[classes] * given // group.size
            else:
                kept_numbers = numbers[np.asarray(given, int)] - numbers.min()
                counts[classes] = np.bincount(kept_numbers, minlength=len(classes))
        return counts


@dataclass(frozen=True)
class DimExtent:
    """The size of a dimension: a fixed part, and pairs of a unit class and the indices that each of its units takes.

    The size is fixed + Σ (kept units of the class) · (indices per unit).
    """

    fixed: int
    places: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class CostTerm:
    """A number of MACs or of entries: the product of the extents, times `factor` / `divisor`."""

    extents: tuple[DimExtent, ...]
    factor: int = 1
    divisor: int = 1

    def __mul__(self, other: CostTerm) -> CostTerm:
        return CostTerm((*self.extents, *other.extents), self.factor * other.factor, self.divisor * other.divisor)


class _CostSum:
    """A sum of cost terms as a function of the kept units of each class, compiled to arrays."""

    def __init__(self, products: Sequence[CostTerm]) -> None:
        # Equal extents are evaluated once; a row of `_factors` lists the extents of one term.
        extents = list(dict.fromkeys(extent for product in products for extent in product.extents))
        number = {extent: i for i, extent in enumerate(extents)}
        width = max((len(product.extents) for product in products), default=0)
        rows = [[number[extent] for extent in product.extents] for product in products]
        entries = [(i, unit_class, each) for i, extent in enumerate(extents) for unit_class, each in extent.places]
        # The last extent is 1: it pads terms with fewer factors.
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
    """The units of all groups, partitioned into classes of units that occur equally often along every dimension.

    `dims` gives, for each dimension that costs depend on, the unit at every index.
    """

    def __init__(self, groups: Sequence[Group], dims: Iterable[Units]) -> None:
        starts = np.array([group.start for group in groups], np.int64)
        patterns: list[list[UnitCounts]] = [[group.balance_cells] for group in groups]
        for dim_units in dims:
            units = dim_units[is_unit(dim_units)]
            owner = np.searchsorted(starts, units, side="right") - 1  # the group of each unit
            for i in np.unique(owner).tolist():
                patterns[i].append(np.bincount(units[owner == i] - groups[i].start, minlength=groups[i].size))
        self.of_unit = np.zeros(sum(group.size for group in groups), np.int64)
        """By unit, the number of its class."""
        count = 0
        for group, pattern in zip(groups, patterns, strict=True):
            numbers = _number_equal_columns(pattern)
            self.of_unit[group.start : group.start + group.size] = count + numbers
            count += int(numbers.max()) + 1
        self.sizes = np.bincount(self.of_unit, minlength=count)
        """By class, how many units it has."""

    def make_extent(self, dim_units: Units) -> DimExtent:
        """Return the size of a dimension, given the unit at each of its indices."""
        units = dim_units[is_unit(dim_units)]
        classes, places = np.unique(self.of_unit[units], return_counts=True)
        # Exact: all units of a class occur equally often.
        each = places // self.sizes[classes]
        return DimExtent(len(dim_units) - len(units), tuple(zip(classes.tolist(), each.tolist(), strict=True)))

    def make_dim_term(self, dims: Sequence[Units], size: int) -> CostTerm:
        """Return the size of a dimension that may carry two kinds of units: heads, and channels inside heads.

        Both can be cut at once, so the size is the product of the two shares: extent₁ · extent₂ / size.
        """
        extents = [self.make_extent(dim_units) for dim_units in dims] or [DimExtent(size)]
        term = CostTerm((extents[0],))
        for extent in extents[1:]:
            # Reduce the fraction, which keeps the int64 products small.
            common = math.gcd(extent.fixed, *(each for _, each in extent.places))
            places = tuple((unit_class, each // common) for unit_class, each in extent.places)
            term *= CostTerm((DimExtent(extent.fixed // common, places),), 1, size // common)
        return term

    def evaluate_unpruned(self, term: CostTerm) -> int:
        """Return the value of a term when nothing is removed."""
        extents = (
            extent.fixed + sum(each * int(self.sizes[unit_class]) for unit_class, each in extent.places)
            for extent in term.extents
        )
        return math.prod(extents) * term.factor // term.divisor


def _number_equal_columns(pattern: Sequence[UnitCounts]) -> UnitCounts:
    """Number the columns of a table so that equal columns get equal numbers."""
    varying = [row for row in pattern if (row != row[0]).any()]  # constant rows separate nothing
    if not varying:
        return np.zeros_like(pattern[0])
    numbers: UnitCounts = np.unique(varying, axis=1, return_inverse=True)[1].ravel()
    return numbers


def _list_cost_dims(nodes: Iterable[Node], channels: Channels) -> Iterator[Units]:
    """Yield the units along every dimension that costs depend on: of these operators' values, and of cut tensors."""
    values = dict.fromkeys(name for node in nodes for name in (node.name, *(ref.name for ref in node.refs())))
    for value in values:
        yield from (dim_units for _, dim_units in channels.iter_axis_units(value))
    for group in channels.groups:
        for units in group.cuts.values():
            yield np.where(is_unit(units), units + group.start, units)


class _MacTerms:
    """Expresses the MACs of operators as products of the dimensions that they iterate over."""

    def __init__(self, graph: Graph, channels: Channels, unit_classes: _UnitClasses) -> None:
        self.graph, self.channels, self.unit_classes = graph, channels, unit_classes

    def list_terms(self, node: Node, macs: int) -> list[CostTerm]:
        """Return an operator's MACs as terms; as a constant if it carries no prunable channels."""
        # Most operators of a large network keep their cost: a constant is cheaper than a product.
        terms = list(self._make_node_terms(node)) if self.channels.touches_node(node) else []
        # The terms must reproduce the counted MACs of the unpruned network; otherwise the count is taken as fixed.
        matches = sum(self.unit_classes.evaluate_unpruned(term) for term in terms) == macs
        return terms if matches else [CostTerm((), macs)]

    def _make_node_terms(self, node: Node) -> Iterator[CostTerm]:
        row = lookup_operator(node)
        if row.layer == "linear":
            yield self._make_matmul_term(node, node.args["input"], -1)
        elif row.layer == "product":
            left, right = node.args.get("mat1", node.args.get("self")), node.args.get("mat2", node.args.get("other"))
            # With a stored matrix on the left, the activation is summed over its second last dimension.
            stored = left.name in self.graph.parameters
            yield self._make_matmul_term(node, right, -2) if stored else self._make_matmul_term(node, left, -1)
        elif row.contraction == "einsum":
            yield self._make_einsum_term(node)
        elif row.convolves:
            yield self._make_convolution_term(node, transposed=row.layer == "transposed")
        elif row.contraction == "attention":
            *outer, queries, _ = self._list_dim_terms(node.args["query"])
            keys, width = self._list_dim_terms(node.args["key"])[-2:]
            # Scores are queries × keys × width; the weighted sum is queries × keys × width of the values.
            yield _multiply_terms([*outer, queries, keys, width])
            yield _multiply_terms([*outer, queries, keys, self._list_dim_terms(node.args["value"])[-1]])

    def _make_einsum_term(self, node: Node) -> CostTerm:
        """Return the product over all letters of an einsum; a letter's size comes from an operand with channels."""
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
        """Return the outputs of a matrix product times the dimension of `operand` that it sums over."""
        return _multiply_terms([*self._list_dim_terms(Ref(node.name)), self._list_dim_terms(operand)[dim]])

    def _make_convolution_term(self, node: Node, transposed: bool) -> CostTerm:
        """Return outputs × input channels × kernel / groups; a transposed convolution swaps outputs and inputs."""
        x, kernel = node.args["input"], self.graph.shapes[node.args["weight"].name][2:]
        positions, summed = (x, Ref(node.name)) if transposed else (Ref(node.name), x)
        dim, groups = len(node.shape) - len(kernel) - 1, int(node.args.get("groups", 1))
        if groups > 1 and groups == self.graph.shapes[x.name][dim]:  # depthwise: groups shrink with the channels
            per_entry = math.prod(kernel) * self.graph.shapes[summed.name][dim] // groups
            return _multiply_terms([*self._list_dim_terms(positions), CostTerm((), per_entry)])
        kernel_term = CostTerm((), math.prod(kernel), groups)
        return _multiply_terms([*self._list_dim_terms(positions), self._list_dim_terms(summed)[dim], kernel_term])

    def _list_dim_terms(self, ref: Ref) -> list[CostTerm]:
        """Return the size of each dimension of a value, as a term."""
        shape: Shape = self.graph.shapes[ref.name]
        units: list[list[Units]] = [[] for _ in shape]
        for dim, dim_units in self.channels.iter_axis_units(ref.name):
            units[dim].append(dim_units)
        return [self.unit_classes.make_dim_term(units[dim], size) for dim, size in enumerate(shape)]


def _multiply_terms(products: Iterable[CostTerm]) -> CostTerm:
    return math.prod(products, start=CostTerm(()))  # type: ignore[call-overload, no-any-return]


def _make_parameter_terms(graph: Graph, groups: Iterable[Group], unit_classes: _UnitClasses) -> Iterator[CostTerm]:
    """Yield the number of entries of every parameter."""
    # By tensor, axis, and whether the units are heads: the unit at each index. Several groups can share an axis.
    cuts: dict[str, dict[Axis, dict[bool, Units]]] = {}
    for group in groups:
        for axis, units in group.cuts.items():
            by_kind = cuts.setdefault(axis.tensor, {}).setdefault(axis, {})
            before = by_kind.get(group.heads, make_empty_units(len(units)))
            by_kind[group.heads] = np.where(is_unit(units), units + group.start, before)
    for name, tensor in graph.tensors.items():
        if isinstance(tensor, nn.Parameter):
            sizes = {
                axis: unit_classes.make_dim_term([*by_kind.values()], len(next(iter(by_kind.values()))))
                for axis, by_kind in cuts.get(name, {}).items()
            }
            yield _make_cut_parameter_term(tuple(tensor.shape), sizes)


def _make_cut_parameter_term(shape: Shape, cuts: Mapping[Axis, CostTerm]) -> CostTerm:
    sizes = {dim: CostTerm((DimExtent(size),)) for dim, size in enumerate(shape)}
    sizes |= {axis.dim: size for axis, size in cuts.items()}
    # An axis with blocks (a grouped convolution) counts the channels of all blocks, the tensor those of one.
    return _multiply_terms([*sizes.values(), CostTerm((), 1, math.prod(axis.blocks for axis in cuts))])
