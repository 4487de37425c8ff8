"""What summaries and inspections count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import neuron_merging as nm
from tests.selection.counting import mlp
from tests.zoo import CASES


def test_the_summary_counts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    summary = nm.compress(model, torch.zeros(1, 3, 6, 6), merger="none").summary
    assert summary.parameters == ((3 * 9 + 1) * 8 + 128 * 5 + 5, (3 * 9 + 1) * 4 + 64 * 5 + 5)
    assert summary.macs == (27 * 8 * 16 + 128 * 5, 27 * 4 * 16 + 64 * 5)
    assert [(g.name, g.layers, g.before, g.after, g.removed_count) for g in summary.groups] == [("0", ("0",), 8, 4, 4)]
    assert [(r.layer, r.operator) for r in summary.refusals] == [("3", "output")]
    assert summary.error is not None and summary.error < 1e-5


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ({}, "statistics in closed form"),
        ({"merger": nm.Moments(source="dead-leaves")}, "synthetic inputs"),
        ({"merger": "fold"}, "the weights alone"),
        ({"merger": "none"}, ""),
        ({"calibration": [torch.randn(16, 4)]}, "calibration batches"),
    ],
)
def test_the_summary_says_what_was_fitted_to(options: dict[str, Any], source: str) -> None:
    summary = nm.compress(mlp(4, 8, 3), torch.zeros(1, 4), **options).summary
    assert summary.statistics == source and (f"fitted to: {source}" in str(summary)) == bool(source)


def test_what_a_network_remembers_is_named_as_a_source() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model.train()(torch.randn(32, 1, 8, 8))
    assert "batch-norm statistics" in nm.compress(model.eval(), torch.zeros(1, 1, 8, 8)).summary.statistics


def test_without_verification_there_is_no_error_to_show() -> None:
    result = nm.compress(mlp(4, 8, 3), torch.zeros(1, 4), verify=False, merger="none")
    assert result.summary.error is None
    assert "verified" not in str(result.summary)


def test_hooks_are_reported() -> None:
    model = mlp(4, 8, 3)
    model[0].register_forward_hook(lambda module, inputs, output: None)
    summary = nm.compress(model, torch.zeros(1, 4)).summary
    assert any("hook" in note and "0" in note for note in summary.notes)


def test_a_layer_norm_over_fewer_channels_is_reported() -> None:
    case = CASES["layer norm over channels"]
    summary = nm.compress(case.build(), case.inputs(), merger="none").summary
    assert any("layer_norm" in note and "op" in note for note in summary.notes)


def test_inspect_counts_what_hangs_on_a_group() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    (group,) = nm.inspect(model, torch.zeros(1, 3, 6, 6)).groups
    assert (group.name, group.layers, group.channels, group.consumers) == ("0", ("0",), 8, ("3",))
    assert group.parameters == 8 * (3 * 9 + 1) + 2 * 8 + 4 * 8
