"""Least squares on measured statistics: a few unlabelled batches run through the original network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from neuron_merging.calibration.consumer_weights import ConsumerWeight, find_consumer_weights
from neuron_merging.calibration.distributed import ProcessGroup, check_same_channels
from neuron_merging.calibration.layer_stats import collect_fit_statistics
from neuron_merging.calibration.regression import FitStatistics, check_ridge
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.example_inputs import infer_batch_size
from neuron_merging.inputs.input_sets import split_batch_3_to_1
from neuron_merging.inputs.user_batches import BATCHES_FIX, check_batches, extract_inputs
from neuron_merging.merging.fit import fit_merges, merge_by_weights, prune_computed_weights
from neuron_merging.merging.protocol import MergeResult, merger
from neuron_merging.merging.sequential_fit import fit_sequentially, measure_divergences

PLAIN_FIT_MARGIN = 0.9
"""What the error of a plain fit must fall to on held-back samples, which are few: less may be chance."""
ROW_MULTIPLIER = 8
"""Rows per fitted weight, in units of what made-up inputs deserve: real ones are worth more work."""


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
        return replace(merges, sources=("calibration batches",)) + rest + prune_computed_weights(selection)

    def _fit_sequentially(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight], batches: Iterable[Sequence[Any]]
    ) -> MergeResult:
        with _wrap_batch_errors():
            return fit_sequentially(
                selection, consumer_weights, batches, ridge=self.ridge, restore=bool(self.restore_variance),
                reestimate=self.reestimate, row_factor=ROW_MULTIPLIER, processes=self.processes,
            )  # fmt: skip

    def _fit_at_once(
        self,
        selection: Selection,
        consumer_weights: Sequence[ConsumerWeight],
        known: Iterable[tuple[Axis, Sequence[FitStatistics]]],
    ) -> MergeResult:
        restore = self.sequential is None if self.restore_variance is None else self.restore_variance
        return fit_merges(selection, consumer_weights, known, self.ridge, restore)

    def _prefers_sequential(self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]) -> bool:
        """What was asked for; left open, whether that does better on samples that neither fit has seen."""
        if self.sequential is not None or self.reestimate or self.processes is not None:
            return self.sequential is not False
        pairs = [
            split_batch_3_to_1(batch) for batch in extract_inputs(self._get_batches(selection), selection.analysis)
        ]
        if not pairs or any(fit is held for fit, held in pairs):  # too few to hold any back
            return True
        fit, held = zip(*pairs, strict=True)
        with _wrap_batch_errors():
            known = collect_fit_statistics(selection, consumer_weights, fit, row_factor=ROW_MULTIPLIER)
            ways = (
                self._fit_at_once(selection, consumer_weights, known),
                self._fit_sequentially(selection, consumer_weights, fit),
            )
            plain, sequence = measure_divergences(selection, consumer_weights, ways, held, sure=True)
        return not plain < PLAIN_FIT_MARGIN * sequence

    def _get_batches(self, selection: Selection) -> Iterable[Any]:
        found = self.batches if self.batches is not None else selection.calibration
        if found is None:
            raise MergingError("calibrated needs data", where="merger=", fix="Give calibration=batches.")
        return found

    def trial_inputs(self, selection: Selection, samples: int) -> Iterable[Sequence[Any]]:
        """Some of the inputs that the fit was made on."""
        left = samples
        for batch in extract_inputs(self._get_batches(selection), selection.analysis):
            yield batch
            left -= infer_batch_size(batch)
            if left <= 0:
                return

    def has_reliable_statistics(self, selection: Selection) -> bool:
        """It has data."""
        return True

    def statistics(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> dict[Axis, list[FitStatistics]]:
        """What each of these layers reads in the original network."""
        with _wrap_batch_errors():
            return dict(self._collect_statistics(selection, [u for u in consumer_weights if u.is_fittable]))

    def _collect_statistics(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> Iterator[tuple[Axis, list[FitStatistics]]]:
        batches = extract_inputs(self._get_batches(selection), selection.analysis)
        return collect_fit_statistics(
            selection, consumer_weights, batches, row_factor=ROW_MULTIPLIER, processes=self.processes
        )


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
