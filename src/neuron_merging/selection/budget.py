"""Budgets of the smaller network. What can be limited is one table, `BUDGET_KINDS`: a new kind is one more row.

A limit is a share of the original's cost ("50%", 0.5) or a figure with a unit ("1.2M", "5ms"). Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from neuron_merging.errors import MergingError, suggest_names

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.selection.search import CutCosts

LATENCY_RUNS, LATENCY_SECONDS = 20, 1.0
"""Forward passes that a latency is the median of, and the most seconds that they take together."""
DEFAULT_KEY = "macs"
"""What is limited where a share is given alone."""
LARGEST_PERCENTAGE = 100.0
"""A figure without a unit up to here was almost surely meant as a percentage: no network costs so little."""


@dataclass(frozen=True)
class BudgetKind:
    """One thing that can be limited. Either `count` or `measure` gives what a network costs."""

    key: str
    """What it is called in a budget."""
    meaning: str
    units: Mapping[str, float]
    """The units of figures in small letters, and how much each is; "" where a figure may stand alone."""
    count: Callable[[CutCosts], float] | None = None
    """The cost of a cut that is not carried out."""
    measure: Callable[[nn.Module, tuple[Any, ...]], float] | None = None
    """The cost of a network that is run for it: such costs take time, and disturb one another."""

    @property
    def timed(self) -> bool:
        """Whether the cost is measured by running the network."""
        return self.measure is not None


def measure_seconds(model: nn.Module, inputs: tuple[Any, ...], runtime: str = "") -> float:
    """The median time of a forward pass of the example; in the runtime that the network came with, if none is named."""
    import torch

    from neuron_merging.evaluation.latency import measure_latencies
    from neuron_merging.graph.copying import copy_without_hooks
    from neuron_merging.graph.example_inputs import infer_batch_size
    from neuron_merging.onnx.export import make_ort_callable
    from neuron_merging.onnx.network import OnnxNetwork

    size, own = infer_batch_size(inputs), copy_without_hooks(model).eval()
    in_ort = runtime == "onnxruntime" or (not runtime and isinstance(model, OnnxNetwork))
    run = make_ort_callable(own, inputs, torch.get_num_threads()) if in_ort else own
    return measure_latencies({"it": run}, inputs, (size,), LATENCY_RUNS, LATENCY_SECONDS)["it"][size]


_NUMBER_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}
_BYTE_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIME_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
BUDGET_KINDS = {
    kind.key: kind
    for kind in (
        BudgetKind("macs", "multiply-accumulates", {**_NUMBER_UNITS, "t": 1e12}, lambda cut: cut.macs),
        BudgetKind("params", "parameters", {**_NUMBER_UNITS, "b": 1e9}, lambda cut: cut.parameters),
        BudgetKind("weights", "bytes of weights", _BYTE_UNITS, lambda cut: cut.weight_bytes),
        BudgetKind("latency", "seconds of a forward pass", _TIME_UNITS, measure=measure_seconds),
        BudgetKind(
            "latency@torch",
            "seconds of a forward pass in torch",
            _TIME_UNITS,
            measure=partial(measure_seconds, runtime="torch"),
        ),
        BudgetKind(
            "latency@onnxruntime",
            "seconds of a forward pass in onnxruntime",
            _TIME_UNITS,
            measure=partial(measure_seconds, runtime="onnxruntime"),
        ),
    )
}
"""What can be limited, by key."""


@dataclass(frozen=True)
class BudgetLimit:
    """One thing that is limited: to a share of what the original costs, or to a figure."""

    key: str
    amount: float
    share: bool
    unit: str = ""
    """The unit that the amount was given in, as it was written; "" for a plain number."""

    @property
    def kind(self) -> BudgetKind:
        """The row of the table."""
        return BUDGET_KINDS[self.key]

    @property
    def value(self) -> float | str:
        """The limit as a budget has it: `parse_budget` makes the same limit of it.

        >>> [limit.value for limit in parse_budget({"latency": "5ms", "macs": "50%", "params": 0.5})]
        ['5ms', '50%', 0.5]
        """
        return f"{self.amount / self._scale:.15g}{self.unit}" if self.unit else self.amount

    def compute_allowed(self, original: float) -> float:
        """The cost that may not be exceeded."""
        return self.amount * original if self.share else self.amount

    def format_cost(self, cost: float, original: float) -> str:
        """A cost in the unit that the limit was given in.

        >>> limit, share = parse_budget({"params": "1.2M", "macs": "50%"})
        >>> limit.format_cost(795_000, 3e6), share.format_cost(795_000, 3e6)
        ('0.795M', '26.5%')
        """
        figure = (cost / original if self.share else cost) / self._scale
        return f"{figure:,.0f}" if not self.unit and not self.share else f"{figure:.4g}{self.unit}"

    @property
    def _scale(self) -> float:
        return 0.01 if self.unit == "%" else self.kind.units[self.unit.lower()] if self.unit else 1.0

    def __str__(self) -> str:
        return f"{self.key} {self.value}"


Budget = tuple[BudgetLimit, ...]


def parse_budget(budget: object) -> Budget:
    """A mapping of what is limited to shares (0.5, "50%") or figures ("1.2M", "5ms", "3MB"); a share alone is of MACs.

    Limits that were parsed already stay as they are.

    >>> [str(limit) for limit in parse_budget({"macs": "50%", "params": "1.2M"})]
    ['macs 50%', 'params 1.2M']
    """
    if isinstance(budget, tuple) and budget and all(isinstance(limit, BudgetLimit) for limit in budget):
        return budget
    if isinstance(budget, str | Real) and not isinstance(budget, bool):
        budget = {DEFAULT_KEY: budget}
    if not isinstance(budget, Mapping) or not budget:
        what = f"{budget!r} is not a mapping of what is limited to how much"
        raise MergingError(what, where="budget=", fix='For instance budget={"macs": 0.5}.')
    limits = tuple(_parse_limit(key, value) for key, value in budget.items())
    if sum(limit.kind.timed for limit in limits) > 1:
        raise MergingError("the time of a pass is limited twice", where="budget=", fix="Limit it in one runtime.")
    return limits


def _parse_limit(key: object, value: object) -> BudgetLimit:
    kind = BUDGET_KINDS.get(key) if isinstance(key, str) else None
    if kind is None:
        raise MergingError(f"there is no budget of {key!r}", where="budget=", fix=suggest_names(str(key), BUDGET_KINDS))
    if isinstance(value, str):
        return _parse_limit_text(kind, value)
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise _make_limit_error(kind, value)
    return _make_plain_limit(kind, float(value), value)


def _parse_limit_text(kind: BudgetKind, text: str) -> BudgetLimit:
    found = re.fullmatch(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(%|[A-Za-zµ]*)\s*", text)
    if found is None:
        raise _make_limit_error(kind, text)
    number, unit = float(found[1].replace(",", "").replace("_", "")), found[2]
    if not 0 < number < math.inf:
        raise _make_limit_error(kind, text)
    if not unit:
        return _make_plain_limit(kind, number, text)
    if unit == "%":
        if number > 100:
            raise _make_limit_error(kind, text)
        return BudgetLimit(kind.key, number / 100, share=True, unit=unit)
    if unit.lower() not in kind.units:
        raise _make_limit_error(kind, text)
    return BudgetLimit(kind.key, number * kind.units[unit.lower()], share=False, unit=unit)


def _make_plain_limit(kind: BudgetKind, number: float, given: object) -> BudgetLimit:
    """The limit of a number without a unit: a share up to 1, else a figure."""
    if number <= 1:
        return BudgetLimit(kind.key, number, share=True)
    if "" not in kind.units:
        raise _make_limit_error(kind, given)
    if number <= LARGEST_PERCENTAGE:
        what = f"{given!r} is a figure of {kind.meaning}, not a share"
        raise MergingError(what, where=f"budget[{kind.key!r}]", fix=f'Did you mean "{number:g}%"?')
    return BudgetLimit(kind.key, number, share=False)


def _make_limit_error(kind: BudgetKind, value: object) -> MergingError:
    known = ", ".join(unit for unit in kind.units if unit)
    return MergingError(
        f"{value!r} is no limit of {kind.meaning}",
        where=f"budget[{kind.key!r}]",
        fix=f'Give a share of the original\'s, as 0.5 or "50%", or a figure with a unit ({known}).',
    )
