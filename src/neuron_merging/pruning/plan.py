"""The plan of a pruning: which channels each group keeps, as a value that converts to and from JSON. It also
names, for each removed channel, the kept channels that it was merged into: taken from the merger where it
reports them, otherwise solved from the consumer's new columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.calibration.regression import solve_scaling_matrix
from neuron_merging.channels.analysis import SizeAttribute
from neuron_merging.channels.groups import Axis, Channels, Consumer, Group, select_kept_indices
from neuron_merging.channels.labels import Mask, Units, is_position, is_unit
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.merging.protocol import MeanHandling, Merge, MergeKind, ReasonCode
from neuron_merging.pruning.operator_sizes import compute_operator_sizes

MergeTargets = dict[int, dict[int, float]]
"""By removed unit, the kept units that it went into, each with its weight."""
MAX_TARGETS = 2
"""Partners of a removed unit that are named: the strongest."""
MIN_TARGET_WEIGHT = 0.05
"""A weight below that is not worth a word."""
MAX_COLUMN_ENTRIES = 2**23
"""Entries of the removed columns that are still looked through."""
MAX_REMOVED_UNITS = 2**11
"""Removed units that are still told apart: the work grows with their cube."""


def find_merge_targets(
    group: Group, kept: Units, merges: Sequence[Merge], tensors: Mapping[str, Tensor]
) -> MergeTargets:
    """The strongest partners of every removed unit, as the first reader that can tell has them."""
    removed = np.setdiff1d(np.arange(group.size), kept)
    for merge in merges:
        shares = _compute_merge_weights(group, kept, removed, merge, tensors) if len(removed) else None
        if shares is not None:
            return {int(unit): _select_strongest_targets(row, kept) for unit, row in zip(removed, shares, strict=True)}
    return {}


def _select_strongest_targets(row: Tensor, kept: Units) -> dict[int, float]:
    order = row.abs().argsort(descending=True)[:MAX_TARGETS].tolist()
    return {int(kept[i]): round(float(row[i]), 3) for i in order if abs(float(row[i])) >= MIN_TARGET_WEIGHT}


def _compute_merge_weights(
    group: Group, kept: Units, removed: Units, merge: Merge, tensors: Mapping[str, Tensor]
) -> Tensor | None:
    """A row for each removed unit, a column for each kept one."""
    if merge.scaling is not None:
        return merge.scaling.to_dense().T
    axis = merge.consumer.axis
    if merge.columns is None or axis is None or not is_position(merge.consumer.columns).all():
        return None
    places = merge.consumer.columns
    stored = axis.join_blocks(tensors[axis.tensor].detach()).movedim(axis.dim, 0).flatten(1)
    if len(removed) > MAX_REMOVED_UNITS or places[removed].size * stored.shape[1] > MAX_COLUMN_ENTRIES:
        return None
    old = stored.double().cpu()
    new = old.clone()
    new[merge.positions.cpu()] = merge.columns.detach().movedim(axis.dim, 0).flatten(1).double().cpu()
    gone = old[torch.from_numpy(places[removed])].flatten(1)
    added = (new - old)[torch.from_numpy(places[kept])].flatten(1)
    return solve_scaling_matrix(gone, added, ridge=1e-6)


PLAN_VERSION = 1

# What a plan may hold is in its types: it is read as data from a stranger.
MAX_INT32 = 2**31 - 1
Name = Annotated[str, msgspec.Meta(max_length=1000)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]
Dimension = Annotated[int, msgspec.Meta(ge=0, le=63)]
AttributeName = Annotated[str, msgspec.Meta(pattern=r"^(?!__)[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
"""An attribute that is a size; which of them a network has, and that none grows, is checked against the network."""
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""One of several numbers that are kept together: not all of them need be sizes, and those that are none stay."""
AttributeValue = Size | tuple[Int64, ...] | dict[Name, Int64]
ModuleAttributes = dict[Name, dict[AttributeName, AttributeValue]]
NewSizes = Annotated[tuple[Index | None, ...], msgspec.Meta(max_length=64)]


class Cut(msgspec.Struct, frozen=True):
    """The indices, of `size`, of one axis of one tensor that stay (see `channels.Axis`)."""

    tensor: Name
    dim: Dimension
    size: Size
    kept: tuple[Index, ...]
    blocks: Size = 1


class ConsumerOutcome(msgspec.Struct, frozen=True):
    """What became of one layer that reads a group: see `merging.protocol.Merge`."""

    layer: str
    kind: MergeKind
    reason: ReasonCode | None = None
    detail: str = ""
    folded: int = 0
    mean: MeanHandling = MeanHandling.KEPT
    error: float | None = None

    def said(self, removed: int) -> str:
        """The same in words, for people."""
        merged = self.kind is MergeKind.MERGED
        error = "" if self.error is None else f", expected error {self.error:.0%}"
        parts = [f"{self.kind} {self.folded} of {removed}" if merged else f"{self.kind}{error}"]
        parts += [str(self.mean)] if self.mean else []
        why = ": ".join(part for part in (self.reason, self.detail) if part)
        return f"{self.layer}: {', '.join(parts)}" + (f" ({why})" if why else "")


