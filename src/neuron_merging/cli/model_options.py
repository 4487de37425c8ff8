"""Define the flags that name a model or a compressed folder, and load what they name. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import msgspec
from cyclopts import Parameter

from neuron_merging.checkpoint import recipe as recipes
from neuron_merging.checkpoint.recipe import Recipe, RecipeKey
from neuron_merging.cli import console
from neuron_merging.config import BatchedMetric
from neuron_merging.config.text_values import parse_pairs
from neuron_merging.errors import MergingError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from neuron_merging.config import CompressConfig

Repeatable = Parameter(negative=(), consume_multiple=False)
TextList = Annotated[list[str] | None, Repeatable]
OptionalFlag = Annotated[bool | None, Parameter(negative=())]
"""True, or None if the flag was not given and the recipe decides."""
Flag = Annotated[bool, Parameter(negative=())]
CompressedFolder = Annotated[str, Parameter(help="A folder that compress wrote.")]
CHECKED_IMAGES = 16
"""Images on which the data are checked against the network before any work."""
JsonFlag = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON in place of tables.")]


def make_options_class(name: str, keys: Iterable[RecipeKey], **more: Any) -> Any:
    """Make a class whose fields are command-line flags for these keys, as cyclopts expects it.

    `more` are further flags: type and default by name. Flags of keys that were not given are None.
    """
    flags = [(key.name, Annotated[_choose_flag_type(key), _describe_flag(key)], None) for key in keys]
    options_class = make_dataclass(
        name,
        [*flags, *((flag, kind, default) for flag, (kind, default) in more.items())],
        frozen=True,
        kw_only=True,
        namespace={"__module__": __name__},  # cyclopts treats classes of standard modules as plain values
    )
    return Parameter(name="*")(options_class)


def _choose_flag_type(key: RecipeKey) -> Any:
    """Return the type of a flag: lists of names and mappings are repeated flags, lists of numbers one text."""
    # Numbers with commas, or a percentage: text_values parses and checks them, with better messages than cyclopts.
    if key.type in (list[float], float | str | None):
        return str | None
    return list[str] | None if get_origin(key.type) in (list, dict) else key.type | None


def _describe_flag(key: RecipeKey) -> Parameter:
    return Parameter(help=key.help, negative=f"--no-{key.name}" if key.default is True else (), consume_multiple=False)


def read_flags(options: Any) -> dict[str, Any]:
    """Return flags as keys of a recipe; None for a flag that was not given."""
    given = options if isinstance(options, dict) else vars(options) if options else {}
    pairs = {name for name in given if get_origin(recipes.RECIPE_KEYS[name].type) is dict}
    return {
        name: parse_pairs(value, f"--{name}", recipes.RECIPE_KEYS[name].lone_key) if name in pairs else value
        for name, value in given.items()
    }


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The flags that belong to MODEL.

    Parameters
    ----------
    weights
        The network's weights: .safetensors (with all its shards, or a folder of them), .pt or .pth. The state dict may
        be nested in a trainer's checkpoint.
    weights_key
        The key of the state dict in that file, for example ema or ema.module.
    input
        Shape of an example input, for example 1,3,32,32 or 2,16:int64; repeat it for several inputs.
    arg
        An argument of the network's factory, as NAME=VALUE; may be repeated.
    trust
        Allow a folder or a recipe file to import code (package.module:name); that code can do anything.
    """

    weights: str | None = None
    weights_key: str | None = None
    input: TextList = None
    arg: TextList = None
    trust: Flag = False

    def flags(self) -> dict[str, Any]:
        """Return the flags as keys of a recipe; None for a flag that was not given."""
        named = {"weights": self.weights, "weights_key": self.weights_key, "input": self.input}
        return {**named, "arg": parse_pairs(self.arg, "--arg")}


