"""The stages of `compress`: `compress.py` runs them in order, one file holds each of the larger ones."""

from neuron_merging.pipeline.build_network import build_compressed, verify_plan
from neuron_merging.pipeline.compress import compress_analysis, compress_with_plan
from neuron_merging.pipeline.prepared_inputs import open_eval_set, prepare_calibration_inputs, prepare_inputs
from neuron_merging.pipeline.select_channels import rank_channels, select_kept_channels

__all__ = [
    "build_compressed",
    "compress_analysis",
    "compress_with_plan",
    "open_eval_set",
    "prepare_calibration_inputs",
    "prepare_inputs",
    "rank_channels",
    "select_kept_channels",
    "verify_plan",
]
