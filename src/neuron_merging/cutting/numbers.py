"""Numbers that a network's code computes with, as they reach torch's operators: `x / x.shape[1]` shows here.

The code runs on shapes without values, once as it is and once with fewer channels. Whatever number an operator
is given then follows from sizes alone, so one that changes was made of a number of channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from neuron_merging.channels.operators.elementwise import pointwise
from neuron_merging.channels.operators.table import OPERATORS
from neuron_merging.graph.hollow import Hollow
from neuron_merging.graph.usercode import places_now


@dataclass(frozen=True)
class Number:
    """An operator's call: its name, the numbers that it was given, and the lines of the user's code that led to it."""

    op: str
    values: tuple[tuple[str, float], ...]
    places: tuple[str, ...]


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Number] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = func.overloadpacket.__name__
        given = any(isinstance(value, (int, float)) for value in (*args, *(kwargs or {}).values()))
        values = tuple(_numbers(op, func, args, kwargs or {})) if given else ()
        self.calls.append(Number(op, values, places_now() if values else ()))
        return func(*args, **(kwargs or {}))


def _numbers(op: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Fractions anywhere; whole numbers are positions and lengths, unless the operator is arithmetic."""
    row = OPERATORS.get(op.rstrip("_"))
    kinds = (int, float) if row is not None and row.rule is pointwise else (float,)
    named = {**{a.name: v for a, v in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    return [(k, float(v)) for k, v in named.items() if isinstance(v, kinds) and not isinstance(v, bool)]


def numbers_in(network: Hollow, inputs: tuple[Any, ...]) -> list[Number]:
    """Every call of an operator, in order."""
    tape = _Tape()
    network.run(inputs, tape)
    return tape.calls


def changed(before: list[Number], after: list[Number]) -> list[Number]:
    """The calls that were given other numbers, as long as both go the same way."""
    found = []
    for old, new in zip(before, after, strict=False):
        if old.op != new.op:
            break
        if old.values != new.values:
            found.append(old)
    return found
