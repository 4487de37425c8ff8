"""neuron-merging: make a trained network smaller, without data and without retraining."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from neuron_merging.errors import make_deprecated_getattr

if TYPE_CHECKING:
    from neuron_merging.api import compress, inspect, quantize, synthesize_inputs
    from neuron_merging.channels.analysis import Analysis
    from neuron_merging.channels.rules.table import operator
    from neuron_merging.checkpoint.compressed import Compressed
    from neuron_merging.checkpoint.load_folder import load
    from neuron_merging.checkpoint.save_folder import save
    from neuron_merging.comparison import Comparison, compare
    from neuron_merging.data.open_data import images
    from neuron_merging.data.texts import texts
    from neuron_merging.errors import (
        FidelityError,
        FolderError,
        MergingError,
        ModelError,
        NothingToPrune,
        VerificationError,
    )
    from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs
    from neuron_merging.merging import Calibrated, Cosine, Moments, merger
    from neuron_merging.pruning.plan import Plan
    from neuron_merging.pruning.surgery import apply_plan
    from neuron_merging.pruning.trial_prune import analyse
    from neuron_merging.reproduction.comparison_methods import Fold, Linear
    from neuron_merging.selection.criteria import criterion
    from neuron_merging.sweeps import Sensitivity, Sweep, sensitivity, sweep

__version__ = "0.2.0"
_PUBLIC_NAMES = {
    "api": ("compress", "inspect", "quantize", "synthesize_inputs"),
    "channels.analysis": ("Analysis",),
    "channels.rules.table": ("operator",),
    "checkpoint.compressed": ("Compressed",),
    "checkpoint.load_folder": ("load",),
    "checkpoint.save_folder": ("save",),
    "comparison": ("Comparison", "compare"),
    "data.open_data": ("images",),
    "data.texts": ("texts",),
    "errors": ("FidelityError", "FolderError", "MergingError", "ModelError", "NothingToPrune", "VerificationError"),
    "inputs.batchnorm_inversion": ("GeneratedInputs",),
    "merging": ("Calibrated", "Cosine", "Moments", "merger"),
    "pruning.plan": ("Plan",),
    "pruning.surgery": ("apply_plan",),
    "pruning.trial_prune": ("analyse",),
    "reproduction.comparison_methods": ("Fold", "Linear"),
    "selection.criteria": ("criterion",),
    "sweeps": ("Sensitivity", "Sweep", "sensitivity", "sweep"),
}
_find_renamed = make_deprecated_getattr(
    __name__,
    {
        "remembered": "neuron_merging.api:synthesize_inputs",
        "Remembered": "neuron_merging.inputs.batchnorm_inversion:GeneratedInputs",
        "networks": "neuron_merging.models",
        "measuring": "neuron_merging.evaluation",
        "mergers": "neuron_merging.merging",
        "training": "neuron_merging.reproduction.training",
    },
)
__all__ = [
    "Analysis",
    "Calibrated",
    "Comparison",
    "Compressed",
    "Cosine",
    "FidelityError",
    "Fold",
    "FolderError",
    "GeneratedInputs",
    "Linear",
    "MergingError",
    "ModelError",
    "Moments",
    "NothingToPrune",
    "Plan",
    "Sensitivity",
    "Sweep",
    "VerificationError",
    "analyse",
    "apply_plan",
    "compare",
    "compress",
    "criterion",
    "images",
    "inspect",
    "load",
    "merger",
    "operator",
    "quantize",
    "save",
    "sensitivity",
    "sweep",
    "synthesize_inputs",
    "texts",
]


def __getattr__(name: str) -> object:
    """Import on first use: torch takes seconds, and `neuron-merging --help` needs none of it."""
    for home, names in _PUBLIC_NAMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f"neuron_merging.{home}"), name)
            return value
    return _find_renamed(name)
