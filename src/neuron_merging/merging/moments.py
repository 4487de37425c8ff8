"""Merge without data: least squares on statistics that the network itself implies.

The statistics are measured on inputs synthesised from batch-norm statistics (`inputs.batchnorm_inversion`) or on
self-generated text (`inputs.text`). Otherwise vectors are described in closed form (`calibration.gaussian`), from a
prior on the input or from a layer norm, and feature maps are measured on synthetic inputs. Deep in a network the
statistics of synthetic inputs drift away from those of real data, so norms correct them: a batch norm normalises by
the batch's own statistics; a layer norm behind inputs that cannot be synthesised (tokens) is replaced by noise of
the mean and variance that its parameters state. Where a network reads nothing but tokens, these statistics are
averaged with those of random tokens that run through the unchanged network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from neuron_merging.calibration import gaussian
from neuron_merging.calibration.consumer_weights import MAX_COVARIANCE_FEATURES, ConsumerWeight, find_consumer_weights
from neuron_merging.calibration.layer_stats import collect_fit_statistics, explain_batch_failure
from neuron_merging.calibration.regression import FitStatistics, JointMoments, average_statistics
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.errors import MergingError
from neuron_merging.graph.example_inputs import infer_batch_size
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs import synthetic
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs
from neuron_merging.inputs.input_sets import FIT_EFFORTS, InputRequest, make_fit_inputs, make_heldout_inputs
from neuron_merging.merging.fit import fit_merges, merge_by_weights, prune_computed_weights
from neuron_merging.merging.protocol import MergeResult, Reason, ReasonCode, merger
from neuron_merging.merging.sequential_fit import fit_sequentially, measure_divergences

FitStatisticsByAxis = dict[Axis, list[FitStatistics]]
FitStatisticsIterator = Iterator[tuple[Axis, list[FitStatistics]]]
"""Statistics of one layer after the other, of which only one need be held."""
CLOSED_FORM, SYNTHETIC_INPUTS, RANDOM_TOKENS = FALLBACK_SOURCES = (
    "statistics in closed form",
    "synthetic inputs",
    "random tokens",
)
"""Sources beyond what the network remembers, in the order in which they are told."""
SEQUENTIAL_FIT_MARGIN = 0.9
"""What the divergence on witnesses must fall to for a fit in sequence: on such inputs it looks better than it is."""
STATISTICS_SOURCES = ("auto", "closed-form", "dead-leaves", "remembered")
MIN_SYNTHETIC_SAMPLES = 128
DEAD_VARIANCE = 1e-10
MAX_SAMPLE_MACS = 2**34
"""Multiply-accumulates that may be spent on more than the least number of synthetic inputs."""


@merger("moments")
@dataclass(frozen=True)
class Moments:
    """Fit what each consumer reads, by least squares over all kept channels and taps, without data. The default.

    Parameters
    ----------
    ridge
        The share of each channel's variance that counts as noise.
    smoothness
        The distance, in pixels, over which signals are taken to be correlated.
    restore_variance
        Undo the shrinking that comes with every fit.
    samples
        How many synthetic inputs are used where inputs must be made up; None takes as many as the narrowest layer
        needs for its fit, within a budget of work.
    seed
        For the inputs that are made up.
    source
        Where statistics come from. "auto" is inputs that the network remembers (or text that it writes), if there are
        any; else the closed form for vectors and dead leaves for maps, half and half with random tokens where it reads
        nothing else. "remembered", "closed-form" and "dead-leaves" are each of them alone.
    effort
        "fast" remembers nothing, which takes seconds; "normal" makes up to 256 inputs that the network remembers,
        "best" 512 in twice the steps.

    Raises
    ------
    MergingError
        An option that is no number, or outside its range.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> small = nm.compress(net, torch.zeros(1, 4), ratio=0.5, merger=Moments(ridge=0.001))
    >>> str(small.plan.groups[0].readers[0].kind)
    'fitted'
    """

    ridge: float = 0.01
    smoothness: float = 1.0
    restore_variance: bool = True
    samples: int | None = None
    seed: int = 0
    source: str = "auto"
    effort: str = "normal"

    def __post_init__(self) -> None:
        for name, known in (("source", STATISTICS_SOURCES), ("effort", tuple(FIT_EFFORTS))):
            if getattr(self, name) not in known:
                what = f"{name} {getattr(self, name)!r} is not known"
                raise MergingError(what, where=f"Moments({name}=)", fix=f"Use one of {', '.join(known)}.")
        for name, least in (("ridge", 0.0), ("smoothness", 1e-6)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise MergingError(f"{name} {value!r} is not a number of at least {least}", where=f"Moments({name}=)")
        for name, least in (("samples", 1), ("seed", 0)):
            value = getattr(self, name)
            if (value is not None or name == "seed") and not _is_count(value, least):
                what = f"{name} {value!r} is not a whole number of at least {least}"
                raise MergingError(what, where=f"Moments({name}=)", fix=f"For instance {name}=128.")

    def merge(self, selection: Selection) -> MergeResult:
        """Fit every consumer of which statistics are known; the others by their weights."""
        consumer_weights = find_consumer_weights(selection)
        made = self._get_fit_inputs(selection)
        known, merges = (
            self._fit_on_generated(selection, consumer_weights, made)
            if made.batches
            else self._fit_without_inputs(selection, consumer_weights)
        )
        rest = [consumer_weight for consumer_weight in consumer_weights if consumer_weight not in known]
        why = (
            self._explain_unusable(selection) if any(consumer_weight.is_fittable for consumer_weight in rest) else None
        )
        return merges + merge_by_weights(selection, rest, why) + prune_computed_weights(selection)

    def _fit_without_inputs(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> tuple[list[ConsumerWeight], MergeResult]:
        """Every layer at once, by whatever is known of what it reads."""
        used: dict[Axis, set[str]] = {}
        found = self._iterate_known_statistics(
            selection, [consumer_weight for consumer_weight in consumer_weights if consumer_weight.is_fittable], used
        )
        merges = fit_merges(selection, consumer_weights, found, self.ridge, self.restore_variance)
        sources = sorted({part for parts in used.values() for part in parts}, key=FALLBACK_SOURCES.index)
        return [consumer_weight for consumer_weight in consumer_weights if consumer_weight.axis in used], replace(
            merges, sources=tuple(sources)
        )

    def _fit_on_generated(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight], made: GeneratedInputs
    ) -> tuple[list[ConsumerWeight], MergeResult]:
        """At once, or in sequence where that does clearly better on other inputs that the network remembers."""
        usable, batches = (
            [consumer_weight for consumer_weight in consumer_weights if consumer_weight.is_fittable],
            made.batches,
        )
        heldout = self._get_heldout_inputs(selection).batches
        options: dict[str, Any] = {"ridge": self.ridge, "restore": self.restore_variance}
        known = collect_fit_statistics(selection, usable, batches, seed=self.seed)
        at_once = fit_merges(selection, usable, known, **options)
        in_turn = fit_sequentially(selection, usable, batches, seed=self.seed, include_original=True, **options)
        errors = measure_divergences(selection, usable, (at_once, in_turn), heldout)
        best = in_turn if errors[1] < SEQUENTIAL_FIT_MARGIN * errors[0] else at_once
        return usable, replace(best, sources=(made.source,))

    def statistics(self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]) -> FitStatisticsByAxis:
        """What each of these layers reads, as far as it can be known without data."""
        usable = [consumer_weight for consumer_weight in consumer_weights if consumer_weight.is_fittable]
        made = self._get_fit_inputs(selection).batches
        if made:
            return dict(collect_fit_statistics(selection, usable, made, seed=self.seed))
        return dict(self._iterate_known_statistics(selection, usable, {}))

    def _iterate_known_statistics(
        self, selection: Selection, usable: Sequence[ConsumerWeight], used: dict[Axis, set[str]]
    ) -> FitStatisticsIterator:
        """Without what it remembers, layer by layer; which sources were `used` is written down.

        In closed form, else measured on synthetic inputs; half way from there to tokens at random, where those know it.
        """
        tokens = dict(self._measure_random_tokens(selection, usable))
        closed, measured = (
            self._compute_closed_form(selection, usable),
            self._measure_synthetic(selection, usable, used),
        )
        for part, found in ((CLOSED_FORM, closed), (SYNTHETIC_INPUTS, measured)):
            for axis, statistics in found:
                other = tokens.pop(axis, None)
                used[axis] = {part} if other is None else {part, RANDOM_TOKENS}
                yield (
                    axis,
                    statistics
                    if other is None
                    else [average_statistics(*pair) for pair in zip(statistics, other, strict=True)],
                )
        for axis, statistics in tokens.items():
            used[axis] = {RANDOM_TOKENS}
            yield axis, statistics

    def _measure_synthetic(
        self, selection: Selection, usable: Sequence[ConsumerWeight], known: Mapping[Axis, Any]
    ) -> FitStatisticsIterator:
        """What is not known when it comes to that."""
        rest = [consumer_weight for consumer_weight in usable if consumer_weight.axis not in known]
        if self.source in ("auto", "dead-leaves"):
            yield from self._collect_statistics(selection, rest)

    def _measure_random_tokens(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> FitStatisticsIterator:
        """Where tokens are all that a network reads: what it makes of tokens at random, as it is."""
        plain = self.source == "auto" and self.effort != "fast" and not _has_float_inputs(selection)
        reads = plain and synthetic.find_token_inputs(selection.graph)
        return self._collect_statistics(selection, consumer_weights, noise=False) if reads else iter(())

    def has_reliable_statistics(self, selection: Selection) -> bool:
        """Whether channels can be chosen by what layers read: where that is remembered, or stated in closed form.

        Synthetic images are too far from real ones for that.
        """
        closed = self.source in ("auto", "closed-form") and self.effort != "fast"
        convolves = any(lookup_operator(node).convolves for node in selection.graph.nodes)
        return bool(self._get_fit_inputs(selection).batches) or (closed and not convolves)

    @property
    def input_request(self) -> InputRequest | None:
        """What is to be synthesised for it, if this source takes synthesised inputs."""
        if self.source not in ("auto", "remembered"):
            return None
        effort = "normal" if self.source == "remembered" and self.effort == "fast" else self.effort
        return InputRequest(effort, self.seed, self.samples)

    def _get_fit_inputs(self, selection: Selection) -> GeneratedInputs:
        """Synthesised inputs to fit on, if this source takes any; or why there are none."""
        request = self.input_request
        if request is None:
            return GeneratedInputs(refusal=f"the source is {self.source}")
        if selection.input_sets is not None:
            return selection.input_sets.fit  # type: ignore[no-any-return]
        return make_fit_inputs(selection.analysis, request.effort, request.seed, request.samples)

    def _get_heldout_inputs(self, selection: Selection) -> GeneratedInputs:
        """Synthesised inputs that nothing is fitted on."""
        if selection.input_sets is not None:
            return selection.input_sets.heldout  # type: ignore[no-any-return]
        request = self.input_request or InputRequest()
        return make_heldout_inputs(selection.analysis, request.effort, request.seed)

    def _compute_closed_form(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> FitStatisticsIterator:
        """Layers whose input has statistics in closed form."""
        if self.source not in ("auto", "closed-form"):
            return
        inputs = zip(selection.graph.inputs, flatten_inputs(selection.inputs), strict=True)
        tensors = {name: value for name, value in inputs if name is not None and isinstance(value, Tensor)}
        narrow = [
            consumer_weight
            for consumer_weight in consumer_weights
            if len(consumer_weight.consumers) == 1 and consumer_weight.width <= MAX_COVARIANCE_FEATURES
        ]
        single = [
            consumer_weight
            for consumer_weight in narrow
            if lookup_operator(consumer_weight.consumers[0][1].node).layer == "linear"
        ]
        maps = _find_map_values(selection.graph)
        vectors: dict[str, list[ConsumerWeight]] = {}
        for consumer_weight in single:
            if consumer_weight.consumers[0][1].input not in maps:
                vectors.setdefault(consumer_weight.consumers[0][1].input, []).append(consumer_weight)
        if not vectors:
            return
        priors = {
            name: gaussian.make_input_prior(value, self.smoothness) for name, value in tensors.items() if value.ndim
        }
        given = {name: prior for name, prior in priors.items() if prior is not None}
        for name, known in gaussian.propagate_gaussian(selection.graph, given, vectors):
            for consumer_weight in vectors[name] if known.mean.ndim == 1 else ():
                yield consumer_weight.axis, [_to_joint_moments(selection, consumer_weight, known)]

    def _collect_statistics(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight], noise: bool = True
    ) -> FitStatisticsIterator:
        """Layers whose input is measured on synthetic inputs, if the network takes any."""
        if not consumer_weights or self._explain_unusable(selection) is not None:
            return iter(())
        norms = _SyntheticNorms(self.seed, made_up=_has_float_inputs(selection) or not noise)
        samples = _choose_sample_count(selection, consumer_weights) if self.samples is None else self.samples
        batches = self._make_synthetic(selection, samples)
        share = _choose_sample_batch_size(selection, samples) / samples  # all batches together have enough rows
        # To choose channels, when all of them stay, and to go half way to another source takes covariances.
        alone = (
            consumer_weight
            for consumer_weight in consumer_weights
            if _has_float_inputs(selection) and not consumer_weight.stays.all()
        )
        rows = {
            consumer_weight.axis: samples * _count_output_positions(selection, consumer_weight)
            for consumer_weight in alone
        }
        return collect_fit_statistics(
            selection, consumer_weights, batches, norm=norms.compute, seed=self.seed, row_factor=share, rows=rows
        )

    def _make_synthetic(self, selection: Selection, samples: int) -> Iterator[tuple[Any, ...]]:
        tokens, size = synthetic.find_token_inputs(selection.graph), _choose_sample_batch_size(selection, samples)
        whole = -(-samples // size) * size if selection.analysis.requires_example_batch_size else samples
        return synthetic.synthesize_batches(selection.inputs, whole, self.seed, tokens, size)

    def _explain_unusable(self, selection: Selection) -> Reason | None:
        """Why nothing can be measured on made-up inputs: there are none, or the network's own code refuses them."""
        normed = any(lookup_operator(node).norm == "layer" for node in selection.graph.nodes)
        if not (_has_float_inputs(selection) or synthetic.find_token_inputs(selection.graph) or normed):
            return Reason(ReasonCode.NO_INPUTS, "they have to be numbers, or tokens of a table")
        samples = infer_batch_size(selection.inputs) + (not selection.analysis.requires_example_batch_size)
        said = explain_batch_failure(selection.analysis, next(self._make_synthetic(selection, samples)))
        return Reason(ReasonCode.NO_INPUTS, said) if said else None

    def trial_inputs(self, selection: Selection, samples: int) -> Iterable[Sequence[Any]]:
        """Held-out inputs where the fit was made on synthesised ones; else inputs like those of the fit."""
        if self._get_fit_inputs(selection).batches:
            return self._get_heldout_inputs(selection).batches
        return self._make_synthetic(selection, samples) if self._explain_unusable(selection) is None else ()


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) < 2**63


