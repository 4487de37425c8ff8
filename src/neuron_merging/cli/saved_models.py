"""The commands on a folder that compress wrote: `verify`, `export` and `report`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from neuron_merging.cli import console
from neuron_merging.cli.model_options import CompressedFolder, JsonFlag, RebuildOptions, load_folder_models

if TYPE_CHECKING:
    from torch import nn
from typing import TYPE_CHECKING

import msgspec

from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.cli import model_options as sources
from neuron_merging.cli import result_output
from neuron_merging.cli.model_options import TextList

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.channels.analysis import Analysis
    from neuron_merging.checkpoint.model_folder import Compressed
    from neuron_merging.config import CompressConfig
    from neuron_merging.pruning.plan import Plan


def verify(
    out: CompressedFolder,
    /,
    *,
    against: str | None = None,
    weights: str | None = None,
    rebuild: RebuildOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Check a folder: its checksums, that it loads, and that the network computes what the plan says.

    Parameters
    ----------
    against
        The original network, to compare outputs with; weights, input and arg are for it.
    weights
        Its state dict.
    """
    from neuron_merging import api
    from neuron_merging.checkpoint import model_folder
    from neuron_merging.errors import FolderError, VerificationError

    rebuild = rebuild or RebuildOptions()
    try:
        manifest = model_folder.verify_folder(out)
    except FolderError as fault:
        if not os.path.isdir(out):
            raise
        raise VerificationError(fault.what, where=fault.where, fix=fault.fix) from fault
    small, base, inputs = load_folder_models(out, replace(rebuild, model=against or rebuild.model), weights)
    with console.show_step("comparing"):
        found = api.verify_plan(manifest.plan, api.analyse(base, inputs), small)
        more = _compare_with_original(base, small, inputs) if against else {}
    distance = "no numbers to compare" if found.distance is None else found.distance
    facts = {"files": "sums match", "distance to the zeroed network": distance, "compared": found.compared}
    console.print_facts({**facts, **more}, json)


def _compare_with_original(base: nn.Module, small: nn.Module, inputs: tuple[Any, ...]) -> dict[str, float]:
    from neuron_merging.graph.pytree import flatten_outputs
    from neuron_merging.pruning.verify import run_small_network

    pairs = zip(*(flatten_outputs(run_small_network(net, inputs)) for net in (base, small)), strict=True)
    return {"largest difference to the original": max(float((a.double() - b.double()).abs().amax()) for a, b in pairs)}


def export(
    out: CompressedFolder,
    target: str,
    /,
    *,
    dynamic: TextList = None,
    rebuild: RebuildOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Write the small network as ONNX or .pt2, for any batch size, and check the file against the module.

    Parameters
    ----------
    target
        The file to write: model.onnx or model.pt2.
    dynamic
        A further dynamic dimension, as 2, or 1:2 for dimension 2 of input 1 alone; may be
        repeated.
    """
    from neuron_merging.onnx.export import export_model as write

    small, _, inputs = load_folder_models(out, rebuild)
    with console.show_step(f"writing {target}"):
        written = write(small, inputs, target, dynamic or ())
    console.print_facts(written.facts(), json)


WEIGHTS_DIFFER_NOTE = (
    "the folder’s weights differ from the merged ones: they were fine-tuned, or made from other weights"
)


def report(
    out: CompressedFolder,
    /,
    *,
    to: str | None = None,
    weights: str | None = None,
    eval: str | None = None,
    calibrate: str | None = None,
    rebuild: RebuildOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Write the HTML page of a folder again.

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
    from neuron_merging.api import analyse
    from neuron_merging.checkpoint import model_folder
    from neuron_merging.config import config_from_recipe

    if to is not None:
        atomic.check_output_file(to)
    chosen = _resolve_recipe(out, rebuild, {"weights": weights, "eval": eval, "calibrate": calibrate})
    small, base, inputs = sources.load_folder_models(out, rebuild, chosen.weights)
    settings = sources.attach_data(config_from_recipe(chosen), chosen, base, inputs)
    with console.show_step("compressing the original again"):
        analysis = analyse(base, inputs)
        found, known, notes = _repeat_compression(model_folder.read_plan(out), chosen, settings, analysis, small)
    made, fidelity = result_output.CompressionResult(analysis, found), None
    if known:
        made, fidelity = result_output.measure_result(made, settings.images, "small" if notes else "merged")
    page = result_output.render_result_page(made, chosen, fidelity, notes)
    place = model_folder.write_report_page(out, page) if to is None else atomic.replace_file(to, page.encode())
    console.print_facts({"page": str(place)}, json)


def _resolve_recipe(out: str, rebuild: RebuildOptions | None, flags: dict[str, Any]) -> Recipe:
    """The folder's recipe with what the flags say otherwise."""
    from neuron_merging.checkpoint import model_folder
    from neuron_merging.checkpoint.recipe_names import CODE_KEYS, check_recipe_trusted

    kept = model_folder.read_recipe(out)
    flags = {"model": rebuild.model if rebuild else None, **flags}
    given = {key: value for key, value in flags.items() if value is not None}
    check_recipe_trusted(
        kept, out, rebuild is not None and rebuild.trust, [key for key in CODE_KEYS if key not in given]
    )
    if not kept.weights or not os.path.isfile(kept.weights):
        kept = msgspec.structs.replace(kept, weights=None)
    return msgspec.structs.replace(kept, **given)


def _repeat_compression(
    plan: Plan, chosen: Recipe, settings: CompressConfig, analysis: Analysis, small: nn.Module
) -> tuple[Compressed, bool, tuple[str, ...]]:
    """The folder's network with the merges that made it, if the original's weights are at hand."""
    from neuron_merging import api
    from neuron_merging.models.sources import is_untrained

    if chosen.weights is None and is_untrained(chosen.model or "", chosen.arg):
        console.print_message("the original's weights are not known: give --weights for the whole page")
        return api.build_compressed(plan, analysis, small), False, ()
    again = api.compress_with_plan(plan, analysis, settings, judge=False)
    notes = () if _has_equal_weights(again.model, small) else (WEIGHTS_DIFFER_NOTE,)
    return replace(again, model=small, plan=plan), True, notes


def _has_equal_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether two networks have the same weights, up to what the order of sums does to a fit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(
        (a[k] - b[k]).norm() <= 1e-2 * b[k].norm() + 1e-6 for k in a if a[k].is_floating_point()
    )
