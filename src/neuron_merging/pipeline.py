"""pipeline: compress() runs every stage in one call, and what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_merging import criteria, mergers
from neuron_merging.budget import Ratio, check_ratio, keep, resolve
from neuron_merging.capture import Graph, as_inputs, capture, copied, dropped_hooks
from neuron_merging.channels import Channels, Group, Refusal
from neuron_merging.costs import group_macs, group_parameters, node_macs
from neuron_merging.criteria import Criterion, score
from neuron_merging.errors import MergingError
from neuron_merging.mergers import Calibrated, Merge, Merger, Moments, Task
from neuron_merging.metrics import count_macs, count_parameters
from neuron_merging.operators import Vector
from neuron_merging.plan import Plan, make_plan, unit_mask
from neuron_merging.probe import analyse, layers_it_breaks_without, sizes_used_as_numbers
from neuron_merging.selection import EXPECTED_ERROR, Order, Source, orders
from neuron_merging.surgery import apply_plan
from neuron_merging.task import unit_rows
from neuron_merging.verify import VerificationError
from neuron_merging.verify import verify as check


class NothingToPrune(MergingError):
    """No group takes part: each has a reason."""


@dataclass(frozen=True)
class GroupSummary:
    """What became of one group of channels."""

    name: str
    layers: tuple[str, ...]
    before: int
    after: int
    how: tuple[str, ...]
    error: float | None = None

    @property
    def removed(self) -> int:
        return self.before - self.after


@dataclass(frozen=True)
class Summary:
    """Before and after, group by group, and what could not be touched and why."""

    parameters: tuple[int, int]
    macs: tuple[int, int]
    groups: tuple[GroupSummary, ...]
    refusals: tuple[Refusal, ...]
    error: float | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        (p0, p1), (m0, m1) = self.parameters, self.macs
        lines = [
            f"parameters {p0:,} -> {p1:,} ({p1 / max(p0, 1) - 1:+.1%})",
            f"MACs       {m0:,} -> {m1:,} ({m1 / max(m0, 1) - 1:+.1%})",
        ]
        for group in self.groups:
            lines.append(f"  {group.name}: {group.before} -> {group.after} channels, {'; '.join(group.how)}")
        lines += [f"  kept {refusal}" for refusal in self.refusals]
        lines += [f"  note: {note}" for note in self.notes]
        if self.error is not None:
            lines.append(f"verified: equals the original with removed channels zeroed within {self.error:.1e}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Compressed:
    """The smaller network, the plan that rebuilds it, and the summary."""

    model: nn.Module
    plan: Plan
    summary: Summary
    merges: tuple[Merge, ...] = field(default=(), repr=False)

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Write the folder that `load` reads: weights, plan, recipe and card (see `store`)."""
        from neuron_merging import store

        store.save(self, folder, overwrite=overwrite)


@dataclass(frozen=True)
class GroupInfo:
    """One line of `inspect`: a group and what hangs on it."""

    name: str
    layers: tuple[str, ...]
    channels: int
    consumers: tuple[str, ...]
    residual: bool
    parameters: int
    macs: int


@dataclass(frozen=True)
class Inspection:
    """What can be removed from a network, and what cannot and why."""

    groups: tuple[GroupInfo, ...]
    refusals: tuple[Refusal, ...]

    def __str__(self) -> str:
        rows = [
            f"{g.name}: {g.channels} channels{' (residual)' if g.residual else ''} -> {', '.join(g.consumers)}"
            for g in self.groups
        ]
        return "\n".join(rows + [f"refused {refusal}" for refusal in self.refusals])


def inspect(model: nn.Module, example_inputs: Any) -> Inspection:
    """Which channels can be removed, what reads them, and what stands in the way of the rest.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(inspect(net, torch.zeros(1, 4)))
    0: 8 channels -> 2
    refused 2: output is what the network returns
    """
    return inspect_captured(model, capture(model, example_inputs), example_inputs)


