"""Compare the methods on the checkpoints at hand: accuracy, WARE and seconds, as a table and CSV.

    python benchmarks/accuracy.py [--networks resnet-56,lenet-300-100,vgg-16] [--methods none,moments,…]
                                  [--criteria l1,l2,l2-gm] [--limit N] [--out results.csv]

Needs NEURON_MERGING_DATA (checkpoints and images); FashionMNIST for LeNet.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

import neuron_merging as nm
from neuron_merging import data, metrics, networks
from neuron_merging.mergers import Merger

PAPERS_CUT = dict.fromkeys([f"feature.{i}" for i in (0, 24, 27, 30, 34, 37, 40)], 0.5)


class Case(NamedTuple):
    network: str
    weights: str
    images: str
    ratios: dict[str, Any]
    threshold: float


CASES = [
    Case("lenet-300-100", "paper_lenet_300_100_fashionmnist.safetensors", "fashion-mnist",
         {"50%": 0.5, "60%": 0.6, "70%": 0.7, "80%": 0.8}, 0.45),
    Case("resnet-56", "paper_resnet56_cifar10.safetensors", "cifar-10",
         {"20%": 0.2, "30%": 0.3, "40%": 0.4, "50%": 0.5}, 0.1),
    Case("vgg-16", "vgg16_cifar10_8epochs.safetensors", "cifar-10",
         {"paper's 64%": PAPERS_CUT, "all 30%": {"feature": 0.3}, "all 50%": {"feature": 0.5}}, 0.1),
]  # fmt: skip


def methods(names: list[str], threshold: float, calibration: list[Tensor]) -> Iterator[tuple[str, str | Merger]]:
    known: dict[str, str | Merger] = {
        "none": "none",
        "cosine-released": nm.Cosine(threshold, 0.85, bn="released"),
        "cosine-paper": nm.Cosine(threshold, 0.85, bn="paper"),
        "moments": nm.Moments(),
        "calibrated-128": nm.Calibrated(calibration),
    }
    return ((name, known[name]) for name in names)


def rows(case: Case, root: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = networks.build(case.network)
    model.load_state_dict(load_file(root / case.weights))
    images = data.load(case.images, "test").head(options.limit)
    before, labels = metrics.predict(model, images.batches(250))
    start = {"network": case.network, "criterion": "", "cut": "", "method": "original"}
    yield start | {
        "accuracy": metrics.accuracy(before, labels),
        "ware": 0.0,
        "seconds": 0.0,
        "parameters": metrics.count_parameters(model),
    }
    example = next(iter(images.batches(1)))[0]
    calibration = [next(iter(data.load(case.images, "train").batches(128)))[0]]
    for criterion in options.criteria.split(","):
        for cut, ratio in case.ratios.items():
            for name, merger in methods(options.methods.split(","), case.threshold, calibration):
                clock = time.perf_counter()
                small = nm.compress(model, example, ratio=ratio, criterion=criterion, merger=merger)
                took = time.perf_counter() - clock
                after = metrics.predict(small.model, images.batches(250))[0]
                yield {
                    "network": case.network, "criterion": criterion, "cut": cut, "method": name,
                    "accuracy": metrics.accuracy(after, labels), "ware": metrics.ware(before, after),
                    "seconds": took, "parameters": small.summary.parameters[1],
                }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(case.network for case in CASES))
    parser.add_argument("--methods", default="none,cosine-released,cosine-paper,moments,calibrated-128")
    parser.add_argument("--criteria", default="l1")
    parser.add_argument("--limit", type=int, default=10_000, help="number of test images")
    parser.add_argument("--out", type=Path, help="also write a CSV file")
    options = parser.parse_args()
    root = Path(os.environ.get("NEURON_MERGING_DATA", ""))
    if not (root / CASES[1].weights).is_file():
        sys.exit("set NEURON_MERGING_DATA to the folder with the checkpoints")
    found = []
    for case in CASES:
        if case.network in options.networks.split(","):
            for row in rows(case, root, options):
                found.append(row)
                print(
                    " ".join(str(round(v, 3) if isinstance(v, float) else v) for v in row.values()),
                    file=sys.stderr,
                    flush=True,
                )
    table = Table(*found[0])
    for row in found:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=110).print(table)
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]))
            writer.writeheader()
            writer.writerows(found)
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
