"""Least squares on measured statistics: a few unlabeled batches through the original network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from neuron_merging.channels import Axis
from neuron_merging.errors import MergingError, told
from neuron_merging.measure import Use, find_uses, measure
from neuron_merging.mergers.fit import by_weights, fitted, not_stored
from neuron_merging.mergers.sequential import fit_in_sequence
from neuron_merging.regression import Joint, check_ridge
from neuron_merging.task import Merge, Task

PLENTY = 8
"""Rows per fitted weight, in units of what made-up inputs deserve: real ones are worth more work."""
BATCHES = "Give a list or a data loader of batches that are like the example inputs."


@dataclass(frozen=True)
class Calibrated:
    """Fit every consumer to what it reads when the given batches run through the network.

    `batches` yields tensors, tuples such as (x, y), or dicts. Entries of a dict are found by the names of
    the network's inputs; otherwise only as many leading entries as it has inputs are used, so labels are
    ignored. `sequential` fits layer after layer to what the network that is already merged produces; it
    holds all batches at once, where the plain fit needs one at a time. `reestimate` then gives batch norms
    the statistics that they see.
    """

    batches: Iterable[Any] = field(repr=False)
    ridge: float = 0.01
    restore_variance: bool = False
    sequential: bool = True
    reestimate: bool = False

    def __post_init__(self) -> None:
        check_ridge(self.ridge, "Calibrated(ridge=)")
        if not isinstance(self.batches, Iterable) or isinstance(self.batches, (str, Mapping)):
            raise MergingError(
                f"{type(self.batches).__name__} is not a list or loader of batches", where="calibration=", fix=BATCHES
            )
        if self.sequential and isinstance(self.batches, Iterator):
            # Choosing channels and merging them read the batches one after the other.
            object.__setattr__(self, "batches", list(self.batches))
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
            with _running():
                merges = fit_in_sequence(
                    task, uses, as_batches(self.batches, task), ridge=self.ridge, restore=self.restore_variance,
                    reestimate=self.reestimate, plenty=PLENTY,
                )  # fmt: skip
        else:
            merges = fitted(task, uses, self.statistics(task, uses), self.ridge, self.restore_variance)
        return merges + by_weights(task, [use for use in found if not use.fits]) + not_stored(task)

    def statistics(self, task: Task, uses: Sequence[Use]) -> dict[Axis, list[Joint]]:
        """What each of these layers reads in the original network."""
        with _running():
            return measure(task, [u for u in uses if u.fits], as_batches(self.batches, task), plenty=PLENTY)


@contextmanager
def _running() -> Iterator[None]:
    """What torch says of a batch of the wrong shape, as an error of the calibration."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        raise MergingError(
            f"a calibration batch does not run through the network: {told(error)}", where="calibration=", fix=BATCHES
        ) from error


def as_batches(batches: Iterable[Any], task: Task) -> Iterator[tuple[Any, ...]]:
    """The network's inputs from whatever a data loader yields."""
    for batch in [batches] if isinstance(batches, Tensor) else batches:
        values = _entries(batch, task)
        if len(values) < len(task.inputs):
            raise MergingError(
                f"a calibration batch has {len(values)} entries, the network takes {len(task.inputs)} inputs",
                where="calibration=",
                fix="Yield the inputs first, in the network's order.",
            )
        yield tuple(_like(v, e) for v, e in zip(values, task.inputs, strict=False))


def _entries(batch: Any, task: Task) -> list[Any]:
    """The entries of a batch in order; those of a dict by the names of the network's inputs, if it has them all."""
    if isinstance(batch, Mapping):
        if len(task.inputs) == 1 and isinstance(task.inputs[0], Mapping):
            return [batch]
        names = task.graph.inputs
        return [batch[name] for name in names] if all(name in batch for name in names) else list(batch.values())
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def _like(value: Any, example: Any) -> Any:
    """The value as the network takes it, or an error if it is not like the example."""
    if isinstance(example, Mapping) and isinstance(value, Mapping) and example.keys() <= value.keys():
        return {key: _like(value[key], part) for key, part in example.items()}
    if isinstance(example, (list, tuple)) and isinstance(value, (list, tuple)) and len(value) == len(example):
        parts = [_like(v, e) for v, e in zip(value, example, strict=True)]
        return type(example)(*parts) if hasattr(example, "_fields") else type(example)(parts)
    if isinstance(example, (Mapping, list, tuple)):
        what = f"a calibration batch has an entry that is not built like the example input, a {type(example).__name__}"
        raise MergingError(what, where="calibration=", fix=BATCHES)
    if not isinstance(example, Tensor):
        return value
    if not isinstance(value, Tensor) or value.ndim != example.ndim:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise MergingError(
            f"a calibration batch has an entry of {what}, the example input is a tensor of shape "
            f"{tuple(example.shape)}",
            where="calibration=",
            fix=BATCHES,
        )
    if not value.numel() or bool((value.isnan() | value.isposinf()).any()):
        what = "has entries that are no numbers" if value.numel() else "is empty"
        raise MergingError(f"a calibration batch {what}", where="calibration=", fix="Leave it out.")
    return value.to(example.device, example.dtype if torch.is_floating_point(example) else value.dtype)
