"""Least squares on measured statistics: a few unlabeled batches through the original network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_merging.errors import MergingError
from neuron_merging.measure import find_uses, measure
from neuron_merging.mergers.fit import fitted
from neuron_merging.task import Merge, Task


@dataclass(frozen=True)
class Calibrated:
    """Fit every consumer to what it reads when the given batches run through the network.

    `batches` yields tensors, tuples such as (x, y), or dicts; only as many leading entries as the
    network has inputs are used, so labels are ignored.
    """

    batches: Iterable[Any]
    ridge: float = 0.01
    restore_variance: bool = False

    def merge(self, task: Task) -> list[Merge]:
        uses = find_uses(task)
        found = measure(task, uses, as_batches(self.batches, task.inputs))
        return fitted(task, uses, found, self.ridge, self.restore_variance)


def as_batches(batches: Iterable[Any], example: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The network's inputs from whatever a data loader yields."""
    for batch in [batches] if isinstance(batches, Tensor) else batches:
        values = list(batch.values()) if isinstance(batch, Mapping) else batch
        values = list(values) if isinstance(values, (list, tuple)) else [values]
        if len(values) < len(example):
            raise MergingError(
                f"a calibration batch has {len(values)} entries, the network takes {len(example)} inputs",
                where="calibration=",
                fix="Yield the inputs first, in the network's order.",
            )
        yield tuple(_like(v, e) for v, e in zip(values, example, strict=False))


def _like(value: Any, example: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(example, Tensor):
        return value
    return value.to(example.device, example.dtype if torch.is_floating_point(example) else value.dtype)
