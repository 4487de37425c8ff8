"""inspect: what can be removed from a network, and what cannot and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from neuron_merging.tool.commands import result, show
from neuron_merging.tool.commands import source as sources
from neuron_merging.tool.commands.source import Json, Source

if TYPE_CHECKING:
    from neuron_merging.channels.analysis import Analysis

COLUMNS = ("group", "channels", "parameters", "MACs", "residual", "read by", "can be merged")


def inspect(model: str, /, *, source: Source | None = None, json: Json = False) -> None:
    """List the groups of channels that can be removed, and what stands in the way of the rest.

    Parameters
    ----------
    model
        As for compress.
    """
    chosen = sources.recipe(model, source)
    show.say("loading")
    from neuron_merging import pipeline
    from neuron_merging.measuring.accounting import gathered

    network, inputs = sources.network(chosen, source)
    with show.working("analysing"):
        analysis = pipeline.analyse(network, inputs)
        found = pipeline.inspect(analysis)
        ways = _ways(analysis)
    if json:
        return show.json({**msgspec.to_builtins(found), "merging": ways})
    rows = [
        (
            g.name,
            g.channels,
            f"{g.parameters:,}",
            f"{g.macs:,}",
            "yes" if g.residual else "",
            ", ".join(g.consumers),
            ways[g.name],
        )
        for g in found.groups
    ]
    show.table("Groups", COLUMNS, rows)
    result.refusals(gathered(found.refusals))
    account = found.account
    parts = [(what, f"{account.share(count):.1%}", f"{count:,}", text) for what, count, text in account.lines]
    show.table("Parameters", ("", "share", "parameters", ""), [*parts, ("", "100.0%", f"{account.parameters:,}", "")])


def _ways(analysis: Analysis) -> dict[str, str]:
    """For each group, by which methods it can be merged, and otherwise why not."""
    groups = analysis.channels.groups
    stored = {group.name: all(consumer.axis is not None for consumer in group.consumers) for group in groups}
    reasons = _not_by_cosine(analysis)
    return {
        group.name: "by any method" if not why else f"by fitting; not by cosine: {why}" if stored[group.name] else why
        for group in groups
        for why in [reasons.get(group.name, "it has one channel" if group.size == 1 else "")]
    }


def _not_by_cosine(analysis: Analysis) -> dict[str, str]:
    """Why the paper's merging does not apply to a group; empty where it does."""
    from neuron_merging.errors import NothingToPrune
    from neuron_merging.pipeline import compress_analysed
    from neuron_merging.settings import Settings

    try:
        merged = compress_analysed(analysis, Settings(merger="cosine", scope="all"), verify=False, judge=False).merged
    except NothingToPrune:
        return {}
    found: dict[str, str] = {}
    for merge in merged.merges:
        if merge.reason is not None:
            found.setdefault(merge.group, str(merge.reason))
    return found
