"""Trace the operators between the layer that produces a channel and the layers that consume it.

The paper's theorem needs every operator on this path to commute with a positive scale. Per-channel scales and
shifts (batch norm, layer scale, a bias added later) are allowed and collected as stages; any other operator is a
reason to fall back to plain pruning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.analysis import Site
from neuron_merging.channels.groups import build_position_table, is_position, is_unit
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.merging.protocol import Reason, ReasonCode


@dataclass(frozen=True)
class AffineStage:
    """The map x → scale·x + shift of each unit; `norm` holds (γ, β, mean, variance) of a batch norm."""

    scale: Tensor
    shift: Tensor
    norm: tuple[Tensor, Tensor, Tensor, Tensor] | None = None


class ScaleEffect(Enum):
    """Whether an operator that is no stage commutes with a positive scale."""

    KEEPS = auto()
    """It commutes: f(sx) = s f(x) for s > 0."""
    BREAKS = auto()
    """It does not, or the operator table does not say."""


@dataclass(frozen=True)
class ChannelPath:
    """The stages between the producer and a value, or the reason why the theorem does not apply there."""

    stages: tuple[AffineStage, ...] = ()
    broken: Reason | None = None

    def extend_by(self, passage: AffineStage | ScaleEffect, node: Node) -> ChannelPath:
        """Return the path behind one more operator."""
        if isinstance(passage, AffineStage):
            return replace(self, stages=(*self.stages, passage))
        broken = ChannelPath(broken=Reason(ReasonCode.ON_THE_WAY, f"{node.op} ({node.location})"))
        return self if passage is ScaleEffect.KEEPS else broken


NO_CHAIN = ChannelPath(broken=Reason(ReasonCode.NO_CHAIN))
"""The path to a value that the tracing did not reach."""


def has_stored_filters(site: Site) -> bool:
    """Return whether the filters of the producers are stored tensors, not computed at every call."""
    return bool(site.group.producers) and all(producer.stored for producer in site.group.producers)


def trace_channel_paths(site: Site) -> dict[str, ChannelPath]:
    """Return the path to every value that carries the group's channels."""
    starts = {call.name: call for producer in site.group.producers for call in _find_calls(site.graph, producer.node)}
    found: dict[str, ChannelPath] = {}
    for node in site.graph.iter_downstream(starts.values(), lambda node: node.name in found):
        if node.name in starts:
            found[node.name] = _start_path(site, node)
        # A node with several outputs (split, chunk) has channels only in the items that are taken from it.
        elif site.channels.carries(node.name, site.group) or node.has_several_outputs:
            found[node.name] = _extend_path(site, node, [found[ref.name] for ref in node.refs() if ref.name in found])
    return found


def _find_calls(graph: Graph, producer: Node) -> list[Node]:
    """Return all calls of a producer's weight: a layer that is called twice starts two paths."""
    weight = producer.args.get("weight")
    users = graph.users(weight.name) if isinstance(weight, Ref) else []
    return [producer, *(user for user in users if user.op == producer.op and user.args.get("weight") == weight)]


def _start_path(site: Site, node: Node) -> ChannelPath:
    """Start a path at a producer. Its bias is a stage where a batch norm follows, else an entry of the filter row."""
    bias = node.args.get("bias")
    users = site.graph.users(node.name)
    # In front of a batch norm the paper leaves the bias out of the row, because the norm subtracts it again.
    if not isinstance(bias, Ref) or not all(lookup_operator(user).norm == "batch" for user in users) or not users:
        return ChannelPath()
    shift = _get_per_unit_values(site, bias)
    return ChannelPath() if shift is None else ChannelPath((AffineStage(torch.ones_like(shift), shift),))


def _extend_path(site: Site, node: Node, sources: list[ChannelPath]) -> ChannelPath:
    """Return the path behind a node. Branches may meet only where none of them has a stage."""
    broken = next((s for s in sources if s.broken), None)
    if broken:
        return broken
    if len(sources) > 1:
        # A sum scales with its operands only if all of them carry the same scale; stages could differ.
        plain = lookup_operator(node).joins and not any(s.stages for s in sources)
        return (
            ChannelPath() if plain else ChannelPath(broken=Reason(ReasonCode.BRANCHES, f"{node.op} ({node.location})"))
        )
    return sources[0].extend_by(_classify_operator(site, node), node)


def _classify_operator(site: Site, node: Node) -> AffineStage | ScaleEffect:
    """Return the stage of an operator that reads the channels once, or its effect on scales."""
    row = lookup_operator(node)
    if row.norm == "batch":
        return _build_batch_norm_stage(site, node)
    if row.arithmetic:
        return _build_arithmetic_stage(site, node)
    if _has_nonzero_padding(node) or _has_several_slopes(site, node):
        return ScaleEffect.BREAKS
    # PReLU with one slope for all channels commutes with positive scales as leaky ReLU does.
    single_slope = row.moments == "pointwise" and isinstance(node.args.get("weight"), Ref)
    return ScaleEffect.KEEPS if row.homogeneous or single_slope else ScaleEffect.BREAKS


