"""The plan of a pruning: which channels each group keeps, as a value that converts to and from JSON. It also
names, for each removed channel, the kept channels that it was merged into: taken from the merger where it
reports them, otherwise solved from the consumer's new columns. Operators that store their sizes as data (ONNX
files, captured graphs) get new ones: shapes of reshapes, sizes of splits, bounds of slices, numbers of groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.calibration.regression import solve_scaling_matrix
from neuron_merging.channels.analysis import SizeAttribute
from neuron_merging.channels.groups import (
    Axis,
    Channels,
    Consumer,
    Group,
    Mask,
    Units,
    is_position,
    is_unit,
    select_kept_indices,
)
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.errors import MergingError, deprecated_members, describe_error
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.graph_module import ResizableModule, SizeOverrides, build_size_key
from neuron_merging.merging.protocol import MeanHandling, Merge, MergeKind, ReasonCode

MergeTargets = dict[int, dict[int, float]]
"""By removed unit, the kept units that it was merged into, each with its weight in the scaling matrix Z."""
MAX_TARGETS = 2
"""Targets that a plan names for one removed unit, the strongest first. More would only make the file longer."""
MIN_TARGET_WEIGHT = 0.05
"""Targets with a smaller absolute weight are left out: they take in too little of the removed unit to matter."""
MAX_COLUMN_ENTRIES = 2**23
"""Entries of the removed columns up to which Z is solved from a consumer's columns: 64 MiB in float64."""
MAX_REMOVED_UNITS = 2**11
"""Removed units up to which Z is solved from a consumer's columns: the solve is cubic in their number."""


def find_merge_targets(
    group: Group, kept: Units, merges: Sequence[Merge], tensors: Mapping[str, Tensor]
) -> MergeTargets:
    """Return the strongest merge targets of every removed unit, from the first consumer layer that yields them."""
    removed = np.setdiff1d(np.arange(group.size), kept)
    for merge in merges:
        weights = _compute_merge_weights(group, kept, removed, merge, tensors) if len(removed) else None
        if weights is not None:
            return {int(unit): _select_strongest_targets(row, kept) for unit, row in zip(removed, weights, strict=True)}
    return {}


def _select_strongest_targets(row: Tensor, kept: Units) -> dict[int, float]:
    order = row.abs().argsort(descending=True)[:MAX_TARGETS].tolist()
    return {int(kept[i]): round(float(row[i]), 3) for i in order if abs(float(row[i])) >= MIN_TARGET_WEIGHT}


