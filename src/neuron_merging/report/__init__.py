"""report: one HTML page about a compressed network; it needs nothing but a browser."""

from __future__ import annotations

from neuron_merging.report.collect import collect
from neuron_merging.report.findings import Findings
from neuron_merging.report.page import render
from neuron_merging.report.write import page_of, write

__all__ = ["Findings", "collect", "page_of", "render", "write"]
