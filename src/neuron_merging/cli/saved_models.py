"""The commands on a folder that compress wrote: `verify`, `export` and `report`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.cli import console, result_output
from neuron_merging.cli import model_options as sources
from neuron_merging.cli.model_options import CompressedFolder, JsonFlag, RebuildOptions, TextList, load_folder_models

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.channels.analysis import Analysis
    from neuron_merging.checkpoint.compressed import Compressed
    from neuron_merging.checkpoint.manifest import StoredFigures
    from neuron_merging.config import CompressConfig
    from neuron_merging.onnx.quantize import Int8Network
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
    """Check a folder: its checksums, that it loads, and that the network implements the plan.

    Parameters
    ----------
    against
        The original network, to compare the outputs with; weights, input and arg apply to it.
    weights
        The state dict of the original network.
    """
    from neuron_merging import api, pipeline
    from neuron_merging.checkpoint import load_folder
    from neuron_merging.errors import FolderError, VerificationError

    rebuild = rebuild or RebuildOptions()
    try:
        manifest = load_folder.verify_folder(out)
    except FolderError as fault:
        # A damaged folder fails the verification and gets its exit code; a wrong path is a mistake of the call.
        if not os.path.isdir(out):
            raise
        raise VerificationError(fault.what, where=fault.where, fix=fault.fix) from fault
    small, base, inputs = load_folder_models(out, replace(rebuild, model=against or rebuild.model), weights)
    with console.show_step("comparing"):
        found = pipeline.verify_plan(manifest.plan, api.analyse(base, inputs), small)
        more = _compare_with_original(base, small, inputs) if against else {}
    distance = "no floating-point outputs to compare" if found.distance is None else found.distance
    facts = {"files": "checksums match", "distance to the zeroed network": distance, "compared": found.comparison}
    console.print_facts({**facts, **more}, json)


def _compare_with_original(base: nn.Module, small: nn.Module, inputs: tuple[Any, ...]) -> dict[str, float]:
    from neuron_merging.graph.example_inputs import flatten_outputs
    from neuron_merging.pruning.verify import run_small_network

    pairs = zip(*(flatten_outputs(run_small_network(net, inputs)) for net in (base, small)), strict=True)
    return {"largest difference to the original": max(float((a.double() - b.double()).abs().amax()) for a, b in pairs)}


def export(
    out: CompressedFolder,
    target: str,
    /,
    *,
    dynamic: TextList = None,
    int8: bool = False,
    int8_loss: float | None = None,
    calibrate: str | None = None,
    overwrite: bool = False,
    rebuild: RebuildOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Write the small network as ONNX or .pt2, for any batch size, and check the file against the module.

    Parameters
    ----------
    target
        The file to write: model.onnx or model.pt2.
    dynamic
        A further dynamic dimension: 2, or 1:2 for dimension 2 of input 1 only; may be repeated.
    int8
        Quantise the network to int8 with onnxruntime, calibrated on synthesised inputs.
    int8_loss
        The largest change of the outputs by int8, as a share of their variance (0.02); above it, the layers that lose
        most stay in float.
    calibrate
        With --int8: images or batches to calibrate on, as for compress.
    overwrite
        Replace the file if it exists.
    """
    from neuron_merging.checkpoint.save_folder import check_new_file
    from neuron_merging.onnx.export import export_model as write

    check_new_file(target, overwrite)
    small, _, inputs = load_folder_models(out, rebuild)
    if int8:
        with console.show_step(f"quantising and writing {target}"):
            made = _write_int8(small, inputs, target, int8_loss, calibrate, overwrite)
        console.print_facts({"file": target, **made.facts()}, json)
        return
    with console.show_step(f"writing {target}"):
        written = write(small, inputs, target, dynamic or ())
    console.print_facts(written.facts(), json)


def _write_int8(
    small: nn.Module, inputs: tuple[Any, ...], target: str, loss: float | None, calibrate: str | None, overwrite: bool
) -> Int8Network:
    from neuron_merging.api import quantize
    from neuron_merging.data.open_data import open_batches

    data: Any = None if calibrate is None else open_batches(calibrate, "train")
    return quantize(small, target, inputs, calibration=data, int8_loss=loss, overwrite=overwrite)


WEIGHTS_DIFFER_NOTE = (
    "the folder’s weights differ from the merged ones: they were fine-tuned or come from other weights"
)


