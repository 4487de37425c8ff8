"""CompressConfig defines every option of `compress` once: type, default, check, help, and its form in texts.

The signatures and docstrings of `compress` and `sweep`, the flags of the command line, the keys of recipes and the
settings on the report are derived from its fields. This module does not import torch when it is loaded.
"""

# ruff: noqa: RUF009 (option() makes a field)
from __future__ import annotations

import builtins
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

from neuron_merging.config.text_values import (
    check_choice,
    check_criterion,
    check_effort,
    check_integer,
    check_number,
    check_shares,
    parse_criterion,
    parse_merger,
    parse_share,
)
from neuron_merging.errors import MergingError, deprecated_members, suggest_names
from neuron_merging.selection.budget import DEFAULT_KEY, Budget, parse_budget

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.data.images import Normalization
    from neuron_merging.evaluation.fidelity import Metric
    from neuron_merging.evaluation.verdict import CompressionRequest
    from neuron_merging.merging import Merger
    from neuron_merging.selection.criteria import Criterion, Ratio

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

DEFAULT_RATIO = 0.5
"""Share that is removed if neither a ratio nor a budget nor a largest loss is given."""
SCOPES, OUTPUT_KINDS = ("internal", "all"), ("module", "graph")


# What an option is


@dataclass(frozen=True)
class Option:
    """The properties of an option beyond its name, type and default."""

    help: str
    """The text in docstrings, and on the command line unless `flag_help` is given."""
    flag_help: str = ""
    """The text on the command line, where values are written differently."""
    in_texts: bool = True
    """Whether it has a flag and a recipe key."""
    text: Any = None
    """The type in recipes, where it differs from that in Python."""
    lone_key: str = ""
    """For a mapping: the key of a value that is given without one."""
    check: Callable[[str, Any], None] | None = None
    """Takes the option's name and value; raises an error for an invalid value."""
    parse: Callable[[Any], Any] | None = None
    """Converts the value of a recipe."""
    sweep: bool | str = True
    """Whether all networks of a sweep can share the option; a text is the help of an option that a sweep varies."""
    always_reported: bool = False
    """Whether the report shows the option even if it has its default."""


def option(default: T, help: str, **more: Any) -> T:
    """Return a field of `CompressConfig`; `more` are further fields of `Option`."""
    return field(default=default, metadata={"option": Option(" ".join(help.split()), **more)})


@dataclass(frozen=True)
class NamedOption:
    """An option with its name and its default."""

    name: str
    annotation: str
    default: Any
    about: Option

    @property
    def text_type(self) -> Any:
        """The type in recipes."""
        # The annotation is source text of this file: `from __future__ import annotations` keeps it unevaluated.
        return eval(self.annotation, dict(vars(builtins))) if self.about.text is None else self.about.text

    @property
    def text_default(self) -> Any:
        """The default in recipes."""
        plain = getattr(self.text_type, "__origin__", self.text_type)
        return plain() if plain in (list, dict) else self.default


def list_options(config: type | None = None) -> list[NamedOption]:
    """Return all options of `compress`, in order."""
    return [
        NamedOption(entry.name, str(entry.type), entry.default, entry.metadata["option"])
        for entry in fields(config or CompressConfig)
        if "option" in entry.metadata
    ]


# The options


