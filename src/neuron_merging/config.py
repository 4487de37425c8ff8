"""CompressConfig: every option of `compress` as one checked value, from keywords or from a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, get_type_hints

from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.recipe import Recipe, convert_value, parse_pairs
from neuron_merging.checkpoint.recipe_names import (
    format_input_shapes,
    format_merger,
    get_import_path,
    get_network_import_path,
)
from neuron_merging.data.images import IMAGE_BATCH_SIZE, BatchedDataset, Normalization
from neuron_merging.data.open_data import FunctionBatches, Preprocessing, open_batches
from neuron_merging.errors import MergingError, RecipeError, suggest_names
from neuron_merging.evaluation.eval_set import Metric
from neuron_merging.evaluation.verdict import CompressionRequest
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.graph.user_code import import_object
from neuron_merging.inputs.input_sets import FIT_EFFORTS
from neuron_merging.inputs.synthetic import infer_batch_size
from neuron_merging.inputs.user_batches import check_batches
from neuron_merging.merging import MERGERS, Calibrated, Merger, Moments, find_merger
from neuron_merging.merging.none import Prune
from neuron_merging.merging.protocol import uses_data
from neuron_merging.selection import criteria
from neuron_merging.selection.budget import Budget, parse_budget
from neuron_merging.selection.criteria import Criterion
from neuron_merging.selection.elimination import AUTO_CRITERION, EXPECTED_ERROR
from neuron_merging.selection.ratios import Ratio, check_ratio

DEFAULT_RATIO = 0.5
HELDOUT_IMAGES = 128
"""Images beside those of the calibration that a result is judged on."""


@dataclass(frozen=True)
class CompressConfig:
    """The choices of `compress`, as one value."""

    ratio: Ratio | None = None
    criterion: str | Criterion = AUTO_CRITERION
    merger: str | Merger | None = None
    scope: str = "internal"
    ignore: tuple[str, ...] = ()
    round_to: int = 1
    uniform: bool = False
    effort: str | None = None
    seed: int = 0
    calibration: Iterable[Any] | None = field(default=None, repr=False)
    budget: Budget | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    max_loss: float | None = None
    metric: Metric | None = field(default=None, repr=False)
    """The user's own score of a network."""
    images: Any = field(default=None, repr=False)
    """Data to judge on: images, or batches of inputs with labels behind them if there are any."""
    require: float | None = None
    held: Any = field(default=None, repr=False)
    """Samples like those of the calibration that the fit does not see."""

    @property
    def share(self) -> Ratio:
        """The share to remove; half, where nothing else is said."""
        return DEFAULT_RATIO if self.ratio is None else self.ratio

    def __post_init__(self) -> None:
        for name in ("calibration", "images"):
            if isinstance(getattr(self, name), Iterator):  # all that is done with batches reads them again
                object.__setattr__(self, name, list(getattr(self, name)))

    def fitted_to(self, inputs: Any, norm: Normalization | None = None) -> CompressConfig:
        """With images as the network takes them, where that was left open, and those to fit on in memory."""
        example = next((value for value in flatten_inputs(inputs) if isinstance(value, Tensor)), None)
        if example is None:
            return self
        fit, held, images = (
            data.adapt_to(example, norm) if isinstance(data, BatchedDataset) else data
            for data in (self.calibration, self.held, self.images)
        )
        metric = replace(self.metric, batches=images) if isinstance(self.metric, _BatchedMetric) else self.metric
        return replace(
            self,
            calibration=load_batches_to_memory(fit),
            held=load_batches_to_memory(held),
            images=images,
            metric=metric,
        )

    def method(self) -> Merger:
        """The merger; left open, the best for what is given."""
        usual = Moments if self.calibration is None else Calibrated
        found: Merger = usual() if self.merger is None else find_merger(self.merger)
        return replace(found, effort=self.effort) if self.effort and hasattr(found, "effort") else found  # type: ignore[type-var]

    @property
    def input_effort(self) -> str:
        """The effort that goes into inputs of our own making: the merger's, if it has one."""
        return str(getattr(self.method(), "effort", self.effort or "normal"))

    def describe_request(self) -> CompressionRequest:
        """What was asked for, as far as the advice of a verdict depends on it."""
        method = self.method()
        return CompressionRequest(
            target="budget" if self.budget is not None else "ratio" if self.max_loss is None else "max_loss",
            calibrated=self.calibration is not None or getattr(method, "batches", None) is not None,
            merged=not isinstance(method, Prune),
            effort=self.input_effort,
        )

    def check(self) -> None:
        """Refuse what cannot be meant, before any work is done."""
        self._check_data()
        if self.criterion not in (AUTO_CRITERION, EXPECTED_ERROR):
            criteria.find_criterion(self.criterion)
        if self.effort is not None and self.effort not in FIT_EFFORTS:
            what = f"effort {self.effort!r} is not known"
            raise MergingError(what, where="effort=", fix=f"Use one of {', '.join(FIT_EFFORTS)}.")
        _check_integer("round_to", self.round_to, 1, 2**31 - 1)
        _check_integer("seed", self.seed, 0, 2**63 - 1)
        for pattern, value in (self.share if isinstance(self.share, Mapping) else {"": self.share}).items():
            check_ratio(value, pattern)
        self._check_budget()
        _check_number("max_loss", self.max_loss, math.inf, "0.01")
        _check_number("require", self.require, 1.0, "0.95")

    def _check_budget(self) -> None:
        ways = {"a ratio": self.ratio, "a budget": self.budget, "a largest loss": self.max_loss}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) > 1:
            what = f"{given[0]} says how much goes, and so does {given[1]}"
            fix = "Give one of them; limits= caps single layers."
            raise MergingError(what, where="ratio=, budget=, max_loss=", fix=fix)
        if self.limits and self.budget is None and self.max_loss is None:
            raise MergingError("limits go with a budget", where="limits=", fix="Give budget=, or ratios by layer.")
        for pattern, value in self.limits.items():
            check_ratio(value, pattern)

    def _check_data(self) -> None:
        if self.metric is None and self.images is not None:
            check_batches(self.images, "evaluate=")
        method = self.method()
        if self.calibration is not None:
            check_batches(self.calibration)
            if not uses_data(method):
                what = f"the merger {self.merger!r} uses no data, so calibration has no part"
                raise MergingError(what, where="calibration=", fix="Leave one of the two out.")
        elif uses_data(method) and getattr(method, "batches", None) is None:
            what = f"the merger {self.merger!r} needs data"
            raise MergingError(
                what, where="merger=", fix="Give calibration=batches, or --calibrate on the command line."
            )


