"""The interface of merging methods: what they return, optional protocols, the registry, and plain pruning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from neuron_merging.calibration.layer_stats import ConsumerWeight
from neuron_merging.calibration.regression import FitStatistics
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis, Consumer
from neuron_merging.errors import MergingError
from neuron_merging.graph.user_code import load_plugins
from neuron_merging.inputs.input_sets import InputRequest


class MergeKind(StrEnum):
    """How a consumer layer makes up for its removed channels.

    Examples
    --------
    >>> [str(kind) for kind in MergeKind]
    ['pruned', 'merged', 'fitted']
    """

    PRUNED = "pruned"
    """Removed without compensation."""
    MERGED = "merged"
    """Merged into kept channels by a scaling matrix."""
    FITTED = "fitted"
    """The kept columns were fitted to the layer's original output."""


class ReasonCode(StrEnum):
    """Reasons why a layer was not merged by the chosen method; the value is the text for the user.

    Examples
    --------
    >>> str(ReasonCode.GROUPED)
    'a grouped layer reads it'
    """

    NOT_STORED = "the weight that reads it cannot be rewritten"
    UNEQUAL = "its channels have unequal shares in the next layer"
    GROUPED = "a grouped layer reads it"
    COMPUTED = "its filters are computed, not stored"
    SHARED = "a shared layer reads it"
    SHARED_NORMS = "a shared layer sees its channels through different norms"
    NO_CHAIN = "its path is not a chain of layers"
    ON_THE_WAY = "an operator on the way"
    BRANCHES = "branches meet"
    UNREAD = "nothing reads it"
    SEVERAL_LAYERS = "several layers make it"
    SEVERAL_NORMS = "more than one batch norm on the way"
    DIFFERENT_NORMS = "its readers see it through different norms"
    NORM_ELSEWHERE = "the batch norm is not right behind its layer"
    NORM_BARE = "the batch norm has no scale to rewrite"
    SINGULAR = "its statistics are singular"
    TOO_WIDE = "too wide for a fit"
    WORSE = "left pruned: merged, the outputs were further off"
    NO_INPUTS = "synthetic inputs do not run here"


@dataclass(frozen=True)
class Reason:
    """Why a layer was not merged by the chosen method.

    Parameters
    ----------
    why
        The reason.
    detail
        The operator, location or value that it refers to.

    Examples
    --------
    >>> str(Reason(ReasonCode.ON_THE_WAY, "gelu"))
    'an operator on the way: gelu'
    """

    why: ReasonCode
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.why}: {self.detail}" if self.detail else str(self.why)


class MeanHandling(StrEnum):
    """How the mean contribution of the removed channels is compensated.

    Examples
    --------
    >>> str(MeanHandling.NEW_BIAS)
    'bias added'
    """

    KEPT = ""
    NEW_BIAS = "bias added"
    LOST = "mean not restored"


@dataclass(frozen=True)
class Merge:
    """The new weights of one consumer layer of one group.

    Parameters
    ----------
    group
        The name of the group.
    consumer
        The layer that reads it.
    kind
        How the removed channels are compensated.
    reason
        Why the layer was not merged by the chosen method.
    columns
        The new values of the consumer's weight at `positions` of its channel axis; None keeps the old ones.
    positions
        Positions of the kept units along the channel axis: `columns_of(consumer, site.kept)`.
    bias
        A new bias, for a layer that has none.
    folded
        The number of removed units that were merged or fitted.
    removed
        The number of removed units.
    mean
        How the mean of the removed units is compensated.
    error
        The expected loss, as a share of the consumer's output variance.
    scaling
        The part of Z for removed units, a row per kept and a column per removed one, where the method has such a
        matrix; it may be sparse.

    Examples
    --------
    >>> group = nm.analyse(net, torch.zeros(1, 4)).channels.groups[0]
    >>> Merge(group.name, group.consumers[0], MergeKind.PRUNED, removed=4).reader
    '2'
    """

    group: str
    consumer: Consumer
    kind: MergeKind
    reason: Reason | None = None
    columns: Tensor | None = None
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))
    bias: Tensor | None = None
    folded: int = 0
    removed: int = 0
    mean: MeanHandling = MeanHandling.KEPT
    error: float | None = None
    scaling: Tensor | None = field(default=None, repr=False)
    offset_tensors: tuple[str, ...] = ()
    """Names of the tensors in `MergeResult.tensors` that took the mean."""

    @property
    def reader(self) -> str:
        """The name of the consumer layer."""
        return self.consumer.node.module or self.consumer.node.name