def _compute_merge_weights(
    group: Group, kept: Units, removed: Units, merge: Merge, tensors: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the weights of the merge: a row for each removed unit, a column for each kept one; None if unknown."""
    if merge.scaling is not None:
        return merge.scaling.to_dense().T
    axis = merge.consumer.axis
    if merge.columns is None or axis is None or not is_position(merge.consumer.columns).all():
        return None
    columns = merge.consumer.columns
    stored = axis.join_blocks(tensors[axis.tensor].detach()).movedim(axis.dim, 0).flatten(1)
    if len(removed) > MAX_REMOVED_UNITS or columns[removed].size * stored.shape[1] > MAX_COLUMN_ENTRIES:
        return None
    old = stored.double().cpu()
    new = old.clone()
    new[merge.positions.cpu()] = merge.columns.detach().movedim(axis.dim, 0).flatten(1).double().cpu()
    # The merger reports no Z. Merging adds combinations of the removed columns to the kept ones,
    # so least squares recovers them: new - old = Z · removed. The small ridge handles equal columns.
    removed_columns = old[torch.from_numpy(columns[removed])].flatten(1)
    added = (new - old)[torch.from_numpy(columns[kept])].flatten(1)
    return solve_scaling_matrix(removed_columns, added, ridge=1e-6)


PLAN_VERSION = 1
"""Format of plan.json. A reader refuses a larger number."""

# The types bound every value of a plan, because plan.json may come from an untrusted source.
MAX_INT32 = 2**31 - 1
Name = Annotated[str, msgspec.Meta(max_length=1000)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]
Dimension = Annotated[int, msgspec.Meta(ge=0, le=63)]
AttributeName = Annotated[str, msgspec.Meta(pattern=r"^(?!__)[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
"""Name of a module attribute that holds a size. No dunder names: setting `__class__` would run other code.
`surgery.check_plan_fits` checks that the network has the attribute and that its value does not grow.
"""
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An element of a tuple or dict attribute. Elements that are not sizes do not change and may have any value."""
AttributeValue = Size | tuple[Int64, ...] | dict[Name, Int64]
ModuleAttributes = dict[Name, dict[AttributeName, AttributeValue]]
NewSizes = Annotated[tuple[Index | None, ...], msgspec.Meta(max_length=64)]
"""New sizes of one operator; None for a size that does not change."""


class Cut(msgspec.Struct, frozen=True):
    """The indices that stay along one axis of one tensor, out of `size` (see `channels.Axis` for `blocks`)."""

    tensor: Name
    dim: Dimension
    size: Size
    kept: tuple[Index, ...]
    blocks: Size = 1


@deprecated_members(said="describe")
class ConsumerOutcome(msgspec.Struct, frozen=True):
    """How one consumer layer of a group was merged; the fields are those of `merging.protocol.Merge`."""

    layer: str
    kind: MergeKind
    reason: ReasonCode | None = None
    detail: str = ""
    folded: int = 0
    mean: MeanHandling = MeanHandling.KEPT
    error: float | None = None

    def describe(self, removed: int) -> str:
        """Describe the outcome in words; `removed` is how many units the group lost."""
        merged = self.kind is MergeKind.MERGED
        error = "" if self.error is None else f", expected error {self.error:.0%}"
        parts = [f"{self.kind} {self.folded} of {removed}" if merged else f"{self.kind}{error}"]
        parts += [str(self.mean)] if self.mean else []
        why = ": ".join(part for part in (self.reason, self.detail) if part)
        return f"{self.layer}: {', '.join(parts)}" + (f" ({why})" if why else "")


class GroupDecision(msgspec.Struct, frozen=True):
    """The decision on one group: its layers, its size, the units that stay, and the outcome at each consumer layer.

    `error` is the mean expected error of the consumer layers.
    """

    name: Name
    layers: tuple[Name, ...]
    size: Size
    kept: tuple[Index, ...]
    readers: tuple[ConsumerOutcome, ...] = ()
    error: float | None = None
    partners: dict[Index, dict[Index, float]] = {}
    """By removed unit, the kept units that it was merged into, each with its weight (see `find_merge_targets`)."""


class Plan(msgspec.Struct, frozen=True):
    """Everything needed to rebuild the smaller network from a fresh one of the original class.

    A plan is a value: plans with the same content compare equal, and a plan converts to JSON and back. "The folder"
    in the documentation explains every key.

    Attributes
    ----------
    groups
        The decision on each group: its layers, the units that stay, the outcome at each consumer layer.
    cuts
        The indices that stay along each dimension of each cut tensor.
    modules
        Attributes of modules that change with the sizes, such as `out_channels`.
    biases
        Biases that merging added to layers without one, with their length before cutting.
    baked
        Weights that the original computes at every call (parametrizations) and the smaller network stores.
    sizes
        New sizes for the operators of an ONNX file or a captured graph.
    version
        The format, see `PLAN_VERSION`.

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
        """Convert the plan to indented JSON.

        Returns
        -------
        str
            Text that `from_json` reads.
        """
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Parse a plan from JSON.

        Parameters
        ----------
        text
            Output of `to_json`.

        Returns
        -------
        Plan
            A plan that equals the one that was written.

        Raises
        ------
        MergingError
            The text is not a plan, or has a newer format.

        Examples
        --------
        >>> empty = Plan(groups=(), cuts=(), modules={})
        >>> Plan.from_json(empty.to_json()) == empty
        True
        """
        try:
            # The version first: a newer format may not decode as this class, and deserves its own message.
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
    size_attributes: Sequence[SizeAttribute] = (),
) -> Plan:
    """Make the plan in which each group keeps the units `kept[group name]`; groups without an entry are not pruned."""
    stays = build_keep_mask(channels, kept)
    by_group: dict[str, list[Merge]] = defaultdict(list)
    for merge in merges:
        by_group[merge.group].append(merge)
    # No entry means that the group is not pruned, and neither is one that keeps all units.
    chosen = [group for group in channels.groups if len(kept.get(group.name, ())) not in (0, group.size)]
    axes: dict[Axis, Mask] = {}
    for group in chosen:
        for axis, units in group.cuts.items():
            # Several groups can cut one axis (the inputs of a concatenation): an index stays if all of them keep it.
            global_units = np.where(is_unit(units), group.start + units, units)
            axes[axis] = axes.get(axis, np.ones(len(units), bool)) & select_kept_indices(stays, global_units)
    cuts = [Cut(a.tensor, a.dim, len(stay), tuple(np.flatnonzero(stay).tolist()), a.blocks) for a, stay in axes.items()]
    return Plan(
        groups=tuple(_make_group_decision(group, kept[group.name], by_group[group.name], graph) for group in chosen),
        cuts=tuple(cuts),
        modules=_combine_attributes(
            _combine_attributes(
                _find_cut_weight_attributes(model, cuts), _find_layer_attributes(model, graph, channels, stays)
            ),
            _find_custom_attributes(model, graph, channels, stays, size_attributes),
        ),
        biases={get_bias_name(m.consumer): len(m.bias) for m in merges if m.bias is not None},
        sizes=compute_operator_sizes(model, graph, channels, stays),
    )