def inspect_captured(model: nn.Module, graph: Graph, example_inputs: Any) -> Inspection:
    """Everything after capture."""
    channels = analyse(model, graph, example_inputs)
    spent = node_macs(graph, as_inputs(example_inputs))
    return Inspection(tuple(_info(graph, channels, group, spent) for group in channels.groups), channels.refusals)


def _info(graph: Graph, channels: Channels, group: Group, spent: Mapping[str, int]) -> GroupInfo:
    readers = tuple(dict.fromkeys(c.node.module or c.node.name for c in group.consumers))
    costs = group_parameters(graph, group), group_macs(graph, channels, group, spent)
    return GroupInfo(group.name, group.layers, group.size, readers, group.residual, *costs)


def compress(
    model: nn.Module,
    example_inputs: Any,
    *,
    ratio: Ratio = 0.5,
    criterion: str | Criterion = "l2",
    merger: str | Merger | None = None,
    calibration: Iterable[Any] | None = None,
    scope: str = "internal",
    ignore: Iterable[str] = (),
    round_to: int = 1,
    seed: int = 0,
    verify: bool = True,
) -> Compressed:
    """Remove a share of every group's channels and merge them into the ones that stay.

    `ratio` is the share to remove, one number or patterns of layer names with numbers (later
    patterns win). `calibration` takes unlabeled batches, in whatever form a data loader yields them,
    and measures on them what is otherwise computed without data. `criterion="expected-error"` keeps
    the channels that the rest can replace least. `scope="all"` includes residual streams. The model
    itself is not changed.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> compress(net, torch.zeros(1, 4), ratio=0.5).model[0]
    Linear(in_features=4, out_features=4, bias=True)
    """
    if calibration is not None:
        if merger not in (None, "calibrated"):
            raise MergingError(
                f"calibration goes with no other merger than calibrated, got {merger!r}",
                where="calibration=",
                fix="Leave one of the two out.",
            )
        merger = Calibrated(calibration)
    settings = Settings(ratio, criterion, merger, scope, _patterns(ignore), round_to, seed)
    settings.check()
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        inputs = copied(example_inputs)  # what was made in inference mode cannot be used outside of it
        return compress_captured(model, capture(model, inputs), inputs, settings, verify=verify)


def _patterns(ignore: Any) -> tuple[str, ...]:
    listed = [ignore] if isinstance(ignore, str) or not isinstance(ignore, Iterable) else list(ignore)
    for pattern in listed:
        if not isinstance(pattern, str):
            what = f"{type(pattern).__name__} is not a pattern of layer names"
            raise MergingError(what, where="ignore=", fix='For instance ignore=["layer1.*"].')
    return tuple(listed)


@dataclass(frozen=True)
class Settings:
    """The choices of `compress`, as one value."""

    ratio: Ratio = 0.5
    criterion: str | Criterion = "l2"
    merger: str | Merger | None = None
    scope: str = "internal"
    ignore: tuple[str, ...] = ()
    round_to: int = 1
    seed: int = 0

    def method(self, graph: Graph) -> Merger:
        return mergers.default(graph) if self.merger is None else mergers.find(self.merger)

    def check(self) -> None:
        """Refuse what cannot be meant, before any work is done."""
        if self.merger is not None:
            mergers.find(self.merger)
        if self.criterion != EXPECTED_ERROR:
            criteria.find(self.criterion)
        _check_integer("round_to", self.round_to, 1)
        _check_integer("seed", self.seed, 0)
        for pattern, value in (self.ratio if isinstance(self.ratio, Mapping) else {"": self.ratio}).items():
            check_ratio(value, pattern)


def compress_captured(
    model: nn.Module, graph: Graph, example_inputs: Any, settings: Settings, *, verify: bool = True
) -> Compressed:
    """Everything after capture."""
    refused: dict[str, str] = {}
    held: dict[str, str] = {}
    while True:
        channels = analyse(model, graph, example_inputs, refused, held)
        kept, merges, plan, small = _carry_out(model, graph, channels, example_inputs, settings)
        error = None
        try:
            if verify:
                error = check(graph, channels, plan, unit_mask(channels, kept), small, example_inputs)
        except VerificationError:
            counted = sizes_used_as_numbers(graph, small, example_inputs)
            broken = {} if counted else layers_it_breaks_without(model, graph, channels, kept, example_inputs)
            if not (counted.keys() - refused.keys() or broken.keys() - held.keys()):
                raise
            refused |= counted
            held |= broken
            continue
        found = summarise(model, small, plan, channels, error, example_inputs)
        if verify and error is None:
            found = replace(found, notes=(*found.notes, "not verified: the network returns whole numbers only"))
        return Compressed(small, plan, found, merges)


