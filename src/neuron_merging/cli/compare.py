"""The command `compare`: how alike two networks answer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_merging.cli import console, result_output
from neuron_merging.cli import model_options as sources
from neuron_merging.cli.model_options import JsonFlag, ModelOptions

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.checkpoint.recipe import Recipe


def compare(
    first: str,
    second: str,
    /,
    *,
    eval: str | None = None,
    other_weights: str | None = None,
    effort: str | None = None,
    seed: int = 0,
    require: str | None = None,
    source: ModelOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Measure how alike two networks answer: is this converted, quantised or pruned file still my network?

    Parameters
    ----------
    first
        The reference, as MODEL for compress. The flags --weights, --input and --arg belong to it.
    second
        The network to judge: a folder, an .onnx or .pt2 file, or a network by name, with the --arg of the first one.
    eval
        Data to compare on, as for compress. Without it, inputs are synthesised.
    other_weights
        The weights of the second network, if it is given by name.
    effort, seed
        As for compress.
    require
        The least acceptable fidelity, as 0.95 or 95%; if it is lower, the exit code is 6.
    """
    chosen = sources.build_recipe_from_flags(first, source, eval=eval, effort=effort, seed=seed, require=require)
    console.print_message("loading")
    from neuron_merging.checkpoint.recipe_names import config_from_recipe
    from neuron_merging.comparison import compare as compare_networks

    settings = config_from_recipe(chosen)
    network, inputs = _open(chosen, source)
    other, other_inputs = _open(msgspec.structs.replace(chosen, model=second, weights=other_weights), source)
    example = inputs if inputs is not None else other_inputs
    if eval is not None and not isinstance(network, str):
        settings = sources.attach_data(settings, chosen, network, example or ())
    with console.show_step("comparing"):
        found = compare_networks(
            network,
            other,
            example,
            evaluate=settings.images,
            effort=settings.effort or "normal",
            seed=settings.seed,
            require=settings.require,
            trust=source is not None and source.trust,
            progress=False,
        )
    if json:
        plain = msgspec.to_builtins(found)
        return console.print_json({**plain, "text": str(found)})
    result_output.print_fidelity(found.fidelity)
    calm = found.verdict.level == "good"
    console.print_warning(str(found)) if found.verdict.level == "warning" else console.print_verdict(
        str(found), calm=calm
    )


def _open(chosen: Recipe, source: ModelOptions | None) -> tuple[nn.Module | str, tuple[Any, ...] | None]:
    """Load a network and example inputs; a file is left to its own runtime."""
    from neuron_merging.onnx.formats import find_format

    model = chosen.model or ""
    form = find_format(model)
    if form is None:
        return sources.load_recipe_model(chosen, source)
    if chosen.input and form.make_inputs is not None and os.path.isfile(model):
        from neuron_merging.cli.model_loading import parse_shape

        return model, form.make_inputs(model, [parse_shape(text)[0] for text in chosen.input])
    return model, None
