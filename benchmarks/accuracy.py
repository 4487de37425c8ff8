"""Compare the methods on all available networks: accuracy, WARE and seconds, as a table and CSV.

    python benchmarks/accuracy.py [--networks resnet-56,lenet-300-100,vgg-16,norm-relu,…] [--methods none,moments,…]
                                  [--criteria l1,l2,l2-gm] [--limit N] [--out results.csv]

The paper's checkpoints are looked for in NEURON_MERGING_DATA; the networks of `benchmarks/own.py` are trained
here if their weights are not in its cache; EfficientNet-Lite0 comes as `lite.py` says. A run that is stopped can go
on: cells that --out has are not repeated.
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

import lite
import own
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import evaluation, models
from neuron_merging.merging.protocol import Merger
from neuron_merging.reproduction import datasets, layer_metrics

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


CASES += [
    Case(name, "", "fashion-mnist", {f"{r}%": r / 100 for r in (20, 30, 40, 50, 60)}, 0.1) for name in own.OWN
]  # fmt: skip
LITE = "efficientnet-lite0"
CASES += [Case(LITE, "", "", {"10%": 0.1, "20%": 0.2}, 0.1)]
GREEDY = "calibrated-128, expected error"


def method(name: str, threshold: float, calibration: list[Tensor]) -> str | Merger:
    known: dict[str, str | Merger] = {
        "cosine-released": nm.Cosine(threshold, 0.85, bn="released"),
        "cosine-paper": nm.Cosine(threshold, 0.85, bn="paper"),
        "moments-fast": nm.Moments(effort="fast"),
        "moments-unrestored": nm.Moments(restore_variance=False),
        "calibrated-128": nm.Calibrated(calibration),
        "calibrated-128-plain": nm.Calibrated(calibration, sequential=False),
        GREEDY: nm.Calibrated(calibration),
    }
    return known.get(name, name)


def network(case: Case, root: Path) -> nn.Module:
    if case.network == LITE:
        return lite.network()
    if not case.weights:
        return own.load(case.network)[0]
    model = models.create_network(case.network)
    model.load_state_dict(load_file(root / case.weights))
    return model


def cells(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield criterion, cut and method; a method with its own selection has one criterion."""
    criteria, names = options.criteria.split(","), options.methods.split(",")
    for criterion in criteria:
        yield from ((criterion, cut, name) for cut in case.ratios for name in names)
    if options.greedy:
        yield from (("expected-error", cut, GREEDY) for cut in case.ratios)


def rows(case: Case, root: Path, options: argparse.Namespace, done: set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    todo = [cell for cell in cells(case, options) if (case.network, *cell) not in done]
    if not todo:
        return
    model = network(case, root)
    images = (lite.photographs() if case.network == LITE else datasets.load_dataset(case.images, "test")).head(
        options.limit
    )
    before, labels = evaluation.predict(model, images.batches(250))
    if (case.network, "", "", "original") not in done:
        yield {
            "network": case.network, "criterion": "", "cut": "", "method": "original",
            "accuracy": evaluation.accuracy(before, labels), "ware": 0.0, "seconds": 0.0,
            "parameters": evaluation.count_parameters(model),
        }  # fmt: skip
    analysis = nm.analyse(model, torch.randn_like(next(iter(images.batches(1)))[0]))  # a real image would count as data
    calibration = [next(iter(datasets.load_dataset(case.images, "train").batches(128)))[0]] if case.images else []
    for criterion, cut, name in todo:
        clock = time.perf_counter()
        merger = method(name, case.threshold, calibration)
        small = nm.compress(analysis, ratio=case.ratios[cut], criterion=criterion, merger=merger)
        took = time.perf_counter() - clock
        after = evaluation.predict(small.model, images.batches(250))[0]
        yield {
            "network": case.network, "criterion": criterion, "cut": cut, "method": name,
            "accuracy": evaluation.accuracy(after, labels), "ware": layer_metrics.ware(before, after),
            "seconds": took, "parameters": small.summary.parameters[1],
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(case.network for case in CASES))
    parser.add_argument("--methods", default="none,cosine-released,cosine-paper,linear,fold,moments,calibrated-128")
    parser.add_argument("--criteria", default="l1")
    parser.add_argument("--greedy", action="store_true", help="also calibrated merging with its own choice of channels")
    parser.add_argument("--limit", type=int, default=10_000, help="number of test images")
    parser.add_argument("--out", type=Path, help="also write a CSV file, or go on with it")
    options = parser.parse_args()
    root = Path(os.environ.get("NEURON_MERGING_DATA", ""))
    found: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        with options.out.open(newline="") as file:
            found = list(csv.DictReader(file))
    done = {tuple(row[key] for key in ("network", "criterion", "cut", "method")) for row in found}
    for case in CASES:
        if case.network not in options.networks.split(","):
            continue
        if case.weights and not (root / case.weights).is_file():
            print(f"{case.network}: no {case.weights} in NEURON_MERGING_DATA", file=sys.stderr)
            continue
        for row in rows(case, root, options, done):
            found.append({key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()})
            print(" ".join(str(value) for value in found[-1].values()), file=sys.stderr, flush=True)
            if options.out:
                write(options.out, found)
    table = Table(*(found[0] if found else ()))
    for row in found:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=110).print(table)
    return 0


def write(path: Path, found: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