def load_batches_to_memory(data: Any) -> Any:
    """Images as a list of batches: a fit goes over them more than once."""
    return [x for x, _ in data.batches(IMAGE_BATCH_SIZE)] if isinstance(data, BatchedDataset) else data


def _check_number(name: str, value: object, most: float, example: str) -> None:
    known = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (known and 0 <= float(value) <= most and math.isfinite(value)):  # type: ignore[arg-type]
        bounds = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
        raise MergingError(
            f"{name} {value!r} is not a number {bounds}", where=f"{name}=", fix=f"For instance {example}."
        )


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    whole = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if whole is None or not least <= whole <= most:
        bounds = f"at least {least}" if whole is None or whole < least else f"at most {most}"
        what = f"{name} {value!r} is not an integer of {bounds}"
        raise MergingError(what, where=f"{name}=", fix=f"For instance {name}=8.")


# To texts, and from them


def config_to_recipe(settings: CompressConfig, analysis: Analysis) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe that these settings amount to, and remarks on what no recipe can name."""
    mapped = isinstance(settings.ratio, Mapping)
    method = format_merger(settings.method())
    criterion = settings.criterion if isinstance(settings.criterion, str) else get_import_path(settings.criterion)
    model = get_network_import_path(analysis.model)
    remarks = {
        "model: no class that can be imported and made without arguments; give load() the network with build=": model,
        f"merger: {settings.merger!r}": method,
        "criterion: a function of Python's": criterion,
        "calibrate: batches of Python's": None if settings.calibration is not None else "",
        "eval: data or a function of Python's": None if settings.metric or settings.images is not None else "",
    }
    recipe = Recipe(
        model=model,
        input=format_input_shapes(analysis.inputs),
        ratio=0.0 if mapped else settings.ratio if _has_target(settings) else DEFAULT_RATIO,  # type: ignore[arg-type]
        layer=dict(settings.ratio) if mapped else {},  # type: ignore[arg-type]
        budget={limit.key: limit.value for limit in settings.budget or ()},
        limits=dict(settings.limits),
        max_loss=settings.max_loss,
        ignore=list(settings.ignore),
        scope=settings.scope,
        criterion=criterion or Recipe().criterion,
        merger=method,
        round_to=settings.round_to,
        uniform=settings.uniform,
        effort=settings.effort,
        seed=settings.seed,
        require=settings.require,
    )
    return recipe, tuple(remark for remark, found in remarks.items() if found is None)


def _has_target(settings: CompressConfig) -> bool:
    return any(way is not None for way in (settings.ratio, settings.budget, settings.max_loss))


def config_from_recipe(recipe: Recipe) -> CompressConfig:
    """What a recipe asks for, checked; its data are found, and read when they are needed."""
    crop = None if recipe.crop is None else (recipe.crop, recipe.crop)
    framing = Preprocessing(tuple(recipe.mean), tuple(recipe.std), recipe.resize, crop)
    images = None if recipe.eval is None else open_batches(recipe.eval, "test", framing)
    fit, held = _open_calibration_data(recipe, framing)
    found = CompressConfig(
        ratio={"*": DEFAULT_RATIO if recipe.ratio is None else recipe.ratio, **recipe.layer}
        if recipe.layer
        else recipe.ratio,
        criterion=parse_criterion(recipe.criterion),
        merger=None if recipe.merger is None else parse_merger(recipe.merger),
        scope=recipe.scope,
        ignore=tuple(recipe.ignore),
        round_to=recipe.round_to,
        uniform=recipe.uniform,
        effort=recipe.effort,
        seed=recipe.seed,
        calibration=fit,
        held=held,
        budget=parse_budget(recipe.budget) if recipe.budget else None,
        limits=recipe.limits,
        max_loss=parse_share(recipe.max_loss, "max_loss"),
        metric=_parse_metric(recipe, images),
        images=images,
        require=parse_share(recipe.require, "require"),
    )
    found.check()
    return found


def parse_criterion(text: str) -> str | Criterion:
    """`NAME`, or `package.module:function`."""
    module, _, name = text.partition(":")
    found: str | Criterion = _import_user_object(module, name, "criterion") if name else text
    return found


def parse_merger(text: str) -> Merger:
    """The merger `NAME` or `package.module:Class`, either with `:option=value,…`, its options checked.

    >>> parse_merger("cosine:threshold=0.2,bn=released")
    Cosine(threshold=0.2, balance=0.85, bn='released')
    """
    kinds: dict[str, Any] = dict(MERGERS)
    name, _, rest = text.partition(":")
    if name not in kinds and rest and "=" not in rest.partition(":")[0]:
        own, _, rest = rest.partition(":")
        kinds[name] = _import_user_object(name, own, "merger")
    if name not in kinds:
        raise RecipeError(f"unknown merger {name!r}", where="merger", fix=suggest_names(name, kinds))
    return _build_merger(kinds[name], parse_pairs(rest.split(",") if rest else [], "--merger") or {})


def _import_user_object(module: str, name: str, where: str) -> Any:
    """A class or function of the user's."""
    try:
        return import_object(module, name, where)
    except MergingError as error:
        raise RecipeError(error.what, where=error.where, fix=error.fix) from error


