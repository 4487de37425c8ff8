"""The rows that a consumer layer reads, at every call of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuron_merging.calibration.layer_stats import ConsumerWeight, find_consumer_weights
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Axis, Consumer
from neuron_merging.graph.capture import capture
from neuron_merging.pruning.trial_prune import analyse


@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 1}], ids=str)
def test_rows_of_a_single_tap_are_those_that_the_layer_reads(options: dict[str, int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1, bias=False, **options))
    x = torch.randn(2, 3, 6, 6)
    graph = capture(model, x)
    (use,) = find_consumer_weights(Selection(analyse(model, x), {"0": np.arange(4)}))
    node, value = graph.nodes[-1], model[0](x)
    at = use.get_row_layout(node).sample_positions(value, lambda available, limit: torch.arange(available))
    with torch.no_grad():
        rows, outputs = (
            use.get_row_layout(node).extract_rows(value, at)[0],
            use.get_row_layout(node).extract_outputs(model(x), at)[0],
        )
        assert torch.allclose(rows @ model[1].weight.flatten(1).T, outputs, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"padding": 1}, {"dilation": 2, "padding": 2}, {"stride": 2, "padding": 1}], ids=str
)
def test_patches_are_those_of_unfold(options: dict[str, Any]) -> None:
    conv, x = nn.Conv2d(3, 4, 3, **options), torch.randn(2, 3, 9, 8)
    node = next(n for n in capture(nn.Sequential(conv, nn.Flatten()), x).nodes if n.op == "conv2d")
    use = ConsumerWeight(
        Axis("0.weight", 1), (("", Consumer(node, "x", None, np.arange(3)[:, None], 1)),), np.ones(3, bool), (3, 3)
    )
    at = use.get_row_layout(node).sample_positions(x, lambda available, limit: torch.arange(available))
    assert torch.equal(
        use.get_row_layout(node).extract_rows(x, at)[0], F.unfold(x, 3, **options).transpose(1, 2).flatten(0, 1)
    )
    assert torch.equal(
        use.get_row_layout(node).extract_outputs(conv(x), at)[0], conv(x).flatten(2).transpose(1, 2).flatten(0, 1)
    )
