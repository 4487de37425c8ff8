"""Keep masks: which units, and so which entries of every value, stay; norms and means computed over the kept
channels alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.groups import Channels
from neuron_merging.channels.labels import Mask, Units
from neuron_merging.channels.rules.norms_and_reductions import get_reduced_dims
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Node


def build_keep_mask(channels: Channels, kept: Mapping[str, Units]) -> Mask:
    """For every unit of the network, whether it stays."""
    stays = np.ones(sum(group.size for group in channels.groups) + 1, bool)
    for group in channels.groups:
        if group.name in kept:
            stays[group.start : group.start + group.size] = False
            stays[group.start + np.asarray(kept[group.name], int)] = True
    return stays


def get_value_masks(channels: Channels, stays: Mask, value: str) -> dict[int, Mask]:
    """For each dimension of a value that loses channels, which of them stay."""
    return {dim: stay for dim, stay in channels.get_kept_indices(value, stays).items() if not stay.all()}


def repeat_mask(stay: Mask, size: int) -> Mask:
    """A mask for another number of samples, where they share an axis with their channels: it repeats itself.

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
    """What an operator computes, its statistics taken over the kept channels alone; `masks` are those of its result."""
    if lookup_operator(node).spans and masks:
        return _compute_layer_norm_over_kept(node, args, masks)
    if lookup_operator(node).norm == "group" and int(args["num_groups"]) == 1 and 1 in masks:
        return _compute_group_norm_over_kept(node, args, masks[1])
    if lookup_operator(node).averages:
        return node.compute(_drop_removed_channels(channels, stays, node, args))
    return node.compute(args)


def _drop_removed_channels(channels: Channels, stays: Mask, node: Node, args: dict[str, Any]) -> dict[str, Any]:
    """A mean's arguments, less the channels that it no longer runs over."""
    value = args["self"]
    for dim, stay in get_value_masks(channels, stays, next(node.refs()).name).items():
        if dim in get_reduced_dims(node, value.ndim):
            value = value.index_select(dim, _make_kept_index(stay, value, dim))
    return {**args, "self": value}


def _compute_layer_norm_over_kept(node: Node, args: dict[str, Any], masks: Mapping[int, Mask]) -> Tensor:
    """A layer norm takes its statistics over the kept channels alone."""
    x = args["input"]
    count = len(args["normalized_shape"])
    inner = {dim: stay for dim, stay in masks.items() if dim >= x.ndim - count}
    if not inner:
        return node.compute(args)  # type: ignore[no-any-return]
    cut = dict(args)
    for dim, stay in inner.items():
        index = _make_kept_index(stay, x, dim)
        cut["input"] = cut["input"].index_select(dim, index)
        for name in ("weight", "bias"):
            if cut.get(name) is not None:
                cut[name] = cut[name].index_select(dim - (x.ndim - count), index)
    cut["normalized_shape"] = list(cut["input"].shape[x.ndim - count :])
    value = node.compute(cut)
    for dim, stay in inner.items():
        index = _make_kept_index(stay, x, dim)
        shape = list(value.shape)
        shape[dim] = x.shape[dim]
        value = value.new_zeros(shape).index_copy_(dim, index, value)
    return value  # type: ignore[no-any-return]


def _compute_group_norm_over_kept(node: Node, args: dict[str, Any], stay: Mask) -> Tensor:
    """A norm of all channels as one group takes its statistics over the kept ones alone."""
    x = args["input"]
    index = _make_kept_index(stay, x, 1)
    vectors = {name: args[name].index_select(0, index) for name in ("weight", "bias") if args.get(name) is not None}
    value = node.compute({**args, **vectors, "input": x.index_select(1, index)})
    return value.new_zeros(x.shape).index_copy_(1, index, value)  # type: ignore[no-any-return]
