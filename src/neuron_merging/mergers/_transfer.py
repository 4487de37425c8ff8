"""What happens to a channel between the layer that makes it and the layers that read it.

The paper's theorem needs every operator on the way to commute with a positive scale. Per-channel
scales and shifts (batch norm, layer scale, a bias added later) are allowed and collected as
stages; anything else is a reason to fall back to plain pruning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.labels import is_place, is_unit, positions_of
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Site
from neuron_merging.graph.values import Graph, Node, Ref
from neuron_merging.mergers.interface import Reason, Why


@dataclass(frozen=True)
class Stage:
    """x → scale·x + shift for each unit; `norm` holds (γ, β, mean, variance) of a batch norm."""

    scale: Tensor
    shift: Tensor
    norm: tuple[Tensor, Tensor, Tensor, Tensor] | None = None


class Passage(Enum):
    """What an operator that is no stage does to a positive scale."""

    KEEPS = auto()
    """It commutes with it."""
    BREAKS = auto()
    """It does not, or nothing is known of it."""


@dataclass(frozen=True)
class Transfer:
    """The stages on the way to a value, or why the theorem does not reach it."""

    stages: tuple[Stage, ...] = ()
    broken: Reason | None = None

    def through(self, passage: Stage | Passage, node: Node) -> Transfer:
        """Behind one more operator."""
        if isinstance(passage, Stage):
            return replace(self, stages=(*self.stages, passage))
        broken = Transfer(broken=Reason(Why.ON_THE_WAY, f"{node.op} ({node.place})"))
        return self if passage is Passage.KEEPS else broken


NO_CHAIN = Transfer(broken=Reason(Why.NO_CHAIN))
"""To a value that is not reached at all."""


def stored(site: Site) -> bool:
    """Whether the filters that make the channels are there to be compared, not computed at every call."""
    return bool(site.group.producers) and all(producer.stored for producer in site.group.producers)


def transfers(site: Site) -> dict[str, Transfer]:
    """The transfer to every value that carries the group's channels."""
    starts = {call.name: call for producer in site.group.producers for call in _calls(site.graph, producer.node)}
    found: dict[str, Transfer] = {}
    for node in site.graph.downstream(starts.values(), lambda node: node.name in found):
        if node.name in starts:
            found[node.name] = _bias_stage(site, node)
        elif site.channels.carries(node.name, site.group) or node.several:
            found[node.name] = _step(site, node, [found[ref.name] for ref in node.refs() if ref.name in found])
    return found


def _calls(graph: Graph, producer: Node) -> list[Node]:
    """A layer that is called twice starts its channels twice."""
    weight = producer.args.get("weight")
    users = graph.users(weight.name) if isinstance(weight, Ref) else []
    return [producer, *(user for user in users if user.op == producer.op and user.args.get("weight") == weight)]


def _bias_stage(site: Site, node: Node) -> Transfer:
    """The producer's bias is a shift where a norm follows, and part of the row where none does."""
    bias = node.args.get("bias")
    users = site.graph.users(node.name)
    if not isinstance(bias, Ref) or not all(row_of(user).norm == "batch" for user in users) or not users:
        return Transfer()
    shift = _per_unit(site, bias)
    return Transfer() if shift is None else Transfer((Stage(torch.ones_like(shift), shift),))


def _step(site: Site, node: Node, sources: list[Transfer]) -> Transfer:
    broken = next((s for s in sources if s.broken), None)
    if broken:
        return broken
    if len(sources) > 1:
        plain = row_of(node).joins and not any(s.stages for s in sources)
        return Transfer() if plain else Transfer(broken=Reason(Why.BRANCHES, f"{node.op} ({node.place})"))
    return sources[0].through(_passage(site, node), node)


def _passage(site: Site, node: Node) -> Stage | Passage:
    """What an operator with one carrying operand does to scales."""
    row = row_of(node)
    if row.norm == "batch":
        return _batch_norm(site, node)
    if row.arithmetic:
        return _arithmetic(site, node)
    if _fills_border(node) or _slopes_differ(site, node):
        return Passage.BREAKS
    single_slope = row.moments == "pointwise" and isinstance(node.args.get("weight"), Ref)
    return Passage.KEEPS if row.homogeneous or single_slope else Passage.BREAKS


def _fills_border(node: Node) -> bool:
    """Padding with a constant that is not zero."""
    value = node.args.get("value")
    return isinstance(value, (int, float)) and bool(value)