def _has_nonzero_padding(node: Node) -> bool:
    """Return whether the operator pads with a constant that is not zero, which does not scale with the channel."""
    value = node.args.get("value")
    return isinstance(value, (int, float)) and bool(value)


def _has_several_slopes(site: Site, node: Node) -> bool:
    """Return whether a learned activation (PReLU) has a slope per channel."""
    weight = node.args.get("weight")
    if not isinstance(weight, Ref) or lookup_operator(node).moments != "pointwise":
        return False
    return math.prod(site.graph.shapes[weight.name]) != 1


def _build_batch_norm_stage(site: Site, node: Node) -> AffineStage | ScaleEffect:
    mean, var = (
        _get_per_unit_values(site, node.args.get("running_mean")),
        _get_per_unit_values(site, node.args.get("running_var")),
    )
    if mean is None or var is None:
        return ScaleEffect.BREAKS
    gamma, beta = _get_per_unit_values(site, node.args.get("weight")), _get_per_unit_values(site, node.args.get("bias"))
    gamma = torch.ones_like(mean) if gamma is None else gamma
    beta = torch.zeros_like(mean) if beta is None else beta
    # γ(x − μ)/σ + β = (γ/σ)x + (β − γμ/σ), with σ = sqrt(variance + ε).
    scale = gamma / (var + float(node.args.get("eps", 1e-5))).sqrt()
    return AffineStage(scale, beta - scale * mean, (gamma, beta, mean, var))


def _build_arithmetic_stage(site: Site, node: Node) -> AffineStage | ScaleEffect:
    """Return the stage of an operator that combines the channels with a per-channel tensor or a number."""
    left, right = node.args["self"], node.args["other"]
    value, reads_left = (right, True) if _is_carrier(site, left) else (left, False)
    number = float(value) if isinstance(value, (int, float)) else None
    own = _fill_per_unit(site, number) if number is not None else _get_per_unit_values(site, value)
    if own is None:
        return ScaleEffect.BREAKS
    if lookup_operator(node).arithmetic in ("mul", "div"):
        return _build_scale_stage(node, own, number, reads_left)
    return _build_shift_stage(node, own, reads_left)


def _fill_per_unit(site: Site, number: float) -> Tensor:
    """Return a number for every unit, in float64 on the CPU whatever torch's defaults are."""
    return torch.full((site.group.size,), number, dtype=torch.float64, device="cpu")


def _build_scale_stage(node: Node, own: Tensor, number: float | None, reads_left: bool) -> AffineStage | ScaleEffect:
    """Return the stage of a product or quotient; a positive number commutes and needs none."""
    zero = torch.zeros_like(own)
    if lookup_operator(node).arithmetic == "mul":
        return ScaleEffect.KEEPS if number is not None and number > 0 else AffineStage(own, zero)
    # In value / channel the channel is the denominator: scaling it does not scale the result.
    return AffineStage(1 / own, zero) if reads_left and bool((own != 0).all()) else ScaleEffect.BREAKS


def _build_shift_stage(node: Node, own: Tensor, reads_left: bool) -> AffineStage | ScaleEffect:
    """Return the stage of channel ± α·value, or of value ± α·channel, which is supported only for α = 1."""
    alpha, sign = float(node.args.get("alpha", 1)), 1 if lookup_operator(node).arithmetic == "add" else -1
    one = torch.ones_like(own)
    if reads_left:
        return AffineStage(one, sign * alpha * own)
    return AffineStage(sign * one, own) if alpha == 1 else ScaleEffect.BREAKS


def _is_carrier(site: Site, ref: Any) -> bool:
    return isinstance(ref, Ref) and site.channels.carries(ref.name, site.group)


def _get_per_unit_values(site: Site, ref: Any) -> Tensor | None:
    """Return the values of a stored per-channel tensor in the order of units; None if it is no such tensor."""
    if not isinstance(ref, Ref):
        return None
    name = site.graph.parameters.get(ref.name)
    while name is None:  # look through views such as weight.view(1, -1, 1, 1)
        node = site.graph.node(ref.name)
        inner = list(node.refs()) if node and lookup_operator(node).moves else []
        if len(inner) != 1:
            return None
        ref, name = inner[0], site.graph.parameters.get(inner[0].name)
    axes = [axis for axis in site.group.cuts if axis.tensor == name]
    tensor = site.tensor(name)
    if len(axes) != 1 or tensor.numel() != tensor.shape[axes[0].dim]:
        return None
    units = site.group.cuts[axes[0]]
    places = np.flatnonzero(is_unit(units))
    positions = build_position_table(units[places], places, site.group.size)
    # A unit with several entries has no single value.
    once = positions.shape[1] == 1 and is_position(positions).all()
    return tensor.flatten()[torch.from_numpy(positions[:, 0])] if once else None


def compute_channel_rows(site: Site, transfer: ChannelPath) -> Tensor:
    """Return the filter and the shift of each channel before its activation, with all stages applied."""
    rows = site.rows
    shift = rows.new_zeros(len(rows))
    for stage in transfer.stages:
        scale = stage.scale.to(rows)
        rows, shift = rows * scale[:, None], shift * scale + stage.shift.to(rows)
    return torch.cat([rows, shift[:, None]], 1) if transfer.stages else rows
