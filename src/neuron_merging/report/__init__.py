"""report: one HTML page about a compressed network; it needs nothing but a browser."""

from __future__ import annotations

from neuron_merging.report.collect import collect
from neuron_merging.report.fidelity import BATCH, Fidelity, Score, compare, on_images, on_synthetic_inputs, versions
from neuron_merging.report.findings import Findings
from neuron_merging.report.page import render
from neuron_merging.report.write import page_of, write

__all__ = [
    "BATCH",
    "Fidelity",
    "Findings",
    "Score",
    "collect",
    "compare",
    "on_images",
    "on_synthetic_inputs",
    "page_of",
    "render",
    "versions",
    "write",
]
