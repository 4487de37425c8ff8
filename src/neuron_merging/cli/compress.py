"""The commands `compress` and `apply` (the same plan on other weights)."""

from __future__ import annotations

from typing import Any

from neuron_merging.atomic import check_free_space
from neuron_merging.checkpoint import recipe as recipes
from neuron_merging.cli import console, result_output
from neuron_merging.cli import model_options as sources
from neuron_merging.cli.model_options import (
    SOURCE_KEYS,
    JsonFlag,
    ModelOptions,
    OptionalFlag,
    make_options_class,
    read_flags,
)

CompressOptions: Any = make_options_class(
    "CompressOptions", [key for name, key in recipes.RECIPE_KEYS.items() if name not in SOURCE_KEYS]
)
"""The flags of compress, one per key of a recipe; None for a flag that was not given."""


def compress(
    model: str,
    out: str,
    /,
    *,
    choices: CompressOptions | None = None,
    source: ModelOptions | None = None,
    recipe: str | None = None,
) -> None:
    """Remove channels, merge them into the kept ones, and write a folder or a file.

    Parameters
    ----------
    model
        A built-in network's name, package.module:factory, timm:NAME, torchvision:NAME, hf:NAME_OR_FOLDER, an .onnx or
        .pt2 file, or a folder.
    out
        The folder to write, or a file: small.onnx or small.pt2.
    recipe
        A YAML file with any of these flags as keys. Flags on the command line take precedence.
    """
    flags = {"model": model, **read_flags(choices), **(source or ModelOptions()).flags()}
    keys = {} if recipe is None else recipes.read_recipe_keys(recipe)
    chosen = recipes.merge_flags(keys, flags, recipe or "")
    # Flags and recipe were checked without torch, whose import takes seconds: mistakes are answered at once.
    console.print_message("loading")
    from neuron_merging.api import analyse, convert_to_graph
    from neuron_merging.checkpoint.recipe_names import check_recipe_file_trusted, config_from_recipe
    from neuron_merging.onnx.export import check_int8_target
    from neuron_merging.pipeline import compress_analysis

    check_recipe_file_trusted(recipe or "", keys, flags, source is not None and source.trust)
    settings = config_from_recipe(chosen)
    if not chosen.dry_run:
        # Now, because a target that cannot be written would be noticed only after all the work.
        sources.check_output_target(chosen, out)
    if settings.int8:
        check_int8_target(out)
    network, inputs = sources.load_recipe_model(chosen, source)
    if not chosen.dry_run:
        # Only now is the size of the network known.
        check_free_space(out, network)
    settings = sources.attach_data(settings, chosen, network, inputs)
    with console.show_step("compressing"):
        network, inputs = convert_to_graph(network, inputs) if settings.output == "graph" else (network, inputs)
        analysis = analyse(network, inputs)
        small = compress_analysis(analysis, settings, compare_pruned=True)
    result_output.write_and_print_result(
        result_output.CompressionResult(analysis, small), result_output.fill_recipe(chosen, settings), out
    )


def apply(
    plan: str,
    model: str,
    out: str,
    /,
    *,
    merger: str | None = None,
    source: ModelOptions | None = None,
    overwrite: OptionalFlag = None,
    json: JsonFlag = False,
) -> None:
    """Cut other weights of the same network by the same plan.

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
    chosen = sources.build_recipe_from_flags(model, source, merger=merger, overwrite=overwrite, json=json)
    from neuron_merging.api import analyse
    from neuron_merging.checkpoint import load_folder
    from neuron_merging.checkpoint.recipe_names import config_from_recipe
    from neuron_merging.pipeline import compress_with_plan

    settings = config_from_recipe(chosen)
    sources.check_output_target(chosen, out)
    pruning_plan = load_folder.read_plan(plan)
    network, inputs = sources.load_recipe_model(chosen, source)
    check_free_space(out, network)
    with console.show_step("compressing"):
        analysis = analyse(network, inputs)
        small = compress_with_plan(pruning_plan, analysis, settings)
    result_output.write_and_print_result(
        result_output.CompressionResult(analysis, small), result_output.fill_recipe(chosen, settings), out
    )
