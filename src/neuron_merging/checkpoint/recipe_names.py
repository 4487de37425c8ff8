"""Convert recipes to configs and back, and check which names in a recipe would import code. What the user types is
trusted. What a file names is not: a registered or zoo network is built, while any other name would run code that
the file's author chose and needs the user's consent.
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
from neuron_merging.checkpoint.manifest import is_signed_by_user
from neuron_merging.checkpoint.recipe import DATASETS_NAMED_LIKE_MODULES, RECIPE_KEYS, Recipe
from neuron_merging.config import (
    DEFAULT_RATIO,
    BatchedMetric,
    CompressConfig,
    list_options,
)
from neuron_merging.config.text_values import check_integer, format_merger, get_import_path, import_user_object
from neuron_merging.data.open_data import FunctionBatches, Preprocessing, open_batches
from neuron_merging.data.texts import TextFile
from neuron_merging.errors import FolderError, MergingError, RecipeError
from neuron_merging.graph.example_inputs import infer_batch_size
from neuron_merging.graph.user_code import is_code_reference, split_reference
from neuron_merging.merging import MERGERS
from neuron_merging.models import sources
from neuron_merging.models.state_dicts import WEIGHT_READERS
from neuron_merging.onnx.formats import FILE_FORMATS
from neuron_merging.selection.budget import parse_budget

HELDOUT_IMAGES = 128
"""Images that are held out of the calibration for the verdict: images of the fit would flatter it."""
LIBRARY_PREFIXES = ("", "timm", "torchvision", sources.HF_PREFIX)
"""Prefixes before a colon that are followed by a network's name, not by a function."""


def format_network_title(model: str | None, kind: str) -> str:
    """Return a network's title for reports, without paths. `model` is the recipe's key, `kind` the network's class.

    A network from a user's factory is titled by its class, unless that is `Sequential`, which says nothing.

    >>> [format_network_title(name, "Net") for name in ("resnet-56", "timm:vit_tiny", "hf:org/gpt", "my.nets:small")]
    ['resnet-56', 'vit_tiny', 'gpt', 'Net']
    >>> format_network_title("my.nets:small", "Sequential")
    'small'
    >>> format_network_title("/home/me/detector.v2.onnx", "Net"), format_network_title(None, "Net")
    ('detector.v2', 'Net')
    """
    # Both separators: a recipe may have been written on another system.
    last = re.split(r"[\\/]", (model or "").rstrip("\\/"))[-1]
    stem = last.rpartition(".")[0] if Path(last).suffix.lower() in {*FILE_FORMATS, *WEIGHT_READERS} else last
    home, _, name = stem.rpartition(":")
    return name if name and (home in LIBRARY_PREFIXES or kind == "Sequential") else kind


def get_network_import_path(model: nn.Module) -> str | None:
    """Return the import path of a network's class if it can be built without arguments; None otherwise.

    A class of torch itself, such as Sequential, does not determine the network.
    """
    kind = type(model)
    if kind.__module__.partition(".")[0] == "torch":
        return None
    parameters = inspect.signature(kind).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return None if needed else get_import_path(kind)


def format_input_shapes(inputs: Sequence[Any]) -> list[str]:
    """Format the shapes of example inputs, with their types unless they are floats; empty if they are not tensors.

    >>> format_input_shapes([torch.zeros(1, 3, 8, 8), torch.zeros(2, 4, dtype=torch.int64)])
    ['1,3,8,8', '2,4:int64']
    """
    if not all(isinstance(value, Tensor) and value.ndim for value in inputs):
        return []
    return [",".join(map(str, value.shape)) + _format_dtype(value.dtype) for value in inputs]


def _format_dtype(dtype: torch.dtype) -> str:
    return "" if dtype.is_floating_point else f":{str(dtype).removeprefix('torch.')}"


# Conversion to recipes and back


def config_to_recipe(settings: CompressConfig, analysis: Analysis) -> tuple[Recipe, tuple[str, ...]]:
    """Convert settings to a recipe, with remarks on settings that a recipe cannot express."""
    by_layer = dict(settings.ratio) if isinstance(settings.ratio, Mapping) else {}
    method = format_merger(settings.method())
    criterion = settings.criterion if isinstance(settings.criterion, str) else get_import_path(settings.criterion)
    model = get_network_import_path(analysis.model)
    # A remark is shown if its value is None: the setting has no name that a recipe could hold.
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
    return recipe, tuple(remark for remark, value in remarks.items() if value is None)


def config_from_recipe(recipe: Recipe) -> CompressConfig:
    """Convert a recipe to a checked config. Its data sets are located now and read when they are needed."""
    crop = None if recipe.crop is None else (recipe.crop, recipe.crop)
    framing = Preprocessing(tuple(recipe.mean), tuple(recipe.std), recipe.resize, crop, recipe.bgr, recipe.layout)
    images = None if recipe.eval is None else open_batches(recipe.eval, "test", framing)
    calibration, heldout = _open_calibration_data(recipe, framing)
    given = {}
    for entry in list_options():
        # What a text leaves out may have another form there than in Python: {} for None, as with `budget`.
        if entry.about.in_texts and getattr(recipe, entry.name) != RECIPE_KEYS[entry.name].default:
            value = getattr(recipe, entry.name)
            given[entry.name] = value if entry.about.parse is None else entry.about.parse(value)
    if recipe.layer:
        given["ratio"] = {"*": given.get("ratio", DEFAULT_RATIO), **recipe.layer}
    evaluate: Any = _parse_metric(recipe, images) or images
    config = CompressConfig(**given, calibration=calibration, held=heldout, evaluate=evaluate)
    config.check()
    return config


