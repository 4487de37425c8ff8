"""Measure whether data loading slows an evaluation down: images per second of ResNet-56 against a bare forward pass.

    python benchmarks/evaluation.py [--network resnet-56] [--images 10000] [--batch 250]

The evaluation reads bytes, normalises them, predicts and counts the right answers; the bare pass runs on batches
that are ready. The two take turns, batch by batch, so that other work on the machine slows both; the ratio is that
of the medians. Pixels are random: speed does not depend on them. Fails if the ratio is below 0.8.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from neuron_merging import evaluation, models
from neuron_merging.data import Images

GOAL = 0.8


def random_images(shape: tuple[int, ...], count: int) -> Images:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (count,), generator=generator)
    return Images(x, y, (0.5,) * shape[0], (0.25,) * shape[0], "random pixels", 10)


def evaluate(model: nn.Module, images: Images, batch: int) -> Callable[[], object]:
    return lambda: evaluation.accuracy(*evaluation.predict(model, images.batches(batch)))


def forward(model: nn.Module, images: Images, batch: int) -> Callable[[], object]:
    ready = [x for x, _ in images.batches(batch)]
    return torch.no_grad()(lambda: [model(x) for x in ready])


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet-56")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=250)
    options = parser.parse_args()
    spec = models.find_network(options.network)
    model, images = spec.build(classes=spec.classes).eval(), random_images(spec.input_shape, options.images)
    ways = {"evaluation": evaluate, "bare forward pass": forward}
    times: dict[str, list[float]] = {name: [] for name in ways}
    model(next(iter(images.batches(2)))[0])
    starts = range(0, len(images), options.batch)
    for turn, start in enumerate(track(starts, "measuring", console=Console(stderr=True))):
        end = start + options.batch
        part = replace(images, x=images.x[start:end], y=images.y[start:end])
        runs = {name: way(model, part, options.batch) for name, way in ways.items()}
        for name in sorted(ways, reverse=bool(turn % 2)):
            times[name].append(seconds(runs[name]))
    return report(options.network, options.batch, len(images), times)


def report(network: str, batch: int, count: int, times: dict[str, list[float]]) -> int:
    title = f"{network}, {count:,} images in batches of {batch}, {torch.get_num_threads()} threads"
    table = Table("", "seconds in all", "median of a batch", "images per second", title=title, title_justify="left")
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, middle in medians.items():
        table.add_row(name, f"{sum(times[name]):.1f}", f"{middle:.3f}", f"{batch / middle:.1f}")
    ratio = medians["bare forward pass"] / medians["evaluation"]
    table.add_row("ratio", "", "", f"{ratio:.3f}")
    Console(width=100).print(table)
    return int(ratio < GOAL)


if __name__ == "__main__":
    sys.exit(main())