@torch.no_grad()
def _carry_out(
    model: nn.Module, graph: Graph, channels: Channels, inputs: Any, settings: Settings
) -> tuple[dict[str, Vector], tuple[Merge, ...], Plan, nn.Module]:
    """Choose, merge, plan and cut."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        method = settings.method(graph)
        task = Task(graph, channels, {}, as_inputs(inputs), lambda batch: capture(model, batch))
        kept = choose(task, settings, method)
        merges = tuple(method.merge(replace(task, kept=kept)))
    plan = make_plan(model, graph, channels, kept, merges)
    return kept, merges, plan, apply_plan(model, plan, merges)


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        what = f"{name} {value!r} is not an integer of at least {least}"
        raise MergingError(what, where=f"{name}=", fix=f"For instance {name}=8.")


def choose(task: Task, settings: Settings, method: Merger) -> dict[str, Vector]:
    """The units that every participating group keeps, by the group's name."""
    channels = task.channels
    ratios = resolve(channels, settings.ratio, settings.ignore, settings.scope)
    ranked: dict[str, Order] = {}
    if settings.criterion == EXPECTED_ERROR:
        ranked = orders(task, list(ratios), method if isinstance(method, Source) else Moments())
    kept = {}
    for group in channels.groups:
        if group.name in ratios:
            scores = ranked[group.name].scores if group.name in ranked else _scores(task, group, settings)
            stay = keep(group, scores, ratios[group.name], settings.round_to)
            if len(stay) < group.size:
                kept[group.name] = stay
    if not kept:
        raise NothingToPrune(_nothing(channels, settings.ratio), fix=_remedy(channels, settings.scope))
    return kept


def _scores(task: Task, group: Group, settings: Settings) -> Vector:
    """By the filters alone; for groups of whose readers nothing is known, by their norms."""
    by = "l2" if settings.criterion == EXPECTED_ERROR else settings.criterion
    scores: Vector = score(by, unit_rows(task.graph, group)).double().cpu().numpy()
    return scores


def _nothing(channels: Channels, ratio: Ratio) -> str:
    if not channels.groups:
        reasons = "; ".join(str(refusal) for refusal in channels.refusals[:6])
        return "nothing can be removed: " + (reasons or "the network has no layer with channels of its own")
    reasons = "; ".join(str(refusal) for refusal in channels.refusals[:6])
    return f"ratio {ratio} removes nothing from the groups that take part" + (f": {reasons}" if reasons else "")


def _remedy(channels: Channels, scope: str) -> str:
    if scope == "internal" and any(group.residual for group in channels.groups):
        return 'The remaining groups are residual streams: scope="all" includes them.'
    return "inspect() lists every group and every refusal."


def summarise(
    model: nn.Module, small: nn.Module, plan: Plan, channels: Channels, error: float | None, inputs: Any
) -> Summary:
    """Before and after of a cut that was carried out."""
    notes = [f"hooks of {name} are not carried over" for name in dropped_hooks(model)]
    cut = {choice.name for choice in plan.groups}
    for group in channels.groups:
        if group.name in cut:
            notes += [
                f"{node.op} of {node.module} now takes its statistics over the kept channels" for node in group.mixing
            ]
    return Summary(
        parameters=(count_parameters(model), count_parameters(small)),
        macs=(count_macs(model, inputs), count_macs(small, inputs)),
        groups=tuple(GroupSummary(c.name, c.layers, c.size, len(c.kept), c.how, c.error) for c in plan.groups),
        refusals=channels.refusals,
        error=error,
        notes=tuple(dict.fromkeys(notes)),
    )
