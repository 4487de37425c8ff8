"""made: inputs of our own making, as near as can be to those that a network was trained on.

Where its batch norms remember statistics, inputs are fitted to those (`remembered`); else signals are dead leaves and
tokens are drawn (`synthetic`). An analysis keeps what was made for it, so that choosing, merging and judging pay once.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.macs import total_macs
from neuron_merging.statistics import synthetic
from neuron_merging.statistics.remembered import Remembered, remember, stored_norms

REMEMBERED = "inputs that the network remembers"


@dataclass(frozen=True)
class Effort:
    """How many inputs are remembered, in how many steps, and the multiply-accumulates that this may take."""

    inputs: int
    steps: int
    work: int


EFFORTS: dict[str, Effort | None] = {
    "fast": None,
    "normal": Effort(256, 40, 6 * 10**12),
    "best": Effort(512, 80, 5 * 10**13),
}
"""By name; the fast one remembers nothing."""
LEAST = 32
"""Inputs that are remembered even where they are dear: statistics of fewer are those of single inputs."""
PASSES = 3
"""What a step costs in forward passes: forward, backward, and the statistics."""


def recall(analysis: Analysis, effort: str = "normal", seed: int = 0, samples: int | None = None) -> Remembered:
    """Inputs that the network remembers, made at most once; or why there are none."""
    chosen = EFFORTS[effort]
    if chosen is None:
        return Remembered(refusal="a fast merge makes none")
    norms = stored_norms(analysis.graph)
    if isinstance(norms, str):
        return Remembered(refusal=norms)
    count = samples or _count(analysis, chosen)
    key = ("remembered", count, chosen.steps, seed)
    if key not in analysis.made:
        analysis.made[key] = remember(analysis, count, steps=chosen.steps, seed=seed)
    found: Remembered = analysis.made[key]
    return found


def _count(analysis: Analysis, effort: Effort) -> int:
    batch = synthetic.batch_size(analysis.inputs)
    if analysis.one_batch_only:
        return batch
    each = PASSES * effort.steps * max(1, total_macs(analysis.graph) // batch)
    return int(min(effort.inputs, max(LEAST, effort.work // each)))
