"""report: one HTML page about a compressed network or a sweep; it needs nothing but a browser."""

from __future__ import annotations

from neuron_merging.report.collect import collect
from neuron_merging.report.findings import Findings
from neuron_merging.report.page import render, sweep_page
from neuron_merging.report.write import page_of, write

__all__ = ["Findings", "collect", "page_of", "render", "sweep_page", "write"]
