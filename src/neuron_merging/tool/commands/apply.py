"""apply: the cut of a plan in other weights of the same network."""

from __future__ import annotations

from neuron_merging.tool.commands import result, show
from neuron_merging.tool.commands import source as sources
from neuron_merging.tool.commands.source import Json, Source, Switch


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
    from neuron_merging.folder import store
    from neuron_merging.pipeline import analyse, recut
    from neuron_merging.settings import from_recipe

    settings = from_recipe(chosen)
    sources.check_target(chosen, out)
    cut = store.read_plan(plan)
    network, inputs = sources.network(chosen, source)
    with show.working("compressing"):
        analysis = analyse(network, inputs)
        small = recut(cut, analysis, settings)
    result.finish(result.Result(analysis, small), result.resolved(chosen, settings), out)
