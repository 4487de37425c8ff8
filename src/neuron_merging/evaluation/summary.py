"""Results as values: the summary of a compression, and the inspection of what can be pruned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Group, Refusal, format_unit_count
from neuron_merging.errors import deprecated_members
from neuron_merging.evaluation.costs import Costs, count_parameters
from neuron_merging.evaluation.parameter_coverage import (
    ParameterCoverage,
    count_refusals_by_reason,
    merge_similar_refusals,
)
from neuron_merging.evaluation.verdict import Verdict
from neuron_merging.graph.copying import list_dropped_hooks
from neuron_merging.pruning.plan import ConsumerOutcome, Plan
from neuron_merging.pruning.trial_prune import find_training_failure
from neuron_merging.pruning.verify import VerificationResult


def render_html_sentence(text: str) -> str:
    """A paragraph in bold.

    >>> render_html_sentence("1 < 2")
    '<p><b>1 &lt; 2</b></p>'
    """
    return f"<p><b>{escape(text)}</b></p>" if text else ""


def render_html_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; nothing where there are no rows.

    >>> render_html_table(["group"], [["<b>"]])
    '<table><thead><tr><th>group</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    lines = [_render_cells("td", row) for row in rows]
    if not lines:
        return ""
    return f"<table><thead>{_render_cells('th', headings)}</thead><tbody>{''.join(lines)}</tbody></table>"


def _render_cells(tag: str, texts: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(text))}</{tag}>" for text in texts) + "</tr>"


@deprecated_members(said="descriptions", removed="removed_count")
@dataclass(frozen=True)
class GroupSummary:
    """Channels of one group before and after, and the outcome at each consumer layer."""

    name: str
    layers: tuple[str, ...]
    before: int
    after: int
    readers: tuple[ConsumerOutcome, ...]
    error: float | None = None

    @property
    def removed_count(self) -> int:
        """Number of channels that were removed."""
        return self.before - self.after

    @property
    def descriptions(self) -> tuple[str, ...]:
        """The outcome at each consumer layer, in words."""
        return tuple(consumer.describe(self.removed_count) for consumer in self.readers)


@dataclass(frozen=True)
class SkippedGroup:
    """A group that was requested to be cut and was not, with the reason."""

    name: str
    channels: int
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {format_unit_count(self.name, self.channels)}, {self.why}"


@dataclass(frozen=True)
class Summary:
    r"""The result of a compression: sizes before and after, group by group, and what is not prunable and why.

    `str` returns it as a text.

    Attributes
    ----------
    parameters
        Number of parameters before and after.
    macs
        MACs before and after.
    groups
        The outcome for each group.
    refusals
        Channels that are not prunable, each with the operator that prevents it.
    verified
        The result of the verification; None if it was not run.
    error
        Largest relative difference to the original with the removed channels zeroed; None if it was not measured.
    notes
        Further remarks.
    verdict
        How close the small network's outputs are to the original's; None if they were not compared.
    statistics
        Description of the data that the merges were fitted to.

    Examples
    --------
    >>> summary = nm.compress(net, torch.zeros(1, 4), merger="none", verify=False).summary
    >>> print(str(summary).partition("\n")[2])
    parameters 58 -> 30 (-48.3%)
    MACs       48 -> 24 (-50.0%)
      0: 8 -> 4 channels, 2: pruned
      kept 2: output is what the network returns
      note: offset and scale of synthetic inputs: a guess: standardised values
    """

    parameters: tuple[int, int]
    macs: tuple[int, int]
    groups: tuple[GroupSummary, ...]
    refusals: tuple[Refusal, ...]
    verified: VerificationResult | None
    notes: tuple[str, ...] = ()
    left: tuple[SkippedGroup, ...] = ()
    """Groups that are prunable, were requested to be cut, and were not."""
    verdict: Verdict | None = None
    statistics: str = ""

    @property
    def error(self) -> float | None:
        """The distance that verification measured; None if it was not run."""
        return self.verified.distance if self.verified else None

    @property
    def sizes(self) -> tuple[tuple[str, str, str, str], ...]:
        """Parameters and MACs: what, before, after and change, as texts."""
        pairs = {"parameters": self.parameters, "MACs": self.macs}
        return tuple((k, f"{a:,}", f"{b:,}", f"{b / max(a, 1) - 1:+.1%}") for k, (a, b) in pairs.items())

    def _repr_html_(self) -> str:
        """The verdict, the sizes and the groups, for notebooks."""
        groups = [(g.name, g.before, g.after, "; ".join(g.descriptions)) for g in self.groups]
        return (
            render_html_sentence(str(self.verdict or ""))
            + render_html_table(("", "before", "after", "change"), self.sizes)
            + render_html_table(("group", "before", "after", "how"), groups)
        )

    def __str__(self) -> str:
        lines = [str(self.verdict)] if self.verdict else []
        lines += [f"{what:<10} {before} -> {after} ({change})" for what, before, after, change in self.sizes]
        for group in self.groups:
            lines.append(
                f"  {group.name}: {group.before} -> {format_unit_count(group.name, group.after)}, "
                + "; ".join(group.descriptions)
            )
        lines += [f"  kept {refusal}" for refusal in merge_similar_refusals(self.refusals)]
        lines += [f"  not pruned {left}" for left in self.left]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  fitted to: {self.statistics}"] if self.statistics else []
        if self.verified and self.verified.distance is not None:
            lines.append(f"verified: {self.verified}")
        return "\n".join(lines)


@dataclass(frozen=True)
class GroupInfo:
    """One group in the result of `inspect`: its layers, its consumer layers, and the cost of its channels."""

    name: str
    layers: tuple[str, ...]
    channels: int
    consumers: tuple[str, ...]
    residual: bool
    parameters: int
    macs: int

    @property
    def readers(self) -> str:
        """The first consumer layer, and how many there are beside it."""
        more = len(self.consumers) - 1
        return ", ".join(self.consumers[:1]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, repr=False)
class Inspection:
    """What can be removed from a network, and what cannot and why. `str` returns a line a group and a count per reason.

    Attributes
    ----------
    groups
        The groups, each with its layers, number of channels, consumer layers and costs.
    refusals
        Channels that are not prunable, each with the operator that prevents it.
    account
        The number of parameters that are prunable, not prunable (with the reason), or unused.

    Examples
    --------
    >>> [(group.name, group.channels, group.parameters) for group in nm.inspect(net, torch.zeros(1, 4)).groups]
    [('0', 8, 56)]
    """

    groups: tuple[GroupInfo, ...]
    refusals: tuple[Refusal, ...]
    account: ParameterCoverage

    def __str__(self) -> str:
        rows = [
            f"{g.name}: {format_unit_count(g.name, g.channels)}{' (residual)' if g.residual else ''} -> {g.readers}"
            for g in self.groups
        ]
        counts = count_refusals_by_reason(self.refusals)
        return "\n".join([*rows, *(f"not prunable: {c.size}: {c.why}" for c in counts), self.account.headline])

    def __repr__(self) -> str:
        return f"<Inspection: {len(self.groups)} groups, {self.account.headline}>"

    def _repr_html_(self) -> str:
        """The shares, the groups, and a count per reason, for notebooks."""
        rows = [
            (g.name, g.channels, f"{g.parameters:,}", f"{g.macs:,}", "yes" if g.residual else "", g.readers)
            for g in self.groups
        ]
        counts = [(f"{c.channels:,}", f"{c.layers:,}", c.why) for c in count_refusals_by_reason(self.refusals)]
        return (
            render_html_sentence(self.account.headline)
            + render_html_table(("group", "channels", "parameters", "MACs", "residual", "read by"), rows)
            + render_html_table(("channels", "layers", "not prunable because"), counts)
        )

    def details(self) -> str:
        """The long text: every consumer layer, and each reason with the operator and the line of code."""
        rows = [
            f"{g.name}: {format_unit_count(g.name, g.channels)}{' (residual)' if g.residual else ''} -> "
            + ", ".join(g.consumers)
            for g in self.groups
        ]
        return "\n".join(
            [
                *rows,
                *(f"not prunable: {refusal}" for refusal in merge_similar_refusals(self.refusals)),
                str(self.account),
            ]
        )


def make_group_info(costs: Costs, group: Group) -> GroupInfo:
    """Describe a group; its costs are what removing all of its channels would save."""
    consumers = tuple(dict.fromkeys(c.node.module or c.node.name for c in group.consumers))
    none_kept = {group.name: 0}
    savings = costs.parameters({}) - costs.parameters(none_kept), costs.macs({}) - costs.macs(none_kept)
    return GroupInfo(group.name, group.layers, group.size, consumers, group.residual, *savings)


def summarise(
    analysis: Analysis,
    small: nn.Module,
    plan: Plan,
    verified: VerificationResult | None,
    left: Iterable[SkippedGroup] = (),
    remarks: Iterable[str] = (),
    verdict: Verdict | None = None,
    statistics: str = "",
) -> Summary:
    """Summarise a cut that was carried out; `left` and `remarks` come from the selection of channels."""
    model, channels, costs = analysis.model, analysis.channels, Costs(analysis)
    notes = [*remarks, *(f"hooks of {name} are not carried over" for name in list_dropped_hooks(model))]
    notes += [f"{name} was computed ({by}) and is stored plainly now" for name, by in analysis.folded_weights.items()]
    cut = {choice.name for choice in plan.groups}
    for group in channels.groups:
        if group.name in cut:
            notes += [
                f"{node.op} of {node.module or node.name} now takes its statistics over the kept channels"
                for node in group.norms_across_channels
            ]
    if failure := find_training_failure(analysis, plan):
        notes.append(
            f"it does not run in training mode, because layers that only training uses were not cut: {failure}"
        )
    if verified and verified.distance is None:
        notes.append(str(verified))
    return Summary(
        parameters=(count_parameters(model), count_parameters(small)),
        # From the graph, not by running `small`: so both numbers are counted in the same way.
        macs=(costs.macs({}), costs.macs({choice.name: choice.kept for choice in plan.groups})),
        groups=tuple(GroupSummary(c.name, c.layers, c.size, len(c.kept), c.readers, c.error) for c in plan.groups),
        refusals=channels.refusals,
        verified=verified,
        # A norm that several groups reach would be noted once for each.
        notes=tuple(dict.fromkeys(notes)),
        left=tuple(left),
        verdict=verdict,
        statistics=statistics,
    )