def _combine_attributes(first: ModuleAttributes, second: ModuleAttributes) -> ModuleAttributes:
    return {path: {**first.get(path, {}), **second.get(path, {})} for path in {**first, **second}}


def get_bias_name(consumer: Consumer) -> str:
    """Return the name of the bias that belongs to a consumer's weight."""
    assert consumer.axis is not None
    return consumer.axis.tensor.removesuffix("weight") + "bias"


def _make_group_decision(group: Group, kept: Units, merges: Sequence[Merge], graph: Graph) -> GroupDecision:
    errors = [m.error for m in merges if m.error is not None]
    # A layer that reads the group at several calls has one outcome.
    readers = tuple(dict.fromkeys(_make_consumer_outcome(m) for m in merges))
    error = sum(errors) / len(errors) if errors else None
    partners = find_merge_targets(group, kept, merges, graph.tensors)
    return GroupDecision(group.name, group.layers, group.size, tuple(int(k) for k in kept), readers, error, partners)


def _make_consumer_outcome(merge: Merge) -> ConsumerOutcome:
    why, detail = (merge.reason.why, merge.reason.detail) if merge.reason else (None, "")
    return ConsumerOutcome(merge.reader, merge.kind, why, detail, merge.folded, merge.mean, merge.error)


def _find_layer_attributes(model: nn.Module, graph: Graph, channels: Channels, stays: Mask) -> ModuleAttributes:
    """Return the changed sizes that torch's own modules store as attributes, such as `in_features`."""
    found: ModuleAttributes = {}
    for node in graph.nodes:
        path = node.module.split("@")[0]  # torch.export appends "@1" for a second call of a module
        if not path or not list(node.refs()) or not channels.touches_node(node):
            continue
        try:
            module = model.get_submodule(path)
        except AttributeError:  # an operator of a file need not belong to a module
            continue
        sizes = _compute_layer_sizes(module, node, graph, channels, stays)
        changed = {name: size for name, size in sizes.items() if getattr(module, name, size) != size}
        if changed:
            found.setdefault(path, {}).update(changed)
    return found


