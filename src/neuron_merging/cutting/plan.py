"""plan: what is kept where, as a value that goes to JSON and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from torch import nn

from neuron_merging.channels.groups import Axis, Channels, Consumer, Group, stays_at
from neuron_merging.channels.labels import Mask, Units, is_unit
from neuron_merging.channels.masks import staying
from neuron_merging.errors import MergingError
from neuron_merging.graph.values import Graph, Node
from neuron_merging.mergers.interface import Kind, Mean, Merge, Why

VERSION = 1


class Cut(msgspec.Struct, frozen=True):
    """The indices, of `size`, of one axis of one tensor that stay (see `channels.Axis`)."""

    tensor: str
    dim: int
    size: int
    kept: tuple[int, ...]
    blocks: int = 1


class Reader(msgspec.Struct, frozen=True):
    """What became of one layer that reads a group: see `mergers.interface.Merge`."""

    layer: str
    kind: Kind
    reason: Why | None = None
    detail: str = ""
    folded: int = 0
    mean: Mean = Mean.KEPT
    error: float | None = None

    def said(self, removed: int) -> str:
        """The same in words, for people."""
        merged = self.kind is Kind.MERGED
        error = "" if self.error is None else f", expected error {self.error:.0%}"
        parts = [f"{self.kind} {self.folded} of {removed}" if merged else f"{self.kind}{error}"]
        parts += [str(self.mean)] if self.mean else []
        why = ": ".join(part for part in (self.reason, self.detail) if part)
        return f"{self.layer}: {', '.join(parts)}" + (f" ({why})" if why else "")


class Choice(msgspec.Struct, frozen=True):
    """One group's decision: its layers, how many units it had, which stay, and what its readers made of it."""

    name: str
    layers: tuple[str, ...]
    size: int
    kept: tuple[int, ...]
    readers: tuple[Reader, ...] = ()
    error: float | None = None


class Plan(msgspec.Struct, frozen=True):
    """Everything needed to rebuild the smaller network from a fresh one of the original class."""

    groups: tuple[Choice, ...]
    cuts: tuple[Cut, ...]
    modules: dict[str, dict[str, int | tuple[int, ...]]]
    biases: dict[str, int] = {}
    version: int = VERSION

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read a plan back.

        >>> empty = Plan(groups=(), cuts=(), modules={})
        >>> Plan.from_json(empty.to_json()) == empty
        True
        """
        try:
            version = msgspec.json.decode(text, type=_Header).version
            if version > VERSION:
                raise MergingError(
                    f"the plan has format {version}, this version reads up to {VERSION}",
                    where="plan",
                    fix="Update neuron-merging.",
                )
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise MergingError(
                f"not a plan: {error}", where="plan", fix="Give a plan.json that was written here."
            ) from error


class _Header(msgspec.Struct):
    version: int


def make_plan(
    model: nn.Module,
    graph: Graph,
    channels: Channels,
    kept: Mapping[str, Units],
    merges: Sequence[Merge] = (),
) -> Plan:
    """The plan that keeps `kept[group name]`; groups without an entry stay whole."""
    stays = staying(channels, kept)
    by_group: dict[str, list[Merge]] = defaultdict(list)
    for merge in merges:
        by_group[merge.group].append(merge)
    chosen = [group for group in channels.groups if len(kept.get(group.name, ())) not in (0, group.size)]
    axes: dict[Axis, Mask] = {}
    for group in chosen:
        for axis, units in group.cuts.items():
            there = np.where(is_unit(units), group.start + units, units)
            axes[axis] = axes.get(axis, np.ones(len(units), bool)) & stays_at(stays, there)
    cuts = [Cut(a.tensor, a.dim, len(stay), tuple(np.flatnonzero(stay).tolist()), a.blocks) for a, stay in axes.items()]
    return Plan(
        groups=tuple(_choice(group, kept[group.name], by_group[group.name]) for group in chosen),
        cuts=tuple(cuts),
        modules=_combined(_lenders(model, cuts), _attributes(model, graph, channels, stays)),
        biases={bias_name(m.consumer): len(m.bias) for m in merges if m.bias is not None},
    )


def _combined(
    first: dict[str, dict[str, int | tuple[int, ...]]], second: dict[str, dict[str, int | tuple[int, ...]]]
) -> dict[str, dict[str, int | tuple[int, ...]]]:
    return {path: {**first.get(path, {}), **second.get(path, {})} for path in {**first, **second}}


def bias_name(consumer: Consumer) -> str:
    """The bias beside a consumer's weight."""
    assert consumer.axis is not None
    return consumer.axis.tensor.removesuffix("weight") + "bias"


