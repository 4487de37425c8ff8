"""Measure many cuts of one network: the sensitivity of each group, and sweeps over a grid of settings."""

from neuron_merging.sweeps.grid import sweep
from neuron_merging.sweeps.group_sensitivity import CutLoss, GroupSensitivity, Sensitivity, sensitivity
from neuron_merging.sweeps.results import Sweep, SweepRow

__all__ = ["CutLoss", "GroupSensitivity", "Sensitivity", "Sweep", "SweepRow", "sensitivity", "sweep"]
