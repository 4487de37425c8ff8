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
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from neuron_merging.calibration import gaussian
from neuron_merging.calibration.layer_stats import (
    MAX_COVARIANCE_FEATURES,
    ConsumerWeight,
    collect_fit_statistics,
    count_output_positions,
    count_rows,
    explain_batch_failure,
    find_consumer_weights,
)
from neuron_merging.calibration.regression import FitStatistics, JointMoments, average_statistics
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.errors import MergingError
from neuron_merging.graph.example_inputs import flatten_inputs, infer_batch_size
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.inputs import synthetic
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs
from neuron_merging.inputs.input_scale import is_synthesizable
from neuron_merging.inputs.input_sets import (
    FIT_EFFORTS,
    InputRequest,
    is_search_expensive,
    make_fit_inputs,
    make_heldout_inputs,
    make_synthetic_batches,
    take_fit_texts,
)
from neuron_merging.inputs.scale_from_norms import find_input_scales
from neuron_merging.inputs.text import SELF_GENERATED_TEXT
from neuron_merging.merging.fit import (
    ROBUST_RIDGE,
    FitOptions,
    fit_merges,
    fit_variants,
    merge_by_weights,
    prune_computed_weights,
)
from neuron_merging.merging.protocol import MergeResult, Reason, ReasonCode, merger
from neuron_merging.merging.sequential_fit import fit_sequentially, measure_divergences

FitStatisticsIterator = Iterator[tuple[Axis, list[FitStatistics]]]
"""Yields the statistics of one layer after the other, so that only one need be in memory."""
CLOSED_FORM, SYNTHETIC_INPUTS, RANDOM_TOKENS = FALLBACK_SOURCES = (
    "statistics in closed form",
    "synthetic inputs",
    "random tokens",
)
"""Sources of statistics other than generated inputs, in the order in which a summary names them."""
CLOSE_FIT_MARGIN = 0.9
"""A fit that follows the inputs more closely is used if its divergence on held-out inputs is below this multiple of the
other fit's. Held-out inputs are generated like those of the fit and favour it."""
STATISTICS_SOURCES = ("auto", "closed-form", "dead-leaves", "remembered")
MIN_SYNTHETIC_SAMPLES, FEWEST_SYNTHETIC_SAMPLES = 128, 16
"""Least number of synthetic inputs, and the least for an expensive network."""
MAX_PASS_MACS = {"fast": 2**38, "normal": 2**40, "best": 2**42}
"""Multiply-accumulates that the least number of synthetic inputs may take, by effort: some ten seconds on a CPU, a
minute by default. An expensive network has large feature maps, so that few inputs give many rows."""
DEAD_VARIANCE = 1e-10
"""Relative to the squared mean plus the stored variance: a smaller batch variance is rounding of a constant channel."""
MAX_SAMPLE_MACS = 2**34
"""Multiply-accumulates that synthetic inputs beyond the least number may take, seconds on a CPU."""


