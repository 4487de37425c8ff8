"""Run the full-size network as if channels had been removed: their values are set to zero, and merged columns, biases
and other edits are applied. Masks tell which units stay, by value and dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from neuron_merging.channels.groups import Axis, Channels, Mask, Units
from neuron_merging.channels.rules.norms_and_reductions import get_reduced_dims
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import Interpreter, NodeHook


def build_keep_mask(channels: Channels, kept: Mapping[str, Units]) -> Mask:
    """Return, for every unit of the network, whether it stays. Groups that are not in `kept` keep all units."""
    # One entry more than there are units: NO_UNIT (-1) indexes it, and such indices stay.
    stays = np.ones(sum(group.size for group in channels.groups) + 1, bool)
    for group in channels.groups:
        if group.name in kept:
            stays[group.start : group.start + group.size] = False
            stays[group.start + np.asarray(kept[group.name], int)] = True
    return stays


def get_value_masks(channels: Channels, stays: Mask, value: str) -> dict[int, Mask]:
    """Return, for each dimension of a value that loses channels, which indices stay."""
    return {dim: stay for dim, stay in channels.get_kept_indices(value, stays).items() if not stay.all()}


def repeat_mask(stay: Mask, size: int) -> Mask:
    """Resize a mask to another batch size, if samples and channels share the axis and the mask is periodic.

    >>> repeat_mask(np.array([True, False, True, False]), 6).tolist()
    [True, False, True, False, True, False]
    """
    if len(stay) == size:
        return stay
    period = math.gcd(len(stay), size)
    repeats = (stay.reshape(-1, period) == stay[:period]).all()
    return np.resize(stay, size) if repeats else stay


def _make_kept_index(stay: Mask, value: Tensor, dim: int) -> Tensor:
    return torch.from_numpy(np.flatnonzero(repeat_mask(stay, value.shape[dim]))).to(value.device)


def compute_over_kept(
    channels: Channels, stays: Mask, node: Node, args: dict[str, Any], masks: Mapping[int, Mask]
) -> Any:
    """Compute an operator with statistics over the kept channels alone. `masks` are those of its result.

    In the pruned network a norm's mean and variance run over fewer channels. Zeros would count in both.
    """
    if lookup_operator(node).spans and masks:
        return _compute_layer_norm_over_kept(node, args, masks)
    if lookup_operator(node).norm == "group" and int(args["num_groups"]) == 1 and 1 in masks:
        return _compute_group_norm_over_kept(node, args, masks[1])
    if lookup_operator(node).averages:
        return node.compute(_drop_removed_channels(channels, stays, node, args))
    return node.compute(args)


def _drop_removed_channels(channels: Channels, stays: Mask, node: Node, args: dict[str, Any]) -> dict[str, Any]:
    """Return a mean's arguments without the removed channels among those that it runs over."""
    value = args["self"]
    for dim, stay in get_value_masks(channels, stays, next(node.refs()).name).items():
        if dim in get_reduced_dims(node, value.ndim):
            value = value.index_select(dim, _make_kept_index(stay, value, dim))
    return {**args, "self": value}


def _compute_layer_norm_over_kept(node: Node, args: dict[str, Any], masks: Mapping[int, Mask]) -> Tensor:
    """Compute a layer norm over the kept channels, with zeros at the removed ones."""
    x = args["input"]
    count = len(args["normalized_shape"])
    # Masks of other dimensions do not change the statistics; `_set_to_zero` applies them to the result.
    normalized = {dim: stay for dim, stay in masks.items() if dim >= x.ndim - count}
    if not normalized:
        return node.compute(args)  # type: ignore[no-any-return]
    cut = dict(args)
    for dim, stay in normalized.items():
        index = _make_kept_index(stay, x, dim)
        cut["input"] = cut["input"].index_select(dim, index)
        for name in ("weight", "bias"):
            if cut.get(name) is not None:
                cut[name] = cut[name].index_select(dim - (x.ndim - count), index)
    cut["normalized_shape"] = list(cut["input"].shape[x.ndim - count :])
    value = node.compute(cut)
    for dim, stay in normalized.items():  # scatter back to the full size
        index = _make_kept_index(stay, x, dim)
        shape = list(value.shape)
        shape[dim] = x.shape[dim]
        value = value.new_zeros(shape).index_copy_(dim, index, value)
    return value  # type: ignore[no-any-return]


