"""Values of options: parse them from texts of users or files, write them as texts, and check them.

This module does not import torch when it is loaded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import msgspec
import yaml

from neuron_merging.errors import MergingError, RecipeError, suggest_names

if TYPE_CHECKING:
    from neuron_merging.merging import Merger
    from neuron_merging.selection.criteria import Criterion


def convert_value(value: Any, kind: Any, where: str, path: str) -> Any:
    """Convert a value of a recipe to a type, or raise an error that says what it should be."""
    origin = get_origin(kind)
    if origin is dict and isinstance(value, dict):
        return {
            _check_key_is_text(k, where, path): convert_value(v, get_args(kind)[1], where, f"{path}.{k}")
            for k, v in value.items()
        }
    if origin is list and isinstance(value, str):
        # A single name needs no list in YAML.
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


# Criteria, mergers and shares in texts

PLAIN_TYPES = (str, int, float, bool, type(None))
"""Types of merger options that can be written in a text."""


def parse_criterion(text: str) -> str | Criterion:
    """Parse `NAME` or `package.module:function`."""
    module, _, name = text.partition(":")
    found: str | Criterion = import_user_object(module, name, "criterion") if name else text
    return found


def parse_merger(text: str) -> Merger:
    """Build a merger from `NAME` or `package.module:Class`, either with `:option=value,…`; check its options.

    >>> parse_merger("cosine:threshold=0.2,bn=released")
    Cosine(threshold=0.2, balance=0.85, bn='released')
    """
    from neuron_merging.merging import MERGERS

    kinds: dict[str, Any] = dict(MERGERS)
    name, _, rest = text.partition(":")
    # `module:Class`, unlike `NAME:option=value`, has no equals sign before the next colon.
    if name not in kinds and rest and "=" not in rest.partition(":")[0]:
        own, _, rest = rest.partition(":")
        kinds[name] = import_user_object(name, own, "merger")
    if name not in kinds:
        raise RecipeError(f"unknown merger {name!r}", where="merger", fix=suggest_names(name, kinds))
    return _build_merger(kinds[name], parse_pairs(rest.split(",") if rest else [], "--merger") or {})


def import_user_object(module: str, name: str, where: str) -> Any:
    """Import a class or function of the user."""
    from neuron_merging.graph.user_code import import_object

    try:
        return import_object(module, name, where)
    except MergingError as error:
        raise RecipeError(error.what, where=error.where, fix=error.fix) from error


def _build_merger(kind: Any, options: dict[str, Any]) -> Merger:
    """Build a merger; check each option against the type of its field."""
    kinds = {k: v for k, v in get_type_hints(kind).items() if k in _list_merger_options(kind)}
    for key in options:
        if key not in kinds:
            raise RecipeError(f"unknown option {key!r}", where=f"merger.{key}", fix=suggest_names(key, kinds))
    chosen = {k: convert_value(v, kinds[k], "", f"merger.{k}") for k, v in options.items()}
    try:
        merger: Merger = kind(**chosen)
    except TypeError as error:
        raise RecipeError(f"the merger cannot be made: {error}", where="merger", fix="Give it its options.") from error
    return merger


def _list_merger_options(kind: Any) -> set[str]:
    """Return the fields that a text can set: all but those for data and processes."""
    return set(getattr(kind, "__dataclass_fields__", get_type_hints(kind))) - {"batches", "processes", "uses_data"}


def format_merger(merger: Merger) -> str | None:
    """Format a merger as `NAME:option=value,…` for recipes; None if it cannot be written so.

    >>> from neuron_merging.merging import Cosine
    >>> format_merger(Cosine(threshold=0.2))
    'cosine:threshold=0.2'
    """
    from neuron_merging.merging import MERGERS

    known: dict[type, str] = {kind: name for name, kind in MERGERS.items()}
    name = known.get(type(merger)) or get_import_path(type(merger))
    options = _get_changed_options(merger)
    if name is None or options is None:
        return None
    return name + (
        ":" + ",".join(f"{key}={_format_option(value)}" for key, value in options.items()) if options else ""
    )


def _get_changed_options(merger: Any) -> dict[str, Any] | None:
    """Return the options that differ from their defaults; None if one cannot be written in a text."""
    if not is_dataclass(merger):
        return {}
    options = [(f, getattr(merger, f.name)) for f in fields(merger) if f.init and f.name != "batches"]
    # A field without a default is always written.
    changed = {f.name: value for f, value in options if value != (f.default if f.default is not MISSING else None)}
    return changed if all(isinstance(value, PLAIN_TYPES) for value in changed.values()) else None


def _format_option(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)


def get_import_path(thing: Any) -> str | None:
    """Return `package.module:name` of an object; None if importing that does not give the object.

    >>> from torch import nn
    >>> get_import_path(nn.Linear), get_import_path(lambda: 0)
    ('torch.nn.modules.linear:Linear', None)
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<")
    found: Any = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    for part in name.split("."):  # follows nested classes; a lambda or local function is not found
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing else None


def parse_share(name: str) -> Callable[[float | str | None], float | None]:
    """Return a parser of numbers and percentages.

    >>> parse_share("max_loss")("1%"), parse_share("require")(0.95)
    (0.01, 0.95)
    """

    def parse(value: float | str | None) -> float | None:
        if not isinstance(value, str):
            return value
        try:
            return float(value.removesuffix("%")) / 100 if value.endswith("%") else float(value)
        except ValueError as error:
            raise RecipeError(f"{value!r} is not a number", where=name, fix="Write 0.01 or 1%.") from error

    return parse


# Checks of options: each takes the option's name and value, and raises an error for an invalid value


def check_choice(*known: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value not in known:
            raise MergingError(f"unknown {name} {value!r}", where=f"{name}=", fix=f"Use {' or '.join(known)}.")

    return check


def check_number(most: float, example: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        # numpy's numbers are Real, and True is, too.
        known = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (known and 0 <= float(value) <= most and math.isfinite(value)):
            bounds = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
            what = f"{name} {value!r} is not a number {bounds}"
            raise MergingError(what, where=f"{name}=", fix=f"For instance {example}.")

    return check


def check_integer(least: int, most: int = 2**31 - 1) -> Callable[[str, Any], None]:
    """Return a check that a value is an integer within these bounds."""

    def check(name: str, value: Any) -> None:
        whole = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
        if whole is None or not least <= whole <= most:
            bounds = f"at least {least}" if whole is None or whole < least else f"at most {most}"
            what = f"{name} {value!r} is not an integer of {bounds}"
            raise MergingError(what, where=f"{name}=", fix=f"For instance {name}=8.")

    return check


def check_shares(name: str, value: Any) -> None:
    """Check a share, or shares by pattern."""
    from neuron_merging.selection.criteria import check_ratio

    for pattern, share in (value if isinstance(value, Mapping) else {"": value}).items():
        if value is not None:
            check_ratio(share, pattern)


def check_criterion(name: str, value: Any) -> None:
    from neuron_merging.selection.criteria import find_criterion
    from neuron_merging.selection.elimination import AUTO_CRITERION, EXPECTED_ERROR

    if value not in (AUTO_CRITERION, EXPECTED_ERROR):
        find_criterion(value)


def check_effort(name: str, value: Any) -> None:
    from neuron_merging.inputs.input_sets import FIT_EFFORTS

    if value is not None and value not in FIT_EFFORTS:
        what = f"effort {value!r} is not known"
        raise MergingError(what, where="effort=", fix=f"Use one of {', '.join(FIT_EFFORTS)}.")