def _slopes_differ(site: Site, node: Node) -> bool:
    """A learned activation that has more than one slope."""
    weight = node.args.get("weight")
    if not isinstance(weight, Ref) or row_of(node).moments != "pointwise":
        return False
    return math.prod(site.graph.shapes[weight.name]) != 1


def _batch_norm(site: Site, node: Node) -> Stage | Passage:
    mean, var = _per_unit(site, node.args.get("running_mean")), _per_unit(site, node.args.get("running_var"))
    if mean is None or var is None:
        return Passage.BREAKS
    gamma, beta = _per_unit(site, node.args.get("weight")), _per_unit(site, node.args.get("bias"))
    gamma = torch.ones_like(mean) if gamma is None else gamma
    beta = torch.zeros_like(mean) if beta is None else beta
    scale = gamma / (var + float(node.args.get("eps", 1e-5))).sqrt()
    return Stage(scale, beta - scale * mean, (gamma, beta, mean, var))


def _arithmetic(site: Site, node: Node) -> Stage | Passage:
    """A per-channel tensor or a number combined with the channel."""
    left, right = node.args["self"], node.args["other"]
    value, reads_left = (right, True) if _carries(site, left) else (left, False)
    number = float(value) if isinstance(value, (int, float)) else None
    own = _filled(site, number) if number is not None else _per_unit(site, value)
    if own is None:
        return Passage.BREAKS
    if row_of(node).arithmetic in ("mul", "div"):
        return _scaled(node, own, number, reads_left)
    return _shifted(node, own, reads_left)


def _filled(site: Site, number: float) -> Tensor:
    """The same number for every unit, whatever torch's defaults are."""
    return torch.full((site.group.size,), number, dtype=torch.float64, device="cpu")


def _scaled(node: Node, own: Tensor, number: float | None, reads_left: bool) -> Stage | Passage:
    """Channel times or by a value; a positive number is what the theorem allows anyhow."""
    zero = torch.zeros_like(own)
    if row_of(node).arithmetic == "mul":
        return Passage.KEEPS if number is not None and number > 0 else Stage(own, zero)
    return Stage(1 / own, zero) if reads_left and bool((own != 0).all()) else Passage.BREAKS


def _shifted(node: Node, own: Tensor, reads_left: bool) -> Stage | Passage:
    """Channel ± α·value, or value ± α·channel, of which only α = 1 is a shift."""
    alpha, sign = float(node.args.get("alpha", 1)), 1 if row_of(node).arithmetic == "add" else -1
    one = torch.ones_like(own)
    if reads_left:
        return Stage(one, sign * alpha * own)
    return Stage(sign * one, own) if alpha == 1 else Passage.BREAKS


def _carries(site: Site, ref: Any) -> bool:
    return isinstance(ref, Ref) and site.channels.carries(ref.name, site.group)


def _per_unit(site: Site, ref: Any) -> Tensor | None:
    """The values of a stored per-channel tensor in the order of units, if that is what it is."""
    if not isinstance(ref, Ref):
        return None
    name = site.graph.parameters.get(ref.name)
    while name is None:
        node = site.graph.node(ref.name)
        inner = list(node.refs()) if node and row_of(node).moves else []
        if len(inner) != 1:
            return None
        ref, name = inner[0], site.graph.parameters.get(inner[0].name)
    axes = [axis for axis in site.group.cuts if axis.tensor == name]
    tensor = site.tensor(name)
    if len(axes) != 1 or tensor.numel() != tensor.shape[axes[0].dim]:
        return None
    units = site.group.cuts[axes[0]]
    places = np.flatnonzero(is_unit(units))
    positions = positions_of(units[places], places, site.group.size)
    once = positions.shape[1] == 1 and is_place(positions).all()
    return tensor.flatten()[torch.from_numpy(positions[:, 0])] if once else None


def channel_rows(site: Site, transfer: Transfer) -> Tensor:
    """What a channel is before its activation: filter and shift, through every scale on the way."""
    rows = site.rows
    shift = rows.new_zeros(len(rows))
    for stage in transfer.stages:
        scale = stage.scale.to(rows)
        rows, shift = rows * scale[:, None], shift * scale + stage.shift.to(rows)
    return torch.cat([rows, shift[:, None]], 1) if transfer.stages else rows