def _compute_group_norm_over_kept(node: Node, args: dict[str, Any], stay: Mask) -> Tensor:
    """Compute a group norm with one group over the kept channels, with zeros at the removed ones."""
    x = args["input"]
    index = _make_kept_index(stay, x, 1)
    vectors = {name: args[name].index_select(0, index) for name in ("weight", "bias") if args.get(name) is not None}
    value = node.compute({**args, **vectors, "input": x.index_select(1, index)})
    return value.new_zeros(x.shape).index_copy_(1, index, value)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class MergedColumns:
    """New values for some indices along an axis of a tensor."""

    axis: Axis
    positions: Tensor
    values: Tensor

    def write_into(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor with these values written into it."""
        wide = self.axis.join_blocks(tensor.detach())
        # Joining blocks, or widening under `Float64Mode`, has made a copy already.
        wide = wide.clone() if _has_same_memory(wide, tensor) else wide
        # No cast to the dtype of `wide`: under `Float64Mode` it would widen the values a second time.
        wide.index_copy_(self.axis.dim, self.positions.to(wide.device), self.values.to(wide.device))
        return self.axis.split_blocks(wide)


def _has_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass(frozen=True)
class GraphEdits:
    """Changes to a captured graph for one run.

    `tensors` have the original size, by dotted name. `biases` are new biases of layers without one, by the name of the
    layer's weight. `columns` are written into a copy of a tensor when it is read, since copies of all tensors at once
    would take too much memory.
    """

    tensors: Mapping[str, Tensor] = field(repr=False, default_factory=dict)
    biases: Mapping[str, Tensor] = field(repr=False, default_factory=dict)
    columns: Mapping[str, Sequence[MergedColumns]] = field(repr=False, default_factory=dict)

    def __or__(self, other: GraphEdits) -> GraphEdits:
        """Return both edits combined. The other's take precedence."""
        return GraphEdits(
            {**self.tensors, **other.tensors}, {**self.biases, **other.biases}, {**self.columns, **other.columns}
        )

    def write_columns(self, graph: Graph) -> GraphEdits:
        """Return the edits with all columns written into tensors now, for runs that read each tensor many times."""
        tensors = {name: self.tensors.get(name, graph.tensors[name]) for name in self.columns}
        for name, written in self.columns.items():
            for columns in written:
                tensors[name] = columns.write_into(tensors[name])
        return GraphEdits({**self.tensors, **tensors}, self.biases)


@dataclass(frozen=True)
class MaskedGraph:
    """A graph and its channels, to run with some channels set to zero.

    `stays` tells for every unit of the network whether it stays (see `build_keep_mask`).
    """

    graph: Graph
    channels: Channels

    def start(self, inputs: Sequence[Any], stays: Mask, edits: GraphEdits) -> Interpreter:
        """Return a run on flat inputs, before its first node."""
        return Interpreter(self.graph, inputs, self._replace_tensors(edits), self._make_hook(stays, edits))

    def continue_with(self, run: Interpreter, stays: Mask, edits: GraphEdits) -> Interpreter:
        """Continue a run with other channels and edits than it started with."""
        edits = edits.write_columns(self.graph)
        run.hook = self._make_hook(stays, edits)
        run.replace_tensors(self._replace_tensors(edits))
        return run

    def _replace_tensors(self, edits: GraphEdits) -> Mapping[str, Tensor]:
        return {**self.graph.tensors, **edits.tensors}

    def _make_hook(self, stays: Mask, edits: GraphEdits) -> NodeHook:
        tensors = self._replace_tensors(edits)
        # An operator gets tensors, not names, so those to write columns into are recognised by identity.
        names = {id(tensors[name]): name for name in edits.columns}
        masked, stored_values = not stays.all(), self._stored_values

        def write_columns(value: Any) -> Any:
            for columns in edits.columns.get(names.get(id(value), ""), ()):
                value = columns.write_into(value)
            return value

        def compute_node(node: Node, args: dict[str, Any]) -> Any:
            args = self._add_new_bias(node, tree_map(write_columns, args) if names else args, edits.biases)
            if not masked:
                return node.compute(args)
            stored = node.name in stored_values
            masks = {} if stored else get_value_masks(self.channels, stays, node.name)
            return self._set_to_zero(compute_over_kept(self.channels, stays, node, args, masks), masks)

        return compute_node

    def _add_new_bias(self, node: Node, args: dict[str, Any], biases: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments with a new bias, if the layer has one. The layer adds it along the right dimension."""
        weight = node.args.get("weight") if biases else None
        name = self.graph.parameters.get(weight.name) if isinstance(weight, Ref) else None
        if name is None or name not in biases or args.get("bias") is not None:
            return args
        return {**args, "bias": biases[name].to(args["weight"])}

    @cached_property
    def _stored_values(self) -> set[str]:
        """Values computed from stored tensors alone. They need no mask: the activations they meet are zero already.

        The output of a layer on such values counts as an activation, as where a position table passes two layers.
        """
        values = {*self.graph.parameters, *self.graph.constants}
        for node in self.graph.nodes:
            refs = [ref.name for ref in node.refs()]
            if refs and values.issuperset(refs) and not lookup_operator(node).layer:
                values.add(node.name)
        return values

    @cached_property
    def _writes_in_place(self) -> bool:
        return any(node.inplace for node in self.graph.nodes)

    def _set_to_zero(self, value: Any, masks: Mapping[int, Mask]) -> Any:
        """Set removed channels to zero. A product with the mask would turn infinities into NaN."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._set_to_zero(part, masks) for part in value)
        for dim, stay in masks.items():
            along = [-1 if d == dim else 1 for d in range(value.ndim)]
            removed = ~torch.from_numpy(repeat_mask(stay, value.shape[dim])).to(value.device).view(along)
            # If the network writes into views, the zeros must go into the memory that the views share. Expanded
            # tensors (stride 0) cannot be written into.
            in_place = self._writes_in_place and 0 not in value.stride()
            value = value.masked_fill_(removed, 0) if in_place else value.masked_fill(removed, 0)
        return value
