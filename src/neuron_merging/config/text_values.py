"""Parse values from texts of users or files: NAME=VALUE pairs, checked conversion, untrusted YAML.

This module does not import torch.
"""

from __future__ import annotations

from typing import Any, get_args, get_origin

import msgspec
import yaml

from neuron_merging.errors import RecipeError


def convert_value(value: Any, kind: Any, where: str, path: str) -> Any:
    """Convert a value of a recipe to a type, or raise an error that says what it should be."""
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
            f"{what}: {truncate_repr(value)}", where=format_location(where, path + inside.rstrip("`")), fix=fix
        ) from error


def _parse_numbers(text: str, where: str, path: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        what = f"{truncate_repr(text)} is not a list of numbers"
        raise RecipeError(what, where=format_location(where, path), fix="Write 0.485,0.456,0.406.") from error


def _check_key_is_text(key: Any, where: str, path: str) -> str:
    if not isinstance(key, str):
        raise RecipeError(
            f"{truncate_repr(key)} is not a name", where=format_location(where, path), fix="Put it in quotes."
        )
    return key


def _describe_type(kind: Any) -> str:
    names = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
    if get_origin(kind) is list:
        return "a list of texts" if get_args(kind) == (str,) else "a list of numbers"
    if get_origin(kind) is dict:
        return "a mapping of names to values"
    return " or ".join(names.get(k, str(k)) for k in (get_args(kind) or (kind,)) if k is not type(None))


def format_location(where: str, path: str) -> str:
    return f"{where}: {path}" if where else path


LONE_VALUE_STARTS = tuple("0123456789.")
"""First characters of a value that may be given without its key."""


def parse_pairs(entries: list[str] | None, flag: str, lone_key: str = "") -> dict[str, Any] | None:
    """Parse `NAME=VALUE` flags into a mapping, with values as YAML; a value alone belongs to `lone_key`, if given.

    >>> parse_pairs(["layer1.*=0.3"], "--layer"), parse_pairs(["50%"], "--budget", "macs")
    ({'layer1.*': 0.3}, {'macs': '50%'})
    """
    if entries is None:
        return None
    found = {}
    for entry in entries:
        is_lone = lone_key and entry[:1] in LONE_VALUE_STARTS and "=" not in entry
        name, equals, value = (lone_key, "=", entry) if is_lone else entry.partition("=")
        if not name or not equals:
            raise RecipeError(f"{entry!r} is not NAME=VALUE", where=flag, fix=f"Write {flag} 'name=value'.")
        found[name] = parse_yaml(value, flag)
    return found


# Untrusted YAML

MAX_RECIPE_BYTES, MAX_NESTING, MAX_INTEGER_BITS = 1 << 16, 16, 64
"""Limits on a recipe: its bytes, its nesting depth, and the bits of an integer. A recipe may come from a stranger."""


def parse_yaml(text: str | bytes, where: str) -> Any:
    """Parse YAML without anchors and tags: nested anchors expand a short text exponentially ("billion laughs")."""
    if len(text) > MAX_RECIPE_BYTES:
        raise RecipeError(f"more than {MAX_RECIPE_BYTES:,} bytes", where=where, fix="A recipe has a few lines.")
    try:
        _check_yaml_events(text, where)
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that Python cannot represent
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


def truncate_repr(value: Any) -> str:
    """Return the repr of a value for a message, cut to 80 characters.

    >>> truncate_repr("ab"), len(truncate_repr("a" * 1000))
    ("'ab'", 80)
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