@merger("moments")
@dataclass(frozen=True)
class Moments:
    """Fit every consumer layer by least squares over all kept channels and taps, without data. The default.

    Parameters
    ----------
    ridge
        The share of each channel's variance that is added to the diagonal of the covariance.
    smoothness
        The correlation length of the prior on input signals, in pixels.
    restore_variance
        Scale each output back to its original variance, which every least-squares fit shrinks.
    samples
        The number of synthetic inputs; None takes as many as the fit of the widest layer needs, within a limit of work.
    seed
        Seeds the synthetic inputs.
    source
        Where statistics come from. "auto" takes inputs synthesised from batch-norm statistics, or self-generated text.
        Without either it takes the closed form for vectors and dead-leaves images for feature maps; for a network that
        reads only tokens, these are averaged with random tokens. "remembered" (synthesised inputs), "closed-form" and
        "dead-leaves" restrict it to one source.
    effort
        "fast" synthesises up to 64 inputs in few steps and takes seconds. "normal" synthesises up to 256 inputs, "best"
        512 in twice the steps.

    Raises
    ------
    MergingError
        An option is not a number or outside its range.

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
        """Fit every consumer layer that has statistics; merge the others by their weights."""
        consumer_weights = find_consumer_weights(selection)
        generated = self._get_fit_inputs(selection)
        known, merges = (
            self._fit_on_generated(selection, consumer_weights, generated)
            if generated.batches
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
        """Fit every layer on statistics in closed form, of synthetic inputs or of random tokens."""
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
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight], generated: GeneratedInputs
    ) -> tuple[list[ConsumerWeight], MergeResult]:
        """Fit in two ways, and return the one that is closer to the original on held-out inputs.

        The second fit follows the inputs more closely than the first. That repairs errors of earlier layers, but on
        few inputs, or on inputs of one kind, it also follows what is particular to them. So it has to be clearly
        better. A sequential fit follows them closest; for an expensive network it would take too long, and a fit with a
        small ridge is compared with one with a large ridge. A language model's own text is of one kind, so only its
        sequential fit with a large ridge is made.
        """
        usable = [consumer_weight for consumer_weight in consumer_weights if consumer_weight.is_fittable]
        batches, heldout = take_fit_texts(generated), self._get_heldout_inputs(selection).batches
        plain = FitOptions(self.ridge, self.restore_variance)
        robust = FitOptions(max(self.ridge, ROBUST_RIDGE), restore=False)
        expensive = is_search_expensive(selection.analysis)
        in_sequence = partial(fit_sequentially, selection, usable, batches, seed=self.seed, include_original=True)
        if expensive and generated.source == SELF_GENERATED_TEXT:
            found = in_sequence(ridge=robust.ridge, restore=robust.restore)
            return usable, replace(found, sources=(generated.source,))
        rows = count_rows(selection, usable, batches)
        known = collect_fit_statistics(selection, usable, batches, seed=self.seed, rows=rows)
        if expensive:
            candidates = fit_variants(selection, usable, known, [robust, plain])
        else:
            candidates = fit_variants(selection, usable, known, [plain])
            candidates.append(in_sequence(ridge=plain.ridge, restore=plain.restore))
        errors = measure_divergences(selection, usable, candidates, heldout)
        best = candidates[errors[1] < CLOSE_FIT_MARGIN * errors[0]]
        return usable, replace(best, sources=(generated.source,))

    def statistics(self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]) -> FitStatisticsIterator:
        """Yield the statistics of what each of these layers reads, as far as they can be had without data."""
        usable = [consumer_weight for consumer_weight in consumer_weights if consumer_weight.is_fittable]
        if batches := take_fit_texts(self._get_fit_inputs(selection)):
            return collect_fit_statistics(selection, usable, batches, seed=self.seed)
        return self._iterate_known_statistics(selection, usable, {})

    def _iterate_known_statistics(
        self, selection: Selection, usable: Sequence[ConsumerWeight], used: dict[Axis, set[str]]
    ) -> FitStatisticsIterator:
        """Yield statistics layer by layer, without generated inputs; record the sources of each layer in `used`.

        They are in closed form, else measured on synthetic inputs. Layers that random tokens reach get the average of
        both.
        """
        tokens = _StatisticsQueue(self._measure_random_tokens(selection, usable))
        closed, measured = (
            self._compute_closed_form(selection, usable),
            self._measure_synthetic(selection, usable, used),
        )
        for part, found in ((CLOSED_FORM, closed), (SYNTHETIC_INPUTS, measured)):
            for axis, statistics in found:
                other = tokens.take(axis)
                used[axis] = {part} if other is None else {part, RANDOM_TOKENS}
                yield (
                    axis,
                    statistics
                    if other is None
                    else [average_statistics(*pair) for pair in zip(statistics, other, strict=True)],
                )
        for axis, statistics in tokens.take_rest():
            used[axis] = {RANDOM_TOKENS}
            yield axis, statistics

    def _measure_synthetic(
        self, selection: Selection, usable: Sequence[ConsumerWeight], known: Mapping[Axis, Any]
    ) -> FitStatisticsIterator:
        """Measure the layers that the closed form did not cover; `known` is complete once this generator starts."""
        rest = [consumer_weight for consumer_weight in usable if consumer_weight.axis not in known]
        if self.source in ("auto", "dead-leaves"):
            yield from self._collect_statistics(selection, rest)

    def _measure_random_tokens(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> FitStatisticsIterator:
        """Measure the unchanged network on random tokens, if tokens are all that it reads."""
        plain = self.source == "auto" and self.effort != "fast" and not _has_float_inputs(selection)
        reads = plain and synthetic.find_token_inputs(selection.graph)
        return self._collect_statistics(selection, consumer_weights, noise=False) if reads else iter(())

    @property
    def input_request(self) -> InputRequest | None:
        """The inputs to synthesise; None if the source does not use any."""
        if self.source not in ("auto", "remembered"):
            return None
        return InputRequest(self.effort, self.seed, self.samples)

    def _get_fit_inputs(self, selection: Selection) -> GeneratedInputs:
        """Return the generated inputs to fit on, or the reason why there are none."""
        request = self.input_request
        if request is None:
            return GeneratedInputs(refusal=f"the source is {self.source}")
        if selection.input_sets is not None:
            return selection.input_sets.fit  # type: ignore[no-any-return]
        return make_fit_inputs(selection.analysis, request.effort, request.seed, request.samples)

    def _get_heldout_inputs(self, selection: Selection) -> GeneratedInputs:
        """Return generated inputs that nothing is fitted on."""
        if selection.input_sets is not None:
            return selection.input_sets.heldout  # type: ignore[no-any-return]
        request = self.input_request or InputRequest()
        return make_heldout_inputs(selection.analysis, request.effort, request.seed)

    def _compute_closed_form(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight]
    ) -> FitStatisticsIterator:
        """Yield statistics in closed form, for linear layers that read vectors."""
        if self.source not in ("auto", "closed-form"):
            return
        inputs = zip(selection.graph.inputs, flatten_inputs(selection.inputs), strict=True)
        tensors = {name: value for name, value in inputs if name is not None and isinstance(value, Tensor)}
        # The closed form describes what one call reads. Layers that share a weight read different values.
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
        # Behind convolutions the Gaussian prior on images is too crude; such layers are measured instead.
        maps = _find_map_values(selection.graph)
        vectors: dict[str, list[ConsumerWeight]] = {}
        for consumer_weight in single:
            if consumer_weight.consumers[0][1].input not in maps:
                vectors.setdefault(consumer_weight.consumers[0][1].input, []).append(consumer_weight)
        if not vectors:
            return
        scales = dict(zip(selection.graph.inputs, find_input_scales(selection.analysis), strict=True))
        priors = {
            name: gaussian.make_input_prior(value, self.smoothness, scales[name])
            for name, value in tensors.items()
            if value.ndim
        }
        given = {name: prior for name, prior in priors.items() if prior is not None}
        for name, known in gaussian.propagate_gaussian(selection.graph, given, vectors):
            # A sample of several rows (tokens × features) has no single mean vector that the layer reads.
            for consumer_weight in vectors[name] if known.mean.ndim == 1 else ():
                yield consumer_weight.axis, [_to_joint_moments(selection, consumer_weight, known)]

    def _collect_statistics(
        self, selection: Selection, consumer_weights: Sequence[ConsumerWeight], noise: bool = True
    ) -> FitStatisticsIterator:
        """Measure layers on synthetic inputs, if the network takes any."""
        if not consumer_weights or self._explain_unusable(selection) is not None:
            return iter(())
        norms = _SyntheticNorms(self.seed, has_float_inputs=_has_float_inputs(selection) or not noise)
        samples = self.samples or _choose_sample_count(selection, consumer_weights, self.effort)
        batches: Iterable[Any] = self._make_synthetic(selection, samples)
        if not _has_float_inputs(selection):
            batches = list(batches)  # tokens take little memory, and batches that can be read again allow parts
        whole = selection.analysis.round_up_samples(samples)
        size = selection.analysis.fixed_batch_size or synthetic.choose_batch_size(selection.inputs, whole)
        share = size / whole / selection.analysis.row_share  # the rows of all batches add up
        # Few rows are stored as they are. Selecting channels (all of them stay) and averaging need covariances.
        alone = (
            consumer_weight
            for consumer_weight in consumer_weights
            if _has_float_inputs(selection) and not consumer_weight.stays.all()
        )
        batch = infer_batch_size(selection.inputs)
        rows = {
            consumer_weight.axis: samples * count_output_positions(selection.graph, consumer_weight, batch)
            for consumer_weight in alone
        }
        return collect_fit_statistics(
            selection, consumer_weights, batches, norm=norms.compute, seed=self.seed, row_factor=share, rows=rows
        )

    def _make_synthetic(self, selection: Selection, samples: int) -> Iterator[tuple[Any, ...]]:
        return make_synthetic_batches(selection.analysis, samples, self.seed)

    def _explain_unusable(self, selection: Selection) -> Reason | None:
        """Return why no synthetic inputs can be used: none can be made, or the model's code rejects them."""
        normed = any(lookup_operator(node).norm == "layer" for node in selection.graph.nodes)
        if not (_has_float_inputs(selection) or synthetic.find_token_inputs(selection.graph) or normed):
            return Reason(ReasonCode.NO_INPUTS, "they have to be numbers, or tokens of a table")
        # One sample more than the example has: a batch size that the code fixes shows now, not during the fit.
        samples = infer_batch_size(selection.inputs) + (selection.analysis.fixed_batch_size is None)
        failure = explain_batch_failure(selection.analysis, next(self._make_synthetic(selection, samples)))
        return Reason(ReasonCode.NO_INPUTS, failure) if failure else None

    def trial_inputs(self, selection: Selection, samples: int) -> Iterable[Sequence[Any]]:
        """Return held-out inputs where the fit used generated ones; else inputs like those of the fit."""
        if self._get_fit_inputs(selection).batches:
            return self._get_heldout_inputs(selection).batches
        return self._make_synthetic(selection, samples) if self._explain_unusable(selection) is None else ()


