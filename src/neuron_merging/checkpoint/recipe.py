"""Recipe: every option of `compress` as one value that goes to YAML and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import yaml

from neuron_merging.errors import RecipeError, suggest_names
from neuron_merging.graph.user_code import is_code_reference, split_reference

DATASETS_NAMED_LIKE_MODULES = ("digits", "imagenet")
"""Data sets whose names could be those of modules."""
RUN_ONLY_KEYS = ("report", "keep_inputs", "dry_run", "json", "overwrite")
"""Keys that say how the command ran, not what it made: they are read but not saved."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What `neuron-merging compress` was asked for; each field is a flag of the same name."""

    model: str | None = None
    weights: str | None = None
    weights_key: str | None = None
    input: list[str] = []
    arg: dict[str, Any] = {}
    ratio: float | None = None
    layer: dict[str, float] = {}
    budget: dict[str, float | str] = {}
    limits: dict[str, float] = {}
    max_loss: float | str | None = None
    ignore: list[str] = []
    scope: str = "internal"
    criterion: str = "auto"
    merger: str | None = None
    round_to: int = 1
    uniform: bool = False
    effort: str | None = None
    seed: int = 0
    calibrate: str | None = None
    calibrate_images: int = 512
    eval: str | None = None
    output: str = "module"
    metric: str | None = None
    require: float | str | None = None
    mean: list[float] = []
    std: list[float] = []
    resize: int | None = None
    crop: int | None = None
    report: bool = True
    keep_inputs: bool = False
    dry_run: bool = False
    json: bool = False
    overwrite: bool = False

    def to_yaml(self) -> str:
        """All keys that describe the result, defaults included.

        >>> build_recipe(yaml.safe_load(Recipe(ratio=0.3).to_yaml())).ratio
        0.3
        """
        kept = {key: value for key, value in msgspec.structs.asdict(self).items() if key not in RUN_ONLY_KEYS}
        return str(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))

    def with_absolute_paths(self) -> Recipe:
        """The same with paths that hold from any folder."""
        paths = {key: _make_absolute(getattr(self, key)) for key in ("model", "weights")}
        data = {key: _make_data_absolute(getattr(self, key)) for key in ("calibrate", "eval")}
        return msgspec.structs.replace(self, **paths, **data)


def _make_absolute(path: str | None) -> str | None:
    return os.path.abspath(path) if path and os.path.exists(path) else path


def _make_data_absolute(text: str | None) -> str | None:
    if text is None or is_code_reference(text, DATASETS_NAMED_LIKE_MODULES):
        return text
    name, path = split_reference(text)
    here = _make_absolute(os.path.expanduser(text))
    return f"{name}:{os.path.abspath(os.path.expanduser(path))}" if path and here == text else here


def resolve_recipe(file: str | Path | None, flags: Mapping[str, Any]) -> Recipe:
    """The recipe of a file, if any; flags that were given (are not None) win over its keys."""
    return merge_flags({} if file is None else read_recipe_keys(file), flags, str(file or ""))


def read_recipe_keys(file: str | Path) -> dict[str, Any]:
    """The keys of a YAML file."""
    try:
        with open(file, "rb") as stream:
            return parse_recipe_keys(stream.read(MAX_RECIPE_BYTES + 1), str(file))
    except OSError as error:
        raise RecipeError(f"the recipe cannot be read: {error}", fix="Give a YAML file.") from error


def parse_recipe_keys(text: str | bytes, where: str = "recipe") -> dict[str, Any]:
    """The keys of YAML text."""
    keys = _parse_yaml(text, where)
    if not isinstance(keys, dict | None):
        raise RecipeError(f"expected keys and values, got {type(keys).__name__}", where=where, fix="Write ratio: 0.5")
    return keys or {}


def merge_flags(keys: Mapping[str, Any], flags: Mapping[str, Any], where: str = "") -> Recipe:
    """The recipe of a file's keys; flags that were given (are not None) win over them."""
    return build_recipe({**keys, **{k: v for k, v in flags.items() if v is not None}}, where)


