"""The cost of every stage grows with the number of layers, no faster: steps are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.find_channels import find_channels
from neuron_merging.channels.groups import Units
from neuron_merging.config import CompressConfig
from neuron_merging.evaluation.costs import Costs
from neuron_merging.graph.capture import capture
from neuron_merging.merging.protocol import find_merger
from neuron_merging.pipeline import prepare_inputs, select_kept_channels
from neuron_merging.pruning.plan import make_plan
from neuron_merging.pruning.surgery import apply_plan

SHALLOW, DEEP = 12, 48


@cache
def analysed(layers: int) -> Analysis:
    hidden = [part for _ in range(layers) for part in (nn.Linear(4, 4), nn.ReLU())]
    model, inputs = nn.Sequential(*hidden, nn.Linear(4, 2)), (torch.randn(1, 4),)
    graph = capture(model, inputs)
    return Analysis(model, inputs, graph, find_channels(graph))


def steps(work: Callable[[], object]) -> int:
    """Lines of the library that are executed."""
    count = 0

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def follow(frame: FrameType, event: str, arg: Any) -> Any:
        return local if "neuron_merging" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def keep_half(analysis: Analysis) -> Mapping[str, Units]:
    """The channels that stay by default."""
    config = CompressConfig()
    return select_kept_channels(analysis, config, prepare_inputs(analysis, config, judge=False)).kept


STAGES: dict[str, Callable[[Analysis], object]] = {
    "channels": lambda a: find_channels(a.graph),
    "choosing": keep_half,
    "pruning": lambda a: find_merger("none").merge(Selection(a, keep_half(a))),
    "cosine": lambda a: find_merger("cosine").merge(Selection(a, keep_half(a))),
    "plan": lambda a: make_plan(a.model, a.graph, a.channels, keep_half(a)),
    "surgery": lambda a: apply_plan(a.model, make_plan(a.model, a.graph, a.channels, keep_half(a))),
    "costs": Costs,
}


@pytest.mark.parametrize("stage", STAGES)
def test_four_times_the_layers_take_about_four_times_the_steps(stage: str) -> None:
    shallow, deep = analysed(SHALLOW), analysed(DEEP)
    few, many = (steps(lambda a=a: STAGES[stage](a)) for a in (shallow, deep))  # type: ignore[misc]
    assert many < 1.15 * few * DEEP / SHALLOW
