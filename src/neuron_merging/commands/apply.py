"""apply: the cut of a plan in other weights of the same network."""

from __future__ import annotations

from neuron_merging.commands import result, show
from neuron_merging.commands import source as sources
from neuron_merging.commands.source import Json, Source, Switch


def apply(
    plan: str,
    model: str,
    out: str,
    /,
    *,
    merger: str | None = None,
    source: Source | None = None,
    overwrite: Switch = None,
    json: Json = False,
) -> None:
    """Make the same cut in other weights of the same network.

    Parameters
    ----------
    plan
        A folder that compress wrote, or its plan.json.
    model
        As for compress.
    out
        The folder to write.
    merger
        As for compress.
    overwrite
        Replace the folder if it exists.
    """
    chosen = sources.recipe(model, source, merger=merger, overwrite=overwrite, json=json)
    from neuron_merging import models, store
    from neuron_merging.apply import cut_again

    settings = chosen.settings()
    sources.check_target(chosen, out)
    cut = store.read_plan(plan)
    network, inputs = sources.network(chosen)
    with show.working("compressing"):
        graph = models.captured(network, inputs)
        method = settings.method(graph)
        small = cut_again(cut, network, graph, inputs, method)
    result.finish(result.Result(network, graph, inputs, small), result.resolved(chosen, method), out)
