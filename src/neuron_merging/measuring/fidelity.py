"""fidelity: how much of the original network's answers the smaller ones give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.cutting.plan import Plan
from neuron_merging.cutting.surgery import apply_plan
from neuron_merging.errors import MergingError
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.quiet import plain_attention
from neuron_merging.graph.trees import as_inputs, called, copied, flat, flatten_outputs
from neuron_merging.statistics.synthetic import is_numeric, probes

BATCH = 256
FEW = 8
EXACT = 1e-12
"""Of the square of the outputs: a variance below that is rounding."""
WORK = 1e10
"""Multiply-accumulates that the original may spend on synthetic inputs: a few seconds of one core."""
Batches = Iterable[tuple[tuple[Any, ...], Tensor | None]]


@dataclass(frozen=True)
class Score:
    """One network's marks; None where the question makes no sense for its outputs.

    `accuracy` and `same` are percentages: labels found, and inputs whose largest output is that of the original.
    `agreement` is Lin's concordance of all outputs with the original's: 1 where they are equal, 0 where they have
    nothing to do with each other. Unlike the correlation it sees a shift and a change of scale.
    """

    network: str
    accuracy: float | None
    same: float | None
    agreement: float | None


@dataclass(frozen=True)
class Fidelity:
    """Scores of the original (first) and of smaller networks on the same inputs.

    `favourite` is the share, in percent, of the answer that the original gives most often. Near 100 the inputs
    tell little about `same`: a network that always gives this answer has it too.
    """

    inputs: str
    synthetic: bool
    scores: tuple[Score, ...]
    favourite: float | None


def versions(model: nn.Module, small: nn.Module, plan: Plan, name: str = "merged") -> dict[str, nn.Module]:
    """The networks to compare: the original, the same cut with nothing to make up for it, and the small one."""
    pruned = apply_plan(model, Plan(plan.groups, plan.cuts, plan.modules))
    return {"original": model, "pruned": pruned, name: small}


def on_images(images: Any) -> tuple[Batches, str]:
    """Labelled images as batches, and what they are."""
    return (((x,), y) for x, y in images.batches(BATCH)), f"{len(images):,} images of {images.name}"


def on_synthetic_inputs(model: nn.Module, example_inputs: Any, macs: int, seed: int = 1) -> tuple[Batches, str]:
    """Inputs that were made up, in batches that the network takes, and what they are."""
    inputs = as_inputs(example_inputs, model)
    if not any(is_numeric(value) for value in flat(inputs)):
        return [(inputs, None)], "the example inputs"
    size = max((len(v) for v in flat(inputs) if isinstance(v, Tensor) and v.ndim), default=1)
    samples = int(min(256, max(16, WORK * size // max(macs, 1)))) // size * size or size
    if _takes(model, next(probes(inputs, size + 1, seed))):
        chosen = probes(inputs, samples, seed)
    else:
        chosen = (next(probes(inputs, size, seed + i)) for i in range(samples // size))
    return ((batch, None) for batch in chosen), f"{samples:,} synthetic inputs"


def _takes(model: nn.Module, batch: tuple[Any, ...]) -> bool:
    """Whether the network runs on another batch size than that of its example."""
    try:
        with torch.no_grad():
            called(bare_copy(model).eval(), copied(batch))
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return False
    return True


@torch.no_grad()
def compare(networks: Mapping[str, nn.Module], batches: Batches, inputs: str) -> Fidelity:
    """Run all networks, the original first, on the same batches."""
    with plain_attention(), torch.random.fork_rng(devices=[]):
        return _compare(networks, batches, inputs)


def _compare(networks: Mapping[str, nn.Module], batches: Batches, inputs: str) -> Fidelity:
    quiet = [bare_copy(network).eval() for network in networks.values()]
    tallies = [_Tally() for _ in networks]
    for batch, labels in batches:
        outputs = [_first(called(network, copied(batch))) for network in quiet]
        for tally, output in zip(tallies, outputs, strict=True):
            tally.add(output, outputs[0], labels)
    scores = tuple(tally.score(name) for name, tally in zip(networks, tallies, strict=True))
    return Fidelity(inputs, not tallies[0].labelled, scores, tallies[0].favourite())


def _first(outputs: Any) -> Tensor:
    """The output that is looked at: the first of floating point."""
    found = [tensor for tensor in flatten_outputs(outputs) if tensor.is_floating_point()]
    if not found:
        fix = "Give a network that returns scores: whole numbers cannot be compared."
        raise MergingError("the network returns no numbers to compare", where="report", fix=fix)
    return found[0] if found[0].ndim else found[0][None]


class _Tally:
    """Sums over batches."""

    def __init__(self) -> None:
        self.samples = self.hits = self.same = 0
        self.sums: list[Tensor | float] = [0.0] * 5
        self.answers: Counter[int] = Counter()
        self.classes = self.labelled = False

    def add(self, output: Tensor, original: Tensor, labels: Tensor | None) -> None:
        self.classes = output.ndim == 2 and output.shape[1] > 1
        self.samples += len(original)
        x, y = original.double(), output.double()
        self.sums = [total + part.sum(0) for total, part in zip(self.sums, (x, y, x * x, y * y, x * y), strict=True)]
        if self.classes:
            self.same += int((output.argmax(1) == original.argmax(1)).sum())
            self.answers.update(output.argmax(1).tolist())
        if labels is not None:
            self.labelled = True
            self.hits += _hits(output, labels)

    def score(self, name: str) -> Score:
        count = max(self.samples, 1)
        return Score(
            network=name,
            accuracy=100 * self.hits / count if self.labelled else None,
            same=100 * self.same / count if self.classes else None,
            agreement=self._agreement(),
        )

    def favourite(self) -> float | None:
        return 100 * max(self.answers.values()) / self.samples if self.answers else None

    def _agreement(self) -> float | None:
        """None where the original gives one answer to all inputs: to agree with that says nothing."""
        x, y, xx, yy, xy = (torch.as_tensor(total) for total in self.sums)
        count = self.samples
        if count < FEW:  # too few to know each output's own mean
            count *= x.numel()
            x, y, xx, yy, xy = (total.sum() for total in (x, y, xx, yy, xy))
        together = 2 * float((xy - x * y / count).sum())
        apart = float((xx + yy - 2 * x * y / count).sum())
        varies = float((xx - x * x / count).sum()) > EXACT * float(xx.sum())
        return together / apart if varies and apart > 0 else None


def _hits(output: Tensor, labels: Tensor) -> int:
    if output.ndim != 2 or labels.shape != output.shape[:1]:
        raise MergingError(
            f"accuracy needs one row of class scores per image; the network returns {tuple(output.shape)}",
            where="--eval",
            fix="Leave out --eval for networks that do not classify.",
        )
    return int((output.argmax(1).cpu() == labels.cpu()).sum())