SOURCE_KEYS = {"model", *ModelOptions.__dataclass_fields__}
"""The keys of a recipe that select the network."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RebuildOptions:
    """The flags with which the network of a folder is rebuilt.

    Parameters
    ----------
    model
        The original architecture, if the folder's recipe does not name it.
    input
        Another shape of the example input, for instance with another batch size.
    arg
        An argument of the network's factory, as NAME=VALUE; may be repeated.
    trust
        Allow the folder to import code (package.module:name); that code can do anything.
    """

    model: str | None = None
    input: TextList = None
    arg: TextList = None
    trust: Flag = False


def build_recipe_from_flags(model: str, source: ModelOptions | None, **more: Any) -> Recipe:
    """Build the recipe of a network from its flags."""
    return recipes.resolve_recipe(None, {"model": model, **(source or ModelOptions()).flags(), **more})


def parse_ratio_list(text: str, flag: str) -> list[float]:
    """Parse numbers separated by commas.

    >>> parse_ratio_list("0.25,0.5", "--ratios")
    [0.25, 0.5]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise MergingError(f"{text!r} is not a list of numbers", where=flag, fix=f"Write {flag} 0.25,0.5.") from error


def load_recipe_model(chosen: Recipe, source: ModelOptions | None = None) -> tuple[nn.Module, tuple[Any, ...]]:
    """Load the network of a recipe whose MODEL came from the command line, and example inputs."""
    from neuron_merging.cli import model_loading
    from neuron_merging.models.sources import is_untrained, is_user_factory

    assert chosen.model is not None
    with console.redirect_stdout_to_stderr():
        network, inputs = model_loading.load_model(
            chosen.model,
            weights=chosen.weights,
            weights_key=chosen.weights_key,
            input=chosen.input,
            arg=chosen.arg,
            trust=(source or ModelOptions()).trust,
        )
    if chosen.weights is None and is_untrained(chosen.model, chosen.arg):
        console.print_message("no --weights were given: the network's weights are random")
    elif chosen.weights is None and is_user_factory(chosen.model):
        console.print_message(f"no --weights were given: they are random, unless {chosen.model} loads some itself")
    return network, inputs


def load_folder_models(
    out: str, rebuild: RebuildOptions | None, weights: str | None = None
) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """Load the small network of a folder, the original (with `weights` if given), and example inputs."""
    console.print_message("loading")
    from neuron_merging.checkpoint import load_folder
    from neuron_merging.checkpoint.recipe_names import check_arguments_trusted, check_recipe_trusted
    from neuron_merging.cli import model_loading
    from neuron_merging.graph.example_inputs import normalize_inputs

    options = rebuild or RebuildOptions()
    flags = {
        "model": options.model,
        "weights": weights,
        "input": options.input,
        "arg": parse_pairs(options.arg, "--arg"),
    }
    given = {k: v for k, v in flags.items() if v is not None}
    # The recipe's path of weights held where the folder was written. The original gets weights only if they are given.
    chosen = msgspec.structs.replace(load_folder.read_recipe(out), **{"weights": None, **given})
    name, trust = options.model, options.trust
    assert chosen.model is not None or name is None
    # A name on the command line is the user's own word; one from the folder may name a stranger's code.
    if name is None:
        check_recipe_trusted(chosen, out, trust, keys=("model",))
    elif options.arg is None:
        check_arguments_trusted(name, chosen.arg, out, trust)
    with console.redirect_stdout_to_stderr():
        build = (lambda: load_folder.build_or_load_network(name, chosen.arg, trust=trust)) if name else None
        small = load_folder.load(out, build=build, trust=trust)
        # `fresh` only for a network that the folder names: what the user names may come with its weights.
        base, inputs = model_loading.load_model(
            chosen.model or "", weights=weights, input=chosen.input, arg=chosen.arg, fresh=name is None, trust=trust
        )
    return small, base, normalize_inputs(inputs, base)


