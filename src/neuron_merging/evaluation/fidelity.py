"""Compare the outputs of smaller networks with the original's. Fidelity is the coefficient of determination R² of the
outputs: 1 − Σ‖y − ŷ‖² / Σ‖y − ȳ‖², at least 0.

An `EvalSet` holds the batches on which networks are compared. User data is checked first: input shape, number of
classes, and input range against the first batch norm's training statistics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuron_merging import progress
from neuron_merging.calibration.output_divergence import (
    OutputPart,
    find_logits_outputs,
    find_output_parts,
    split_outputs,
)
from neuron_merging.channels.analysis import Analysis
from neuron_merging.errors import MergingError, describe_error, raise_if_out_of_memory
from neuron_merging.graph.compare import MAX_ENTRIES_AT_ONCE, ErrorSums, as_plain_tensor, compute_error_share
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.example_inputs import (
    call_model,
    clone_inputs,
    flatten_inputs,
    flatten_outputs,
    get_input_names,
    infer_batch_size,
)
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.graph.process_state import disable_fused_attention, restore_rng
from neuron_merging.graph.user_code import find_user_line
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs, InputBatch
from neuron_merging.inputs.input_scale import is_picture
from neuron_merging.inputs.input_sets import (
    InputSet,
    OriginalOutputs,
    count_samples,
    make_fallback_inputs,
    mix_pairs,
    take_generated_or_fallback,
)
from neuron_merging.inputs.scale_from_norms import count_real_samples
from neuron_merging.inputs.text import find_text_input
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.surgery import apply_plan

IMAGES_PER_BATCH = 256
"""Images in one batch of an evaluation: large enough to be fast, small enough for memory."""
SAMPLE_LIMITS = (16, 64)
"""Synthesised inputs on which networks are compared, at least and at most."""
MIN_SYNTHESISED = 32
"""Inputs synthesised from statistics on which networks are compared at least, if there are so many."""
MAX_EVAL_MACS = 1e10
"""MACs that the original may spend on synthesised inputs: a few seconds of one core."""
LabelledBatches = Iterable[tuple[tuple[Any, ...], Tensor | None]]
CONSTANT_OUTPUT = "the original gives the same output for all inputs"
SINGLE_NUMBER_OUTPUT = "the network gives one number for the whole batch"
NON_FINITE_OUTPUT = "the original's outputs are not finite"
INPUTS_REJECTED = "the network's code rejects the generated inputs"
INTEGER_OUTPUT = "the network returns only integers"


@dataclass(frozen=True)
class NetworkScore:
    """Scores of one network; None where a score is not defined for its outputs.

    `accuracy` and `same` are percentages: correct predictions, and inputs with the same top class as the original.
    `agreement` is Lin's concordance correlation coefficient of the outputs with the original's: 1 if they are equal,
    0 if they are unrelated. Unlike Pearson's correlation it drops with a shift or a change of scale.
    `fidelity` is 1 − squared error / variance of the original's outputs, at least 0. With several outputs, or an
    output of several parts, both are those of the worst.

    For a causal language model, `kl` is the Kullback-Leibler divergence of its predictions from the original's, in nats
    per token, `perplexity` that of the text, and the fidelity is exp(−kl).
    """

    network: str
    accuracy: float | None
    same: float | None
    agreement: float | None
    fidelity: float | None = None
    kl: float | None = None
    perplexity: float | None = None


@dataclass(frozen=True)
class Fidelity:
    """Scores of the original (first) and of smaller networks on the same inputs.

    `favourite` is the percentage of inputs that the original assigns to its most frequent class. Near 100, `same`
    means little: a constant network would reach the same score. `why` explains a missing fidelity.
    """

    inputs: str
    synthetic: bool
    scores: tuple[NetworkScore, ...]
    favourite: float | None
    why: str = ""


def build_compared_networks(
    model: nn.Module, small: nn.Module, plan: Plan, name: str = "merged"
) -> dict[str, nn.Module]:
    """Return the networks to compare: the original, plain pruning with the same plan, and the small network."""
    # Without `biases`: they come from the merges, which this network is compared with.
    pruned = apply_plan(model, Plan(plan.groups, plan.cuts, plan.modules, sizes=plan.sizes))
    return {"original": model, "pruned": pruned, name: small}


def make_image_batches(images: Any, size: int = IMAGES_PER_BATCH) -> tuple[LabelledBatches, str]:
    """Return batches of images, with labels if there are any, and a description."""
    pairs = (((x,), y if images.has_labels else None) for x, y in images.batches(size))
    return pairs, f"{len(images):,} images of {images.name}"


def take_eval_inputs(analysis: Analysis, heldout: GeneratedInputs, seed: int = 0) -> InputSet:
    """Take as many inputs as are cheap to evaluate: held-out synthesised ones, else fallback inputs."""
    size = infer_batch_size(analysis.inputs)
    least, most = SAMPLE_LIMITS
    count = int(min(most, max(least, MAX_EVAL_MACS * size // max(count_graph_macs(analysis.graph), 1))))
    # These exist already, and a handful of them would give a noisy verdict.
    count = max(count, MIN_SYNTHESISED) if heldout.batches else count
    # Another seed than that of the inputs to fit on.
    return take_generated_or_fallback(heldout, analysis, count, seed + 1)


@torch.no_grad()
def compare_networks(
    networks: Mapping[str, nn.Module],
    batches: LabelledBatches,
    inputs: str,
    *,
    synthetic: bool = False,
    parts: Sequence[OutputPart] = (),
    original: OriginalOutputs | None = None,
    text_input: int | None = None,
) -> Fidelity:
    """Run all networks, the original first, on the same batches, and score them.

    `inputs` describes the batches. `synthetic` batches that the original's code rejects are skipped. `text_input` is
    the position of the tokens that a causal language model reads.
    """
    with disable_fused_attention(), restore_rng():
        return _compare_on_batches(networks, batches, inputs, synthetic, parts, original, text_input)


def _compare_on_batches(
    networks: Mapping[str, nn.Module],
    batches: LabelledBatches,
    inputs: str,
    synthetic: bool,
    parts: Sequence[OutputPart],
    known: OriginalOutputs | None,
    text_input: int | None,
) -> Fidelity:
    # The user's hooks must not run, nor see these inputs.
    copies = [copy_without_hooks(network).eval() for network in networks.values()]
    accumulators, accepted = [_ScoreAccumulator(parts) for _ in networks], 0
    for batch, labels in batches:
        try:
            # Earlier stages may have run the original on the same batches.
            found = call_model(copies[0], clone_inputs(batch)) if known is None else known.compute(batch)
            original = _select_float_outputs(found)
        except Exception as error:  # the network's own code, which may reject synthesised inputs
            raise_if_out_of_memory(error)
            if not synthetic:
                raise
            continue
        accepted += 1
        others = [_select_float_outputs(call_model(network, clone_inputs(batch))) for network in copies[1:]]
        text = None if text_input is None else flatten_inputs(batch)[text_input]
        for accumulator, outputs in zip(accumulators, (original, *others), strict=True):
            if text is None:
                accumulator.add(outputs, original, labels)
            else:
                accumulator.add_text(outputs[0], original[0], text)
    scores = tuple(accumulator.score(name) for name, accumulator in zip(networks, accumulators, strict=True))
    first = accumulators[0]
    why = INPUTS_REJECTED if synthetic and not accepted else first.explain_missing_fidelity()
    return Fidelity(inputs, not first.labelled, scores, first.compute_favourite_share(), why)


def _select_float_outputs(outputs: Any) -> list[Tensor]:
    """Return the floating-point outputs, with a row for each sample; complex ones as pairs of reals."""
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in flatten_outputs(outputs)]
    # Integers are indices or classes: their differences have no scale.
    return [t if t.ndim else t[None] for t in tensors if t.is_floating_point()]


@dataclass
class _AgreementSums(ErrorSums):
    """Adds the other network's sums, and the sum of products with the original's outputs."""

    other_total: Tensor | float = 0.0
    other_squares: Tensor | float = 0.0
    products: Tensor | float = 0.0

    def _add_sums(self, x: Tensor, y: Tensor) -> None:
        super()._add_sums(x, y)
        self.other_total, self.other_squares = self.other_total + y.sum(0), self.other_squares + (y * y).sum(0)
        self.products = self.products + (x * y).sum(0)

    @property
    def covariance(self) -> float:
        return self.sum_products(self.total, self.other_total, self.products)

    @property
    def spread(self) -> float:
        """Denominator of Lin's concordance: both variances plus the squared distance of the means."""
        # n · (σx² + σy² + (μx − μy)²) = Σx² + Σy² − 2 · Σx · Σy / n
        squares = self.power + float(as_plain_tensor(self.other_squares).sum())
        return squares + 2 * self.sum_products(self.total, self.other_total, 0.0)