def report(
    out: CompressedFolder,
    /,
    *,
    to: str | None = None,
    eval: str | None = None,
    weights: str | None = None,
    calibrate: str | None = None,
    rebuild: RebuildOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Write the HTML page about a folder, from the figures that the folder stores.

    With --eval, --model, --weights or --calibrate, the network is evaluated again for the page, which needs the
    original network. So does a folder without figures, as older versions wrote it. The folder's figures do not change.

    Parameters
    ----------
    to
        The file to write (default: report.html in the folder).
    eval
        Data to evaluate on, as for compress.
    weights
        The original network's state dict, if it is not at the path in the recipe.
    calibrate
        For a folder without figures: the calibration images, if they are not at the path in the recipe.
    """
    from neuron_merging import atomic
    from neuron_merging.checkpoint import load_folder, save_folder

    # First, because measuring may take minutes.
    if to is not None:
        atomic.check_output_file(to)
    stored, recipe = load_folder.read_figures(out)
    # Stored figures are shown as they are. Only other data, weights or code are a reason to measure again.
    changed = any((eval, weights, calibrate, rebuild and rebuild.model))
    if stored is None:
        console.print_message("the folder stores no figures: measuring them with the original network")
    if stored is None or changed:
        recipe = _resolve_recipe(out, rebuild, {"weights": weights, "eval": eval, "calibrate": calibrate})
        stored = _measure_stored_figures(out, recipe, rebuild, stored)
    page = _render_page(stored, recipe, out)
    place = save_folder.write_report_page(out, page) if to is None else atomic.replace_file(to, page.encode())
    console.print_facts({"page": str(place)}, json)


def _render_page(stored: StoredFigures, recipe: Recipe, out: str) -> str:
    """Render the page from figures that may come from an untrusted folder; raise if they are damaged."""
    from jinja2 import TemplateError

    from neuron_merging.errors import FolderError, describe_error

    try:
        return result_output.render_stored_page(stored, recipe)
    except (ArithmeticError, LookupError, TypeError, ValueError, TemplateError, msgspec.MsgspecError) as error:
        what = f"the figures are damaged: {describe_error(error)}"
        raise FolderError(what, where=out, fix="Take the folder from its source again.") from error


def _measure_stored_figures(
    out: str, chosen: Recipe, rebuild: RebuildOptions | None, known: StoredFigures | None
) -> StoredFigures:
    """Evaluate a folder again with the original network; `known` figures that this does not measure are kept."""
    from neuron_merging.api import analyse
    from neuron_merging.checkpoint import load_folder, save_folder
    from neuron_merging.checkpoint.compressed import Compressed
    from neuron_merging.checkpoint.recipe_names import config_from_recipe
    from neuron_merging.pipeline import open_eval_set
    from neuron_merging.pruning.trial_prune import resolve_kept_units
    from neuron_merging.report.html_page import replace_judgement
    from neuron_merging.selection.judge import judge_network

    small, base, inputs = sources.load_folder_models(out, rebuild, chosen.weights)
    settings = sources.attach_data(config_from_recipe(chosen), chosen, base, inputs)
    plan, has_weights = load_folder.read_plan(out), _has_original_weights(chosen)
    with console.show_step("cutting the original again"):
        analysis = analyse(base, inputs)
        resolve_kept_units(plan, analysis.channels)  # the plan may come from an untrusted folder
        if known is None:
            compressed, notes = _repeat_compression(plan, settings, analysis, small, has_weights)
        else:
            compressed, notes = Compressed(small, plan, known.figures.summary, figures=known.figures), ()
    verdict = compressed.summary.verdict
    if has_weights:
        with console.show_step("comparing"):
            judged = judge_network(
                analysis,
                small,
                plan,
                open_eval_set(analysis, settings),
                compare_pruned=True,
                request=verdict.request if verdict else settings.describe_request(),
                name="small" if WEIGHTS_DIFFER_NOTE in notes else "merged",
            )
            compressed = replace_judgement(compressed, analysis, judged)
    stored = save_folder.build_stored_figures(compressed, chosen, notes=notes)
    assert stored is not None
    return stored if known is None else msgspec.structs.replace(known, figures=stored.figures)


def _has_original_weights(chosen: Recipe) -> bool:
    from neuron_merging.models.sources import is_untrained

    if chosen.weights is not None or not is_untrained(chosen.model or "", chosen.arg):
        return True
    console.print_message("the original's weights are unknown: give --weights for the complete page")
    return False


def _resolve_recipe(out: str, rebuild: RebuildOptions | None, flags: dict[str, Any]) -> Recipe:
    """Return the folder's recipe with the flags that override it."""
    from neuron_merging.checkpoint import load_folder
    from neuron_merging.checkpoint.recipe_names import CODE_KEYS, check_recipe_trusted

    recipe = load_folder.read_recipe(out)
    flags = {"model": rebuild.model if rebuild else None, **flags}
    given = {key: value for key, value in flags.items() if value is not None}
    # Only what still comes from the folder has to be trusted.
    check_recipe_trusted(
        recipe, out, rebuild is not None and rebuild.trust, [key for key in CODE_KEYS if key not in given]
    )
    # The path was right where the folder was written; it need not exist here.
    if not recipe.weights or not os.path.isfile(recipe.weights):
        recipe = msgspec.structs.replace(recipe, weights=None)
    return msgspec.structs.replace(recipe, **given)


def _repeat_compression(
    plan: Plan, settings: CompressConfig, analysis: Analysis, small: nn.Module, has_weights: bool
) -> tuple[Compressed, tuple[str, ...]]:
    """Return the folder's network; repeat the merges if the original's weights are available."""
    from neuron_merging import pipeline
    from neuron_merging.evaluation.figures import collect_figures

    if not has_weights:
        compressed = pipeline.build_compressed(plan, analysis, small)
        return replace(compressed, figures=collect_figures(analysis, small, plan, compressed.summary, None)), ()
    repeated = pipeline.compress_with_plan(plan, analysis, settings, judge=False)
    notes = () if _has_equal_weights(repeated.model, small) else (WEIGHTS_DIFFER_NOTE,)
    return replace(repeated, model=small, plan=plan), notes


def _has_equal_weights(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two networks have the same weights up to rounding in the least-squares fit."""
    a, b = one.state_dict(), other.state_dict()
    # Least squares amplifies the rounding of sums, which depends on the thread count: allow 1 % of the norm.
    return a.keys() == b.keys() and all(
        (a[k] - b[k]).norm() <= 1e-2 * b[k].norm() + 1e-6 for k in a if a[k].is_floating_point()
    )
