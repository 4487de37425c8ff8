"""naming: objects of Python as the texts by which recipes name them, where there are such texts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.choosing.budget import Limit
from neuron_merging.mergers import MERGERS, Merger

PLAIN = (str, int, float, bool, type(None))


def named(thing: Any) -> str | None:
    """`package.module:name`, if that is found there again by who imports it.

    >>> named(nn.Linear), named(lambda: 0)
    ('torch.nn.modules.linear:Linear', None)
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "<")
    found: Any = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing else None


def network_named(model: nn.Module) -> str | None:
    """The class of a network that can be built without arguments; torch's own containers say nothing of it."""
    kind = type(model)
    if kind.__module__.partition(".")[0] == "torch":
        return None
    needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind not in (2, 4)]
    return None if needed else named(kind)


def inputs_named(inputs: Sequence[Any]) -> list[str]:
    """The shapes of example inputs, with their types where those are no floats; nothing if they are no tensors.

    >>> inputs_named([torch.zeros(1, 3, 8, 8), torch.zeros(2, 4, dtype=torch.int64)])
    ['1,3,8,8', '2,4:int64']
    """
    if not all(isinstance(value, Tensor) and value.ndim for value in inputs):
        return []
    return [",".join(map(str, value.shape)) + _type(value.dtype) for value in inputs]


def _type(dtype: torch.dtype) -> str:
    return "" if dtype.is_floating_point else f":{str(dtype).removeprefix('torch.')}"


def merger_named(merger: Merger) -> str | None:
    """`NAME:option=value,…`, as recipes have it; None for one without a name.

    >>> from neuron_merging.mergers import Cosine
    >>> merger_named(Cosine(threshold=0.2))
    'cosine:threshold=0.2'
    """
    known: dict[type, str] = {kind: name for name, kind in MERGERS.items()}
    name = known.get(type(merger)) or named(type(merger))
    options = _options(merger)
    if name is None or options is None:
        return None
    return name + (":" + ",".join(f"{key}={_spelled(value)}" for key, value in options.items()) if options else "")


def _options(merger: Merger) -> dict[str, Any] | None:
    """What differs from the defaults; None if a text cannot give it."""
    if not is_dataclass(merger):
        return {}
    own = [(f, getattr(merger, f.name)) for f in fields(merger) if f.init and f.name != "batches"]
    changed = {f.name: value for f, value in own if value != (f.default if f.default is not MISSING else None)}
    return changed if all(isinstance(value, PLAIN) for value in changed.values()) else None


def _spelled(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)


def limit_named(limit: Limit) -> float | str:
    """A limit as a budget has it."""
    units = {"latency": "s", "weights": "B"}
    return limit.amount if limit.share or limit.key not in units else f"{limit.amount:g}{units[limit.key]}"
