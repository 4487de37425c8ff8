"""neuron-merging: make a trained network smaller, at once and without data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuron_merging.criteria import criterion
    from neuron_merging.errors import MergingError
    from neuron_merging.mergers import Calibrated, Cosine, Fold, Linear, Moments
    from neuron_merging.pipeline import Compressed, NothingToPrune, compress, inspect
    from neuron_merging.plan import Plan
    from neuron_merging.store import FolderError, load, save
    from neuron_merging.surgery import apply_plan
    from neuron_merging.verify import VerificationError

__version__ = "0.1.0"
__all__ = [
    "Calibrated",
    "Compressed",
    "Cosine",
    "Fold",
    "FolderError",
    "Linear",
    "MergingError",
    "Moments",
    "NothingToPrune",
    "Plan",
    "VerificationError",
    "apply_plan",
    "compress",
    "criterion",
    "inspect",
    "load",
    "save",
]
_HOMES = {
    "criteria": ("criterion",),
    "errors": ("MergingError",),
    "mergers": ("Calibrated", "Cosine", "Fold", "Linear", "Moments"),
    "pipeline": ("Compressed", "NothingToPrune", "compress", "inspect"),
    "plan": ("Plan",),
    "store": ("FolderError", "load", "save"),
    "surgery": ("apply_plan",),
    "verify": ("VerificationError",),
}


def __getattr__(name: str) -> object:
    """Import on first use: torch takes seconds, and `neuron-merging --help` needs none of it."""
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f"neuron_merging.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