def _has_float_inputs(selection: Selection) -> bool:
    return any(synthetic.is_float_tensor(value) for value in flatten_inputs(selection.inputs))


def _find_map_values(graph: Graph) -> set[str]:
    """The values that are computed from feature maps; a layer norm on the way states its output anyhow."""
    found: set[str] = set()
    for node in graph.nodes:
        reads_maps = lookup_operator(node).convolves or any(ref.name in found for ref in node.refs())
        if reads_maps and not lookup_operator(node).spans:
            found.add(node.name)
    return found


def _to_joint_moments(
    selection: Selection, consumer_weight: ConsumerWeight, known: gaussian.GaussianStats
) -> JointMoments:
    (weight,) = consumer_weight.to_matrices(selection.tensor(consumer_weight.axis.tensor).to(known.mean))
    return JointMoments.of(known.mean, known.cov, weight, consumer_weight.kept_columns(0).to(known.mean.device))


def _choose_sample_count(selection: Selection, consumer_weights: Sequence[ConsumerWeight]) -> int:
    """Enough inputs for eight rows per fitted weight in every layer, as long as they are cheap."""
    batch = infer_batch_size(selection.inputs)
    wanted = max(
        [
            MIN_SYNTHETIC_SAMPLES,
            *(
                8 * len(consumer_weight.kept_columns(0)) // _count_output_positions(selection, consumer_weight)
                for consumer_weight in consumer_weights
            ),
        ]
    )
    return min(wanted, max(MIN_SYNTHETIC_SAMPLES, MAX_SAMPLE_MACS * batch // max(1, count_graph_macs(selection.graph))))


def _choose_sample_batch_size(selection: Selection, samples: int) -> int:
    """How many of so many inputs make a batch; as many as the example has, where the network takes no others."""
    if selection.analysis.requires_example_batch_size:
        return infer_batch_size(selection.inputs)
    return synthetic.choose_batch_size(selection.inputs, samples)


def _count_output_positions(selection: Selection, consumer_weight: ConsumerWeight) -> int:
    """Where a layer puts something out, in one sample."""
    shape = next(iter(consumer_weight.consumers))[1].node.shape
    outputs = selection.graph.tensors[consumer_weight.axis.tensor].shape[1 if consumer_weight.axis.dim == 0 else 0]
    return max(1, math.prod(shape) // max(1, outputs * infer_batch_size(selection.inputs)))


def _normalize_by_batch(node: Node, args: dict[str, Any]) -> Tensor:
    """A batch norm of the batch's mean and variance; channels that are constant take the stored ones.

    Rounding would be blown up to the scale of a signal, and what a constant comes to be is in the parameters.
    """
    value, eps, usual = args["input"], args["eps"], args["running_var"]
    own, mean, gain = torch.native_batch_norm(value, args["weight"], args["bias"], None, None, True, 0.0, eps)
    if usual is None:
        return own
    dead = gain.double() ** -2 - eps <= DEAD_VARIANCE * (mean.double().square() + usual.double()) + 1e-6 * eps
    shape = [-1, *(1 for _ in value.shape[2:])]
    return torch.where(dead.view(shape), node.compute(args), own) if bool(dead.any()) else own


class _SyntheticNorms:
    """Normalisation layers whose output follows their parameters, not the synthetic input."""

    def __init__(self, seed: int, made_up: bool) -> None:
        self.generator, self.made_up = torch.Generator("cpu").manual_seed(seed), made_up

    def compute(self, node: Node, args: dict[str, Any]) -> Any:
        if lookup_operator(node).norm == "batch" and args["input"].numel() > args["input"].shape[1]:
            return _normalize_by_batch(node, args)
        if lookup_operator(node).norm == "layer" and not self.made_up:
            return self._draw_noise(args["input"], args.get("weight"), args.get("bias"))
        return node.compute(args)

    def _draw_noise(self, like: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        value = torch.randn(like.shape, generator=self.generator, **synthetic.CPU_FLOAT32).to(like)
        value = value * weight if weight is not None else value
        return value + bias if bias is not None else value
