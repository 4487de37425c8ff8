"""Measure the cost of all sensitivities of ResNet-56: 27 groups, four ratios, in forward passes of the same inputs.

    python benchmarks/sensitivity.py

Needs, in NEURON_MERGING_DATA, the paper's checkpoint. Passes are counted twice: by multiply-accumulates, and by the
clock, beside the network's own forward pass of the probes, timed before and after. Inputs that the network remembers
take longer to make than all of it; they are made once, so synthetic ones stand for them here.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import neuron_merging as nm
from neuron_merging import models
from neuron_merging.config import CompressConfig
from neuron_merging.pipeline import prepare_inputs

RUNS = 5
MOST = 40


@torch.no_grad()
def forward(model: torch.nn.Module, probes: list[tuple[Any, ...]]) -> list[float]:
    """Return the seconds of forward passes over all inputs."""
    found = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for batch in probes:
            model(*batch)
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    model = models.create_network("resnet-56")
    model.load_state_dict(load_file(Path(os.environ["NEURON_MERGING_DATA"]) / "paper_resnet56_cifar10.safetensors"))
    analysis = nm.analyse(model.eval(), torch.zeros(1, 3, 32, 32))
    search = prepare_inputs(analysis, CompressConfig(effort="fast"), search=True).sets.search
    assert search is not None
    found = search.probes
    probes = list(found.batches)
    print(f"{found}, {torch.get_num_threads()} threads")
    for exact in (False, True):
        before = forward(model, probes)
        start = time.perf_counter()
        losses = nm.sensitivity(analysis, criterion="l2", effort="fast", exact=exact)
        seconds = time.perf_counter() - start
        one = statistics.median(before + forward(model, probes))
        cells = [loss for group in losses.groups for loss in group.losses]
        print(
            f"{len(losses.groups)} groups × {len(losses.ratios)} ratios, {sum(loss.measured for loss in cells)} of "
            f"{len(cells)} measured: {losses.passes:.1f} passes by multiply-accumulates, {seconds / one:.1f} by the "
            f"clock ({seconds:.1f} s; one pass {one:.3f} s)",
            flush=True,
        )
        assert exact or losses.passes < MOST


if __name__ == "__main__":
    main()
