"""Compare the outputs of smaller networks with the original's. Fidelity is 1 - (squared error / variance of the
original's outputs), at least 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.calibration.output_divergence import OutputPart, split_outputs
from neuron_merging.channels.analysis import Analysis
from neuron_merging.errors import MergingError
from neuron_merging.graph.compare import ErrorSums, as_plain_tensor, compute_error_share
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.example_inputs import infer_batch_size
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.graph.process_state import disable_fused_attention, restore_rng
from neuron_merging.graph.pytree import call_model, clone_inputs, flatten_outputs
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs
from neuron_merging.inputs.input_sets import MIN_INPUTS, InputSet, make_heldout_inputs, take_generated_or_fallback
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.surgery import apply_plan

IMAGES_PER_BATCH = 256
SAMPLE_LIMITS = (16, 64)
"""Inputs of our own making that networks are compared on, at least and at most."""
MAX_EVAL_MACS = 1e10
"""Multiply-accumulates that the original may spend on those: a few seconds of one core."""
MAX_ENTRIES_AT_ONCE = 2**22
"""Entries of outputs that are compared together, in double precision: a language model has a vocabulary of them."""
LabelledBatches = Iterable[tuple[tuple[Any, ...], Tensor | None]]
CONSTANT_OUTPUT = "the original gives the same output for all inputs"
SINGLE_NUMBER_OUTPUT = "the network gives one number for the whole batch"
NON_FINITE_OUTPUT = "the original's outputs are not finite"
INPUTS_REJECTED = "the network's code rejects the generated inputs"
INTEGER_OUTPUT = "the network returns only integers"


@dataclass(frozen=True)
class NetworkScore:
    """One network's marks; None where the question makes no sense for its outputs.

    `accuracy` and `same` are percentages: labels found, and inputs whose largest output is that of the original.
    `agreement` is Lin's concordance of the outputs with the original's: 1 where they are equal, 0 where they have
    nothing to do with each other. Unlike the correlation it sees a shift and a change of scale.
    `fidelity` is one minus the squared error relative to the variance of the original's outputs; 0 is the least. Of
    several outputs, or of parts that one is put together from, both are those of the worst.
    """

    network: str
    accuracy: float | None
    same: float | None
    agreement: float | None
    fidelity: float | None = None


@dataclass(frozen=True)
class Fidelity:
    """Scores of the original (first) and of smaller networks on the same inputs.

    `favourite` is the share, in percent, of the answer that the original gives most often. Near 100 the inputs
    tell little about `same`: a network that always gives this answer has it too. `why` says why there is no fidelity.
    """

    inputs: str
    synthetic: bool
    scores: tuple[NetworkScore, ...]
    favourite: float | None
    why: str = ""


def build_compared_networks(
    model: nn.Module, small: nn.Module, plan: Plan, name: str = "merged"
) -> dict[str, nn.Module]:
    """The networks to compare: the original, the same cut with nothing to make up for it, and the small one."""
    pruned = apply_plan(model, Plan(plan.groups, plan.cuts, plan.modules, sizes=plan.sizes))
    return {"original": model, "pruned": pruned, name: small}


def make_image_batches(images: Any) -> tuple[LabelledBatches, str]:
    """Images as batches, with their labels if they have any, and what they are."""
    pairs = (((x,), y if images.has_labels else None) for x, y in images.batches(IMAGES_PER_BATCH))
    return pairs, f"{len(images):,} images of {images.name}"


def make_synthetic_batches(analysis: Analysis) -> tuple[LabelledBatches, str]:
    """Inputs in place of data, as many as are cheap, and what they are."""
    found = take_eval_inputs(analysis, make_heldout_inputs(analysis))
    return [(batch, None) for batch in found.batches], str(found)


def take_eval_inputs(analysis: Analysis, heldout: GeneratedInputs, seed: int = 0) -> InputSet:
    """Inputs in place of data, as many as are cheap: held-out ones, else fallback inputs."""
    size = infer_batch_size(analysis.inputs)
    least, most = SAMPLE_LIMITS
    count = int(min(most, max(least, MAX_EVAL_MACS * size // max(count_graph_macs(analysis.graph), 1))))
    count = max(count, MIN_INPUTS) if heldout.batches else count
    return take_generated_or_fallback(heldout, analysis, count, seed + 1)


@torch.no_grad()
def compare_networks(
    networks: Mapping[str, nn.Module],
    batches: LabelledBatches,
    inputs: str,
    *,
    made_up: bool = False,
    parts: Sequence[OutputPart] = (),
) -> Fidelity:
    """Run all networks, the original first, on the same batches; without those of our own making that it refuses."""
    with disable_fused_attention(), restore_rng():
        return _compare_on_batches(networks, batches, inputs, made_up, parts)


def _compare_on_batches(
    networks: Mapping[str, nn.Module], batches: LabelledBatches, inputs: str, made_up: bool, parts: Sequence[OutputPart]
) -> Fidelity:
    quiet = [copy_without_hooks(network).eval() for network in networks.values()]
    tallies, taken = [_ScoreAccumulator(parts) for _ in networks], 0
    for batch, labels in batches:
        try:
            original = _select_float_outputs(call_model(quiet[0], clone_inputs(batch)))
        except Exception:  # the network's own code, which may refuse what was made up
            if not made_up:
                raise
            continue
        taken += 1
        others = [_select_float_outputs(call_model(network, clone_inputs(batch))) for network in quiet[1:]]
        for tally, outputs in zip(tallies, (original, *others), strict=True):
            tally.add(outputs, original, labels)
    scores = tuple(tally.score(name) for name, tally in zip(networks, tallies, strict=True))
    first = tallies[0]
    why = INPUTS_REJECTED if made_up and not taken else first.why()
    return Fidelity(inputs, not first.labelled, scores, first.favourite(), why)


def _select_float_outputs(outputs: Any) -> list[Tensor]:
    """The outputs that are looked at: those of floating point, a row for each sample."""
    found = [torch.view_as_real(t) if t.is_complex() else t for t in flatten_outputs(outputs)]
    return [t if t.ndim else t[None] for t in found if t.is_floating_point()]


@dataclass
class _AgreementSums(ErrorSums):
    """Also the other network's sums, and the products of both."""

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
        """Both variances and the squared distance of the means together."""
        squares = self.power + float(as_plain_tensor(self.other_squares).sum())
        return squares + 2 * self.sum_products(self.total, self.other_total, 0.0)


