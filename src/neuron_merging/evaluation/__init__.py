"""Evaluate networks: cost, predictions, fidelity, verdict and latency."""

from neuron_merging.errors import make_deprecated_getattr
from neuron_merging.evaluation.costs import count_macs, count_parameters
from neuron_merging.evaluation.predictions import accuracies, accuracy, predict

__all__ = ["accuracies", "accuracy", "count_macs", "count_parameters", "predict"]

__getattr__ = make_deprecated_getattr(
    __name__,
    {
        name: f"neuron_merging.reproduction.layer_metrics:{name}"
        for name in ("max_cosine", "max_similarities", "reconstruction_errors", "ware", "ware_at")
    },
)