@deprecated_members(fitted_to="adapt_data_to")
@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """The options of `compress`, as one value."""

    budget: Mapping[str, float | str] | Budget | float | str | None = option(
        None,
        """What the result may cost, in place of a ratio: "macs", "params", "weights" (bytes) and "latency" (of the
        example on this machine), each a share of the original's (0.5, "50%") or an amount ("1.2M", "3MB", "5ms"). A
        share alone limits the multiply-accumulates. How much each group loses is decided by measuring the network's
        outputs.""",
        flag_help="What the result may cost, as macs=50%, params=1.2M, weights=3MB or latency=5ms; may be repeated. "
        "How much each layer loses is decided by measuring the network's outputs.",
        text=dict[str, float | str],
        lone_key=DEFAULT_KEY,
        sweep="Budgets, as macs=90%,70%,50%. May be repeated: every combination is tried.",
    )
    ratio: Ratio | None = option(
        None,
        """The share of channels to remove from every group, or a mapping of patterns of layer names to shares; later
        patterns win. The default without a budget is 0.5.""",
        flag_help="The share of channels to remove, the same in each group (default 0.5, without a budget); a budget "
        "is usually better.",
        text=float | None,
        check=check_shares,
        sweep="Ratios, as 0.3,0.5: the same share of every layer. A budget is usually better.",
    )
    limits: Mapping[str, float] | None = option(
        None,
        "With a budget: patterns of layers, and the share that they may lose at most.",
        flag_help="With a budget: what some layers may lose at most, as 'PATTERN=RATIO'; may be repeated.",
        text=dict[str, float],
        check=check_shares,
    )
    criterion: str | Criterion = option(
        "auto",
        """Which channels stay: "expected-error" for those that the rest can replace least, the name of a score of
        filters (l1, l2, l2-gm, random), or a function of the filters, one row per channel, to one score per row.
        "auto" is the expected error with a merger that has statistics (the default, "calibrated"), else l2.""",
        flag_help="Which channels stay: auto (default), expected-error, l1, l2, l2-gm, random, or "
        "package.module:function.",
        text=str,
        check=check_criterion,
        parse=parse_criterion,
        sweep="Criteria, as l2,l2-gm (default auto).",
        always_reported=True,
    )
    merger: str | Merger | None = option(
        None,
        "A name or an object. The default is `calibrated` with calibration batches and `moments` without.",
        flag_help="none, cosine, linear, fold, moments, calibrated or package.module:Class, with options after a "
        "colon: cosine:threshold=0.2,bn=released. The default is the best that needs no data, or calibrated with "
        "--calibrate.",
        text=str | None,
        parse=parse_merger,
        sweep="Merging methods, as none,cosine:threshold=0.2,bn=released,moments (default: calibrated with data, else "
        "moments).",
    )
    calibration: Iterable[Any] | None = option(
        None,
        "Unlabelled batches to measure statistics on, in any form that a data loader yields.",
        in_texts=False,
    )
    scope: str = option(
        "internal",
        '"internal", or "all" to cut residual streams too.',
        flag_help='"internal" (default) or "all": residual streams too.',
        check=check_choice(*SCOPES),
        always_reported=True,
    )
    ignore: Sequence[str] = option(
        (),
        "Patterns of layers that are not pruned.",
        flag_help="Layers that are not pruned, as a pattern; may be repeated.",
        text=list[str],
    )
    round_to: int = option(1, "Keep a multiple of this many channels.", check=check_integer(1))
    uniform: bool = option(
        False,
        """Keep equal numbers of channels in repeated layers and add no biases, so that the original's configuration
        class can describe the result.""",
        flag_help="Layers that repeat keep equal numbers of channels and none gets a new bias, so that the original's "
        "configuration, with other numbers, describes the result (transformers' from_pretrained).",
    )
    effort: str | None = option(
        None,
        """How much work goes into synthesised inputs, to fit on and to judge by: "fast" (seconds), "normal" (up to some
        minutes for a large network, once) or "best".""",
        flag_help="How much work goes into synthesised inputs: fast (seconds), normal (default), best.",
        check=check_effort,
    )
    allocation: str = option(
        "auto",
        """How a budget is shared out between layers: "search" tries cuts of each layer on inputs, "gradient" estimates
        all of them from one backward pass, "auto" searches unless that would take too long.""",
        flag_help="How a budget is shared out between layers: search (tries cuts), gradient (one backward pass), or "
        "auto (default: a search unless it would take too long).",
        check=check_choice("auto", "search", "gradient"),
    )
    seed: int = option(0, 'Seeds the criterion "random" and synthetic inputs.', check=check_integer(0, 2**63 - 1))
    verify: bool = option(
        True,
        "Compare the result with the original whose removed channels are set to zero.",
        in_texts=False,
        sweep=False,
    )
    output: str = option(
        "module",
        """"module" for a network of the same class. "graph" for its captured graph as a module: where the class holds
        a number of channels as a constant, so that it cannot be cut, its graph can. Save that as small.pt2 or
        small.onnx.""",
        flag_help='"module" (default) for a network of the same class, "graph" for its captured graph, which can be '
        "cut where the class holds a number of channels as a constant; OUT is then an .onnx or .pt2 file.",
        check=check_choice(*OUTPUT_KINDS),
        sweep=False,
    )
    max_loss: float | None = option(
        None,
        """In place of a ratio or a budget: the smallest network that is found whose score is at most this much below
        the original's. The score is that of `evaluate`, else the fidelity of the outputs (the original's is 1).""",
        flag_help="In place of a ratio or a budget: the smallest network whose score is at most so much (0.01 or 1%) "
        "below the original's: the --metric, else the accuracy on --eval, else the fidelity of the outputs.",
        text=float | str | None,
        check=check_number(math.inf, "0.01"),
        parse=parse_share("max_loss"),
        sweep=False,
    )
    evaluate: Callable[[nn.Module], Any] | Iterable[Any] | None = option(
        None,
        """A function of a network that returns a number, the higher the better; or labelled data (`images`, or batches
        of inputs and labels), of which the accuracy is the score, as a share. The verdict is given on such data.""",
        in_texts=False,
    )
    require: float | None = option(
        None,
        "The least acceptable fidelity of the outputs; a lower one raises an error.",
        flag_help="The least acceptable fidelity of the outputs, as 0.95; if it is lower, nothing is written and the "
        "exit code is 6.",
        text=float | str | None,
        check=check_number(1.0, "0.95"),
        parse=parse_share("require"),
        sweep=False,
    )
    int8: bool = option(
        False,
        """Quantise the smaller network to int8 with onnxruntime, calibrated on the inputs of the fit. `save` then
        writes the int8 file, and the verdict is about it.""",
        flag_help="Write an int8 file: quantised by onnxruntime, calibrated on the inputs of the fit (synthesised or "
        "those of --calibrate), and judged. OUT is then an .onnx file.",
        sweep=False,
    )
    int8_loss: float | None = option(
        None,
        """The largest change of the outputs by int8, as a share of their variance (default 0.02); above it, the layers
        that lose most stay in float.""",
        flag_help="The largest change of the outputs by int8, as a share of their variance (0.02); above it, the "
        "layers that lose most stay in float.",
        text=float | str | None,
        check=check_number(1.0, "0.02"),
        parse=parse_share("int8_loss"),
        sweep=False,
    )
    progress: bool | None = option(
        None,
        "Whether to show a bar on stderr. The default shows it in notebooks and at Python's prompt.",
        in_texts=False,
        sweep=False,
    )
    held: Any = field(default=None, repr=False)
    """Held-out samples of the calibration data; not an option of `compress`."""

    def __post_init__(self) -> None:
        tidy: dict[str, Any] = {
            "budget": None if self.budget is None else parse_budget(self.budget),
            "limits": None if self.limits is None else dict(self.limits),
            "ignore": _list_patterns(self.ignore),
            # Several stages read the batches, and an iterator can be read only once.
            **{k: list(v) for k in ("calibration", "evaluate") if isinstance(v := getattr(self, k), Iterator)},
        }
        for name, value in tidy.items():
            # The dataclass is frozen, and this is still its construction.
            object.__setattr__(self, name, value)

    @property
    def share(self) -> Ratio:
        """The share to remove; `DEFAULT_RATIO` if no ratio is given."""
        return DEFAULT_RATIO if self.ratio is None else self.ratio

    @property
    def has_target(self) -> bool:
        """Whether a ratio, a budget or a largest loss is given."""
        return any(target is not None for target in (self.ratio, self.budget, self.max_loss))

    @property
    def metric(self) -> Metric | None:
        """The user's metric of a network, if `evaluate` is a function."""
        return self.evaluate if callable(self.evaluate) else None

    @property
    def images(self) -> Any:
        """Data to judge on, if `evaluate` has any: images, or batches of inputs and optional labels."""
        if isinstance(self.evaluate, BatchedMetric):
            return self.evaluate.batches
        return None if callable(self.evaluate) else self.evaluate

    def adapt_data_to(self, inputs: Any, norm: Normalization | None = None) -> CompressConfig:
        """Return settings whose image datasets match the example input, with the data to fit on loaded into memory."""
        from torch import Tensor

        from neuron_merging.data.images import BatchedDataset
        from neuron_merging.graph.example_inputs import flatten_inputs

        example = next((value for value in flatten_inputs(inputs) if isinstance(value, Tensor)), None)
        if example is None:
            return self
        fit, held, images = (
            data.adapt_to(example, norm) if isinstance(data, BatchedDataset) else data
            for data in (self.calibration, self.held, self.images)
        )
        given = self.evaluate
        judge: Any = replace(given, batches=images) if isinstance(given, BatchedMetric) else self.metric or images
        fit, held = load_batches_to_memory(fit), load_batches_to_memory(held)
        return replace(self, calibration=fit, held=held, evaluate=judge)

    def method(self) -> Merger:
        """Return the merger; by default `Calibrated` with calibration data, else `Moments`."""
        from neuron_merging.merging import Calibrated, Moments, find_merger

        # Statistics of real data are better than any that are synthesised.
        usual = Moments if self.calibration is None else Calibrated
        found: Merger = usual() if self.merger is None else find_merger(self.merger)
        return replace(found, effort=self.effort) if self.effort and hasattr(found, "effort") else found  # type: ignore[type-var]

    @property
    def input_effort(self) -> str:
        """The effort for synthesised inputs: the merger's, if it has one."""
        return str(getattr(self.method(), "effort", self.effort or "normal"))

    def describe_request(self) -> CompressionRequest:
        """Return the part of the settings that the advice of a verdict depends on."""
        from neuron_merging.evaluation.verdict import CompressionRequest
        from neuron_merging.merging.protocol import Prune, StatisticsSource

        method = self.method()
        return CompressionRequest(
            target="budget" if self.budget is not None else "ratio" if self.max_loss is None else "max_loss",
            calibrated=self.calibration is not None or getattr(method, "batches", None) is not None,
            merged=not isinstance(method, Prune),
            effort=self.input_effort,
            by_weights=not isinstance(method, StatisticsSource),
        )

    def check(self) -> None:
        """Raise an error for invalid or contradictory settings, before any work is done."""
        self._check_data()
        for entry in list_options(type(self)):
            if entry.about.check is not None:
                entry.about.check(entry.name, getattr(self, entry.name))
        self._check_target()

    def _check_target(self) -> None:
        targets = {"a ratio": self.ratio, "a budget": self.budget, "a largest loss": self.max_loss}
        given = [name for name, value in targets.items() if value is not None]
        if len(given) > 1:
            what = f"{given[0]} and {given[1]} cannot both be given"
            fix = "Give one of them; limits= caps single layers."
            raise MergingError(what, where="ratio=, budget=, max_loss=", fix=fix)
        if self.limits and self.budget is None and self.max_loss is None:
            raise MergingError("limits= needs a budget", where="limits=", fix="Give budget=, or ratios by layer.")

    def _check_data(self) -> None:
        from neuron_merging.inputs.user_batches import check_batches
        from neuron_merging.merging.protocol import uses_data

        if self.metric is None and self.images is not None:
            check_batches(self.images, "evaluate=")
        method = self.method()
        if self.calibration is not None:
            check_batches(self.calibration)
            if not uses_data(method):
                what = f"the merger {self.merger!r} uses no data, so calibration= would be ignored"
                raise MergingError(what, where="calibration=", fix="Leave one of the two out.")
        elif uses_data(method) and getattr(method, "batches", None) is None:
            what = f"the merger {self.merger!r} needs data"
            raise MergingError(
                what, where="merger=", fix="Give calibration=batches, or --calibrate on the command line."
            )


