"""Print the figures that a right implementation reproduces, ours beside them, cell by cell.

    python benchmarks/oracle.py [lenet] [resnet] [--limit N]

Needs NEURON_MERGING_DATA (the paper's checkpoints, CIFAR-10 test images) and FashionMNIST.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

import neuron_merging as nm
from neuron_merging import data, metrics, networks

CRITERIA = ("l1", "l2", "l2-gm")
LENET = {
    ("l1", "none"): (88.40, 85.17, 71.26, 66.76),
    ("l1", "cosine"): (88.69, 86.92, 82.75, 80.02),
    ("l2", "none"): (87.86, 83.03, 71.21, 63.90),
    ("l2", "cosine"): (88.38, 88.07, 83.27, 77.11),
    ("l2-gm", "none"): (88.08, 85.82, 78.38, 64.19),
    ("l2-gm", "cosine"): (88.57, 88.10, 86.39, 77.49),
}


class Cell(NamedTuple):
    network: str
    criterion: str
    ratio: float
    merger: str
    accuracy: float
    ware: float | None
    parameters: int | None


def lenet_cells() -> Iterator[Cell]:
    for (criterion, merger), row in LENET.items():
        for ratio, accuracy in zip((0.5, 0.6, 0.7, 0.8), row, strict=True):
            yield Cell("lenet-300-100", criterion, ratio, merger, accuracy, None, None)


def resnet_cells(root: Path) -> Iterator[Cell]:
    names = {"l1-norm": "l1", "l2-norm": "l2", "l2-GM": "l2-gm"}
    for row in json.loads((root / "oracle_resnet56.json").read_text())["rows"]:
        merger = "none" if row["kind"] == "prune" else "cosine"
        yield Cell(
            "resnet-56", names[row["criterion"]], row["ratio"], merger, row["accuracy"], row["ware"], row["params"]
        )


def run(cells: list[Cell], weights: Path, images: data.Images, threshold: float) -> Iterator[tuple[Cell, Cell]]:
    model = networks.build(cells[0].network)
    model.load_state_dict(load_file(weights))
    example = next(iter(images.batches(1)))[0]
    before, labels = metrics.predict(model, images.batches(250))
    print(f"{cells[0].network}: baseline {metrics.accuracy(before, labels):.2f} % on {len(images)} images")
    for cell in cells:
        merger = "none" if cell.merger == "none" else nm.Cosine(threshold, 0.85, bn="released")
        small = nm.compress(model, example, ratio=cell.ratio, criterion=cell.criterion, merger=merger)
        after, _ = metrics.predict(small.model, images.batches(250))
        got = metrics.accuracy(after, labels)
        yield (
            cell,
            cell._replace(
                accuracy=round(got, 2), ware=metrics.ware(before, after), parameters=small.summary.parameters[1]
            ),
        )


def check(want: Cell, got: Cell) -> bool:
    """LeNet to the digit; ResNet within 0.05 points and 0.01 WARE, parameters equal."""
    if want.ware is None:
        return got.accuracy == want.accuracy
    close = abs(got.accuracy - want.accuracy) <= 0.05 + 1e-9 and abs((got.ware or 0) - want.ware) <= 0.01 + 1e-9
    return close and got.parameters == want.parameters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="*", default=["lenet", "resnet"])
    parser.add_argument("--limit", type=int, default=10_000, help="number of test images")
    options = parser.parse_args()
    root = Path(os.environ.get("NEURON_MERGING_DATA", ""))
    if not (root / "oracle_resnet56.json").is_file():
        sys.exit("set NEURON_MERGING_DATA to the folder with the paper's checkpoints")
    jobs = {
        "lenet": (list(lenet_cells()), "paper_lenet_300_100_fashionmnist.safetensors", "fashion-mnist", 0.45),
        "resnet": (list(resnet_cells(root)), "paper_resnet56_cifar10.safetensors", "cifar-10", 0.1),
    }
    failures = 0
    for which in options.which:
        cells, file, name, threshold = jobs[which]
        table = Table("criterion", "ratio", "merger", "accuracy", "ours", "WARE", "ours", "parameters", "ours", "")
        for want, got in run(cells, root / file, data.load(name, "test").head(options.limit), threshold):
            good = check(want, got)
            failures += not good
            table.add_row(
                want.criterion,
                f"{want.ratio:.0%}",
                want.merger,
                f"{want.accuracy:.2f}",
                f"{got.accuracy:.2f}",
                "" if want.ware is None else f"{want.ware:.3f}",
                f"{got.ware:.3f}",
                "" if want.parameters is None else f"{want.parameters:,}",
                f"{got.parameters:,}",
                "ok" if good else "DIFFERS",
            )
        Console(width=110).print(table)
    print(f"{failures} cells differ")
    return int(failures > 0)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
