"""A small network and the report data of its page."""

from __future__ import annotations

import re
from functools import cache

import torch
from torch import nn

import neuron_merging as nm
from neuron_merging import report
from neuron_merging.evaluation import fidelity
from neuron_merging.evaluation.fidelity import make_synthetic_eval_set
from neuron_merging.inputs.input_sets import make_heldout_inputs
from neuron_merging.report import html_page
from neuron_merging.report.report_data import ReportData


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


@cache
def collected(merger: str | None = None) -> tuple[nn.Module, nm.Compressed, ReportData]:
    model, x = net(), torch.zeros(1, 1, 8, 8)
    analysis = nm.analyse(model, x)
    small = nm.compress(analysis, merger=merger)
    eval_set = make_synthetic_eval_set(analysis, make_heldout_inputs(analysis))
    found = eval_set.compare(fidelity.build_compared_networks(model, small.model, small.plan))
    return model, small, report.collect_report_data(analysis, small, found, title="net", method="", load="")


def shown(findings: ReportData) -> str:
    """Its text without tags."""
    body = html_page.render_report_data(findings).partition("<body>")[2].partition("<script>")[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))