@dataclass
class TokenSums:
    """Sums over the tokens of texts: divergence from the original's predictions, and surprise at the next token."""

    count: int = 0
    divergence: float = 0.0
    surprise: float = 0.0
    predicted: int = 0

    def add(self, logits: Tensor, original: Tensor, text: Tensor) -> None:
        """Add one text: scores over the vocabulary, tokens × vocabulary, and the tokens."""
        count = max(1, MAX_ENTRIES_AT_ONCE // logits.shape[-1])
        for start in range(0, len(text), count):
            own = slice(start, start + count)
            # In float64, some tokens at a time: a vocabulary may be large.
            q, p = (scores[own].double().log_softmax(-1) for scores in (logits, original))
            # A token with the score −∞ has probability 0 and no share in the divergence.
            self.divergence += float(torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum())
            following = text[start + 1 : start + count + 1, None].to(q.device, torch.int64)
            self.surprise -= float(q[: len(following)].gather(1, following).sum())
        self.count, self.predicted = self.count + len(text), self.predicted + len(text) - 1

    @property
    def kl(self) -> float:
        """Divergence in nats per token; infinite where the network's scores are not finite."""
        mean = self.divergence / max(1, self.count)
        return max(0.0, mean) if math.isfinite(mean) else math.inf

    @property
    def perplexity(self) -> float:
        """Perplexity of the texts; infinite where it is too large for a number."""
        mean = self.surprise / max(1, self.predicted)
        return math.exp(mean) if mean < MAX_SURPRISE else math.inf


MAX_SURPRISE = 700.0
"""Nats per token beyond which a perplexity is infinite: exp(700) is near the largest float64."""


class _ScoreAccumulator:
    """Accumulates the scores of one network over batches, as sums.

    `sums` is indexed by output and by the shape of a sample: a network may return other shapes for other batches.
    """

    def __init__(self, parts: Sequence[OutputPart] = ()) -> None:
        self.parts = parts
        self.samples = self.hits = self.same = 0
        self.sums: dict[int, dict[tuple[int, ...], _AgreementSums]] = {}
        self.class_counts: Counter[int] = Counter()
        self.classes = self.labelled = self.misshapen = False
        self.tokens = TokenSums()

    def add(self, outputs: list[Tensor], original: list[Tensor], labels: Tensor | None) -> None:
        """Add one batch: the network's outputs, the original's, and the labels if there are any."""
        # Outputs of another shape are skipped below; they make the fidelity 0.
        self.misshapen |= [t.shape for t in outputs] != [t.shape for t in original]
        pieces = (split_outputs(original, self.parts), split_outputs(outputs, self.parts))
        for i, (x, y) in enumerate(zip(*pieces, strict=False)):
            if x.shape == y.shape and x.numel():
                self._add_output(i, x, y)
        if outputs and original:
            self._add_top_classes(outputs[0], original[0])
        if labels is not None:
            self.labelled = True
            self.hits += _count_correct(outputs[0] if outputs else torch.empty(0), labels)

    def add_text(self, logits: Tensor, original: Tensor, text: Tensor) -> None:
        """Add one batch of texts: scores over the vocabulary at each token."""
        self.samples += len(text)
        for x, y, own in zip(logits, original, text, strict=True):
            self.tokens.add(x, y, own)

    def _add_output(self, i: int, x: Tensor, y: Tensor) -> None:
        """Add one output in slices of samples that fit into memory as float64."""
        count = max(1, MAX_ENTRIES_AT_ONCE * len(x) // x.numel())
        sums = self.sums.setdefault(i, {}).setdefault(tuple(x.shape[1:]), _AgreementSums())
        for start in range(0, len(x), count):
            sums.add(x[start : start + count], y[start : start + count])

    def _add_top_classes(self, output: Tensor, original: Tensor) -> None:
        """Count top classes if the output looks like logits: one row of at least two scores per sample."""
        self.samples += len(original)
        self.classes = output.ndim == 2 and output.shape[1] > 1 and output.shape == original.shape
        if self.classes:
            self.same += int((output.argmax(1) == original.argmax(1)).sum())
            self.class_counts.update(output.argmax(1).tolist())

    def score(self, name: str) -> NetworkScore:
        """Return the scores over all batches."""
        count = max(self.samples, 1)
        return NetworkScore(
            network=name,
            accuracy=100 * self.hits / count if self.labelled else None,
            same=100 * self.same / count if self.classes else None,
            agreement=self._compute_agreement(),
            # For text, exp(−KL) plays the role of R²: 1 if the predictions are equal, towards 0 as they part.
            fidelity=math.exp(-self.tokens.kl) if self.tokens.count else self._compute_fidelity(),
            kl=self.tokens.kl if self.tokens.count else None,
            perplexity=self.tokens.perplexity if self.tokens.count else None,
        )

    def compute_favourite_share(self) -> float | None:
        """Return the percentage of samples in the most frequent class; None if the outputs are not logits."""
        return 100 * max(self.class_counts.values()) / self.samples if self.class_counts else None

    def explain_missing_fidelity(self) -> str:
        """Return why there is no fidelity; an empty text if there is one."""
        if self.tokens.count:
            return ""
        if not self.sums:
            return INTEGER_OUTPUT
        if self._list_varying_outputs():
            return ""
        single = all(sums.count == 1 and shape == () for shapes in self.sums.values() for shape, sums in shapes.items())
        return NON_FINITE_OUTPUT if not self._has_finite() else SINGLE_NUMBER_OUTPUT if single else CONSTANT_OUTPUT

    def _has_finite(self) -> bool:
        return any(sums.known for shapes in self.sums.values() for sums in shapes.values())

    def _is_broken(self) -> bool:
        """Whether the outputs differ in shape from the original's, or are NaN or infinite where those are finite."""
        return self.misshapen or any(sums.broken for shapes in self.sums.values() for sums in shapes.values())

    def _list_varying_outputs(self) -> list[list[_AgreementSums]]:
        """Return the sums of outputs that vary over samples, a list with all shapes for each output."""
        outputs = (list(shapes.values()) for shapes in self.sums.values())
        return [output for output in outputs if sum(sums.variance for sums in output) > 0]

    def _compute_fidelity(self) -> float | None:
        """Return the fidelity of the worst output; 0 if an output is broken, None if no output varies."""
        if self._is_broken() and self._has_finite():
            return 0.0
        return min((max(0.0, 1 - compute_error_share(output)) for output in self._list_varying_outputs()), default=None)

    def _compute_agreement(self) -> float | None:
        """Return Lin's concordance of the worst output; None if none varies: agreeing with a constant is trivial."""
        varying = self._list_varying_outputs()
        if not varying or self._is_broken():
            return 0.0 if varying else None
        # Lin's concordance: 2·cov / (var₁ + var₂ + (mean₁ − mean₂)²), summed over entries.
        pairs = [(sum(2 * sums.covariance for sums in out), sum(sums.spread for sums in out)) for out in varying]
        return min((covariance / spread for covariance, spread in pairs if spread > 0), default=None)


def _count_correct(output: Tensor, labels: Tensor) -> int:
    if output.ndim != 2 or labels.shape != output.shape[:1]:
        raise MergingError(
            f"accuracy needs one row of class scores per image; the network returns {tuple(output.shape)}",
            where="--eval",
            fix="Leave out --eval for networks that do not classify.",
        )
    return int((output.argmax(1).cpu() == labels.cpu()).sum())


ODD_VARIANCE_RATIO, WRONG_VARIANCE_RATIO = 4.0, 100.0
"""Ratios of the variance at the first batch norm to its training statistics beyond which there is a note, and an
error. Pixels in 0..255 in place of 0..1 give 65,025. Pixels that were not divided by a deviation of 0.225 give 1/20.
"""
WRONG_DATA_FIX = "Give the data that it was trained on."
SEVERAL_INPUTS_FIX = "Give a .npz file with an array for each input, named as the input."
WRONG_RANGE_FIX = "Normalise them as in training: --mean and --std, or mean= and std=."


@torch.no_grad()
def check_eval_data(
    model: nn.Module, batch: tuple[Any, ...], labels: Tensor | None = None, classes: int = 0, *, where: str
) -> list[str]:
    """Refuse data that does not fit the network, and return notes on data that looks unusual."""
    for value in flatten_inputs(batch):
        # Minus infinity is allowed, since attention masks hold it.
        if isinstance(value, Tensor) and (not value.numel() or bool((value.isnan() | value.isposinf()).any())):
            what = "a batch has entries that are not finite" if value.numel() else "a batch is empty"
            raise MergingError(what, where=where, fix="Leave it out.")
    copy = copy_without_hooks(model).eval()
    with _watch_first_norm(copy) as seen:
        outputs = _run_batch(copy, batch, where)
    notes = _check_range(seen, where)
    if labels is not None:
        notes += _check_classes(outputs, labels, classes, where)
    return notes


def _run_batch(model: nn.Module, batch: tuple[Any, ...], where: str) -> Any:
    try:
        with disable_fused_attention():
            return call_model(model, clone_inputs(batch))
    except Exception as error:
        shapes = ", ".join(str(tuple(v.shape)) for v in flatten_inputs(batch) if isinstance(v, Tensor))
        what = f"the network does not take a batch of {shapes or 'these'}: {describe_error(error)}"
        several = len(get_input_names(model)) > len(batch) == 1
        raise MergingError(what, where=where, fix=SEVERAL_INPUTS_FIX if several else WRONG_DATA_FIX) from error


@contextmanager
def _watch_first_norm(model: nn.Module) -> Iterator[list[tuple[str, float, float]]]:
    """Record, for the first trained batch norm that runs: its name, and the shift and spread of its input
    relative to its training statistics.
    """
    seen: list[tuple[str, float, float]] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and _has_trained_stats(module):
            # The default binds the name of this round; a closure would see that of the last one.
            def record_input(norm: _BatchNorm, args: tuple[Any, ...], name: str = name) -> None:
                if not seen and args and args[0].ndim > 1:
                    seen.append((name, *_compare_with_training(norm, args[0])))

            handles.append(module.register_forward_pre_hook(record_input))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _has_trained_stats(norm: _BatchNorm) -> bool:
    """Whether running statistics exist and differ from their initial values, mean 0 and variance 1."""
    mean, var = norm.running_mean, norm.running_var
    if mean is None or var is None or mean.is_meta:
        return False
    return bool(mean.isfinite().all() and var.isfinite().all()) and bool(mean.any() or (var != 1).any())


def _compare_with_training(norm: _BatchNorm, value: Tensor) -> tuple[float, float]:
    """Return the mean over channels of |mean - μ| / σ and of variance / σ², for the stored μ and σ²."""
    assert norm.running_mean is not None and norm.running_var is not None
    rows = value.transpose(0, 1).flatten(1).double()
    # The clamp is for dead channels, whose variance is zero.
    mean, var = norm.running_mean.double(), norm.running_var.double().clamp(min=1e-12)
    shift = (rows.mean(1) - mean).abs() / var.sqrt()
    return float(shift.mean()), float((rows.var(1, unbiased=False) / var).mean())


def _check_range(seen: list[tuple[str, float, float]], where: str) -> list[str]:
    for name, shift, spread in seen:
        finding = f"{name} sees {spread:.2g} times the variance of its training, and a mean {shift:.2g} deviations off"
        if not 1 / WRONG_VARIANCE_RATIO < spread < WRONG_VARIANCE_RATIO:
            raise MergingError(
                f"the range of the data differs from the training data's: {finding}", where=where, fix=WRONG_RANGE_FIX
            )
        if not 1 / ODD_VARIANCE_RATIO < spread < ODD_VARIANCE_RATIO or shift > 1:
            return [f"the data of {where} may not be normalised as in training: {finding}"]
    return []


def _check_classes(outputs: Any, labels: Tensor, classes: int, where: str) -> list[str]:
    """Refuse labels that the network's outputs cannot be scored with, and note unused classes."""
    tensors = flatten_outputs(outputs)
    if not tensors or tensors[0].ndim != 2 or len(tensors[0]) != len(labels) or labels.ndim != 1:
        shape = tuple(tensors[0].shape) if tensors else "nothing"
        what = f"accuracy needs one row of class scores for each label; the network returns {shape}"
        raise MergingError(what, where=where, fix="Leave the labels out, or give a metric of your own.")
    width, needed = tensors[0].shape[1], max(classes, int(labels.max()) + 1)
    what = f"the images have {needed} classes, the network has {width} outputs"
    if needed > width or int(labels.min()) < 0:
        raise MergingError(what if needed > width else "a label is negative", where=where, fix=WRONG_DATA_FIX)
    if 0 < classes < width:
        return [f"{what}: the accuracy is right only if the first {classes} outputs mean these classes"]
    return []


Metric = Callable[[nn.Module], Any]
"""A user-defined score of a network; higher is better."""


@dataclass(frozen=True)
class EvalSet:
    """Batches of inputs, with labels if there are any. `data` is whether they are real data, not synthesised."""

    open: Callable[[], LabelledBatches]
    inputs: str
    data: bool
    labelled: bool = False
    length: int | None = None
    """The number of batches, if known."""
    parts: tuple[OutputPart, ...] = ()
    """Parts of the original's outputs that are compared separately, if known."""
    guessed: bool = False
    """Whether the inputs are fallback inputs, which use no statistics of the training data."""
    fitted: bool = False
    """Whether the network was fitted to these inputs."""
    original: OriginalOutputs | None = None
    """The original's outputs, if earlier stages share them."""
    text_input: int | None = None
    """The position of the tokens that a causal language model reads."""
    mixtures: tuple[InputBatch, ...] = ()
    """Means of pairs of synthesised inputs, on which the network is compared, too."""
    plain_images: tuple[InputBatch, ...] = ()
    """Synthetic images that match no statistics of the network, on which it is compared, too."""

    def compare(self, networks: Mapping[str, nn.Module]) -> Fidelity:
        """Compare all networks with the first one."""
        known = self.original is not None and self.original.model is next(iter(networks.values()))
        return compare_networks(
            networks,
            self._iterate_with_progress(),
            self.inputs,
            synthetic=not self.data,
            parts=self.parts,
            original=self.original if known else None,
            text_input=self.text_input,
        )

    def compare_on_mixtures(self, original: nn.Module, network: nn.Module) -> float | None:
        """Return the fidelity of a network to the original on the mixtures; None without any."""
        return self._compare_on_others(original, network, self.mixtures)

    def compare_on_plain_images(self, original: nn.Module, network: nn.Module) -> float | None:
        """Return the fidelity of a network to the original on the plain synthetic images; None without any."""
        return self._compare_on_others(original, network, self.plain_images)

    def _compare_on_others(
        self, original: nn.Module, network: nn.Module, batches: Sequence[InputBatch]
    ) -> float | None:
        networks, pairs = {"original": original, "it": network}, [(batch, None) for batch in batches]
        found = compare_networks(networks, pairs, "others", synthetic=True, parts=self.parts) if pairs else None
        return None if found is None else found.scores[-1].fidelity

    def accuracy(self, network: nn.Module) -> float:
        """Return the accuracy of a network, in 0..1."""
        percent = self.compare({"it": network}).scores[0].accuracy
        assert percent is not None
        return percent / 100

    def fidelity(self, original: nn.Module, network: nn.Module) -> float:
        """Return the fidelity of a network to the original; raise an error if the outputs have none."""
        comparison = self.compare({"original": original, "it": network})
        if (value := comparison.scores[1].fidelity) is None:
            fix = "Give evaluate= a function that returns a score."
            raise MergingError(f"the outputs cannot be compared: {comparison.why}", where="max_loss=", fix=fix)
        return value

    def iterate_inputs(self) -> Iterator[InputBatch]:
        return (batch for batch, _ in self.open())

    def _iterate_with_progress(self) -> LabelledBatches:
        for done, pair in enumerate(self.open()):
            progress.report_progress(f"comparing on {self.inputs}", done, self.length or 0)
            yield pair


def make_synthetic_eval_set(
    analysis: Analysis, heldout: GeneratedInputs, seed: int = 0, original: OriginalOutputs | None = None
) -> EvalSet:
    """Make an evaluation set of held-out synthesised inputs, or of fallback inputs if none could be synthesised."""
    inputs = take_eval_inputs(analysis, heldout, seed)
    pairs = [(batch, None) for batch in inputs.batches]
    parts = find_output_parts(analysis.graph)
    synthesised = not inputs.guessed and not _returns_class_scores(analysis)
    return EvalSet(
        lambda: pairs,
        str(inputs),
        data=False,
        length=len(pairs),
        text_input=find_text_input(analysis),
        parts=parts,
        guessed=inputs.guessed,
        original=original,
        mixtures=mix_pairs(inputs.batches) if synthesised else (),
        plain_images=_make_plain_images(analysis, count_samples(inputs.batches), seed) if synthesised else (),
    )


def _make_plain_images(analysis: Analysis, count: int, seed: int) -> tuple[InputBatch, ...]:
    """Make synthetic images at the scale that batch norms state; none for a network that takes other inputs.

    Synthesised inputs begin as such images. The descent then adds what the statistics ask for, mostly fine detail.
    """
    values = flatten_inputs(analysis.inputs)
    if len(values) != 1 or not is_picture(values[0]):
        return ()
    return make_fallback_inputs(analysis, count, seed + 1).batches


def _returns_class_scores(analysis: Analysis) -> bool:
    """Return whether all outputs are class scores: a mixture belongs to no class, so that any change flips them."""
    shapes = [tuple(analysis.graph.shapes.get(ref.name, ())) for ref in analysis.graph.outputs]
    return len(find_logits_outputs(analysis.graph, shapes)) == len(shapes)


def explain_missing_fidelity(analysis: Analysis, batches: Iterable[InputBatch]) -> str:
    """Return why outputs on these inputs cannot be compared with a smaller network's; an empty text if they can."""
    return compare_networks({"original": analysis.model}, ((batch, None) for batch in batches), "", synthetic=True).why


def make_example_eval_set(analysis: Analysis) -> EvalSet | None:
    """Make an evaluation set of the example inputs; None unless they hold real values, as far as one can tell."""
    count = count_real_samples(analysis)
    if not count:
        return None
    source = f"the {count} example inputs" if count > 1 else "the example input"
    pairs = [(analysis.inputs, None)]
    return EvalSet(lambda: pairs, source, data=True, length=1, parts=find_output_parts(analysis.graph))


@torch.no_grad()
def compute_metric(metric: Metric, model: nn.Module) -> float:
    """Score a network with the user's function; any failure there becomes one MergingError."""
    try:
        score = metric(copy_without_hooks(model).eval())
    except MergingError:
        raise
    except Exception as error:  # any exception of the user's code
        what = f"the metric raised {describe_error(error)}"
        raise MergingError(
            what, where=find_user_line(error) or "evaluate=", fix="Fix the function; its argument is the network."
        ) from error
    value = score.item() if isinstance(score, Tensor) and score.numel() == 1 else score
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        what = f"the metric returned {_describe_value(score)}, not a number"
        raise MergingError(what, where="evaluate=", fix="Return one number, the higher the better.")
    return float(value) + 0.0  # turns -0.0 into 0.0


def _describe_value(value: object) -> str:
    return repr(value) if isinstance(value, Real | str | None) else f"a {type(value).__name__}"
