"""sweeping: many cuts of one network side by side: group by group, and setting by setting."""

from neuron_merging.sweeping.losses import GroupLoss, Loss, Sensitivity, sensitivity

__all__ = ["GroupLoss", "Loss", "Sensitivity", "sensitivity"]
