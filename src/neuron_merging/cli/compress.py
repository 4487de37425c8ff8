"""The commands `compress` and `apply` (the same plan on other weights)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from neuron_merging.checkpoint import recipe as recipes
from neuron_merging.cli import console, result_output
from neuron_merging.cli import model_options as sources
from neuron_merging.cli.model_options import JsonFlag, ModelOptions, OptionalFlag, TextList
from neuron_merging.errors import MergingError


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """What to remove and how, each a key of a recipe; None where the flag was not given.

    Parameters
    ----------
    budget
        The way to say how small: what the result may cost, as macs=50%, params=1.2M, weights=3MB or latency=5ms; may
        be repeated. How much each layer loses is found by what that does to the network's answers.
    ratio
        For those who know why: the share of channels to remove from each group (default 0.5, without a budget).
    limits
        With a budget: what some layers may lose at most, as 'PATTERN=RATIO'; may be repeated.
    layer
        Another ratio for some layers, as 'PATTERN=RATIO'; may be repeated.
    ignore
        Layers to leave whole, as a pattern; may be repeated.
    scope
        "internal" (default) or "all": residual streams too.
    criterion
        Which channels stay: auto (default), expected-error, l1, l2, l2-gm, random, or package.module:function.
    merger
        none, cosine, linear, fold, moments, calibrated or package.module:Class, with options after a colon:
        cosine:threshold=0.2,bn=released. The default is the best that needs no data, or calibrated with --calibrate.
    round_to
        Keep a multiple of this many channels.
    uniform
        Layers that repeat keep equal numbers of channels and none gets a new bias, so that the original's
        configuration, with other numbers, describes the result (transformers' from_pretrained).
    effort
        What may be spent on inputs of our own making: fast (seconds), normal (default), best.
    seed
        For the criterion "random" and for synthetic inputs.
    calibrate
        Data to measure statistics on: a folder of images, a .npz or .safetensors file, package.module:function that
        yields batches, or NAME or NAME:PATH (digits, cifar-10, …).
    calibrate_images
        How many of them (default 512).
    output
        "module" (default) for a network of the same class, "graph" for its captured graph, which can be cut where the
        class holds a number of channels as a constant; OUT is then an .onnx or .pt2 file.
    max_loss
        In place of a ratio or a budget: the smallest network whose score is at most so much (0.01 or 1%) below the
        original's: the --metric, else the accuracy on --eval, else the fidelity of the outputs.
    eval
        Data to judge on, as for --calibrate; with labels, the accuracy before and after is given.
    metric
        A score of your own: package.module:function of a network and the batches of --eval (without --eval, of a
        network) that returns a number, the higher the better.
    require
        The least fidelity of the outputs that is acceptable, as 0.95; below, nothing is written and the exit code is 6.
    mean
        Of each channel of images in a folder or file, of pixels in 0..1, as 0.485,0.456,0.406; one number for grey.
    std
        The same for the standard deviation.
    resize
        What the short side of images in a folder becomes.
    crop
        The square that is cut out of their middle (default: the size that the network takes).
    report
        Write an HTML page into the folder too (default).
    keep_inputs
        Write the inputs that the network remembered into the folder too, as inputs.safetensors.
    overwrite
        Replace the folder if it exists.
    dry_run
        Do everything but write.
    json
        Print JSON in place of tables.
    """

    budget: TextList = None
    ratio: float | None = None
    limits: TextList = None
    max_loss: str | None = None
    layer: TextList = None
    ignore: TextList = None
    scope: str | None = None
    criterion: str | None = None
    merger: str | None = None
    round_to: int | None = None
    uniform: OptionalFlag = None
    effort: str | None = None
    seed: int | None = None
    calibrate: str | None = None
    calibrate_images: int | None = None
    output: str | None = None
    eval: str | None = None
    metric: str | None = None
    require: str | None = None
    mean: str | None = None
    std: str | None = None
    resize: int | None = None
    crop: int | None = None
    report: Annotated[bool | None, Parameter(negative="--no-report")] = None
    keep_inputs: OptionalFlag = None
    overwrite: OptionalFlag = None
    dry_run: OptionalFlag = None
    json: OptionalFlag = None

    def flags(self) -> dict[str, Any]:
        """As keys of a recipe."""
        texts = {"layer": self.layer, "budget": self.budget, "limits": self.limits}
        return {**asdict(self), **{key: recipes.parse_pairs(entries, f"--{key}") for key, entries in texts.items()}}


def compress(
    model: str,
    out: str,
    /,
    *,
    choices: CompressOptions | None = None,
    source: ModelOptions | None = None,
    recipe: str | None = None,
) -> None:
    """Remove channels, merge them into those that stay, and write a folder or a file.

    Parameters
    ----------
    model
        A built-in network's name, package.module:factory, timm:NAME, torchvision:NAME, hf:NAME_OR_FOLDER, an .onnx or
        .pt2 file, or a folder.
    out
        The folder to write, or a file: small.onnx or small.pt2.
    recipe
        A YAML file with any of these flags as keys; flags win.
    """
    flags = {"model": model, **(choices or CompressOptions()).flags(), **(source or ModelOptions()).flags()}
    keys = {} if recipe is None else recipes.read_recipe_keys(recipe)
    chosen = recipes.merge_flags(keys, flags, recipe or "")
    console.print_message("loading")
    from neuron_merging.api import OUTPUT_KINDS, analyse, compress_analysis, convert_to_graph
    from neuron_merging.checkpoint import recipe_names
    from neuron_merging.config import config_from_recipe

    recipe_names.check_recipe_file_trusted(recipe or "", keys, flags, source is not None and source.trust)
    settings = config_from_recipe(chosen)
    if chosen.output not in OUTPUT_KINDS:
        raise MergingError(
            f"unknown output {chosen.output!r}", where="--output", fix=f"Use {' or '.join(OUTPUT_KINDS)}."
        )
    if not chosen.dry_run:
        sources.check_output_target(chosen, out)
    network, inputs = sources.load_recipe_model(chosen, source)
    settings = sources.attach_data(settings, chosen, network, inputs)
    with console.show_step("compressing"):
        network, inputs = convert_to_graph(network, inputs) if chosen.output == "graph" else (network, inputs)
        analysis = analyse(network, inputs)
        small = compress_analysis(analysis, settings, pruned=True)
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
    chosen = sources.build_recipe_from_flags(model, source, merger=merger, overwrite=overwrite, json=json)
    from neuron_merging.api import analyse, compress_with_plan
    from neuron_merging.checkpoint import model_folder
    from neuron_merging.config import config_from_recipe

    settings = config_from_recipe(chosen)
    sources.check_output_target(chosen, out)
    cut = model_folder.read_plan(plan)
    network, inputs = sources.load_recipe_model(chosen, source)
    with console.show_step("compressing"):
        analysis = analyse(network, inputs)
        small = compress_with_plan(cut, analysis, settings)
    result_output.write_and_print_result(
        result_output.CompressionResult(analysis, small), result_output.fill_recipe(chosen, settings), out
    )