def check_output_target(chosen: Recipe, out: str) -> None:
    """Raise if OUT must not be written to, before any work is done."""
    from neuron_merging.checkpoint import save_folder
    from neuron_merging.onnx.formats import find_format, list_suffixes

    if chosen.output == "graph" and find_format(out) is None:
        fix = f"Name it {list_suffixes('small')}."
        raise MergingError("a graph cannot be saved as a folder, because it has no class", where=out, fix=fix)
    if find_format(out) is not None:
        save_folder.check_new_file(out, chosen.overwrite)
    else:
        save_folder.check_target_folder(out, chosen.overwrite)
    # Replacing OUT would delete an input that lies in it.
    source, target = os.path.realpath(chosen.model or ""), os.path.realpath(out)
    if os.path.exists(source) and os.path.commonpath([source, target]) == target:
        raise MergingError("OUT is the path of the input network", where=out, fix="Give another OUT.")


def attach_data(settings: CompressConfig, chosen: Recipe, net: nn.Module, inputs: tuple[Any, ...]) -> CompressConfig:
    """Return the settings with images as the network expects them; raise early if they do not fit the network."""
    from neuron_merging.cli import model_loading

    settings = _encode_texts(settings, chosen)
    norm = model_loading.find_normalisation(chosen.model or ":?", net)
    if norm is None and _is_normalisation_unknown(settings):
        console.print_message("note: pixels are normalised by ImageNet's mean and std; --mean and --std override them")
    settings = settings.adapt_data_to(inputs, norm)
    _check_calibration_batches(net, chosen.calibrate, settings.calibration)
    _check_eval_images(net, chosen.eval, settings.images)
    return settings


def _encode_texts(settings: CompressConfig, chosen: Recipe) -> CompressConfig:
    """Return the settings with tokens in place of text files, by the tokenizer that lies beside the network."""
    from neuron_merging.data.texts import EVAL_LENGTH, MAX_CALIBRATION_TEXTS, MAX_EVAL_TEXTS, TextFile
    from neuron_merging.inputs.text import TEXT_LENGTH, load_tokenizer

    given = (settings.calibration, settings.images)
    if not any(isinstance(data, TextFile) for data in given):
        return settings
    # The tokenizer lies where the network comes from.
    place = (chosen.model or "").removeprefix("hf:")
    tokenizer = load_tokenizer(place)
    fit, judge = (
        data.encode(tokenizer, length, count) if isinstance(data, TextFile) else data
        for data, length, count in zip(
            given, (TEXT_LENGTH, EVAL_LENGTH), (MAX_CALIBRATION_TEXTS, MAX_EVAL_TEXTS), strict=True
        )
    )
    metric = settings.evaluate
    evaluate = replace(metric, batches=judge) if isinstance(metric, BatchedMetric) else settings.metric or judge
    return replace(settings, calibration=fit, evaluate=evaluate)


def _is_normalisation_unknown(settings: CompressConfig) -> bool:
    """Return whether some images have no known normalisation."""
    from neuron_merging.data import Arrays, FolderImages

    given = [data for data in (settings.calibration, settings.images) if isinstance(data, Arrays | FolderImages)]
    pixels = [data for data in given if isinstance(data, FolderImages) or data.holds_pixels]
    return any(not data.mean for data in pixels)


def _check_eval_images(net: nn.Module, data: str | None, images: Any) -> None:
    from neuron_merging.data.images import BatchedDataset

    if isinstance(images, BatchedDataset):
        x, y = next(images.batches(CHECKED_IMAGES))
        _check_network_data(net, data, x, y if images.has_labels else None, images.classes)


def _check_calibration_batches(net: nn.Module, data: str | None, batches: Any) -> None:
    """Check the first calibration batch; a user's function is not called yet."""
    if isinstance(batches, list) and not isinstance(batches[0], dict):
        _check_network_data(net, data, batches[0][:CHECKED_IMAGES])


def _check_network_data(
    net: nn.Module, data: str | None, x: Tensor, labels: Tensor | None = None, classes: int = 0
) -> None:
    from neuron_merging.evaluation.fidelity import check_eval_data

    with console.redirect_stdout_to_stderr():
        notes = check_eval_data(net, (x,), labels, classes, where=str(data))
    for note in notes:
        console.print_message(f"note: {note}")
