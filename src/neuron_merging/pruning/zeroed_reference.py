"""The reference that a pruned network must equal: the original at full size with the removed channels set to zero.
Its tensors are the original's, with the columns, biases and values that the merges give. Neither the plan nor
the surgery is used, so their errors show in the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from neuron_merging.channels.groups import Axis, Channels
from neuron_merging.channels.labels import Mask
from neuron_merging.channels.masks import compute_over_kept, get_value_masks
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.copying import named_tensors_with_aliases
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import run_graph
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.merging.protocol import MergeResult
from neuron_merging.pruning.plan import Plan


@dataclass(frozen=True)
class ReferenceTensors:
    """Full-size tensors by name, and biases that merging has made, by the name of the weight beside them."""

    tensors: Mapping[str, Tensor] = field(repr=False)
    biases: Mapping[str, Tensor] = field(repr=False, default_factory=dict)
    columns: Mapping[str, Sequence[MergedColumns]] = field(repr=False, default_factory=dict)
    """What is written into tensors, by their names, where they are used: all of them at once would be a lot."""

    def filled(self, args: dict[str, Any]) -> dict[str, Any]:
        """A node's arguments, with the columns in the tensors that have any."""
        names = {id(self.tensors[name]): name for name in self.columns}
        if not names:
            return args

        def fill(value: Any) -> Any:
            for columns in self.columns.get(names.get(id(value), ""), ()):
                value = columns.into(value)
            return value

        found: dict[str, Any] = tree_map(fill, args)
        return found


@dataclass(frozen=True)
class MergedColumns:
    """New values at some positions along an axis."""

    axis: Axis
    positions: Tensor
    values: Tensor

    def into(self, tensor: Tensor) -> Tensor:
        wide = self.axis.join_blocks(tensor.detach())
        # In double precision, or with its blocks side by side, it is a copy already.
        wide = wide.clone() if _has_same_memory(wide, tensor) else wide
        # Where all is computed in doubles, the values become doubles as they are read: asked for, they would twice.
        wide.index_copy_(self.axis.dim, self.positions.to(wide.device), self.values.to(wide.device))
        return self.axis.split_blocks(wide)


def _has_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def build_reference_from_merges(graph: Graph, merged: MergeResult) -> ReferenceTensors:
    """The original's tensors with what the merges change."""
    tensors = dict(graph.tensors) | dict(merged.tensors)
    biases = {}
    columns: dict[str, list[MergedColumns]] = {}
    for merge in merged.merges:
        axis = merge.consumer.axis
        if axis is None:
            continue
        if merge.columns is not None:
            own = MergedColumns(axis, merge.positions, _cast_like(graph.tensors[axis.tensor], merge.columns))
            columns.setdefault(axis.tensor, []).append(own)
        if merge.bias is not None:
            biases[axis.tensor] = _cast_like(graph.tensors[axis.tensor], merge.bias)
    return ReferenceTensors(
        {name: _cast_like(graph.tensors[name], tensor) for name, tensor in tensors.items()}, biases, columns
    )


def _cast_like(old: Tensor, new: Tensor) -> Tensor:
    """In the precision in which the smaller network stores it."""
    return new.detach().to(old.device, old.dtype)


def build_reference_from_small(graph: Graph, plan: Plan, small: nn.Module) -> ReferenceTensors:
    """The small network's own tensors in the places that were kept, where nothing is known of its merges."""
    own = named_tensors_with_aliases(small)
    tensors = {name: _embed_small_tensor(tensor, own[name], plan, name) for name, tensor in graph.tensors.items()}
    biases = {}
    for name, size in plan.biases.items():
        weight = name.removesuffix("bias") + "weight"
        layer = small.get_submodule(name.rpartition(".")[0])
        out = 1 if getattr(layer, "transposed", False) else 0
        kept = next((cut.kept for cut in plan.cuts if cut.tensor == weight and cut.dim == out), range(size))
        biases[weight] = (
            own[name].detach().new_zeros(size).index_copy_(0, _make_kept_index(kept, own[name]), own[name].detach())
        )
    return ReferenceTensors(tensors, biases)


