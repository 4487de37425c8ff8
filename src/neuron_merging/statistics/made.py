"""made: how many inputs a network is asked to remember, and that it is asked once.

An analysis keeps what was made for it, and the disk keeps it for the next one (`keeping`), so that choosing, merging,
judging and every further cut of the same network pay once. Inputs to fit on and inputs to judge by are never the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.macs import total_macs
from neuron_merging.statistics import synthetic
from neuron_merging.statistics.remembered import NO_NORMS, Batch, Remembered, remember, stored_norms
from neuron_merging.statistics.spoken import speak
from neuron_merging.statistics.texts import read_out


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
"""To fit on, by name; the fast one remembers nothing."""
JUDGES: dict[str, Effort | None] = {
    "fast": None,
    "normal": Effort(64, 40, 2 * 10**12),
    "best": Effort(128, 80, 10**13),
}
"""To judge by."""
LEAST = 32
"""Inputs that are remembered even where they are dear: statistics of fewer are those of single inputs."""
SLOW = 10
"""Text is written in as many passes as it has tokens, of small batches, which run at a fraction of the speed."""
PASSES = 3
"""What a step costs in forward passes: forward, backward, and the statistics."""


def recall(analysis: Analysis, effort: str = "normal", seed: int = 0, samples: int | None = None) -> Remembered:
    """Inputs that the network remembers, to fit on; or why there are none."""
    return _asked(analysis, EFFORTS[effort], seed, samples, _remembered)


def witnesses(analysis: Analysis, effort: str = "normal", seed: int = 0) -> Remembered:
    """Others that it remembers, to judge by, or texts that it can read; or why there are none."""
    return _asked(analysis, JUDGES[effort], seed + 1, None, _readable)


def so_far(analysis: Analysis) -> tuple[Batch, ...]:
    """Inputs that were made in the course of the work; of several sets the largest, which merges are fitted on."""
    made = (found.batches for found in reversed(analysis.made.values()))  # those to judge by come first
    return max(made, key=lambda batches: sum(map(synthetic.batch_size, batches)), default=())


Maker = Callable[[Analysis, Effort, int, int | None], Remembered]


def _asked(analysis: Analysis, effort: Effort | None, seed: int, samples: int | None, make: Maker) -> Remembered:
    if effort is None:
        return Remembered(refusal="a fast merge makes none")
    key = (effort, seed, samples, make.__name__)
    if key not in analysis.made:
        analysis.made[key] = make(analysis, effort, seed, samples)
    found: Remembered = analysis.made[key]
    return found


def _remembered(analysis: Analysis, effort: Effort, seed: int, samples: int | None) -> Remembered:
    norms = stored_norms(analysis.graph)
    if not isinstance(norms, str):
        return remember(analysis, samples or _count(analysis, effort), steps=effort.steps, seed=seed)
    spoken = speak(analysis, samples or effort.inputs, effort.work // SLOW, seed) if norms == NO_NORMS else None
    return spoken if spoken is not None and spoken.batches else Remembered(refusal=norms)


def _readable(analysis: Analysis, effort: Effort, seed: int, samples: int | None) -> Remembered:
    made = _remembered(analysis, effort, seed, samples)
    texts = None if made.batches else read_out(analysis, samples or effort.inputs, effort.work, seed)
    return texts if texts is not None and texts.batches else made


def _count(analysis: Analysis, effort: Effort) -> int:
    batch = synthetic.batch_size(analysis.inputs)
    if analysis.channels_along_batch:
        return 2 * batch  # one to fit on and one to try cuts on
    each = PASSES * effort.steps * max(1, total_macs(analysis.graph) // batch)
    return int(min(effort.inputs, max(LEAST, effort.work // each)))
