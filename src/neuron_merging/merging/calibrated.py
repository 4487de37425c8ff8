"""Least squares on measured statistics: a few unlabelled batches run through the original network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from neuron_merging.calibration.consumer_weights import ConsumerWeight, find_consumer_weights
from neuron_merging.calibration.distributed import ProcessGroup, check_same_channels
from neuron_merging.calibration.layer_stats import collect_fit_statistics
from neuron_merging.calibration.regression import FitStatistics, check_ridge
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.pytree import KeywordInputs, get_forward_parameters, split_keyword_inputs
from neuron_merging.inputs.input_sets import split_batch_3_to_1
from neuron_merging.inputs.synthetic import infer_batch_size
from neuron_merging.merging.fit import fit_merges, merge_by_weights, prune_computed_weights
from neuron_merging.merging.protocol import MergeResult, merger
from neuron_merging.merging.sequential_fit import fit_sequentially, measure_divergence

PLAIN_FIT_MARGIN = 0.9
"""What the error of a plain fit must fall to on held-back samples, which are few: less may be chance."""
ROW_MULTIPLIER = 8
"""Rows per fitted weight, in units of what made-up inputs deserve: real ones are worth more work."""
LABEL_KEYS = ("label", "labels", "target", "targets", "y")
"""What people call the labels in a batch that is a dict."""
BATCHES_FIX = "Give a list or a data loader of batches that are like the example inputs."


@merger("calibrated")
@dataclass(frozen=True)
class Calibrated:
    """Fit every consumer to what it reads when batches run through the network.

    Parameters
    ----------
    batches
        Yields tensors, tuples such as (x, y), or dicts; left out, `compress(calibration=)` gives them. Entries of a
        dict are found by the names of the network's inputs; otherwise only as many leading entries as it has inputs
        are used, so labels are ignored.
    ridge
        The share of each channel's variance that counts as noise; it grows where there are few rows.
    restore_variance
        Scale each output back to the variance that it had; left open, in a plain fit that was chosen for its result.
    sequential
        Fit layer after layer to what the network that is already merged produces. That holds all batches at once,
        where the plain fit needs one at a time. Left open, both are tried, and judged on a quarter of the samples.
    reestimate
        Then give batch norms the statistics that they see.
    processes
        Several processes, as `training.processes.current()` knows them under `accelerate launch`, measure together:
        each runs batches of its own, and all fit to the sums over all of them.

    Raises
    ------
    MergingError
        An option that is no number or outside its range, or what cannot be batches.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> small = nm.compress(net, torch.zeros(1, 4), ratio=0.5, merger=Calibrated([torch.randn(64, 4)]))
    >>> str(small.plan.groups[0].readers[0].kind)
    'fitted'
    """

    uses_data: ClassVar[bool] = True
    batches: Iterable[Any] | None = field(default=None, repr=False)
    ridge: float = 0.01
    restore_variance: bool | None = None
    sequential: bool | None = None
    reestimate: bool = False
    processes: ProcessGroup | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_ridge(self.ridge, "Calibrated(ridge=)")
        if self.batches is not None:
            check_batches(self.batches)
        if self.sequential is not False and isinstance(self.batches, Iterator):
            # Choosing channels and merging them read the batches one after the other.
            object.__setattr__(self, "batches", list(self.batches))
        if self.reestimate and self.sequential is False:
            raise MergingError(
                "batch norms are re-estimated during a sequential fit",
                where="Calibrated(reestimate=)",
                fix="Leave sequential=True.",
            )
        if self.reestimate and self.processes is not None:
            raise MergingError(
                "batch norms are re-estimated by one process",
                where="Calibrated(processes=)",
                fix="Leave one of them out.",
            )

    def merge(self, selection: Selection) -> MergeResult:
        """Fit every consumer to the batches; those that cannot be fitted by their weights."""
        check_same_channels(selection.kept, self.processes)
        found = find_consumer_weights(selection)
        uses = [use for use in found if use.fits]
        if self._prefers_sequential(selection, uses):
            merges = self._fit_sequentially(selection, uses, extract_inputs(self._get_batches(selection), selection))
        else:
            with _wrap_batch_errors():
                merges = self._plain(selection, uses, self._collect_statistics(selection, uses))
        rest = merge_by_weights(selection, [use for use in found if not use.fits])
        return replace(merges, sources=("calibration batches",)) + rest + prune_computed_weights(selection)

    def _fit_sequentially(
        self, selection: Selection, uses: Sequence[ConsumerWeight], batches: Iterable[Sequence[Any]]
    ) -> MergeResult:
        with _wrap_batch_errors():
            return fit_sequentially(
                selection, uses, batches, ridge=self.ridge, restore=bool(self.restore_variance),
                reestimate=self.reestimate, plenty=ROW_MULTIPLIER, team=self.processes,
            )  # fmt: skip

    def _plain(
        self,
        selection: Selection,
        uses: Sequence[ConsumerWeight],
        known: Iterable[tuple[Axis, Sequence[FitStatistics]]],
    ) -> MergeResult:
        restore = self.sequential is None if self.restore_variance is None else self.restore_variance
        return fit_merges(selection, uses, known, self.ridge, restore)

    def _prefers_sequential(self, selection: Selection, uses: Sequence[ConsumerWeight]) -> bool:
        """What was asked for; left open, whether that does better on samples that neither fit has seen."""
        if self.sequential is not None or self.reestimate or self.processes is not None:
            return self.sequential is not False
        pairs = [split_batch_3_to_1(batch) for batch in extract_inputs(self._get_batches(selection), selection)]
        if not pairs or any(fit is held for fit, held in pairs):  # too few to hold any back
            return True
        fit, held = zip(*pairs, strict=True)
        with _wrap_batch_errors():
            known = collect_fit_statistics(selection, uses, fit, plenty=ROW_MULTIPLIER)
            ways = (self._plain(selection, uses, known), self._fit_sequentially(selection, uses, fit))
            plain, sequence = (measure_divergence(selection, uses, merged, held, sure=True) for merged in ways)
        return not plain < PLAIN_FIT_MARGIN * sequence

    def _get_batches(self, selection: Selection) -> Iterable[Any]:
        found = self.batches if self.batches is not None else selection.calibration
        if found is None:
            raise MergingError("calibrated needs data", where="merger=", fix="Give calibration=batches.")
        return found

    def inputs(self, selection: Selection, samples: int) -> Iterable[Sequence[Any]]:
        """Some of the inputs that the fit was made on."""
        left = samples
        for batch in extract_inputs(self._get_batches(selection), selection):
            yield batch
            left -= infer_batch_size(batch)
            if left <= 0:
                return

    def has_reliable_statistics(self, selection: Selection) -> bool:
        """It has data."""
        return True

    def statistics(self, selection: Selection, uses: Sequence[ConsumerWeight]) -> dict[Axis, list[FitStatistics]]:
        """What each of these layers reads in the original network."""
        with _wrap_batch_errors():
            return dict(self._collect_statistics(selection, [u for u in uses if u.fits]))

    def _collect_statistics(
        self, selection: Selection, uses: Sequence[ConsumerWeight]
    ) -> Iterator[tuple[Axis, list[FitStatistics]]]:
        batches = extract_inputs(self._get_batches(selection), selection)
        return collect_fit_statistics(selection, uses, batches, plenty=ROW_MULTIPLIER, team=self.processes)


def check_batches(batches: object, where: str = "calibration=") -> None:
    """Refuse what cannot be batches."""
    if not isinstance(batches, Iterable) or isinstance(batches, (str, Mapping)):
        what = f"{type(batches).__name__} is not a list or loader of batches"
        raise MergingError(what, where=where, fix=BATCHES_FIX)


@contextmanager
def _wrap_batch_errors() -> Iterator[None]:
    """What torch says of a batch of the wrong shape, as an error of the calibration."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        raise MergingError(
            f"a calibration batch does not run through the network: {describe_error(error)}",
            where="calibration=",
            fix=BATCHES_FIX,
        ) from error