def _find_custom_attributes(
    model: nn.Module, graph: Graph, channels: Channels, stays: Mask, size_attributes: Sequence[SizeAttribute]
) -> ModuleAttributes:
    """Return the changed sizes that the user's own modules store as attributes."""
    found: ModuleAttributes = {}
    for attribute in size_attributes:
        old = graph.shapes[attribute.value]
        new = channels.shape_after_pruning(attribute.value, old, stays)
        if new[attribute.dim] != old[attribute.dim]:
            changed = found.setdefault(attribute.module, {})
            # A tuple or dict attribute can hold several sizes: continue from the value that is already changed.
            value = changed.get(attribute.name, getattr(model.get_submodule(attribute.module), attribute.name))
            changed[attribute.name] = attribute.replace_size(value, new[attribute.dim])
    return found


def _find_cut_weight_attributes(model: nn.Module, cuts: Sequence[Cut]) -> ModuleAttributes:
    """Return the sizes of linear and convolution layers whose weight is cut.

    A layer whose weight is read by other code, and whose forward never runs, has no node in the graph.
    """
    found: ModuleAttributes = {}
    for cut in cuts:
        path, _, name = cut.tensor.rpartition(".")
        module = model.get_submodule(path)
        if name == "weight" and isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) and cut.dim < 2:
            kind = "features" if isinstance(module, nn.Linear) else "channels"
            # A transposed convolution stores its weight as (in, out, ...).
            is_output = cut.dim == int(getattr(module, "transposed", False))
            found.setdefault(path, {})[f"{'out' if is_output else 'in'}_{kind}"] = len(cut.kept)
    return found


