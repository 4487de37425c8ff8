"""Print where the time of `compress` goes, stage by stage, in seconds of the CPU and in forward passes.

    python benchmarks/stages.py [--networks resnet-56,efficientnet,…] [--efforts fast,normal] [--store] [--warm]

The budget is 70 % of the MACs, nothing is cached. Each stage is compared with `benchmarks/stages.json`, a profile in
forward passes; `--store` writes the profile. `--warm` also takes the time of a second cut, to 60 %. A forward pass is
one of 16 inputs, measured in the same run, so that the figures of two machines can be compared. A network whose weights
are not there is skipped, with the reason (see `six_networks.py`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from six_networks import NETWORKS

import neuron_merging as nm
from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.example_inputs import call_model, resample_inputs
from neuron_merging.inputs import input_sets
from neuron_merging.pipeline import compress, select_channels

STAGES = {
    "making inputs": (compress, "prepare_inputs"),
    "ordering channels": (select_channels, "rank_channels"),
    "gradients": (select_channels, "measure_sensitivities"),
    "searching": (select_channels, "find_best_within_budget"),
    "fitting": (compress, "merge_and_prune"),
    "verifying": (compress, "verify_and_summarise"),
    "judging": (compress, "_attach_verdict"),
}
"""The functions of the pipeline whose time is taken."""
BUDGET, SECOND_BUDGET = "70%", "60%"
PROFILE = Path(__file__).with_suffix(".json")


@contextmanager
def timed_stages() -> Iterator[dict[str, float]]:
    """Take the CPU time of each stage; one that another calls is taken out of the other's."""
    spent: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    inner = [0.0]
    old = {stage: getattr(*place) for stage, place in STAGES.items()}

    def wrap(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **more: Any) -> Any:
            start = time.process_time()
            inner.append(0.0)
            try:
                return function(*args, **more)
            finally:
                whole = time.process_time() - start
                spent[stage] += whole - inner.pop()
                inner[-1] += whole

        return run

    for stage, (module, name) in STAGES.items():
        setattr(module, name, wrap(stage, old[stage]))
    try:
        yield spent
    finally:
        for stage, (module, name) in STAGES.items():
            setattr(module, name, old[stage])


@torch.no_grad()
def forward_seconds(analysis: Analysis) -> float:
    """Return the CPU seconds of a forward pass of 16 inputs, the least of three."""
    size = analysis.fixed_batch_size or 16
    batch, times = resample_inputs(analysis.inputs, size), []
    for _ in range(3):
        start = time.process_time()
        call_model(analysis.model, batch)
        times.append((time.process_time() - start) * 16 / size)
    return min(times)


def measure(name: str, effort: str, stored: dict[str, float], warm: bool) -> dict[str, float]:
    """Compress a network, print its stages beside the stored ones, and return them in forward passes."""
    try:
        model, example = NETWORKS[name]()
    except (ImportError, OSError, StopIteration, ValueError) as error:
        print(f"{name}: skipped ({error})", flush=True)
        return stored
    start = time.process_time()
    analysis = nm.analyse(model, example)
    analysing = time.process_time() - start
    forward = forward_seconds(analysis)
    wall, cpu, system = time.perf_counter(), time.process_time(), os.times().system
    with timed_stages() as spent:
        small = nm.compress(analysis, budget=BUDGET, effort=effort)
    wall, cpu, system = time.perf_counter() - wall, time.process_time() - cpu, os.times().system - system
    verdict = small.summary.verdict
    passes = {stage: seconds / forward for stage, seconds in {**spent, "all": cpu}.items()}
    print(
        f"{name}, {effort}: {cpu:.1f} s of CPU, {system:.1f} of these in the system; {wall:.1f} s by the clock; "
        f"analysis {analysing:.1f} s; verdict {verdict.level if verdict else '-'} {verdict.fidelity if verdict else ''}"
    )
    for stage, count in passes.items():
        ratio = f", {count / stored[stage]:.2f} of the stored profile" if stored.get(stage, 0) >= 1 else ""
        print(f"  {stage}: {count * forward:.1f} s, {count:.0f} passes of 16{ratio}", flush=True)
    if warm:
        start = time.process_time()
        nm.compress(analysis, budget=SECOND_BUDGET, effort=effort)
        print(
            f"  a second cut: {time.process_time() - start:.1f} s, {(time.process_time() - start) / cpu:.0%}",
            flush=True,
        )
    return {stage: round(count, 1) for stage, count in passes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--efforts", default=",".join(list(input_sets.FIT_EFFORTS)[:2]))
    parser.add_argument("--store", action="store_true", help="write the profile that later runs are compared with")
    parser.add_argument("--warm", action="store_true", help="also cut a second time, with the inputs of the first")
    arguments = parser.parse_args()
    os.environ["NEURON_MERGING_CACHE"] = ""
    profile = json.loads(PROFILE.read_text()) if PROFILE.is_file() else {}
    for name in arguments.networks.split(","):
        for effort in arguments.efforts.split(","):
            key = f"{name}, {effort}"
            profile[key] = measure(name, effort, profile.get(key, {}), arguments.warm)
            if arguments.store:
                PROFILE.write_text(json.dumps(profile, indent=1) + "\n")


if __name__ == "__main__":
    main()
