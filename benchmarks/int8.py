"""int8 without data: accuracy, latency and size of networks in float32 and int8, by what the ranges were measured on.

    python benchmarks/int8.py lite resnet56 fastestdet [--budget 77%] [--photographs 200] [--inputs default]

`lite` is EfficientNet-Lite0 (top-1 on photographs), `resnet56` the paper's network (top-1 on the CIFAR-10 test images),
`fastestdet` a detector as its authors export it (AP50 on COCO pictures). The data is read from $NEURON_MERGING_DATA,
the networks from there or from the packages that `benchmarks/lite.py` names. Everything is measured in onnxruntime, one
thread. `--inputs` limits the table to kinds of calibration inputs whose names contain it. With `--budget`, the network
is compressed first, without data, and its float and int8 files are measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import detection
import lite
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import neuron_merging as nm
from neuron_merging import models
from neuron_merging.evaluation.latency import measure_timings
from neuron_merging.inputs.input_sets import make_fallback_inputs, make_fit_inputs
from neuron_merging.inputs.synthetic import clip_to_deviations
from neuron_merging.onnx.export import export_model, open_ort_callable
from neuron_merging.onnx.quantize import quantize_onnx_file
from neuron_merging.reproduction import datasets

SAMPLES = 32
"""Calibration inputs of each kind."""
RUNS = 40


@dataclass(frozen=True)
class Case:
    """A network, the score of a file of it, and real inputs to calibrate on for comparison."""

    model: Any
    example: Any
    score: Callable[[Path], float]
    real: Tensor
    unit: str


def make_lite(count: int) -> Case:
    photographs = lite.photographs()
    x, y = photographs.x[128 : 128 + count], photographs.y[128 : 128 + count]
    score = lambda file: measure_accuracy(file, x, y, 1)  # noqa: E731
    return Case(lite.network(), torch.zeros(1, 3, 224, 224), score, photographs.x[:SAMPLES], "top-1 %")


def make_resnet56(count: int) -> Case:
    file = detection.find_data("paper_resnet56_cifar10.safetensors")
    net = models.create_network("resnet-56")
    net.load_state_dict(load_file(file))
    pairs = list(datasets.load_dataset("cifar-10", "test").head(10 * count).batches(100))
    x, y = (torch.cat(part) for part in zip(*pairs, strict=True))
    real = next(iter(datasets.load_dataset("cifar-10", "train").batches(SAMPLES)))[0]
    return Case(net.eval(), torch.zeros(1, 3, 32, 32), lambda f: measure_accuracy(f, x, y, 100), real, "top-1 %")


def make_fastestdet(count: int) -> Case:
    pictures = detection.read_pictures()
    real = torch.cat([torch.from_numpy(own.pixels) for own in pictures[:SAMPLES]])
    file = detection.find_data(detection.MODEL_FILE)
    return Case(file, None, lambda f: detection.measure_ap50(f, pictures[SAMPLES:]), real, "AP50")


CASES = {"lite": make_lite, "resnet56": make_resnet56, "fastestdet": make_fastestdet}


def measure_accuracy(file: Path, x: Tensor, y: Tensor, batch: int) -> float:
    run = open_ort_callable(str(file), 1)
    found = [np.argmax(run(part)[0], 1) for part in x.split(batch)]
    return 100 * float((np.concatenate(found) == y.numpy()).mean())


def describe_file(case: Case, file: Path, label: str) -> None:
    """Print score, latency and size of a file."""
    example = case.real[:1]
    timing = measure_timings({"it": open_ort_callable(str(file), 1)}, (example,), (1,), RUNS)["it"][1]
    size = file.stat().st_size / 1e6
    print(f"| {label} | {case.score(file):.1f} | {timing.median * 1e3:.2f} | {size:.2f} |", flush=True)


def list_inputs(analysis: Any, case: Case) -> dict[str, Sequence[tuple[Any, ...]]]:
    """Return calibration inputs by what they are."""
    noise = torch.randn(case.real.shape, generator=torch.Generator().manual_seed(0))
    found: dict[str, Sequence[tuple[Any, ...]]] = {"real inputs": [(case.real,)], "noise": [(noise,)]}
    found["dead leaves"] = make_fallback_inputs(analysis, SAMPLES, 0).batches
    made = make_fit_inputs(analysis, samples=SAMPLES).batches
    if made:
        found["inverted batch norms"] = made
        found["the same, clipped (default)"] = [clip_to_deviations(batch) for batch in made]
    else:
        found["the same, clipped (default)"] = [clip_to_deviations(batch) for batch in found["dead leaves"]]
    return found


def compare_inputs(case: Case, folder: Path, kinds: str) -> None:
    """Print the table of one network as it is: float32, then int8 by calibration inputs."""
    analysis = nm.analyse(case.model, case.example)
    file = folder / "float.onnx"
    export_model(analysis.model, analysis.inputs, file)
    describe_file(case, file, "float32")
    for label, batches in list_inputs(analysis, case).items():
        if kinds not in label:
            continue
        target = folder / f"{label[:8]}.onnx"
        made = quantize_onnx_file(file, batches, batches)
        made.write(target)
        kept = f", {len(made.float_layers)} layers in float" if made.float_layers else ""
        describe_file(case, target, f"int8, {label}{kept}")


def compress_and_quantize(case: Case, folder: Path, budget: str) -> None:
    """Print float and int8 of the compressed network, both without data."""
    start = time.perf_counter()
    small = nm.compress(case.model, case.example, budget={"macs": budget}, int8=True)
    seconds = time.perf_counter() - start
    assert small.int8 is not None
    export_model(small.model, small.inputs, folder / "small.onnx")
    small.int8.write(folder / "small-int8.onnx")
    describe_file(case, folder / "small.onnx", f"{budget} of the MACs, float32")
    describe_file(case, folder / "small-int8.onnx", f"{budget} of the MACs, int8")
    print(f"\n{seconds:.0f} s; {small.summary.verdict}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", choices=[*CASES])
    parser.add_argument("--budget", help="share of the multiply-accumulates to compress to first, as 77%%")
    parser.add_argument("--photographs", type=int, default=200, help="real inputs to measure on")
    parser.add_argument("--inputs", default="", help="a part of the names of calibration inputs; default: all of them")
    arguments = parser.parse_args()
    for name in arguments.networks:
        case = CASES[name](arguments.photographs)
        print(f"\n{name}\n\n| calibrated on | {case.unit} | ms | MB |\n|---|---|---|---|", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            compare_inputs(case, Path(folder), arguments.inputs)
            if arguments.budget:
                compress_and_quantize(case, Path(folder), arguments.budget)


if __name__ == "__main__":
    main()
