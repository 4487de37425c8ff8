"""sweeping: many cuts of one network side by side: group by group, and setting by setting."""

from neuron_merging.sweeping.grid import sweep
from neuron_merging.sweeping.losses import GroupLoss, Loss, Sensitivity, sensitivity
from neuron_merging.sweeping.outcome import Row, Sweep

__all__ = ["GroupLoss", "Loss", "Row", "Sensitivity", "Sweep", "sensitivity", "sweep"]
