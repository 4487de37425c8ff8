"""Merging methods, one file each: they compensate removed channels in the consumer layers."""

from neuron_merging.merging.calibrated import Calibrated
from neuron_merging.merging.cosine import Cosine
from neuron_merging.merging.moments import Moments
from neuron_merging.merging.protocol import MERGERS, Merge, Merger, MergeResult, Prune, find_merger, merger

__all__ = [
    "MERGERS",
    "Calibrated",
    "Cosine",
    "Merge",
    "MergeResult",
    "Merger",
    "Moments",
    "Prune",
    "find_merger",
    "merger",
]
