"""neuron-merging: make a trained network smaller, at once and without data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuron_merging.channels.analysis import Analysis
    from neuron_merging.channels.operators.table import operator
    from neuron_merging.choosing.criteria import criterion
    from neuron_merging.cutting.plan import Plan
    from neuron_merging.cutting.surgery import apply_plan
    from neuron_merging.cutting.trial import analyse
    from neuron_merging.data.opening import images
    from neuron_merging.errors import (
        FidelityError,
        FolderError,
        MergingError,
        ModelError,
        NothingToPrune,
        VerificationError,
    )
    from neuron_merging.folder.store import Compressed, load, save
    from neuron_merging.mergers import Calibrated, Cosine, Fold, Linear, Moments, merger
    from neuron_merging.pipeline import compress, inspect, remembered
    from neuron_merging.statistics.remembered import Remembered
    from neuron_merging.sweeping import Sensitivity, Sweep, sensitivity, sweep

__version__ = "0.2.0"
_HOMES = {
    "channels.analysis": ("Analysis",),
    "channels.operators.table": ("operator",),
    "choosing.criteria": ("criterion",),
    "cutting.plan": ("Plan",),
    "cutting.surgery": ("apply_plan",),
    "cutting.trial": ("analyse",),
    "data.opening": ("images",),
    "errors": ("FidelityError", "FolderError", "MergingError", "ModelError", "NothingToPrune", "VerificationError"),
    "folder.store": ("Compressed", "load", "save"),
    "mergers": ("Calibrated", "Cosine", "Fold", "Linear", "Moments", "merger"),
    "pipeline": ("compress", "inspect", "remembered"),
    "statistics.remembered": ("Remembered",),
    "sweeping": ("Sensitivity", "Sweep", "sensitivity", "sweep"),
}
__all__ = [
    "Analysis",
    "Calibrated",
    "Compressed",
    "Cosine",
    "FidelityError",
    "Fold",
    "FolderError",
    "Linear",
    "MergingError",
    "ModelError",
    "Moments",
    "NothingToPrune",
    "Plan",
    "Remembered",
    "Sensitivity",
    "Sweep",
    "VerificationError",
    "analyse",
    "apply_plan",
    "compress",
    "criterion",
    "images",
    "inspect",
    "load",
    "merger",
    "operator",
    "remembered",
    "save",
    "sensitivity",
    "sweep",
]


def __getattr__(name: str) -> object:
    """Import on first use: torch takes seconds, and `neuron-merging --help` needs none of it."""
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f"neuron_merging.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
