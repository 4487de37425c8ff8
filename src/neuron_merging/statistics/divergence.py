"""How far the answers of a network are from those of the original.

Answers that end in a sigmoid or a softmax are compared before it: where inputs are made up, all probabilities may be
next to zero, and a network that answers nothing at all would look as good as any other. What is put together at the
end is compared part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from neuron_merging.graph.values import Graph
from neuron_merging.statistics.parts import parts_of


@dataclass
class Divergence:
    """Sums over batches of how far outputs are from the original's.

    `classes` are the outputs (by position) that are scores of classes: for those it is the Kullback-Leibler
    divergence; for all others the squared error relative to the variance over samples of the original's outputs.
    Scores are divided by the `temperature` first, and their divergence is brought back to scale: the higher it is,
    the less do single inputs between two classes weigh.
    """

    classes: frozenset[int] = frozenset()
    temperature: float = 1.0
    samples: int = 0
    kl: float = 0.0
    error: dict[int, float] = field(default_factory=dict)
    size: dict[int, float] = field(default_factory=dict)

    def add(self, original: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
        """One batch's outputs of both networks."""
        for i, (before, after) in enumerate(zip(original, changed, strict=True)):
            if i in self.classes:
                self.kl += float(_kl(before.double(), after.double(), self.temperature))
            elif isinstance(before, Tensor) and before.is_floating_point():
                x, y = before.double(), after.double()
                self.error[i] = self.error.get(i, 0.0) + float((x - y).square().sum())
                self.size[i] = self.size.get(i, 0.0) + float((x - x.mean(0)).square().sum())
        self.samples += len(original[0]) if original and original[0].ndim else 1

    @property
    def value(self) -> float:
        """Mean divergence per sample, summed over outputs; infinity where an output is no number."""
        shares = [self.error[i] / max(self.size[i], 1e-30) for i in self.error]
        total = self.kl / max(self.samples, 1) + sum(shares)
        return total if total == total else float("inf")


def _kl(before: Tensor, after: Tensor, temperature: float) -> Tensor:
    """Summed over samples; what is a distribution already counts as it is."""
    sums = before.sum(1)
    if bool((before >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        before, after = (value.clamp(min=1e-12).log() for value in (before, after))
    p, q = ((scores / temperature).log_softmax(1) for scores in (before, after))
    return temperature**2 * (p.exp() * (p - q)).sum()


def unsquashed(graph: Graph) -> Graph:
    """The graph that returns the parts of its answers, and of those what a last sigmoid or softmax is given."""
    return replace(graph, outputs=tuple(part.ref for part in parts_of(graph)))
