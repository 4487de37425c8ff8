"""inspect: what can be removed from a network, and what cannot and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from neuron_merging.commands import result, show
from neuron_merging.commands import source as sources
from neuron_merging.commands.source import Json, Source

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.capture import Graph

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
    from neuron_merging import models, pipeline

    network, inputs = sources.network(chosen)
    with show.working("analysing"):
        graph = models.captured(network, inputs)
        found = pipeline.inspect_captured(network, graph, inputs)
        ways = _ways(network, graph, inputs)
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
    result.refusals(found.refusals)


def _ways(network: nn.Module, graph: Graph, inputs: tuple[Any, ...]) -> dict[str, str]:
    """For each group, by which methods it can be merged, and otherwise why not."""
    from neuron_merging.probe import analyse

    groups = analyse(network, graph, inputs).groups
    stored = {group.name: all(consumer.axis is not None for consumer in group.consumers) for group in groups}
    reasons = _not_by_cosine(network, graph, inputs)
    return {
        group.name: "by any method" if not why else f"by fitting; not by cosine: {why}" if stored[group.name] else why
        for group in groups
        for why in [reasons.get(group.name, "it has one channel" if group.size == 1 else "")]
    }


def _not_by_cosine(network: nn.Module, graph: Graph, inputs: tuple[Any, ...]) -> dict[str, str]:
    """Why the paper's merging does not apply to a group; empty where it does."""
    from neuron_merging.pipeline import NothingToPrune, Settings, compress_captured

    try:
        settings = Settings(merger="cosine", scope="all")
        plan = compress_captured(network, graph, inputs, settings, verify=False).plan
    except NothingToPrune:
        return {}
    told = {g.name: [how.partition(": pruned: ")[2] for how in g.how] for g in plan.groups}
    return {name: next(filter(None, whys), "") for name, whys in told.items()}
