"""What became of a network, and what could become of it: as values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Group, Refusal
from neuron_merging.cutting.plan import Plan, Reader
from neuron_merging.graph.copying import dropped_hooks
from neuron_merging.measuring.size import Costs, count_parameters


@dataclass(frozen=True)
class GroupSummary:
    """What became of one group of channels."""

    name: str
    layers: tuple[str, ...]
    before: int
    after: int
    readers: tuple[Reader, ...]
    error: float | None = None

    @property
    def removed(self) -> int:
        return self.before - self.after

    @property
    def said(self) -> tuple[str, ...]:
        """What each reader made of it, in words."""
        return tuple(reader.said(self.removed) for reader in self.readers)


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
            lines.append(f"  {group.name}: {group.before} -> {group.after} channels, {'; '.join(group.said)}")
        lines += [f"  kept {refusal}" for refusal in self.refusals]
        lines += [f"  note: {note}" for note in self.notes]
        if self.error is not None:
            lines.append(f"verified: equals the original with removed channels zeroed within {self.error:.1e}")
        return "\n".join(lines)


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


def group_info(costs: Costs, group: Group) -> GroupInfo:
    """A group, with what would go if all of it went."""
    readers = tuple(dict.fromkeys(c.node.module or c.node.name for c in group.consumers))
    gone = {group.name: 0}
    spared = costs.parameters({}) - costs.parameters(gone), costs.macs({}) - costs.macs(gone)
    return GroupInfo(group.name, group.layers, group.size, readers, group.residual, *spared)


def summarise(analysis: Analysis, small: nn.Module, plan: Plan, error: float | None) -> Summary:
    """Before and after of a cut that was carried out."""
    model, channels, costs = analysis.model, analysis.channels, Costs(analysis)
    notes = [f"hooks of {name} are not carried over" for name in dropped_hooks(model)]
    cut = {choice.name for choice in plan.groups}
    for group in channels.groups:
        if group.name in cut:
            notes += [
                f"{node.op} of {node.module} now takes its statistics over the kept channels" for node in group.mixing
            ]
    return Summary(
        parameters=(count_parameters(model), count_parameters(small)),
        macs=(costs.macs({}), costs.macs({choice.name: choice.kept for choice in plan.groups})),
        groups=tuple(GroupSummary(c.name, c.layers, c.size, len(c.kept), c.readers, c.error) for c in plan.groups),
        refusals=channels.refusals,
        error=error,
        notes=tuple(dict.fromkeys(notes)),
    )
