"""report: the page about a folder, made anew."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_merging.folder.recipe import Recipe
from neuron_merging.tool.commands import result, show
from neuron_merging.tool.commands import source as sources
from neuron_merging.tool.commands.source import Folder, Json, Rebuild

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.channels.analysis import Analysis
    from neuron_merging.cutting.plan import Plan
    from neuron_merging.folder.store import Compressed
    from neuron_merging.settings import Settings

DIFFERS = "the folder’s weights are not those that merging gives: they were trained further, or made from other weights"


def report(
    out: Folder,
    /,
    *,
    to: str | None = None,
    weights: str | None = None,
    eval: str | None = None,
    calibrate: str | None = None,
    rebuild: Rebuild | None = None,
    json: Json = False,
) -> None:
    """Write the HTML page about a folder anew.

    Parameters
    ----------
    to
        The file to write (default: report.html in the folder).
    weights
        The original network's state dict, if it is not where the recipe says.
    eval
        Labelled images to give accuracies on, as NAME or NAME:PATH (default: those of the recipe).
    calibrate
        The images that the statistics were measured on, if they are not where the recipe says.
    """
    from neuron_merging import atomic
    from neuron_merging.folder import store
    from neuron_merging.pipeline import analyse
    from neuron_merging.settings import from_recipe

    if to is not None:
        atomic.check_file(to)
    chosen = _chosen(out, rebuild, {"weights": weights, "eval": eval, "calibrate": calibrate})
    small, base, inputs = sources.reopen(out, rebuild, chosen.weights)
    settings = sources.with_data(from_recipe(chosen), chosen, base, inputs)
    with show.working("cutting the original again"):
        analysis = analyse(base, inputs)
        found, known, notes = _again(store.read_plan(out), chosen, settings, analysis, small)
    made, fidelity = result.Result(analysis, found), None
    if known:
        made, fidelity = result.measured(made, settings.images, "small" if notes else "merged")
    page = result.written_page(made, chosen, fidelity, notes)
    place = store.put_page(out, page) if to is None else atomic.replace_file(to, page.encode())
    show.facts({"page": str(place)}, json)


def _chosen(out: str, rebuild: Rebuild | None, flags: dict[str, Any]) -> Recipe:
    """The folder's recipe with what the flags say otherwise."""
    from neuron_merging.folder import store
    from neuron_merging.folder.trust import KEYS, check_trusted

    kept = store.recipe_of(out)
    flags = {"model": rebuild.model if rebuild else None, **flags}
    given = {key: value for key, value in flags.items() if value is not None}
    check_trusted(kept, out, rebuild is not None and rebuild.trust, [key for key in KEYS if key not in given])
    if not kept.weights or not os.path.isfile(kept.weights):
        kept = msgspec.structs.replace(kept, weights=None)
    return msgspec.structs.replace(kept, **given)


def _again(
    plan: Plan, chosen: Recipe, settings: Settings, analysis: Analysis, small: nn.Module
) -> tuple[Compressed, bool, tuple[str, ...]]:
    """The folder's network with the merges that made it, if the original's weights are at hand."""
    from neuron_merging import pipeline
    from neuron_merging.networks.sources import is_untrained

    if chosen.weights is None and is_untrained(chosen.model or "", chosen.arg):
        show.say("the original's weights are not known: give --weights for the whole page")
        return pipeline.as_compressed(plan, analysis, small), False, ()
    again = pipeline.recut(plan, analysis, settings, judge=False)
    notes = () if _equal(again.model, small) else (DIFFERS,)
    return replace(again, model=small, plan=plan), True, notes


def _equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two networks have the same weights, up to what the order of sums does to a fit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(
        (a[k] - b[k]).norm() <= 1e-2 * b[k].norm() + 1e-6 for k in a if a[k].is_floating_point()
    )