def _build_merger(kind: Any, options: dict[str, Any]) -> Merger:
    """A merger with options, each checked against the kind of its field."""
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
    """The fields that a text can give: data is given otherwise."""
    return set(getattr(kind, "__dataclass_fields__", get_type_hints(kind))) - {"batches", "processes", "uses_data"}


def parse_share(value: float | str | None, name: str) -> float | None:
    """A number, or a percentage.

    >>> parse_share("1%", "max_loss"), parse_share(0.95, "require")
    (0.01, 0.95)
    """
    if not isinstance(value, str):
        return value
    try:
        return float(value.removesuffix("%")) / 100 if value.endswith("%") else float(value)
    except ValueError as error:
        raise RecipeError(f"{value!r} is not a number", where=name, fix="Write 0.01 or 1%.") from error


def _parse_metric(recipe: Recipe, images: Any) -> Metric | None:
    """`package.module:function`, of a network and the batches of --eval, or of a network alone."""
    if recipe.metric is None:
        return None
    module, _, name = recipe.metric.partition(":")
    if not name:
        what = f"{recipe.metric!r} is not package.module:function"
        raise RecipeError(what, where="metric", fix="Name a function of a network and batches that returns a number.")
    own = _import_user_object(module, name, "metric")
    return own if images is None else _BatchedMetric(own, images)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _BatchedMetric:
    """A metric of a network and batches, as a metric of a network."""

    metric: Any
    batches: Any

    def __call__(self, network: nn.Module) -> Any:
        return self.metric(network, iter(self.batches))


def _open_calibration_data(recipe: Recipe, framing: Preprocessing) -> tuple[Any, Any]:
    """Images from all of the data set, at equal distances, and others between them; or a function's batches."""
    if recipe.calibrate is None:
        return None, None
    count = recipe.calibrate_images
    _check_integer("calibrate_images", count, 1, 2**31 - 1)
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