class GroupDecision(msgspec.Struct, frozen=True):
    """One group's decision: its layers, how many units it had, which stay, and what its readers made of it."""

    name: Name
    layers: tuple[Name, ...]
    size: Size
    kept: tuple[Index, ...]
    readers: tuple[ConsumerOutcome, ...] = ()
    error: float | None = None
    partners: dict[Index, dict[Index, float]] = {}
    """By removed unit, the kept ones that took in most of it, each with its weight."""


class Plan(msgspec.Struct, frozen=True):
    """Everything needed to rebuild the smaller network from a fresh one of the original class.

    A plan is a value: equal plans compare equal, and it goes to JSON and back. See "The folder" for the meaning of
    every key.

    Attributes
    ----------
    groups
        What was decided for each group: its layers, the units that stay, what its readers made of it.
    cuts
        Which indices of which dimension of which tensor stay.
    modules
        Attributes of modules that change with the sizes, such as `out_channels`.
    biases
        Biases that merging added to layers without one, with their length before cutting.
    baked
        Weights that the original computes at every call and the smaller network stores.
    sizes
        Sizes that operators of a file or a captured graph are given in place of their own.
    version
        The format.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> plan = nm.compress(net, torch.zeros(1, 4), ratio=0.5).plan
    >>> [(cut.tensor, cut.dim, cut.size, len(cut.kept)) for cut in plan.cuts]
    [('0.weight', 0, 8, 4), ('0.bias', 0, 8, 4), ('2.weight', 1, 8, 4)]
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    groups: tuple[GroupDecision, ...]
    cuts: tuple[Cut, ...]
    modules: ModuleAttributes
    biases: dict[Name, Size] = {}
    baked: tuple[Name, ...] = ()
    sizes: dict[Name, NewSizes] = {}
    version: int = PLAN_VERSION

    def to_json(self) -> str:
        """The plan as JSON, with line breaks for people.

        Returns
        -------
        str
            What `from_json` reads.
        """
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read a plan back.

        Parameters
        ----------
        text
            What `to_json` wrote.

        Returns
        -------
        Plan
            An equal plan.

        Raises
        ------
        MergingError
            It is not a plan, or one of a newer format.

        Examples
        --------
        >>> empty = Plan(groups=(), cuts=(), modules={})
        >>> Plan.from_json(empty.to_json()) == empty
        True
        """
        try:
            version = msgspec.json.decode(text, type=_PlanHeader).version
            if version > PLAN_VERSION:
                raise MergingError(
                    f"the plan has format {version}, this version reads up to {PLAN_VERSION}",
                    where="plan",
                    fix="Update neuron-merging.",
                )
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MergingError(
                f"not a plan: {describe_error(error)}", where="plan", fix="Give a plan.json that was written here."
            ) from error


class _PlanHeader(msgspec.Struct):
    version: int


def make_plan(
    model: nn.Module,
    graph: Graph,
    channels: Channels,
    kept: Mapping[str, Units],
    merges: Sequence[Merge] = (),
    followers: Sequence[SizeAttribute] = (),
) -> Plan:
    """The plan that keeps `kept[group name]`; groups without an entry stay whole."""
    stays = build_keep_mask(channels, kept)
    by_group: dict[str, list[Merge]] = defaultdict(list)
    for merge in merges:
        by_group[merge.group].append(merge)
    chosen = [group for group in channels.groups if len(kept.get(group.name, ())) not in (0, group.size)]
    axes: dict[Axis, Mask] = {}
    for group in chosen:
        for axis, units in group.cuts.items():
            there = np.where(is_unit(units), group.start + units, units)
            axes[axis] = axes.get(axis, np.ones(len(units), bool)) & select_kept_indices(stays, there)
    cuts = [Cut(a.tensor, a.dim, len(stay), tuple(np.flatnonzero(stay).tolist()), a.blocks) for a, stay in axes.items()]
    return Plan(
        groups=tuple(_make_group_decision(group, kept[group.name], by_group[group.name], graph) for group in chosen),
        cuts=tuple(cuts),
        modules=_combine_attributes(
            _combine_attributes(
                _find_cut_weight_attributes(model, cuts), _find_layer_attributes(model, graph, channels, stays)
            ),
            _find_custom_attributes(model, graph, channels, stays, followers),
        ),
        biases={get_bias_name(m.consumer): len(m.bias) for m in merges if m.bias is not None},
        sizes=compute_operator_sizes(model, graph, channels, stays),
    )


