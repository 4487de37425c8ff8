"""Compare networks within a budget with a uniform cut of the same cost, with and without data.

    python benchmarks/budgets.py [--networks resnet-56,…] [--budget macs=0.5] [--limit N] [--images 128] [--out FILE]
    python benchmarks/budgets.py --networks resnet-20 --weights resnet-20=runs/resnet-20/model.safetensors

Needs, in NEURON_MERGING_DATA, the checkpoints and test images, and for EfficientNet-Lite0 what `lite.py` says. Networks
that `neuron-merging train` has made are given with --weights; those of `own.py` are trained if they have to be. The
uniform cut takes the same share from every group, as much as the budget asks for. A run that is stopped goes on: cells
that --out has are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lite
import own
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import evaluation, models
from neuron_merging.evaluation.costs import Costs
from neuron_merging.reproduction import datasets
from neuron_merging.selection.budget import allocate_uniformly

BUDGETS = {
    "resnet-56": [("macs", 0.7), ("macs", 0.5), ("macs", 0.4), ("params", 0.7), ("params", 0.5), ("params", 0.4)],
    "vgg-16": [("macs", 0.5), ("macs", 0.25)],
    "efficientnet-lite0": [("macs", 0.88), ("macs", 0.77)],
    "lenet-300-100": [("macs", 0.5), ("macs", 0.25)],
}
OTHERS = [("macs", 0.7), ("macs", 0.5)]
WEIGHTS = {
    "resnet-56": "paper_resnet56_cifar10.safetensors",
    "vgg-16": "vgg16_cifar10_8epochs.safetensors",
    "lenet-300-100": "paper_lenet_300_100_fashionmnist.safetensors",
}


@dataclass(frozen=True)
class Case:
    """A network, test images, and calibration images."""

    model: nn.Module
    images: Any
    calibration: list[Tensor]


def case(name: str, limit: int | None, count: int, weights: Mapping[str, str] | None = None) -> Case:
    if name == "efficientnet-lite0":
        photographs = lite.photographs()
        rest = lite.Photographs(photographs.x[count:], photographs.y[count:])
        return Case(lite.network(), rest.head(limit or len(rest.x)), list(photographs.x[:count].split(32)))
    kind = "fashion-mnist" if name.startswith("lenet") or name in own.OWN else "cifar-10"
    model = own.load(name)[0] if name in own.OWN else models.create_network(name)
    if name not in own.OWN:
        known_at = Path(os.environ["NEURON_MERGING_DATA"])
        model.load_state_dict(load_file((weights or {}).get(name) or known_at / WEIGHTS[name]))
    images = datasets.load_dataset(kind, "test")
    known = next(iter(datasets.load_dataset(kind, "train").batches(count)))[0]
    return Case(model.eval(), images if limit is None else images.head(limit), [known])


def ways(analysis: nm.Analysis, found: Case, key: str, share: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the options of `compress` by name."""
    yield "uniform", {"ratio": same_share(analysis, key, share)}
    yield "allocated", {"budget": {key: share}}
    yield f"allocated, {sum(map(len, found.calibration))} images", {
        "budget": {key: share}, "calibration": found.calibration,
    }  # fmt: skip


def same_share(analysis: nm.Analysis, key: str, share: float) -> dict[str, float]:
    """Return the ratio of a uniform cut that stays within the budget."""
    costs, groups = Costs(analysis), [group for group in analysis.channels.groups if not group.residual]
    used = costs.macs if key == "macs" else costs.parameters
    sizes = {group.name: group.size for group in groups}
    ones = dict.fromkeys(sizes, 1)
    counts = allocate_uniformly(sizes, lambda counts: used(counts) / used({}) / share - 1, ones, ones)
    return {name: 1 - counts[name] / size for name, size in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(BUDGETS))
    parser.add_argument("--budget", action="append", default=[], help="only this one, as macs=0.5; may be repeated")
    parser.add_argument("--limit", type=int, default=None, help="measure on the first so many images")
    parser.add_argument("--no-data", action="store_true", help="leave out what is allocated with images")
    parser.add_argument("--images", type=int, default=128, help="for calibration")
    parser.add_argument("--weights", action="append", default=[], help="of a network trained here, as NAME=FILE")
    parser.add_argument("--out", type=Path, default=None, help="a CSV file to write to and to go on from")
    options = parser.parse_args()
    done = read(options.out)
    for name in options.networks.split(","):
        found = case(name, options.limit, options.images, dict(pair.split("=", 1) for pair in options.weights))
        example = torch.randn_like(next(iter(found.images.batches(1)))[0])  # a real image would count as data
        analysis = nm.analyse(found.model, example)
        print(f"{name}: {accuracy(found.model, found):.2f} %", flush=True)
        for key, share in BUDGETS.get(name, OTHERS):
            if options.budget and f"{key}={share:g}" not in options.budget:
                continue
            for way, asked in ways(analysis, found, key, share):
                if options.no_data and "calibration" in asked:
                    continue
                if (name, key, f"{share:g}", way) not in done:
                    keep(options.out, measured(name, analysis, found, (key, share, way), asked))


def measured(name: str, analysis: nm.Analysis, found: Case, cell: tuple[str, float, str], asked: dict[str, Any]) -> Any:
    key, share, way = cell
    start = time.perf_counter()
    small = nm.compress(analysis, **asked)
    took = time.perf_counter() - start
    before, after = small.summary.macs if key == "macs" else small.summary.parameters
    score, notes = accuracy(small.model, found), "; ".join(small.summary.notes)
    print(
        f"{name} {share:.0%} of {key}, {way}: {score:.2f} % at {after / before:.1%}, {took:.0f} s; {notes}", flush=True
    )
    return name, key, f"{share:g}", way, f"{score:.2f}", f"{after / before:.4f}", f"{took:.0f}"


def accuracy(model: nn.Module, found: Case) -> float:
    return evaluation.accuracy(*evaluation.predict(model, found.images.batches(125)))


def read(file: Path | None) -> set[tuple[str, ...]]:
    if file is None or not file.exists():
        return set()
    with open(file, newline="") as stream:
        return {tuple(row[:4]) for row in csv.reader(stream)}


def keep(file: Path | None, row: tuple[str, ...]) -> None:
    if file is not None:
        with open(file, "a", newline="") as stream:
            csv.writer(stream).writerow(row)


if __name__ == "__main__":
    main()
