"""Names in recipes: Python objects as text, and a check of which names would import code. What the user types is
trusted. What a file says is data: a built-in or zoo network is built, any other name would run code chosen by
the file's author and needs the user's consent.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from neuron_merging.checkpoint.recipe import DATASETS_NAMED_LIKE_MODULES, Recipe
from neuron_merging.errors import FolderError, MergingError, RecipeError
from neuron_merging.graph.user_code import is_code_reference, split_reference
from neuron_merging.merging import MERGERS, Merger
from neuron_merging.models import sources

FILE_SUFFIXES = (".onnx", ".pt2", ".pt", ".pth", ".safetensors")
LIBRARY_PREFIXES = ("", "timm", "torchvision", sources.HF_PREFIX)
"""What stands before a colon where a name, not a function, follows."""
PLAIN_TYPES = (str, int, float, bool, type(None))


def get_import_path(thing: Any) -> str | None:
    """`package.module:name`, if that is found there again by who imports it.

    >>> get_import_path(nn.Linear), get_import_path(lambda: 0)
    ('torch.nn.modules.linear:Linear', None)
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<")
    found: Any = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing else None


def format_network_title(model: str | None, kind: str) -> str:
    """The name of a network for people: never a path. `model` is what a recipe names, `kind` the network's class.

    A factory is known by the class that it makes, unless that is torch's own, which says nothing.

    >>> [format_network_title(name, "Net") for name in ("resnet-56", "timm:vit_tiny", "hf:org/gpt", "my.nets:small")]
    ['resnet-56', 'vit_tiny', 'gpt', 'Net']
    >>> format_network_title("my.nets:small", "Sequential")
    'small'
    >>> format_network_title("/home/me/detector.v2.onnx", "Net"), format_network_title(None, "Net")
    ('detector.v2', 'Net')
    """
    last = re.split(r"[\\/]", (model or "").rstrip("\\/"))[-1]
    stem = last.rpartition(".")[0] if last.lower().endswith(FILE_SUFFIXES) else last
    home, _, name = stem.rpartition(":")
    return name if name and (home in LIBRARY_PREFIXES or kind == "Sequential") else kind


def get_network_import_path(model: nn.Module) -> str | None:
    """The class of a network that can be built without arguments; torch's own containers say nothing of it."""
    kind = type(model)
    if kind.__module__.partition(".")[0] == "torch":
        return None
    needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind not in (2, 4)]
    return None if needed else get_import_path(kind)


def format_input_shapes(inputs: Sequence[Any]) -> list[str]:
    """The shapes of example inputs, with their types where those are no floats; nothing if they are no tensors.

    >>> format_input_shapes([torch.zeros(1, 3, 8, 8), torch.zeros(2, 4, dtype=torch.int64)])
    ['1,3,8,8', '2,4:int64']
    """
    if not all(isinstance(value, Tensor) and value.ndim for value in inputs):
        return []
    return [",".join(map(str, value.shape)) + _format_dtype(value.dtype) for value in inputs]


def _format_dtype(dtype: torch.dtype) -> str:
    return "" if dtype.is_floating_point else f":{str(dtype).removeprefix('torch.')}"


def format_merger(merger: Merger) -> str | None:
    """`NAME:option=value,…`, as recipes have it; None for one without a name.

    >>> from neuron_merging.merging import Cosine
    >>> format_merger(Cosine(threshold=0.2))
    'cosine:threshold=0.2'
    """
    known: dict[type, str] = {kind: name for name, kind in MERGERS.items()}
    name = known.get(type(merger)) or get_import_path(type(merger))
    options = _get_changed_options(merger)
    if name is None or options is None:
        return None
    return name + (
        ":" + ",".join(f"{key}={_format_option(value)}" for key, value in options.items()) if options else ""
    )


def _get_changed_options(merger: Merger) -> dict[str, Any] | None:
    """What differs from the defaults; None if a text cannot give it."""
    if not is_dataclass(merger):
        return {}
    own = [(f, getattr(merger, f.name)) for f in fields(merger) if f.init and f.name != "batches"]
    changed = {f.name: value for f, value in own if value != (f.default if f.default is not MISSING else None)}
    return changed if all(isinstance(value, PLAIN_TYPES) for value in changed.values()) else None


def _format_option(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)


CODE_KEYS = ("model", "criterion", "merger", "calibrate", "eval", "metric")
"""The keys of a recipe that can name code."""


def check_recipe_trusted(recipe: Recipe, folder: str | Path, trust: bool, keys: Iterable[str] = CODE_KEYS) -> None:
    """Refuse a folder's recipe that names code, unless it is trusted; `keys` are those that will be used."""
    fix = "If you trust its author, give --trust or load(..., trust=True). Or name the network with --model or build=."
    _check_keys_trusted(msgspec.structs.asdict(recipe), keys, trust, FolderError, str(folder), fix)


def check_recipe_file_trusted(file: str | Path, keys: Mapping[str, Any], flags: Mapping[str, Any], trust: bool) -> None:
    """The same for the keys of a recipe file; flags that the user typed (are not None) are used in their place."""
    fix = "If you trust its author, give --trust. Or give the flag yourself."
    typed = {key: value for key, value in flags.items() if value is not None}
    _check_keys_trusted(keys, [key for key in CODE_KEYS if key not in typed], trust, RecipeError, str(file), fix)
    if "arg" not in typed:
        check_arguments_trusted(str(typed.get("model", "")), keys.get("arg"), str(file), trust, RecipeError)


def check_arguments_trusted(
    model: str, arg: Any, where: str, trust: bool, kind: type[MergingError] = FolderError
) -> None:
    """Refuse a file's arguments for a network that the user typed, if they make a zoo open or fetch files."""
    code = sources.describe_foreign_code(model, arg) if isinstance(arg, dict) else None
    if code and not trust and not sources.describe_foreign_code(model, {}):
        raise kind(
            f"arg would {code}", where=where, fix="If you trust its author, give --trust. Or give --arg yourself."
        )


def _check_keys_trusted(
    found: Mapping[str, Any], keys: Iterable[str], trust: bool, kind: type[MergingError], where: str, fix: str
) -> None:
    for key in () if trust else keys:
        value = found.get(key)
        code = _describe_code(key, value, found.get("arg")) if isinstance(value, str) else None
        if code is not None:
            raise kind(f"{key}: {value!r} would {code}", where=where, fix=fix)


def _describe_code(key: str, text: str, arg: Any) -> str | None:
    """What a value would make Python do beyond building something known."""
    if key == "model":
        return sources.describe_foreign_code(text, arg if isinstance(arg, dict) else {})
    module, name = split_reference(text)
    if key in ("calibrate", "eval") and not is_code_reference(text, DATASETS_NAMED_LIKE_MODULES):
        return None
    if not name or (key == "merger" and module in MERGERS):
        return None
    return f"import {module} and call {name.partition(':')[0]}"