def _compute_layer_sizes(
    module: nn.Module, node: Node, graph: Graph, channels: Channels, stays: Mask
) -> dict[AttributeName, AttributeValue]:
    """Return the size attributes of one of torch's modules after pruning, from the shapes around its operator."""
    before = graph.shapes[next(node.refs()).name]
    into = channels.shape_after_pruning(next(node.refs()).name, before, stays)
    out = channels.shape_after_pruning(node.name, node.shape, stays)
    row = lookup_operator(node)
    if isinstance(module, nn.Linear) and row.layer == "linear":
        return {"in_features": into[-1], "out_features": out[-1]}
    if isinstance(module, nn.modules.conv._ConvNd) and row.convolves:
        dim = len(before) - len(module.kernel_size) - 1
        depthwise = module.groups > 1 and module.groups == before[dim]
        groups = into[dim] if depthwise else module.groups
        return {"in_channels": into[dim], "out_channels": out[dim], "groups": groups}
    if isinstance(module, nn.modules.batchnorm._NormBase) and row.norm in ("batch", "instance"):
        return {"num_features": into[1]}
    if isinstance(module, nn.GroupNorm) and row.norm == "group":
        # Channels are removed in whole groups; a norm with a single group keeps it and becomes narrower.
        return {"num_channels": into[1], "num_groups": max(1, module.num_groups * into[1] // before[1])}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and row.spans:
        return {"normalized_shape": into[len(into) - len(module.normalized_shape) :]}
    if isinstance(module, nn.PReLU) and "weight" in node.args and module.num_parameters > 1:
        return {"num_parameters": into[1]}
    if isinstance(module, nn.Embedding) and row.layer == "table":
        return {"embedding_dim": out[-1]}
    return {}


def compute_operator_sizes(model: nn.Module, graph: Graph, channels: Channels, stays: Mask) -> dict[str, SizeOverrides]:
    """Return, by operator, the sizes that change when only the units in `stays` are kept.

    The result is empty for an ordinary module: its own code computes the sizes.
    """
    if not isinstance(model, ResizableModule):
        return {}
    overrides = {}
    for node in graph.nodes:
        kind, sizes = _compute_node_sizes(node, graph, channels, stays) if channels.touches_node(node) else ("", ())
        if any(size is not None for size in sizes):
            overrides[build_size_key(node.module, kind)] = sizes
    return overrides


def _compute_node_sizes(node: Node, graph: Graph, channels: Channels, stays: Mask) -> tuple[str, SizeOverrides]:
    """Return which kind of size an operator stores, and its new values; None for each that does not change."""
    kind = lookup_operator(node).sizes
    if kind in ("shape", "normalized shape"):
        sizes = _select_changed_sizes(node.shape, channels.shape_after_pruning(node.name, node.shape, stays))
        return "size", sizes if kind == "shape" else sizes[-len(node.args["normalized_shape"]) :]
    if kind == "pieces" and isinstance(node.args.get("split_sizes", node.args.get("split_size")), list):
        return "pieces", _count_kept_along_dim(node, channels, stays, _count_split_sizes)
    if kind == "range":
        return f"range.{_get_slice_dim(node, graph)}", _count_kept_along_dim(node, channels, stays, _count_slice_bounds)
    if kind == "groups":
        return "groups", _count_channel_groups(node, graph, channels, stays)
    return "", ()


def _select_changed_sizes(old: Sequence[int], new: Sequence[int]) -> SizeOverrides:
    return tuple(None if a == b else b for a, b in zip(old, new, strict=True))


def _get_slice_dim(node: Node, graph: Graph) -> int:
    return int(node.args.get("dim", 0)) % len(graph.shapes[next(node.refs()).name])


def _count_kept_along_dim(
    node: Node, channels: Channels, stays: Mask, count: Callable[[Node, Mask], SizeOverrides]
) -> SizeOverrides:
    """Apply `count` to the kept indices along the dimension at which an operator splits or slices its input."""
    before = next(node.refs()).name
    units = channels.units.get(before, {})
    dim = int(node.args.get("dim", 0))
    # `dim` may count from the end, while `units` are indexed from the front.
    dims = [d for d in units if d == dim or (dim < 0 and d == dim + _count_dims(node))]
    return count(node, select_kept_indices(stays, units[dims[0]])) if dims else ()


def _count_dims(node: Node) -> int:
    return len(node.shape)


def _count_split_sizes(node: Node, kept: Mask) -> SizeOverrides:
    sizes = node.args.get("split_sizes", node.args.get("split_size"))
    ends = np.cumsum(sizes)
    # Each piece keeps as many entries as there are kept indices in its own interval.
    new = [int(kept[end - size : end].sum()) for end, size in zip(ends, sizes, strict=True)]
    return _select_changed_sizes(sizes, new)


def _count_slice_bounds(node: Node, kept: Mask) -> SizeOverrides:
    start, end = int(node.args.get("start") or 0), node.args.get("end")
    # Exporters write INT64_MAX for "to the end".
    stop = len(kept) if end is None else min(int(end), len(kept))
    new = (int(kept[:start].sum()), int(kept[:stop].sum()))
    return (None if new[0] == start else new[0], None if stop == len(kept) or new[1] == stop else new[1])


def _count_channel_groups(node: Node, graph: Graph, channels: Channels, stays: Mask) -> SizeOverrides:
    """Return the new number of groups: it shrinks with the channels of a depthwise convolution or a group norm.

    Other grouped convolutions keep their number of groups; each group becomes narrower.
    """
    name = "num_groups" if lookup_operator(node).norm == "group" else "groups"
    groups = int(node.args.get(name, 1))
    x = node.args.get("input")
    if groups == 1 or not isinstance(x, Ref):
        return (None,)
    before = graph.shapes[x.name]
    after = channels.shape_after_pruning(x.name, before, stays)
    dim = _find_channel_dim(node, before, graph)
    if name == "groups" and groups != before[dim]:  # not depthwise
        return (None,)
    return _select_changed_sizes([groups], [groups * after[dim] // before[dim]])


def _find_channel_dim(node: Node, shape: Sequence[int], graph: Graph) -> int:
    """Return the channel dimension of an operator's input: 1, or 0 where a convolution reads an unbatched sample."""
    weight = node.args.get("weight")
    if not lookup_operator(node).convolves or not isinstance(weight, Ref):
        return 1
    return len(shape) - len(graph.shapes[weight.name]) + 1


def set_operator_sizes(model: nn.Module, sizes: Mapping[str, SizeOverrides]) -> None:
    """Set the new sizes on a copy of the network; an ordinary module has none to set."""
    if isinstance(model, ResizableModule):
        model.sizes = {**model.sizes, **sizes}
