"""One self-contained HTML page about a compressed network or a sweep."""

from __future__ import annotations

from neuron_merging.errors import make_deprecated_getattr
from neuron_merging.report.html_page import (
    measure_figures,
    render_report,
    render_report_data,
    render_sweep_report,
    write_report,
)
from neuron_merging.report.report_data import ReportData, build_report_data, collect_report_data

__all__ = [
    "ReportData",
    "build_report_data",
    "collect_report_data",
    "measure_figures",
    "render_report",
    "render_report_data",
    "render_sweep_report",
    "write_report",
]

__getattr__ = make_deprecated_getattr(
    __name__,
    {
        old: f"neuron_merging.report:{new}"
        for old, new in {
            "Findings": "ReportData",
            "collect": "collect_report_data",
            "page_of": "render_report",
            "render": "render_report_data",
            "sweep_page": "render_sweep_report",
            "write": "write_report",
        }.items()
    },
)