def _list_patterns(ignore: Any) -> tuple[str, ...]:
    listed = [ignore] if isinstance(ignore, str) or not isinstance(ignore, Iterable) else list(ignore)
    for pattern in listed:
        if not isinstance(pattern, str):
            what = f"{type(pattern).__name__} is not a pattern of layer names"
            raise MergingError(what, where="ignore=", fix='For instance ignore=["layer1.*"].')
    return tuple(listed)


@dataclass(frozen=True)
class BatchedMetric:
    """Turns a metric of a network and batches into a metric of a network."""

    metric: Any
    batches: Any

    def __call__(self, network: nn.Module) -> Any:
        return self.metric(network, iter(self.batches))


def load_batches_to_memory(data: Any) -> Any:
    """Load an image dataset as a list of batches: a fit reads them more than once."""
    from neuron_merging.data.images import IMAGE_BATCH_SIZE, BatchedDataset

    return [x for x, _ in data.batches(IMAGE_BATCH_SIZE)] if isinstance(data, BatchedDataset) else data


# Signatures


class ModelFunction(Protocol[P, R_co]):
    """A function of a network, example inputs and options."""

    def __call__(self, model: Any, example_inputs: Any = None, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def takes_options(config: Callable[P, CompressConfig]) -> Callable[[Callable[..., R]], ModelFunction[P, R]]:
    """Give a function with `**options` the signature of a config, and a docstring that explains each option."""

    def decorate(function: Callable[..., R]) -> ModelFunction[P, R]:
        document_options(function, {entry.name: entry.about.help for entry in list_options(cast("type", config))})
        return cast("ModelFunction[P, R]", function)

    return decorate


def takes_sweep_options(function: Callable[P, R]) -> Callable[P, R]:
    """Do the same for a sweep: it varies some options, and all its networks share the others."""
    several = "One as for `compress`, or a list of them to go through; the values of a mapping may be lists too."
    helps = {
        entry.name: "As for `compress`." if entry.about.sweep is True else several
        for entry in list_options()
        if entry.about.sweep
    }
    document_options(function, helps)
    return function


def document_options(function: Callable[..., Any], helps: Mapping[str, str]) -> None:
    """Replace `**options` in the signature and the docstring by these options, except for those it already has."""
    known, plain = {entry.name: entry for entry in list_options()}, inspect.signature(function)
    # Options that a function spells out itself keep its own annotation and help.
    explicit = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = [known[name] for name in helps if name not in plain.parameters]
    more = [
        inspect.Parameter(
            entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=entry.annotation
        )
        for entry in added
    ]
    function.__signature__ = plain.replace(parameters=[*explicit, *more])  # type: ignore[attr-defined]
    before, _, after = inspect.getdoc(function).partition("**options\n")  # type: ignore[union-attr]
    texts = "\n".join(f"{o.name}\n{textwrap.indent(textwrap.fill(helps[o.name], 112), '    ')}" for o in added)
    function.__doc__ = before + texts + "\n" + after.partition("\n")[2] if after else before


def build_config(options: Mapping[str, Any], caller: str = "compress") -> CompressConfig:
    """Build a config from keyword arguments; an unknown one raises a TypeError that suggests the nearest name."""
    known = {entry.name for entry in list_options()}
    for name in options:
        if name not in known:
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}. {suggest_names(name, known)}")
    return CompressConfig(**options)