def _parse_metric(recipe: Recipe, images: Any) -> Any:
    """Import the metric `package.module:function`; it takes a network and, with --eval, the batches."""
    if recipe.metric is None:
        return None
    module, _, name = recipe.metric.partition(":")
    if not name:
        what = f"{recipe.metric!r} is not package.module:function"
        raise RecipeError(what, where="metric", fix="Name a function of a network and batches that returns a number.")
    metric = import_user_object(module, name, "metric")
    return metric if images is None else BatchedMetric(metric, images)


def _open_calibration_data(recipe: Recipe, framing: Preprocessing) -> tuple[Any, Any]:
    """Open the calibration data, and images held out of it; a function's batches have no held-out part.

    Both are taken at equal distances, because files are often sorted by class; held-out images lie in between.
    """
    if recipe.calibrate is None:
        return None, None
    count = recipe.calibrate_images
    check_integer(1)("calibrate_images", count)
    name = recipe.calibrate.partition(":")[0]
    # ImageNet is read from its validation images only.
    data = open_batches(recipe.calibrate, "test" if name == "imagenet" else "train", framing)
    if isinstance(data, TextFile):
        return data, None
    if isinstance(data, FunctionBatches):
        return _FirstSamples(data, count), None
    step = len(data) // count
    heldout = range(step // 2, len(data), step)[:HELDOUT_IMAGES] if step > 1 else ()
    return data.subsample(count), data.select(heldout) if heldout else None


@dataclass(frozen=True)
class _FirstSamples:
    """The first batches of a function, until they hold `count` samples."""

    batches: FunctionBatches
    count: int

    def __iter__(self) -> Iterator[Any]:
        missing = self.count
        for batch in self.batches:
            yield batch
            missing -= infer_batch_size((batch,))
            if missing <= 0:
                return


# Names that would import code

CODE_KEYS = ("model", "criterion", "merger", "calibrate", "eval", "metric")
"""Keys of a recipe that can name code."""


def check_recipe_trusted(recipe: Recipe, folder: str | Path, trust: bool, keys: Iterable[str] = CODE_KEYS) -> None:
    """Refuse a folder's recipe that names code, unless the user trusts it or wrote the folder.

    Only `keys`, which will be used, are checked.
    """
    # Who wrote the folder on this machine has run that code already.
    trust = trust or is_signed_by_user(folder)
    fix = "If you trust its author, give --trust or load(..., trust=True). Or name the network with --model or build=."
    _check_keys_trusted(msgspec.structs.asdict(recipe), keys, trust, FolderError, str(folder), fix)


def check_recipe_file_trusted(file: str | Path, keys: Mapping[str, Any], flags: Mapping[str, Any], trust: bool) -> None:
    """Refuse a recipe file that names code, unless it is trusted; keys that the user's flags override are skipped."""
    fix = "If you trust its author, give --trust. Or give the flag yourself."
    typed = {key: value for key, value in flags.items() if value is not None}
    _check_keys_trusted(keys, [key for key in CODE_KEYS if key not in typed], trust, RecipeError, str(file), fix)
    # Arguments can name files that a zoo would open, even if the user chose the network.
    if "arg" not in typed:
        check_arguments_trusted(str(typed.get("model", "")), keys.get("arg"), str(file), trust, RecipeError)


def check_arguments_trusted(
    model: str, arg: Any, where: str, trust: bool, kind: type[MergingError] = FolderError
) -> None:
    """Refuse a file's arguments for a network that the user named, if they make a zoo open or fetch files."""
    code = sources.describe_foreign_code(model, arg) if isinstance(arg, dict) else None
    trust = trust or (kind is FolderError and is_signed_by_user(where))
    if code and not trust and not sources.describe_foreign_code(model, {}):
        raise kind(
            f"arg would {code}", where=where, fix="If you trust its author, give --trust. Or give --arg yourself."
        )


def _check_keys_trusted(
    values: Mapping[str, Any], keys: Iterable[str], trust: bool, kind: type[MergingError], where: str, fix: str
) -> None:
    for key in () if trust else keys:
        value = values.get(key)
        code = _describe_code(key, value, values.get("arg")) if isinstance(value, str) else None
        if code is not None:
            raise kind(f"{key}: {value!r} would {code}", where=where, fix=fix)


def _describe_code(key: str, text: str, arg: Any) -> str | None:
    """Describe the code that a value would run; None if it names only what this package or a zoo provides."""
    if key == "model":
        return sources.describe_foreign_code(text, arg if isinstance(arg, dict) else {})
    module, name = split_reference(text)
    if key in ("calibrate", "eval") and not is_code_reference(text, DATASETS_NAMED_LIKE_MODULES):
        return None
    if not name or (key == "merger" and module in MERGERS):
        return None
    return f"import {module} and call {name.partition(':')[0]}"
