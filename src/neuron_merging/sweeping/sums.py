"""sums: of networks and settings, so that a result is found again exactly as long as it still holds."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.trees import flat
from neuron_merging.settings import Settings
from neuron_merging.sweeping.scores import Accuracy


def sum_of(value: Any) -> str:
    """Of a setting: of its code too, where it has any that may change."""
    found = hashlib.sha256()
    for part in _content(value):
        found.update(part + b"\0")
    return found.hexdigest()[:32]


def _content(value: Any) -> Iterator[bytes]:
    if isinstance(value, Settings):
        for name in sorted(value.__dataclass_fields__):
            yield name.encode()
            yield from _content(getattr(value, name))
    elif isinstance(value, Accuracy):
        yield value.images.digest.encode()
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _content(part)
    elif value is None or isinstance(value, str | int | float | Mapping):
        yield repr(value).encode()
    else:
        yield _source(value)
        yield cloudpickle.dumps(value)


def _source(value: Any) -> bytes:
    """The code of a function or of an object's class: pickled, one that can be imported is a name."""
    try:
        return inspect.getsource(value if callable(value) and hasattr(value, "__name__") else type(value)).encode()
    except (OSError, TypeError):
        return b""


def network_sum(analysis: Analysis) -> str:
    """Of a network's operators and tensors, and of its example."""
    graph, found = analysis.graph, hashlib.sha256()
    for node in graph.nodes:
        found.update(repr((node.name, node.op, dict(node.args), node.shapes)).encode())
    tensors = {**graph.tensors, **{f"constant {k}": v for k, v in graph.constants.items()}}
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + sum_of(tensor).encode())
    found.update(
        sum_of([value if isinstance(value, Tensor) else repr(value) for value in flat(analysis.inputs)]).encode()
    )
    return found.hexdigest()[:32]
