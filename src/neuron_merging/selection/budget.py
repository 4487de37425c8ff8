"""Budgets of the smaller network: parse shares and absolute figures such as "50%", "1.2M" or "5ms"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from neuron_merging.errors import MergingError

BUDGET_KEYS = {
    "macs": ("multiply-accumulates", {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}),
    "params": ("parameters", {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}),
    "weights": (
        "bytes of weights",
        {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30},
    ),
    "latency": ("seconds of a forward pass", {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}),
}
LATENCY_RUNTIMES = ("torch", "onnxruntime")
"""In what the time of a pass can be measured; it is named as in "latency@onnxruntime"."""
BUDGET_KEYS |= {f"latency@{runtime}": BUDGET_KEYS["latency"] for runtime in LATENCY_RUNTIMES}
"""What can be limited: its meaning, and the units of absolute figures."""


@dataclass(frozen=True)
class BudgetLimit:
    """One thing that is limited: to a share of what the original has, or to an absolute figure."""

    key: str
    amount: float
    share: bool

    def of(self, original: float) -> float:
        """The figure that may not be passed."""
        return self.amount * original if self.share else self.amount

    def __str__(self) -> str:
        return f"{self.key} {self.amount:.3g} of the original's" if self.share else f"{self.key} {self.amount:.6g}"


Budget = tuple[BudgetLimit, ...]


def parse_budget(budget: object) -> Budget:
    """A mapping of what is limited to shares (0.5, "50%") or absolute figures ("1.2M", "5ms", "3MB").

    >>> parse_budget({"macs": "50%", "params": "1.2M"})
    (Limit(key='macs', amount=0.5, share=True), Limit(key='params', amount=1200000.0, share=False))
    """
    if not isinstance(budget, Mapping) or not budget:
        what = f"{budget!r} is not a mapping of what is limited to how much"
        raise MergingError(what, where="budget=", fix='For instance budget={"macs": 0.5}.')
    limits = tuple(_parse_limit(key, value) for key, value in budget.items())
    if sum(limit.key.startswith("latency") for limit in limits) > 1:
        raise MergingError("the time of a pass is limited twice", where="budget=", fix="Limit it in one runtime.")
    return limits


def _parse_limit(key: object, value: object) -> BudgetLimit:
    if key not in BUDGET_KEYS:
        raise MergingError(f"there is no budget of {key!r}", where="budget=", fix=f"Limit {', '.join(BUDGET_KEYS)}.")
    assert isinstance(key, str)
    if isinstance(value, str):
        return _parse_limit_text(key, value)
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise _make_limit_error(key, value)
    number = float(value)
    if number <= 1:
        return BudgetLimit(key, number, share=True)
    if key.startswith("latency"):
        raise _make_limit_error(key, value)
    return BudgetLimit(key, number, share=False)


def _parse_limit_text(key: str, text: str) -> BudgetLimit:
    found = re.fullmatch(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(%|[A-Za-zµ]*)\s*", text)
    if found is None:
        raise _make_limit_error(key, text)
    number, unit = float(found[1].replace(",", "").replace("_", "")), found[2].lower()
    if unit == "%" or (not unit and number <= 1):
        share = number / 100 if unit == "%" else number
        if not 0 < share <= 1:
            raise _make_limit_error(key, text)
        return BudgetLimit(key, share, share=True)
    units = BUDGET_KEYS[key][1]
    if unit not in units or not 0 < number < math.inf:
        raise _make_limit_error(key, text)
    return BudgetLimit(key, number * units[unit], share=False)


def _make_limit_error(key: str, value: object) -> MergingError:
    meaning, units = BUDGET_KEYS[key]
    known = ", ".join(unit for unit in units if unit)
    return MergingError(
        f"{value!r} is no limit of {meaning}",
        where=f"budget[{key!r}]",
        fix=f'Give a share of the original\'s, as 0.5 or "50%", or a figure with a unit ({known}).',
    )