def extract_inputs(batches: Iterable[Any], selection: Selection) -> Iterator[tuple[Any, ...]]:
    """The network's inputs from whatever a data loader yields."""
    return (inputs for inputs, _ in extract_inputs_and_labels(batches, selection))


def extract_inputs_and_labels(
    batches: Iterable[Any], selection: Selection, where: str = "calibration="
) -> Iterator[tuple[tuple[Any, ...], Tensor | None]]:
    """The same, each with the labels that follow the inputs, if it has any: whole numbers, one for each sample."""
    positional, named = split_keyword_inputs(selection.inputs)
    wanted = {key: value for key, value in named.items() if isinstance(value, Tensor)}
    examples = [*positional, *wanted.values()]
    names = [*list(get_forward_parameters(selection.analysis.model))[: len(positional)], *wanted]
    for batch in [batches] if isinstance(batches, Tensor) else batches:
        values, count = _list_entries(batch, examples, names), len(examples)
        if len(values) < count:
            raise MergingError(
                f"a batch has {len(values)} entries, the network takes {count} inputs",
                where=where,
                fix="Yield the inputs first, in the network's order.",
            )
        found = [_convert_to_example(v, e, where) for v, e in zip(values, examples, strict=False)]
        by_name = dict(zip(wanted, found[len(positional) :], strict=True))
        inputs = (*found[: len(positional)], *([KeywordInputs({**named, **by_name})] if named else []))
        yield inputs, _extract_labels(values[count] if len(values) > count else None, inputs)


