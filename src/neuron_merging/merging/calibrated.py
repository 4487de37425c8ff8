"""Merge by least squares on statistics that are measured on the user's unlabelled batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from neuron_merging.calibration.distributed import ProcessGroup, check_same_channels
from neuron_merging.calibration.layer_stats import ConsumerWeight, collect_fit_statistics, find_consumer_weights
from neuron_merging.calibration.output_divergence import find_token_logits
from neuron_merging.calibration.regression import FitStatistics, average_statistics, check_ridge
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.example_inputs import infer_batch_size
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.inputs.input_sets import split_batches_3_to_1, take_fit_texts
from neuron_merging.inputs.text import SELF_GENERATED_TEXT
from neuron_merging.inputs.user_batches import BATCHES_FIX, check_batches, extract_inputs
from neuron_merging.merging.fit import ROBUST_RIDGE, fit_merges, merge_by_weights, prune_computed_weights
from neuron_merging.merging.protocol import MergeResult, merger
from neuron_merging.merging.sequential_fit import fit_sequentially, measure_divergences

PLAIN_FIT_MARGIN = 0.9
"""The plain fit replaces the sequential one only if its error on held-back samples is below this multiple: these are
few, and a smaller difference may be chance."""
ROW_MULTIPLIER = 8
"""Multiplies the rows per fitted weight of synthetic inputs: real data is worth more work."""


@merger("calibrated")
@dataclass(frozen=True)
class Calibrated:
    """Fit every consumer layer on what it reads when calibration batches run through the network.

    Parameters
    ----------
    batches
        Yields tensors, tuples such as (x, y), or dicts; by default those of `compress(calibration=)`. Entries of a dict
        are matched by the names of the network's inputs. Otherwise only as many leading entries as it has inputs are
        used, so labels are ignored.
    ridge
        The share of each channel's variance that is added to the diagonal of the covariance; it grows where there are
        few rows.
    restore_variance
        Scale each output back to its original variance. None does so only in a plain fit that was chosen by comparison.
    sequential
        Fit layers in sequence, each on the outputs of the layers merged before it. This holds all batches in memory,
        while the plain fit needs one at a time. None tries both and compares them on a quarter of the samples; a
        language model, which is fitted to text of its own as well, is fitted in sequence.
    reestimate
        During a sequential fit, give batch norms the statistics that they see.
    processes
        The processes of `accelerate launch`: each runs its own batches, and all fit to the sums over all of them.

    Raises
    ------
    MergingError
        An option is not a number or outside its range, or `batches` cannot be iterated over.

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
            # Selection and merging both read the batches, and an iterator can be read only once.
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
        """Fit every consumer layer to the batches; merge those that are too wide by their weights."""
        check_same_channels(selection.kept, self.processes)
        found = find_consumer_weights(selection)
        consumer_weights = [consumer_weight for consumer_weight in found if consumer_weight.is_fittable]
        if self._prefers_sequential(selection, consumer_weights):
            merges = self._fit_sequentially(
                selection, consumer_weights, extract_inputs(self._get_batches(selection), selection.analysis)
            )
        else:
            with _wrap_batch_errors():
                merges = self._fit_at_once(
                    selection, consumer_weights, self._collect_statistics(selection, consumer_weights)
                )
        rest = merge_by_weights(
            selection, [consumer_weight for consumer_weight in found if not consumer_weight.is_fittable]
        )
        own = ("calibration batches", *([SELF_GENERATED_TEXT] if self._get_own_text(selection) else []))
        return replace(merges, sources=own) + rest + prune_computed_weights(selection)

    def _fit_sequentially(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight], batches: Iterable[Sequence[Any]]
    ) -> MergeResult:
        own = self._get_own_text(selection)
        with _wrap_batch_errors():
            return fit_sequentially(
                selection, consumer_weights, batches, ridge=max(self.ridge, ROBUST_RIDGE) if own else self.ridge,
                restore=bool(self.restore_variance) and not own, reestimate=self.reestimate, row_factor=ROW_MULTIPLIER,
                processes=self.processes, include_original=bool(own), beside=own,
            )  # fmt: skip

    def _fit_at_once(
        self,
        selection: Selection,
        consumer_weights: Sequence[ConsumerWeight],
        known: Iterable[tuple[Axis, Sequence[FitStatistics]]],
    ) -> MergeResult:
        # Compared with a sequential fit, the plain one competes at its best; asked for by name, it is bare least
        # squares.
        restore = self.sequential is None if self.restore_variance is None else self.restore_variance
        if self._get_own_text(selection):
            return fit_merges(selection, consumer_weights, known, max(self.ridge, ROBUST_RIDGE), restore=False)
        return fit_merges(selection, consumer_weights, known, self.ridge, restore)

    def _prefers_sequential(self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]) -> bool:
        """Return `sequential`; if it is None, whether the sequential fit is better on held-back samples."""
        if self.sequential is not None or self.reestimate or self.processes is not None:
            return self.sequential is not False
        if self._get_own_text(selection):
            return True
        fit, held = split_batches_3_to_1(extract_inputs(self._get_batches(selection), selection.analysis))
        if not fit or {id(batch) for batch in fit} & {id(batch) for batch in held}:  # too few samples to hold any back
            return True
        with _wrap_batch_errors():
            known = collect_fit_statistics(selection, consumer_weights, fit, row_factor=ROW_MULTIPLIER)
            candidates = (
                self._fit_at_once(selection, consumer_weights, known),
                self._fit_sequentially(selection, consumer_weights, fit),
            )
            plain, sequence = measure_divergences(selection, consumer_weights, candidates, held, confident=True)
        return not plain < PLAIN_FIT_MARGIN * sequence

    def _get_batches(self, selection: Selection) -> Iterable[Any]:
        found = self.batches if self.batches is not None else selection.calibration
        if found is None:
            raise MergingError("calibrated needs data", where="merger=", fix="Give calibration=batches.")
        return found

    def trial_inputs(self, selection: Selection, samples: int) -> Iterable[Sequence[Any]]:
        """Yield some of the inputs that the fit was made on."""
        left = samples
        for batch in extract_inputs(self._get_batches(selection), selection.analysis):
            yield batch
            left -= infer_batch_size(batch)
            if left <= 0:
                return

    def statistics(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> Iterator[tuple[Axis, list[FitStatistics]]]:
        """Yield the statistics of what each of these layers reads in the original network."""
        with _wrap_batch_errors():
            yield from self._collect_statistics(selection, [u for u in consumer_weights if u.is_fittable])

    def _collect_statistics(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> Iterator[tuple[Axis, list[FitStatistics]]]:
        given = list(extract_inputs(self._get_batches(selection), selection.analysis))
        found = collect_fit_statistics(
            selection, consumer_weights, given, row_factor=ROW_MULTIPLIER, processes=self.processes
        )
        own = self._get_own_text(selection)
        return _average_pairs(found, collect_fit_statistics(selection, consumer_weights, own)) if own else found

    def _get_own_text(self, selection: Selection) -> tuple[InputBatch, ...]:
        """Return self-generated text of a language model, which has half of the say; nothing for other networks.

        The user's text is of one kind. A fit to it alone is worse on all other text.
        """
        if self.processes is not None or selection.input_sets is None or find_token_logits(selection.graph) is None:
            return ()
        return take_fit_texts(selection.input_sets.fit)


def _average_pairs(
    one: Iterator[tuple[Axis, list[FitStatistics]]], other: Iterator[tuple[Axis, list[FitStatistics]]]
) -> Iterator[tuple[Axis, list[FitStatistics]]]:
    """Average the statistics of two sources, which come in the same order."""
    for (axis, first), (_, second) in zip(one, other, strict=True):
        yield axis, [average_statistics(*pair) for pair in zip(first, second, strict=True)]


@contextmanager
def _wrap_batch_errors() -> Iterator[None]:
    """Turn the error that torch raises for a batch of the wrong shape into an error about `calibration=`."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        raise MergingError(
            f"a calibration batch does not run through the network: {describe_error(error)}",
            where="calibration=",
            fix=BATCHES_FIX,
        ) from error