class _StatisticsQueue:
    """Takes statistics from an iterator as they are needed. Those of layers that are passed over wait."""

    def __init__(self, source: FitStatisticsIterator) -> None:
        self._source, self._waiting = source, dict[Axis, list[FitStatistics]]()

    def take(self, axis: Axis) -> list[FitStatistics] | None:
        """Return the statistics of one layer; None if there are none."""
        # Both sources follow the order of the graph, so that few layers wait at any time.
        while axis not in self._waiting and (found := next(self._source, None)) is not None:
            self._waiting[found[0]] = found[1]
        return self._waiting.pop(axis, None)

    def take_rest(self) -> FitStatisticsIterator:
        """Yield what is left."""
        yield from self._waiting.items()
        yield from self._source


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) < 2**63


def _has_float_inputs(selection: Selection) -> bool:
    return any(is_synthesizable(value) for value in flatten_inputs(selection.inputs))


def _find_map_values(graph: Graph) -> set[str]:
    """Return the values computed from feature maps, up to the next layer norm, whose output is known anyhow."""
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


def _choose_sample_count(selection: Selection, consumer_weights: Sequence[ConsumerWeight], effort: str) -> int:
    """Return enough inputs for eight rows per fitted weight in every layer, within limits of work.

    Even where fewer would be enough, at least `MIN_SYNTHETIC_SAMPLES` are taken, if they are cheap.
    """
    batch = infer_batch_size(selection.inputs)
    macs = max(1, count_graph_macs(selection.graph) // batch)
    enough = max(
        8 * len(weight.kept_columns(0)) // count_output_positions(selection.graph, weight, batch)
        for weight in consumer_weights
    )
    least = max(FEWEST_SYNTHETIC_SAMPLES, min(MIN_SYNTHETIC_SAMPLES, MAX_PASS_MACS[effort] // macs))
    return max(least, min(enough, MAX_SAMPLE_MACS // macs))


def _normalize_by_batch(node: Node, args: dict[str, Any]) -> Tensor:
    """Normalise by the batch's statistics, as in training; constant channels use the stored ones.

    Statistics of synthetic inputs drift away from the stored ones with depth, and this keeps their scale. Dividing a
    constant channel by its batch deviation would blow rounding up to the scale of a signal.
    """
    value, eps, usual = args["input"], args["eps"], args["running_var"]
    own, mean, gain = torch.native_batch_norm(value, args["weight"], args["bias"], None, None, True, 0.0, eps)
    if usual is None:
        return own
    # native_batch_norm returns 1/sqrt(var + eps), from which the batch variance is recovered.
    dead = gain.double() ** -2 - eps <= DEAD_VARIANCE * (mean.double().square() + usual.double()) + 1e-6 * eps
    shape = [-1, *(1 for _ in value.shape[2:])]
    return torch.where(dead.view(shape), node.compute(args), own) if bool(dead.any()) else own


class _SyntheticNorms:
    """Computes normalisation layers such that their output follows their parameters, not the synthetic input."""

    def __init__(self, seed: int, has_float_inputs: bool) -> None:
        self.generator, self.has_float_inputs = torch.Generator("cpu").manual_seed(seed), has_float_inputs

    def compute(self, node: Node, args: dict[str, Any]) -> Any:
        """Compute a norm: batch norms by batch statistics; layer norms as noise, where inputs cannot be synthesised."""
        # One value per channel has no variance: such a norm keeps its stored statistics.
        if lookup_operator(node).norm == "batch" and args["input"].numel() > args["input"].shape[1]:
            return _normalize_by_batch(node, args)
        if lookup_operator(node).norm == "layer" and not self.has_float_inputs:
            return self._draw_noise(args["input"], args.get("weight"), args.get("bias"))
        return node.compute(args)

    def _draw_noise(self, like: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        # Drawn on the CPU in float32, so that a seed gives the same noise on every device and in every precision.
        value = torch.randn(like.shape, generator=self.generator, **synthetic.CPU_FLOAT32).to(like)
        value = value * weight if weight is not None else value
        return value + bias if bias is not None else value
