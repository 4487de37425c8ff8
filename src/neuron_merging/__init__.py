"""neuron-merging: make a trained network smaller, at once and without data."""

from neuron_merging.criteria import criterion
from neuron_merging.errors import MergingError
from neuron_merging.mergers import Calibrated, Cosine, Moments
from neuron_merging.pipeline import Compressed, NothingToPrune, compress, inspect
from neuron_merging.plan import Plan
from neuron_merging.surgery import apply_plan
from neuron_merging.verify import VerificationError

__version__ = "0.1.0"
__all__ = [
    "Calibrated",
    "Compressed",
    "Cosine",
    "MergingError",
    "Moments",
    "NothingToPrune",
    "Plan",
    "VerificationError",
    "apply_plan",
    "compress",
    "criterion",
    "inspect",
]