def _embed_small_tensor(full: Tensor, small: Tensor, plan: Plan, name: str) -> Tensor:
    """The small network's values at the kept places of a full-size tensor."""
    cuts = [cut for cut in plan.cuts if cut.tensor == name]
    if not cuts:
        return small.detach()
    axes = [Axis(name, cut.dim, cut.blocks) for cut in cuts]
    return _embed_along_axes(full.detach().clone(), small.detach(), axes, [cut.kept for cut in cuts])


def _embed_along_axes(full: Tensor, small: Tensor, axes: Sequence[Axis], kept: Sequence[Sequence[int]]) -> Tensor:
    if not axes:
        return small
    axis, index = axes[0], _make_kept_index(kept[0], full)
    wide = axis.join_blocks(full).clone()
    part = axis.split_blocks(wide.index_select(axis.dim, index))
    part = _embed_along_axes(part, small, axes[1:], kept[1:])
    wide.index_copy_(axis.dim, index, axis.join_blocks(part))
    return axis.split_blocks(wide)


def _make_kept_index(kept: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(kept), dtype=torch.int64, device=like.device)


@dataclass(frozen=True)
class ZeroedGraph:
    """Runs a graph with the units that do not stay set to zero wherever they occur."""

    graph: Graph
    channels: Channels
    stays: Mask

    def run(self, reference: ReferenceTensors, inputs: Sequence[Any]) -> list[Any]:
        def call(node: Node, args: dict[str, Any]) -> Any:
            args = _add_merged_bias(node, reference.filled(args), self.graph, reference.biases)
            masks = {} if node.name in self._stored else get_value_masks(self.channels, self.stays, node.name)
            return self._zeroed(compute_over_kept(self.channels, self.stays, node, args, masks), masks)

        return run_graph(self.graph, flatten_inputs(inputs), reference.tensors, call)

    @cached_property
    def _stored(self) -> set[str]:
        """Values that are made of stored tensors alone: the activations that meet them are zero already.

        What a layer makes of them are activations themselves, as where a table of places goes through two layers.
        """
        found = {*self.graph.parameters, *self.graph.constants}
        for node in self.graph.nodes:
            refs = [ref.name for ref in node.refs()]
            if refs and found.issuperset(refs) and not lookup_operator(node).layer:
                found.add(node.name)
        return found

    @cached_property
    def _writes_in_place(self) -> bool:
        return any(node.inplace for node in self.graph.nodes)

    def _zeroed(self, value: Any, masks: Mapping[int, Mask]) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._zeroed(part, masks) for part in value)
        for dim, stay in masks.items():
            along = [-1 if d == dim else 1 for d in range(value.ndim)]
            gone = ~torch.from_numpy(_repeat_mask(stay, value.shape[dim])).to(value.device).view(along)
            # Where the network writes into views, what is zeroed must stay the memory that others look at.
            here = self._writes_in_place and 0 not in value.stride()
            value = value.masked_fill_(gone, 0) if here else value.masked_fill(gone, 0)
        return value


def _repeat_mask(stay: Mask, size: int) -> Mask:
    """A mask for another number of samples, where they share an axis with their channels: it repeats itself.

    >>> _repeat_mask(np.array([True, False, True, False]), 6).tolist()
    [True, False, True, False, True, False]
    """
    if len(stay) == size:
        return stay
    period = math.gcd(len(stay), size)
    repeats = (stay.reshape(-1, period) == stay[:period]).all()
    return np.resize(stay, size) if repeats else stay


def _add_merged_bias(node: Node, args: dict[str, Any], graph: Graph, biases: Mapping[str, Tensor]) -> dict[str, Any]:
    """A bias that merging has made is not in the captured graph."""
    weight = node.args.get("weight")
    name = graph.parameters.get(weight.name) if isinstance(weight, Ref) else None
    if name is None or name not in biases or args.get("bias") is not None:
        return args
    return {**args, "bias": biases[name].to(args["weight"])}
