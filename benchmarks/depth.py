"""Measure how the cost of every stage grows with depth: seconds, and time per layer relative to the shallowest network.

python benchmarks/depth.py [LAYERS ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from neuron_merging.channels.analysis import Analysis, Selection
from neuron_merging.channels.find_channels import find_channels
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.config import CompressConfig
from neuron_merging.evaluation.summary import summarise
from neuron_merging.graph.capture import capture
from neuron_merging.merging.protocol import find_merger
from neuron_merging.pipeline import prepare_inputs, select_kept_channels
from neuron_merging.pruning.plan import make_plan
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.pruning.trial_prune import exclude_counted_channels
from neuron_merging.pruning.verify import verify_small_network

WIDTH = 8
DEPTHS = (100, 500, 2000)
Result = TypeVar("Result")


def chain(layers: int) -> nn.Module:
    """Build linear layers with an activation between them."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 4))


class Clock:
    """Return the seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, stage: str, work: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = work()
        self.seconds[stage] = time.perf_counter() - start
        return result


@torch.no_grad()
def stages(layers: int) -> dict[str, float]:
    """Run every stage of a compression in order."""
    torch.manual_seed(0)
    model, inputs, clock = chain(layers), (torch.randn(1, WIDTH),), Clock()
    graph = clock.time("export", lambda: capture(model, inputs))
    channels = clock.time("channels", lambda: find_channels(graph))
    analysis = clock.time("trial cuts", lambda: exclude_counted_channels(Analysis(model, inputs, graph, channels)))
    config = CompressConfig()
    kept = clock.time(
        "choosing", lambda: select_kept_channels(analysis, config, prepare_inputs(analysis, config, judge=False)).kept
    )
    pruned = clock.time("merging, none", lambda: find_merger("none").merge(Selection(analysis, kept)))
    merged = clock.time("merging, cosine", lambda: find_merger("cosine").merge(Selection(analysis, kept)))
    plan = clock.time("plan", lambda: make_plan(model, graph, channels, kept, merged.merges))
    clock.time("surgery", lambda: apply_plan(model, plan, merged))
    plain = make_plan(model, graph, channels, kept, pruned.merges)
    small = apply_plan(model, plain, pruned)
    error = clock.time(
        "verifying", lambda: verify_small_network(analysis, plain, build_keep_mask(channels, kept), small)
    )
    clock.time("summary", lambda: summarise(analysis, small, plain, error))
    total = sum(clock.seconds.values())
    after = total - clock.seconds["export"]
    sums = {"pruning without export": after - clock.seconds["merging, cosine"]}
    sums["cosine without export"] = after - clock.seconds["merging, none"]
    return {**clock.seconds, **sums}


def main(depths: list[int]) -> None:
    stages(10)  # what torch does once is no stage's cost
    found = {layers: stages(layers) for layers in depths}
    first = depths[0]
    print(f"{'stage':24}" + "".join(f"{layers:>10} layers" for layers in depths) + "   per layer, last / first")
    for stage in found[first]:
        row = "".join(f"{found[layers][stage]:>15.3f} s" for layers in depths)
        growth = found[depths[-1]][stage] / depths[-1] / (found[first][stage] / first)
        print(f"{stage:24}{row}   {growth:.2f}")
    share = found[depths[-1]]["pruning without export"] / found[depths[-1]]["export"]
    print(f"pruning without export takes {share:.2f} of export's time at {depths[-1]} layers")


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]] or list(DEPTHS))