@dataclass(frozen=True)
class MergeResult:
    """The result of a merger. Two results can be added.

    Parameters
    ----------
    merges
        One merge for every consumer layer of every participating group.
    tensors
        New values of other tensors (a running mean, a bias), by name, at their original size.
    sources
        What the weights were fitted to, for the summary.

    Examples
    --------
    >>> (MergeResult(()) + MergeResult((), {"bn.running_mean": torch.zeros(8)})).tensors.keys()
    dict_keys(['bn.running_mean'])
    """

    merges: tuple[Merge, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    sources: tuple[str, ...] = ()

    def __add__(self, other: MergeResult) -> MergeResult:
        sources = tuple(dict.fromkeys((*self.sources, *other.sources)))
        return MergeResult((*self.merges, *other.merges), {**self.tensors, **other.tensors}, sources)

    def without_weights(self) -> MergeResult:
        """Return the same result without the new weights, which the smaller network has."""
        light = (replace(merge, columns=None, bias=None) for merge in self.merges)
        return MergeResult(tuple(light), {}, self.sources)

    @property
    def fitted_to(self) -> str:
        """What the weights were fitted to, for the summary; "the weights alone" for merges without statistics."""
        if not self.sources and any(merge.kind is not MergeKind.PRUNED for merge in self.merges):
            return "the weights alone"
        return ", ".join(self.sources)


@runtime_checkable
class Merger(Protocol):
    """Compensates the removed units of every group in the weights of its consumer layers.

    Examples
    --------
    >>> class Drop:
    ...     def merge(self, selection):
    ...         return prune_without_merging(selection)
    >>> isinstance(Drop(), Merger)
    True
    """

    def merge(self, selection: Selection) -> MergeResult:
        """Return the new weights of every consumer layer of every group in `selection.sites()`."""
        ...


# Optional protocols. A merger supports one if it has its members; `isinstance` checks that at run time.


@runtime_checkable
class FitsToData(Protocol):
    """A merger that measures statistics on the user's batches."""

    uses_data: bool
    """Whether it uses calibration batches: those of `selection.calibration`, or its own."""
    batches: Iterable[Any] | None
    """Its own batches, if it was given any."""


@runtime_checkable
class SynthesizesInputs(Protocol):
    """A merger that fits on synthesised inputs, which it finds in `selection.input_sets`."""

    effort: str
    """How much work the synthesis may take; `compress(effort=)` replaces it."""

    @property
    def input_request(self) -> InputRequest | None:
        """The inputs that it needs; None if its options make synthesised inputs unnecessary."""
        ...


@runtime_checkable
class StatisticsSource(Protocol):
    """A merger with statistics of what consumer layers read, by which channels can be selected (expected error)."""

    def statistics(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> Mapping[Axis, list[FitStatistics]] | Iterable[tuple[Axis, list[FitStatistics]]]:
        """Return means and covariances of what each of these weights reads.

        Pairs that come one after the other take less memory than a mapping.
        """
        ...


@runtime_checkable
class TrialInputSource(Protocol):
    """A merger that has inputs on which its merges can be compared with plain pruning."""

    def trial_inputs(self, selection: Selection, samples: int) -> Iterable[Sequence[Any]]:
        """Return batches of about so many samples, other than those of the fit where possible."""
        ...


MergerType = TypeVar("MergerType", bound=type)
MERGERS: dict[str, type[Merger]] = {}
"""Registered mergers by their name in `compress(merger=)` and on the command line."""


def merger(name: str) -> Callable[[MergerType], MergerType]:
    """Register a class of mergers under a name that `compress(merger=)` understands.

    Parameters
    ----------
    name
        The name; one that exists already is replaced.

    Returns
    -------
    Callable
        A decorator of classes with a method `merge(selection)` that returns `MergeResult`. The fields of the class are
        its options: `--merger name:field=value`. A class with `uses_data = True` finds unlabelled batches in
        `selection.calibration`.

    Examples
    --------
    >>> @merger("drop")
    ... class Drop:
    ...     def merge(self, selection):
    ...         return prune_without_merging(selection)
    >>> type(find_merger("drop")).__name__
    'Drop'
    """

    def register(kind: MergerType) -> MergerType:
        MERGERS[name] = kind
        return kind

    return register


def find_merger(merger: str | Merger) -> Merger:
    """Return the merger of this name with default options, or the object itself."""
    if isinstance(merger, str):
        if merger not in MERGERS:
            load_plugins()
        if merger not in MERGERS:
            raise MergingError(f"unknown merger {merger!r}", where="merger=", fix=f"Use one of {', '.join(MERGERS)}.")
        return MERGERS[merger]()
    if isinstance(merger, type) or not callable(getattr(merger, "merge", None)):
        raise MergingError(
            f"{merger!r} is not a merger", where="merger=", fix="Give a name or an object with merge(selection)."
        )
    return merger


def uses_data(merger: Merger | type[Merger]) -> bool:
    """Return whether a merger uses calibration batches."""
    return isinstance(merger, FitsToData) and merger.uses_data


def prune_without_merging(selection: Selection) -> MergeResult:
    """Prune without compensation: the remaining weights of every consumer layer keep their values.

    Parameters
    ----------
    selection
        The network and the units that stay.

    Returns
    -------
    MergeResult
        A merge of kind `PRUNED` for every consumer layer.

    Examples
    --------
    >>> selection = Selection(nm.analyse(net, torch.zeros(1, 4)), {"0": [1, 2]})
    >>> [(merge.reader, str(merge.kind), merge.removed) for merge in prune_without_merging(selection).merges]
    [('2', 'pruned', 6)]
    """
    return MergeResult(
        tuple(
            Merge(site.group.name, consumer, MergeKind.PRUNED, removed=len(site.removed))
            for site in selection.sites()
            for consumer in site.group.consumers
        )
    )


@merger("none")
@dataclass(frozen=True)
class Prune:
    """Plain pruning: consumer layers keep their remaining weights."""

    def merge(self, selection: Selection) -> MergeResult:
        return prune_without_merging(selection)
