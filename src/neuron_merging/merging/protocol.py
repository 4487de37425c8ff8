"""What a merging method is given, what it returns, and what it may offer beyond that; the registry of methods;
plain pruning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from neuron_merging.calibration.consumer_weights import ConsumerWeight
from neuron_merging.calibration.regression import FitStatistics
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis, Consumer
from neuron_merging.errors import MergingError
from neuron_merging.graph.user_code import load_plugins
from neuron_merging.inputs.input_sets import InputRequest


class MergeKind(StrEnum):
    """What became of the channels that one layer no longer reads.

    Examples
    --------
    >>> [str(kind) for kind in MergeKind]
    ['pruned', 'merged', 'fitted']
    """

    PRUNED = "pruned"
    """Dropped: nothing makes up for them."""
    MERGED = "merged"
    """Folded into kept ones by a scaling matrix."""
    FITTED = "fitted"
    """The kept columns were fitted to what the layer put out."""


class ReasonCode(StrEnum):
    """Reasons for another kind than the method's own; the prose is the value.

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
    """Why a layer was not treated as the method would.

    Parameters
    ----------
    why
        One of the known reasons.
    detail
        Where, or what.

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
    """Where the mean went that the removed channels had contributed.

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
    """What happens to one consumer of one group.

    Parameters
    ----------
    group
        The group, by name.
    consumer
        The layer that reads it.
    kind
        What became of the channels that go.
    reason
        Why it was not treated as the method would.
    columns
        The new values of the consumer's weight at `positions` of its channel axis; None leaves them as they are.
    positions
        Those of the kept units: `columns_of(consumer, site.kept)`.
    bias
        One to be made, for a layer without.
    folded
        How many removed units the consumer took in.
    removed
        How many there were.
    mean
        Where the mean of the removed units went.
    error
        The share of the consumer's output variance that the method expects to lose.
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
    """Stored tensors, among those of `MergeResult`, that took the mean."""

    @property
    def reader(self) -> str:
        """The layer, by name."""
        return self.consumer.node.module or self.consumer.node.name


@dataclass(frozen=True)
class MergeResult:
    """What a merger returns. Two of them can be added.

    Parameters
    ----------
    merges
        One for every consumer of every group that takes part.
    tensors
        New values of other tensors (a norm's mean, a bias), by name, at their original size.
    sources
        What was fitted to, in words for people.

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
        """What was merged, and how, without the new weights: the smaller network has them."""
        light = (replace(merge, columns=None, bias=None) for merge in self.merges)
        return MergeResult(tuple(light), {}, self.sources)

    @property
    def fitted_to(self) -> str:
        """What was fitted to; the weights alone, if channels were merged by nothing else."""
        if not self.sources and any(merge.kind is not MergeKind.PRUNED for merge in self.merges):
            return "the weights alone"
        return ", ".join(self.sources)


@runtime_checkable
class Merger(Protocol):
    """Folds the removed units of every group into the weights of its consumers.

    Examples
    --------
    >>> class Drop:
    ...     def merge(self, selection):
    ...         return prune_without_merging(selection)
    >>> isinstance(Drop(), Merger)
    True
    """

    def merge(self, selection: Selection) -> MergeResult:
        """The new weights, for every consumer of every group in `selection.sites()`."""
        ...


# What a merger may offer beyond `merge`. Each part is optional; a class that has the method offers it.


@runtime_checkable
class FitsToData(Protocol):
    """A merger that measures statistics on the user's batches."""

    uses_data: bool
    """Whether it looks at calibration batches: those of `selection.calibration`, or its own."""
    batches: Iterable[Any] | None
    """Its own batches, if it was given any."""


@runtime_checkable
class SynthesizesInputs(Protocol):
    """A merger that is fitted to inputs which are synthesised for it; it finds them in `selection.input_sets`."""

    effort: str
    """How much work may go into them: `compress(effort=)` replaces it."""

    @property
    def input_request(self) -> InputRequest | None:
        """What it asks for; None if its options leave it no use for synthesised inputs."""
        ...


@runtime_checkable
class StatisticsSource(Protocol):
    """A merger that knows what consumer layers read, so that channels can be selected by the expected error."""

    def has_reliable_statistics(self, selection: Selection) -> bool:
        """Whether it knows that from inputs like those that the network was trained on."""
        ...

    def statistics(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> dict[Axis, list[FitStatistics]]:
        """Means and covariances of what each of these weights reads."""
        ...


@runtime_checkable
class TrialInputSource(Protocol):
    """A merger that knows inputs on which its merges can be compared with plain pruning."""

    def trial_inputs(self, selection: Selection, samples: int) -> Iterable[Sequence[Any]]:
        """Batches of about so many samples, other than those of the fit where there are any."""
        ...


MergerType = TypeVar("MergerType", bound=type)
MERGERS: dict[str, type[Merger]] = {}
"""By name, as `compress(merger=)` and the command line know them."""


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
    """A merger by name with its defaults, or the object itself."""
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
    """Whether a merger looks at calibration batches."""
    return isinstance(merger, FitsToData) and merger.uses_data


def prune_without_merging(selection: Selection) -> MergeResult:
    """Plain pruning: every consumer's remaining weights as they are.

    Parameters
    ----------
    selection
        The network and the units that stay.

    Returns
    -------
    Merged
        A merge of kind `prune_without_merging` for every consumer.

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
    """Leave the consumers' remaining weights as they are."""

    def merge(self, selection: Selection) -> MergeResult:
        return prune_without_merging(selection)
