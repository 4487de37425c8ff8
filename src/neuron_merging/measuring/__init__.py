"""measuring: size, predictions, differences, fidelity and latency."""

from neuron_merging.measuring.differences import reconstruction_errors, ware, ware_at
from neuron_merging.measuring.predictions import accuracies, accuracy, predict
from neuron_merging.measuring.similarity import max_cosine, max_similarities
from neuron_merging.measuring.size import count_macs, count_parameters

__all__ = [
    "accuracies",
    "accuracy",
    "count_macs",
    "count_parameters",
    "max_cosine",
    "max_similarities",
    "predict",
    "reconstruction_errors",
    "ware",
    "ware_at",
]
