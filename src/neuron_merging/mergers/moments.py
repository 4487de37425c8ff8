"""Merge after the activation, without data: statistics from synthetic inputs and the norms."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_merging import synthetic
from neuron_merging.measure import measure
from neuron_merging.mergers.base import Merge, Task
from neuron_merging.mergers.fit import fitted, uses


@dataclass(frozen=True)
class Moments:
    """Fit what each consumer reads, by least squares over all kept channels and taps."""

    ridge: float = 0.01
    restore_variance: bool = True
    images: int = 128
    seed: int = 0

    def merge(self, task: Task) -> list[Merge]:
        found = [use.reader for use in uses(task)]
        example = task.inputs[0]
        batches = ((x,) for x in synthetic.batches(example, self.images, 128, self.seed))
        grams = measure(task.graph, found, batches, renormalise=True)
        return fitted(task, grams, self.ridge, self.restore_variance)
