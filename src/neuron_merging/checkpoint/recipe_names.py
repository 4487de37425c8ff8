"""Recipes to configs and back, and a check of which names in a recipe would import code. What the user types is
trusted. What a file says is data: a built-in or zoo network is built, any other name would run code chosen by
the file's author and needs the user's consent.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.recipe import DATASETS_NAMED_LIKE_MODULES, RECIPE_KEYS, Recipe
from neuron_merging.config import (
    DEFAULT_RATIO,
    BatchedMetric,
    CompressConfig,
    check_integer,
    format_merger,
    get_import_path,
    import_user_object,
    list_options,
)
from neuron_merging.data.open_data import FunctionBatches, Preprocessing, open_batches
from neuron_merging.errors import FolderError, MergingError, RecipeError
from neuron_merging.graph.example_inputs import infer_batch_size
from neuron_merging.graph.user_code import is_code_reference, split_reference
from neuron_merging.merging import MERGERS
from neuron_merging.models import sources
from neuron_merging.models.state_dicts import WEIGHT_READERS
from neuron_merging.onnx.formats import FILE_FORMATS
from neuron_merging.selection.budget import parse_budget

HELDOUT_IMAGES = 128
"""Images beside those of the calibration that a result is judged on."""
LIBRARY_PREFIXES = ("", "timm", "torchvision", sources.HF_PREFIX)
"""What stands before a colon where a name, not a function, follows."""


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
    stem = last.rpartition(".")[0] if Path(last).suffix.lower() in {*FILE_FORMATS, *WEIGHT_READERS} else last
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


# To recipes, and from them


def config_to_recipe(settings: CompressConfig, analysis: Analysis) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe that these settings amount to, and remarks on what no recipe can name."""
    by_layer = dict(settings.ratio) if isinstance(settings.ratio, Mapping) else {}
    method = format_merger(settings.method())
    criterion = settings.criterion if isinstance(settings.criterion, str) else get_import_path(settings.criterion)
    model = get_network_import_path(analysis.model)
    remarks = {
        "model: no class that can be imported and made without arguments; give load() the network with build=": model,
        f"merger: {settings.merger!r}": method,
        "criterion: a function of Python's": criterion,
        "calibrate: batches of Python's": None if settings.calibration is not None else "",
        "eval: data or a function of Python's": None if settings.evaluate is not None else "",
    }
    named = {
        "ratio": 0.0
        if isinstance(settings.ratio, Mapping)
        else settings.ratio
        if settings.has_target
        else DEFAULT_RATIO,
        "budget": {limit.key: limit.value for limit in parse_budget(settings.budget)} if settings.budget else {},
        "criterion": criterion or RECIPE_KEYS["criterion"].default,
        "merger": method,
    }
    plain = {o.name: getattr(settings, o.name) for o in list_options() if o.about.in_texts and o.name not in named}
    given = {
        key: list(value) if isinstance(value, tuple) else value for key, value in plain.items() if value is not None
    }
    recipe = Recipe(
        model=model,
        input=format_input_shapes(analysis.inputs),
        layer=by_layer,
        **named,
        **given,
    )
    return recipe, tuple(remark for remark, found in remarks.items() if found is None)


def config_from_recipe(recipe: Recipe) -> CompressConfig:
    """What a recipe asks for, checked; its data are found, and read when they are needed."""
    crop = None if recipe.crop is None else (recipe.crop, recipe.crop)
    framing = Preprocessing(tuple(recipe.mean), tuple(recipe.std), recipe.resize, crop)
    images = None if recipe.eval is None else open_batches(recipe.eval, "test", framing)
    fit, held = _open_calibration_data(recipe, framing)
    given = {}
    for entry in list_options():
        if entry.about.in_texts and getattr(recipe, entry.name) != RECIPE_KEYS[entry.name].default:
            value = getattr(recipe, entry.name)
            given[entry.name] = value if entry.about.parse is None else entry.about.parse(value)
    if recipe.layer:
        given["ratio"] = {"*": given.get("ratio", DEFAULT_RATIO), **recipe.layer}
    found = CompressConfig(**given, calibration=fit, held=held, evaluate=_parse_metric(recipe, images) or images)
    found.check()
    return found


def _parse_metric(recipe: Recipe, images: Any) -> Any:
    """`package.module:function`, of a network and the batches of --eval, or of a network alone."""
    if recipe.metric is None:
        return None
    module, _, name = recipe.metric.partition(":")
    if not name:
        what = f"{recipe.metric!r} is not package.module:function"
        raise RecipeError(what, where="metric", fix="Name a function of a network and batches that returns a number.")
    own = import_user_object(module, name, "metric")
    return own if images is None else BatchedMetric(own, images)


def _open_calibration_data(recipe: Recipe, framing: Preprocessing) -> tuple[Any, Any]:
    """Images from all of the data set, at equal distances, and others between them; or a function's batches."""
    if recipe.calibrate is None:
        return None, None
    count = recipe.calibrate_images
    check_integer(1)("calibrate_images", count)
    first = recipe.calibrate.partition(":")[0]
    found = open_batches(recipe.calibrate, "test" if first == "imagenet" else "train", framing)
    if isinstance(found, FunctionBatches):
        return _FirstSamples(found, count), None
    step = len(found) // count
    others = range(step // 2, len(found), step)[:HELDOUT_IMAGES] if step > 1 else ()
    return found.subsample(count), found.select(others) if others else None


@dataclass(frozen=True)
class _FirstSamples:
    """The first batches, until there are enough samples."""

    batches: FunctionBatches
    count: int

    def __iter__(self) -> Iterator[Any]:
        left = self.count
        for batch in self.batches:
            yield batch
            left -= infer_batch_size((batch,))
            if left <= 0:
                return


# Names that would import code

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