def build_recipe(keys: Mapping[Any, Any], where: str = "") -> Recipe:
    """A checked recipe; the error gives the path of the key and the nearest right one."""
    kinds = get_type_hints(Recipe)
    for key in keys:
        if key not in kinds:
            raise RecipeError(
                f"unknown key {_truncate_repr(key)}",
                where=_format_location(where, str(key)[:80]),
                fix=suggest_names(str(key), kinds),
            )
    return Recipe(**{key: convert_value(value, kinds[key], where, key) for key, value in keys.items()})


def convert_value(value: Any, kind: Any, where: str, path: str) -> Any:
    """A value of a recipe as its kind, or an error that says what it should be."""
    origin = get_origin(kind)
    if origin is dict and isinstance(value, dict):
        return {
            _check_key_is_text(k, where, path): convert_value(v, get_args(kind)[1], where, f"{path}.{k}")
            for k, v in value.items()
        }
    if origin is list and isinstance(value, str):
        value = [value] if get_args(kind) == (str,) else _parse_numbers(value, where, path)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, inside = str(error).partition(" - at `$")
        fix = f"{path} is {_describe_type(kind)}."
        raise RecipeError(
            f"{what}: {_truncate_repr(value)}", where=_format_location(where, path + inside.rstrip("`")), fix=fix
        ) from error


def _parse_numbers(text: str, where: str, path: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        what = f"{_truncate_repr(text)} are no numbers"
        raise RecipeError(what, where=_format_location(where, path), fix="Write 0.485,0.456,0.406.") from error


def _check_key_is_text(key: Any, where: str, path: str) -> str:
    if not isinstance(key, str):
        raise RecipeError(
            f"{_truncate_repr(key)} is not a name", where=_format_location(where, path), fix="Put it in quotes."
        )
    return key


def _describe_type(kind: Any) -> str:
    names = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
    if get_origin(kind) is list:
        return "a list of texts" if get_args(kind) == (str,) else "a list of numbers"
    if get_origin(kind) is dict:
        return "a mapping of names to values"
    return " or ".join(names.get(k, str(k)) for k in (get_args(kind) or (kind,)) if k is not type(None))


def _format_location(where: str, path: str) -> str:
    return f"{where}: {path}" if where else path


def parse_pairs(entries: list[str] | None, flag: str) -> dict[str, Any] | None:
    """`NAME=VALUE` flags as a mapping, values read as YAML.

    >>> parse_pairs(["layer1.*=0.3"], "--layer")
    {'layer1.*': 0.3}
    """
    if entries is None:
        return None
    found = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not name or not equals:
            raise RecipeError(f"{entry!r} is not NAME=VALUE", where=flag, fix=f"Write {flag} 'name=value'.")
        found[name] = _parse_yaml(value, flag)
    return found


# YAML from a stranger

MAX_RECIPE_BYTES, MAX_NESTING, MAX_INTEGER_BITS = 1 << 16, 16, 64
"""The largest recipe in bytes, the deepest nesting, and the bits of the largest whole number."""


def _parse_yaml(text: str | bytes, where: str) -> Any:
    """A value from YAML without names for parts of it: those make a short text as large as one likes."""
    if len(text) > MAX_RECIPE_BYTES:
        raise RecipeError(f"more than {MAX_RECIPE_BYTES:,} bytes", where=where, fix="A recipe has a few lines.")
    try:
        _check_yaml_events(text, where)
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that Python has not
        raise RecipeError(f"not YAML: {' '.join(str(error).split())}", where=where, fix="Mend that line.") from error
    _check_integer_sizes(value, where)
    return value


def _check_yaml_events(text: str | bytes, where: str) -> None:
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise RecipeError(
                f"nested more than {MAX_NESTING} deep", where=where, fix="A recipe has lists and mappings."
            )
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise RecipeError(f"uses the anchor {event.anchor!r}", where=where, fix="Write the value out each time.")
        if (tag := getattr(event, "tag", None)) is not None:
            raise RecipeError(f"uses the tag {tag!r}", where=where, fix="Leave it out.")


def _check_integer_sizes(value: Any, where: str) -> None:
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inner:
        _check_integer_sizes(part, where)
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise RecipeError(f"a number of {value.bit_length()} bits", where=where, fix="Give a smaller one.")


def _truncate_repr(value: Any) -> str:
    """A value in a message: as much of it as fits.

    >>> _truncate_repr("ab"), len(_truncate_repr("a" * 1000))
    ("'ab'", 80)
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
