"""trust: what a folder or a recipe file would import, and the user's word for it.

What the user types is his own. What a file says is data: a network of ours or of a zoo is built, anything else that
it names would run code of its writer's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from neuron_merging.errors import FolderError, MergingError, RecipeError
from neuron_merging.folder.recipe import LIKE_MODULES, Recipe
from neuron_merging.graph.usercode import names_code
from neuron_merging.mergers import MERGERS
from neuron_merging.networks import sources

KEYS = ("model", "criterion", "merger", "calibrate", "eval", "metric")
"""The keys of a recipe that can name code."""


def check_trusted(recipe: Recipe, folder: str | Path, trust: bool, keys: Iterable[str] = KEYS) -> None:
    """Refuse a folder's recipe that names code, unless it is trusted; `keys` are those that will be used."""
    fix = "Where you trust who wrote the folder: --trust, or load(..., trust=True). Or give --model or build= yourself."
    _check(msgspec.structs.asdict(recipe), keys, trust, FolderError, str(folder), fix)


def check_file(file: str | Path, keys: Mapping[str, Any], flags: Mapping[str, Any], trust: bool) -> None:
    """The same for the keys of a recipe file; flags that the user typed (are not None) are used in their place."""
    fix = "Where you trust who wrote the file: --trust. Or give the flag yourself."
    typed = {key: value for key, value in flags.items() if value is not None}
    _check(keys, [key for key in KEYS if key not in typed], trust, RecipeError, str(file), fix)
    if "arg" not in typed:
        check_arguments(str(typed.get("model", "")), keys.get("arg"), str(file), trust, RecipeError)


def check_arguments(model: str, arg: Any, where: str, trust: bool, kind: type[MergingError] = FolderError) -> None:
    """Refuse a file's arguments for a network that the user typed, if they make a zoo open or fetch files."""
    code = sources.foreign_code(model, arg) if isinstance(arg, dict) else None
    if code and not trust and not sources.foreign_code(model, {}):
        raise kind(
            f"arg would {code}", where=where, fix="Where you trust who wrote it: --trust. Or give --arg yourself."
        )


def _check(
    found: Mapping[str, Any], keys: Iterable[str], trust: bool, kind: type[MergingError], where: str, fix: str
) -> None:
    for key in () if trust else keys:
        value = found.get(key)
        code = _code(key, value, found.get("arg")) if isinstance(value, str) else None
        if code is not None:
            raise kind(f"{key}: {value!r} would {code}", where=where, fix=fix)


def _code(key: str, text: str, arg: Any) -> str | None:
    """What a value would make Python do beyond building something known."""
    if key == "model":
        return sources.foreign_code(text, arg if isinstance(arg, dict) else {})
    module, colon, name = text.partition(":")
    if key in ("calibrate", "eval") and not names_code(text, LIKE_MODULES):
        return None
    if not colon or (key == "merger" and module in MERGERS):
        return None
    return f"import {module} and call {name.partition(':')[0]}"
