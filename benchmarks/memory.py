"""Measure the peak memory of saving and loading, as a multiple of the model: `python benchmarks/memory.py [MEGABYTES]`.

Each step runs in a process of its own. What a process holds before it has a model (Python, torch, this package) is
taken off: that is measured by one more process, which stops there.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from neuron_merging import atomic
from neuron_merging.checkpoint import load_folder, save_folder
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.evaluation.summary import Summary
from neuron_merging.models import state_dicts
from neuron_merging.pruning.plan import Plan

WIDTH = 1024
LAYER = 4 * WIDTH * (WIDTH + 1)
GOAL = 1.3


def network(megabytes: int) -> nn.Module:
    """Build layers of four megabytes each."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, megabytes * 10**6 // LAYER))))


def compressed(megabytes: int) -> Compressed:
    """Return a result in which nothing was pruned; only its size matters here."""
    nothing = Plan(groups=(), cuts=(), modules={})
    size = megabytes * 10**6 // 4
    summary = Summary((size, size), (size, size), (), (), None)
    return Compressed(network(megabytes), nothing, summary)


def hold(megabytes: int, place: Path) -> None:
    network(megabytes)


def save(megabytes: int, place: Path) -> None:
    save_folder.save(compressed(megabytes), place)


def load(megabytes: int, place: Path) -> None:
    """Load with a `build` that allocates memory; its network must be freed before the weights are loaded."""
    load_folder.load(place, build=lambda: network(megabytes))


def checkpoint(megabytes: int, place: Path) -> None:
    tensors = network(megabytes).state_dict()
    atomic.replace_file(place.with_suffix(".safetensors"), lambda part: state_dicts.write_safetensors(part, tensors))


STEPS: dict[str, Callable[[int, Path], None]] = {"hold": hold, "save": save, "load": load, "checkpoint": checkpoint}


def peak(step: str, megabytes: int, place: Path) -> float:
    """Return the peak memory of a process that runs a step, in bytes; "" for an idle process."""
    done = subprocess.run(
        [sys.executable, __file__, step or "nothing", str(megabytes), str(place)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def ratios(megabytes: int) -> dict[str, float]:
    """Return the peak of each step relative to a process that only holds the model, both minus the idle process."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "small"
        idle = peak("", megabytes, place)
        held = peak("hold", megabytes, place) - idle
        return {step: (peak(step, megabytes, place) - idle) / held for step in STEPS if step != "hold"}


def main(megabytes: int = 400) -> int:
    found = ratios(megabytes)
    for step, ratio in found.items():
        print(f"{step:12} {ratio:.2f} times a model of {megabytes} MB (goal: at most {GOAL})")
    return int(max(found.values()) > GOAL)


def _report_peak(step: str, megabytes: int, place: Path) -> None:
    torch.set_num_threads(1)
    if step in STEPS:
        STEPS[step](megabytes, place)
    unit = 1 if sys.platform == "darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _report_peak(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main(*map(int, sys.argv[1:])))