class _ScoreAccumulator:
    """Sums over batches."""

    def __init__(self, parts: Sequence[OutputPart] = ()) -> None:
        self.parts = parts
        self.samples = self.hits = self.same = 0
        self.sums: dict[int, dict[tuple[int, ...], _AgreementSums]] = {}
        self.answers: Counter[int] = Counter()
        self.classes = self.labelled = self.misshapen = False

    def add(self, outputs: list[Tensor], original: list[Tensor], labels: Tensor | None) -> None:
        self.misshapen |= [t.shape for t in outputs] != [t.shape for t in original]
        pieces = (split_outputs(original, self.parts), split_outputs(outputs, self.parts))
        for i, (x, y) in enumerate(zip(*pieces, strict=False)):
            if x.shape == y.shape and x.numel():
                self._add_output(i, x, y)
        if outputs and original:
            self._add_answers(outputs[0], original[0])
        if labels is not None:
            self.labelled = True
            self.hits += _count_correct(outputs[0] if outputs else torch.empty(0), labels)

    def _add_output(self, i: int, x: Tensor, y: Tensor) -> None:
        """As many samples at once as are not too large together."""
        count = max(1, MAX_ENTRIES_AT_ONCE * len(x) // x.numel())
        sums = self.sums.setdefault(i, {}).setdefault(tuple(x.shape[1:]), _AgreementSums())
        for start in range(0, len(x), count):
            sums.add(x[start : start + count], y[start : start + count])

    def _add_answers(self, output: Tensor, original: Tensor) -> None:
        self.samples += len(original)
        self.classes = output.ndim == 2 and output.shape[1] > 1 and output.shape == original.shape
        if self.classes:
            self.same += int((output.argmax(1) == original.argmax(1)).sum())
            self.answers.update(output.argmax(1).tolist())

    def score(self, name: str) -> NetworkScore:
        count = max(self.samples, 1)
        return NetworkScore(
            network=name,
            accuracy=100 * self.hits / count if self.labelled else None,
            same=100 * self.same / count if self.classes else None,
            agreement=self._agreement(),
            fidelity=self._fidelity(),
        )

    def favourite(self) -> float | None:
        return 100 * max(self.answers.values()) / self.samples if self.answers else None

    def why(self) -> str:
        """What stands in the way of a fidelity."""
        if not self.sums:
            return INTEGER_OUTPUT
        if self._list_varying_outputs():
            return ""
        alone = all(own.count == 1 and shape == () for parts in self.sums.values() for shape, own in parts.items())
        return NON_FINITE_OUTPUT if not self._has_numbers() else SINGLE_NUMBER_OUTPUT if alone else CONSTANT_OUTPUT

    def _has_numbers(self) -> bool:
        return any(own.known for shapes in self.sums.values() for own in shapes.values())

    def _is_broken(self) -> bool:
        """Whether the outputs have other shapes than the original's, or are no numbers where those are."""
        return self.misshapen or any(own.broken for shapes in self.sums.values() for own in shapes.values())

    def _list_varying_outputs(self) -> list[list[_AgreementSums]]:
        """The outputs that differ from sample to sample, each with all its shapes."""
        found = (list(shapes.values()) for shapes in self.sums.values())
        return [parts for parts in found if sum(own.variance for own in parts) > 0]

    def _fidelity(self) -> float | None:
        if self._is_broken() and self._has_numbers():
            return 0.0
        return min((max(0.0, 1 - compute_error_share(parts)) for parts in self._list_varying_outputs()), default=None)

    def _agreement(self) -> float | None:
        """None where the original gives one answer to all inputs: to agree with that says nothing."""
        varying = self._list_varying_outputs()
        if not varying or self._is_broken():
            return 0.0 if varying else None
        pairs = [(sum(2 * own.covariance for own in parts), sum(own.spread for own in parts)) for parts in varying]
        return min((together / apart for together, apart in pairs if apart > 0), default=None)


def _count_correct(output: Tensor, labels: Tensor) -> int:
    if output.ndim != 2 or labels.shape != output.shape[:1]:
        raise MergingError(
            f"accuracy needs one row of class scores per image; the network returns {tuple(output.shape)}",
            where="--eval",
            fix="Leave out --eval for networks that do not classify.",
        )
    return int((output.argmax(1).cpu() == labels.cpu()).sum())