def _extract_labels(value: Any, inputs: tuple[Any, ...]) -> Tensor | None:
    whole = isinstance(value, Tensor) and value.ndim == 1 and not value.is_floating_point()
    return value if whole and len(value) == infer_batch_size(inputs) else None


def _list_entries(batch: Any, examples: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The entries of a batch in order; those of a dict by the names of the network's inputs, if it has them all."""
    if isinstance(batch, Mapping):
        if len(examples) == 1 and isinstance(examples[0], Mapping):
            return [batch]
        if len(names) != len(examples) or not all(name in batch for name in names):
            return list(batch.values())
        return [batch[name] for name in names] + [value for name, value in batch.items() if name in LABEL_KEYS]
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def _convert_to_example(value: Any, example: Any, where: str) -> Any:
    """The value as the network takes it, or an error if it is not like the example."""
    if isinstance(example, Mapping) and isinstance(value, Mapping) and example.keys() <= value.keys():
        return {key: _convert_to_example(value[key], part, where) for key, part in example.items()}
    if isinstance(example, (list, tuple)) and isinstance(value, (list, tuple)) and len(value) == len(example):
        parts = [_convert_to_example(v, e, where) for v, e in zip(value, example, strict=True)]
        return type(example)(*parts) if hasattr(example, "_fields") else type(example)(parts)
    if isinstance(example, (Mapping, list, tuple)):
        what = f"a batch has an entry that is not built like the example input, a {type(example).__name__}"
        raise MergingError(what, where=where, fix=BATCHES_FIX)
    if not isinstance(example, Tensor):
        return value
    if not isinstance(value, Tensor) or value.ndim != example.ndim:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise MergingError(
            f"a batch has an entry of {what}, the example input is a tensor of shape {tuple(example.shape)}",
            where=where,
            fix=BATCHES_FIX,
        )
    if not value.numel() or bool((value.isnan() | value.isposinf()).any()):
        what = "has entries that are no numbers" if value.numel() else "is empty"
        raise MergingError(f"a batch {what}", where=where, fix="Leave it out.")
    return value.to(example.device, example.dtype if torch.is_floating_point(example) else value.dtype)