def _choice(group: Group, kept: Units, merges: Sequence[Merge]) -> Choice:
    errors = [m.error for m in merges if m.error is not None]
    readers = tuple(dict.fromkeys(_reader(m) for m in merges))
    error = sum(errors) / len(errors) if errors else None
    return Choice(group.name, group.layers, group.size, tuple(int(k) for k in kept), readers, error)


def _reader(merge: Merge) -> Reader:
    why, detail = (merge.reason.why, merge.reason.detail) if merge.reason else (None, "")
    return Reader(merge.reader, merge.kind, why, detail, merge.folded, merge.mean, merge.error)


def _attributes(
    model: nn.Module, graph: Graph, channels: Channels, stays: Mask
) -> dict[str, dict[str, int | tuple[int, ...]]]:
    """The sizes that torch's own modules keep as attributes, where they change."""
    found: dict[str, dict[str, int | tuple[int, ...]]] = {}
    for node in graph.nodes:
        path = node.module.split("@")[0]
        if not path or (not channels.units.get(node.name) and not _reads_units(node, channels)):
            continue
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        sizes = _sizes(module, node, graph, channels, stays)
        changed = {name: size for name, size in sizes.items() if getattr(module, name, size) != size}
        if changed:
            found.setdefault(path, {}).update(changed)
    return found


def _lenders(model: nn.Module, cuts: Sequence[Cut]) -> dict[str, dict[str, int | tuple[int, ...]]]:
    """Sizes of layers whose weight is cut, for those that lend it to others' computations."""
    found: dict[str, dict[str, int | tuple[int, ...]]] = {}
    for cut in cuts:
        path, _, name = cut.tensor.rpartition(".")
        module = model.get_submodule(path)
        if name == "weight" and isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) and cut.dim < 2:
            kind = "features" if isinstance(module, nn.Linear) else "channels"
            outwards = cut.dim == int(getattr(module, "transposed", False))
            found.setdefault(path, {})[f"{'out' if outwards else 'in'}_{kind}"] = len(cut.kept)
    return found


def _reads_units(node: Node, channels: Channels) -> bool:
    return any(channels.units.get(ref.name) for ref in node.refs())


def _sizes(
    module: nn.Module, node: Node, graph: Graph, channels: Channels, stays: Mask
) -> dict[str, int | tuple[int, ...]]:
    before = graph.shapes[next(node.refs()).name]
    into = channels.new_shape(next(node.refs()).name, before, stays)
    out = channels.new_shape(node.name, node.shape, stays)
    if isinstance(module, nn.Linear) and node.op == "linear":
        return {"in_features": into[-1], "out_features": out[-1]}
    if isinstance(module, nn.modules.conv._ConvNd) and "conv" in node.op:
        dim = len(before) - len(module.kernel_size) - 1
        alone = module.groups > 1 and module.groups == before[dim]
        groups = into[dim] if alone else module.groups
        return {"in_channels": into[dim], "out_channels": out[dim], "groups": groups}
    if isinstance(module, nn.modules.batchnorm._NormBase) and "norm" in node.op:
        return {"num_features": into[1]}
    if isinstance(module, nn.GroupNorm) and node.op == "group_norm":
        return {"num_channels": into[1], "num_groups": module.num_groups * into[1] // before[1]}
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and "norm" in node.op:
        return {"normalized_shape": into[len(into) - len(module.normalized_shape) :]}
    if isinstance(module, nn.PReLU) and node.op == "prelu" and module.num_parameters > 1:
        return {"num_parameters": into[1]}
    if isinstance(module, nn.Embedding) and node.op == "embedding":
        return {"embedding_dim": out[-1]}
    return {}
