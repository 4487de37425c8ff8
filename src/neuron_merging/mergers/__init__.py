"""mergers: one file per method; each folds removed channels into the layers that read them."""

from neuron_merging.mergers.calibrated import Calibrated
from neuron_merging.mergers.cosine import Cosine
from neuron_merging.mergers.fold import Fold
from neuron_merging.mergers.interface import MERGERS, Merge, Merged, Merger, find, merger
from neuron_merging.mergers.linear import Linear
from neuron_merging.mergers.moments import Moments
from neuron_merging.mergers.none import Prune

__all__ = [
    "MERGERS", "Calibrated", "Cosine", "Fold", "Linear", "Merge", "Merged", "Merger", "Moments", "Prune", "find",
    "merger",
]  # fmt: skip
