"""Recipe: the settings of `neuron-merging compress` as one value that converts to YAML and back. Does not import torch.

Each option of `compress` is a key, taken from its field in `CompressConfig`. The other keys are defined here: the
network, the data by name, and how the command runs. Each key is also a flag of the same name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import yaml
from msgspec import Meta

from neuron_merging.config import list_options
from neuron_merging.config.text_values import (
    MAX_RECIPE_BYTES,
    convert_value,
    format_location,
    parse_yaml,
    truncate_repr,
)
from neuron_merging.errors import RecipeError, suggest_names
from neuron_merging.graph.user_code import is_code_reference, split_reference

DATASETS_NAMED_LIKE_MODULES = ("digits", "imagenet")
"""Data sets whose names are also valid names of Python modules: `digits:PATH` is a path, not code."""
ALONE: dict[str, Any] = {"sweep": False}
"""Marks keys that the cells of a sweep cannot share."""
RUN_ONLY: dict[str, Any] = {"sweep": False, "run_only": True}
"""Marks keys that affect how the command runs, not its result: they are read but not saved."""


class _SourceKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that name the network."""

    model: str | None = None
    weights: str | None = None
    weights_key: str | None = None
    input: list[str] = []
    arg: dict[str, Any] = {}


_OptionKeys: Any = msgspec.defstruct(
    "_OptionKeys",
    [
        (
            entry.name,
            Annotated[
                entry.text_type,
                Meta(
                    description=entry.about.flag_help or entry.about.help,
                    extra={
                        "sweep": entry.about.sweep,
                        "lone_key": entry.about.lone_key,
                        "always_reported": entry.about.always_reported,
                    },
                ),
            ],
            entry.text_default,
        )
        for entry in list_options()
        if entry.about.in_texts
    ],
    bases=(_SourceKeys,),
    namespace={"__doc__": "The options of `compress`."},
    frozen=True,
    kw_only=True,
)


class Recipe(_OptionKeys, frozen=True, kw_only=True):  # type: ignore[misc, call-arg]
    """The settings of `neuron-merging compress`; each field is a flag of the same name."""

    layer: Annotated[
        dict[str, float],
        Meta(description="Another ratio for some layers, as 'PATTERN=RATIO'; may be repeated.", extra=ALONE),
    ] = {}
    calibrate: Annotated[
        str | None,
        Meta(
            description="Data to measure statistics on: a folder of images, a .npz or .safetensors file, a .txt "
            "file for a language model, package.module:function that yields batches, or NAME or NAME:PATH (digits, "
            "cifar-10, …)."
        ),
    ] = None
    calibrate_images: Annotated[int, Meta(description="How many of them (default 512).")] = 512
    eval: Annotated[
        str | None,
        Meta(
            description="Data to judge on, as for --calibrate; with labels, the accuracy before and after is given, "
            "and it is the score of a sweep."
        ),
    ] = None
    metric: Annotated[
        str | None,
        Meta(
            description="A score of your own: package.module:function of a network and the batches of --eval (without "
            "--eval, of a network) that returns a number, the higher the better."
        ),
    ] = None
    mean: Annotated[
        list[float],
        Meta(
            description="The mean of each channel of images in a folder or file, of pixels in 0..1, as "
            "0.485,0.456,0.406; one number for grey."
        ),
    ] = []
    std: Annotated[list[float], Meta(description="The same for the standard deviation.")] = []
    resize: Annotated[int | None, Meta(description="What the short side of images in a folder becomes.")] = None
    crop: Annotated[
        int | None,
        Meta(description="The square that is cut out of their middle (default: the size that the network takes)."),
    ] = None
    bgr: Annotated[
        bool,
        Meta(description="The network takes images of a folder in the order blue, green, red, as OpenCV reads them."),
    ] = False
    layout: Annotated[
        str | None,
        Meta(
            description="How the network takes images of a folder: NCHW or NHWC (default: what the shape of its input "
            "says)."
        ),
    ] = None
    report: Annotated[bool, Meta(description="Write an HTML page into the folder too (default).", extra=RUN_ONLY)] = (
        True
    )
    page: Annotated[
        str | None,
        Meta(
            description="Also write the HTML page to this file: where OUT is a file, there is no folder for it.",
            extra=RUN_ONLY,
        ),
    ] = None
    keep_inputs: Annotated[
        bool,
        Meta(
            description="Write the synthesised inputs into the folder too, as inputs.safetensors.",
            extra=RUN_ONLY,
        ),
    ] = False
    dry_run: Annotated[bool, Meta(description="Do everything but write.", extra=RUN_ONLY)] = False
    json: Annotated[bool, Meta(description="Print JSON in place of tables.", extra=RUN_ONLY)] = False
    overwrite: Annotated[bool, Meta(description="Replace the folder if it exists.", extra=RUN_ONLY)] = False

    def to_yaml(self) -> str:
        """Convert to YAML: all keys that affect the result, defaults included.

        >>> build_recipe(yaml.safe_load(Recipe(ratio=0.3).to_yaml())).ratio
        0.3
        """
        kept = {key: value for key, value in msgspec.structs.asdict(self).items() if not RECIPE_KEYS[key].run_only}
        return str(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))

    def with_absolute_paths(self) -> Recipe:
        """Return the recipe with absolute paths, which are valid from any working directory."""
        paths = {key: _make_absolute(getattr(self, key)) for key in ("model", "weights")}
        data = {key: _make_data_absolute(getattr(self, key)) for key in ("calibrate", "eval")}
        return msgspec.structs.replace(self, **paths, **data)


