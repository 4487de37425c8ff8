"""Least squares on measured statistics: a few unlabeled batches through the original network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_merging.channels import Axis
from neuron_merging.errors import MergingError
from neuron_merging.measure import Use, find_uses, measure
from neuron_merging.mergers.fit import by_weights, fitted, not_stored
from neuron_merging.mergers.sequential import fit_in_sequence
from neuron_merging.regression import Joint
from neuron_merging.task import Merge, Task

PLENTY = 8
"""Rows per fitted weight, in units of what made-up inputs deserve: real ones are worth more work."""


@dataclass(frozen=True)
class Calibrated:
    """Fit every consumer to what it reads when the given batches run through the network.

    `batches` yields tensors, tuples such as (x, y), or dicts; only as many leading entries as the
    network has inputs are used, so labels are ignored. `sequential` fits layer after layer to what the
    network that is already merged produces; it holds all batches at once, where the plain fit needs
    one at a time. `reestimate` then gives batch norms the statistics that they see.
    """

    batches: Iterable[Any]
    ridge: float = 0.01
    restore_variance: bool = False
    sequential: bool = True
    reestimate: bool = False

    def __post_init__(self) -> None:
        if self.reestimate and not self.sequential:
            raise MergingError(
                "batch norms are re-estimated during a sequential fit",
                where="Calibrated(reestimate=)",
                fix="Leave sequential=True.",
            )

    def merge(self, task: Task) -> list[Merge]:
        found = find_uses(task)
        uses = [use for use in found if use.fits]
        if self.sequential:
            batches = as_batches(self.batches, task.inputs)
            merges = fit_in_sequence(
                task, uses, batches, ridge=self.ridge, restore=self.restore_variance, reestimate=self.reestimate,
                plenty=PLENTY,
            )  # fmt: skip
        else:
            merges = fitted(task, uses, self.statistics(task, uses), self.ridge, self.restore_variance)
        return merges + by_weights(task, [use for use in found if not use.fits]) + not_stored(task)

    def statistics(self, task: Task, uses: Sequence[Use]) -> dict[Axis, list[Joint]]:
        """What each of these layers reads in the original network."""
        return measure(task, [u for u in uses if u.fits], as_batches(self.batches, task.inputs), plenty=PLENTY)


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