def _combine_attributes(first: ModuleAttributes, second: ModuleAttributes) -> ModuleAttributes:
    return {path: {**first.get(path, {}), **second.get(path, {})} for path in {**first, **second}}


def get_bias_name(consumer: Consumer) -> str:
    """The bias beside a consumer's weight."""
    assert consumer.axis is not None
    return consumer.axis.tensor.removesuffix("weight") + "bias"


def _make_group_decision(group: Group, kept: Units, merges: Sequence[Merge], graph: Graph) -> GroupDecision:
    errors = [m.error for m in merges if m.error is not None]
    readers = tuple(dict.fromkeys(_make_consumer_outcome(m) for m in merges))
    error = sum(errors) / len(errors) if errors else None
    partners = find_merge_targets(group, kept, merges, graph.tensors)
    return GroupDecision(group.name, group.layers, group.size, tuple(int(k) for k in kept), readers, error, partners)


def _make_consumer_outcome(merge: Merge) -> ConsumerOutcome:
    why, detail = (merge.reason.why, merge.reason.detail) if merge.reason else (None, "")
    return ConsumerOutcome(merge.reader, merge.kind, why, detail, merge.folded, merge.mean, merge.error)


def _find_layer_attributes(model: nn.Module, graph: Graph, channels: Channels, stays: Mask) -> ModuleAttributes:
    """The sizes that torch's own modules keep as attributes, where they change."""
    found: ModuleAttributes = {}
    for node in graph.nodes:
        path = node.module.split("@")[0]
        if not path or not list(node.refs()) or not channels.touches_node(node):
            continue
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        sizes = _compute_layer_sizes(module, node, graph, channels, stays)
        changed = {name: size for name, size in sizes.items() if getattr(module, name, size) != size}
        if changed:
            found.setdefault(path, {}).update(changed)
    return found


def _find_custom_attributes(
    model: nn.Module, graph: Graph, channels: Channels, stays: Mask, followers: Sequence[SizeAttribute]
) -> ModuleAttributes:
    """The attributes of the user's own modules that are sizes, where they change."""
    found: ModuleAttributes = {}
    for follower in followers:
        old = graph.shapes[follower.value]
        new = channels.shape_after_pruning(follower.value, old, stays)
        if new[follower.dim] != old[follower.dim]:
            own = found.setdefault(follower.module, {})
            known = own.get(follower.name, getattr(model.get_submodule(follower.module), follower.name))
            own[follower.name] = follower.replace_size(known, new[follower.dim])
    return found


def _find_cut_weight_attributes(model: nn.Module, cuts: Sequence[Cut]) -> ModuleAttributes:
    """Sizes of layers whose weight is cut, for those that lend it to others' computations."""
    found: ModuleAttributes = {}
    for cut in cuts:
        path, _, name = cut.tensor.rpartition(".")
        module = model.get_submodule(path)
        if name == "weight" and isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) and cut.dim < 2:
            kind = "features" if isinstance(module, nn.Linear) else "channels"
            outwards = cut.dim == int(getattr(module, "transposed", False))
            found.setdefault(path, {})[f"{'out' if outwards else 'in'}_{kind}"] = len(cut.kept)
    return found


def _compute_layer_sizes(
    module: nn.Module, node: Node, graph: Graph, channels: Channels, stays: Mask
) -> dict[AttributeName, AttributeValue]:
    before = graph.shapes[next(node.refs()).name]
    into = channels.shape_after_pruning(next(node.refs()).name, before, stays)
    out = channels.shape_after_pruning(node.name, node.shape, stays)
    row = lookup_operator(node)
    if isinstance(module, nn.Linear) and row.layer == "linear":
        return {"in_features": into[-1], "out_features": out[-1]}
    if isinstance(module, nn.modules.conv._ConvNd) and row.convolves:
        dim = len(before) - len(module.kernel_size) - 1
        alone = module.groups > 1 and module.groups == before[dim]
        groups = into[dim] if alone else module.groups
        return {"in_channels": into[dim], "out_channels": out[dim], "groups": groups}
    if isinstance(module, nn.modules.batchnorm._NormBase) and row.norm in ("batch", "instance"):
        return {"num_features": into[1]}
    if isinstance(module, nn.GroupNorm) and row.norm == "group":
        return {"num_channels": into[1], "num_groups": max(1, module.num_groups * into[1] // before[1])}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and row.spans:
        return {"normalized_shape": into[len(into) - len(module.normalized_shape) :]}
    if isinstance(module, nn.PReLU) and "weight" in node.args and module.num_parameters > 1:
        return {"num_parameters": into[1]}
    if isinstance(module, nn.Embedding) and row.layer == "table":
        return {"embedding_dim": out[-1]}
    return {}