@dataclass(frozen=True)
class RecipeKey:
    """A key of recipes, which is also a flag of the command line."""

    name: str
    type: Any
    default: Any
    help: str = ""
    sweep: bool | str = True
    """Whether all cells of a sweep can share the key; a text describes the values that a sweep goes through."""
    lone_key: str = ""
    """For a mapping: the key that a plain value belongs to."""
    run_only: bool = False
    """Whether the key affects only how the command runs; it is not saved then."""
    always_reported: bool = False
    """Whether reports show the key even at its default."""


def list_recipe_keys(recipe: type[msgspec.Struct] = Recipe) -> dict[str, RecipeKey]:
    """Return all keys of a recipe, by name."""
    hints, empty = get_type_hints(recipe, include_extras=True), recipe()
    return {name: _make_recipe_key(name, hints[name], getattr(empty, name)) for name in recipe.__struct_fields__}


def _make_recipe_key(name: str, hint: Any, default: Any) -> RecipeKey:
    kind, meta = (get_args(hint)[0], get_args(hint)[1]) if hasattr(hint, "__metadata__") else (hint, Meta())
    return RecipeKey(name, kind, default, meta.description or "", **(meta.extra or {}))


RECIPE_KEYS = list_recipe_keys()


def _make_absolute(path: str | None) -> str | None:
    return os.path.abspath(path) if path and os.path.exists(path) else path


def _make_data_absolute(text: str | None) -> str | None:
    """Make the path in PATH or NAME:PATH absolute; a function or a bare name stays."""
    if text is None or is_code_reference(text, DATASETS_NAMED_LIKE_MODULES):
        return text
    name, path = split_reference(text)
    # A path may contain a colon: it is NAME:PATH only if no file has the entire name.
    here = _make_absolute(os.path.expanduser(text))
    return f"{name}:{os.path.abspath(os.path.expanduser(path))}" if path and here == text else here


def resolve_recipe(file: str | Path | None, flags: Mapping[str, Any]) -> Recipe:
    """Build the recipe of a file, if any; flags that are not None override its keys."""
    return merge_flags({} if file is None else read_recipe_keys(file), flags, str(file or ""))


def read_recipe_keys(file: str | Path) -> dict[str, Any]:
    """Read the keys of a YAML file."""
    try:
        with open(file, "rb") as stream:  # one byte beyond the limit, so that the parser can refuse the file
            return parse_recipe_keys(stream.read(MAX_RECIPE_BYTES + 1), str(file))
    except OSError as error:
        raise RecipeError(f"the recipe cannot be read: {error}", fix="Give a YAML file.") from error


def parse_recipe_keys(text: str | bytes, where: str = "recipe") -> dict[str, Any]:
    """Parse the keys of a YAML text."""
    keys = parse_yaml(text, where)
    if not isinstance(keys, dict | None):
        raise RecipeError(f"expected keys and values, got {type(keys).__name__}", where=where, fix="Write ratio: 0.5")
    return keys or {}


def merge_flags(keys: Mapping[str, Any], flags: Mapping[str, Any], where: str = "") -> Recipe:
    """Build the recipe of a file's keys; flags that are not None override them."""
    return build_recipe({**keys, **{k: v for k, v in flags.items() if v is not None}}, where)


def build_recipe(keys: Mapping[Any, Any], where: str = "") -> Recipe:
    """Build and check a recipe; an error names the key and the nearest valid one."""
    for key in keys:
        if key not in RECIPE_KEYS:
            raise RecipeError(
                f"unknown key {truncate_repr(key)}",
                where=format_location(where, str(key)[:80]),
                fix=suggest_names(str(key), RECIPE_KEYS),
            )
    return Recipe(**{key: _convert_key(RECIPE_KEYS[key], value, where) for key, value in keys.items()})


def _convert_key(key: RecipeKey, value: Any, where: str) -> Any:
    # `budget: 50%` is short for `budget: {macs: 50%}`.
    if key.lone_key and isinstance(value, str | int | float):
        value = {key.lone_key: value}
    return convert_value(value, key.type, where, key.name)
