"""Print the speed and memory figures, as ratios within one run.

python benchmarks/speed.py [--skip-large]

Where NEURON_MERGING_DATA has its checkpoint, VGG-16 is the trained one: of random weights a bad verdict is sure, and
what is to blame for it is looked for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from neuron_merging import models
from neuron_merging.config import CompressConfig
from neuron_merging.models import sources
from neuron_merging.pipeline import compress_analysis
from neuron_merging.pruning.trial_prune import analyse


def seconds(work: Callable[[], object], repeat: int = 5) -> float:
    """Return the time of the fastest of several runs, which other processes disturb least."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def vgg() -> None:
    model, batch = models.create_network("vgg-16").eval(), torch.randn(128, 3, 32, 32)
    trained = Path(os.environ.get("NEURON_MERGING_DATA", "")) / "vgg16_cifar10_8epochs.safetensors"
    if trained.is_file():
        model.load_state_dict(load_file(trained))
    forward = seconds(lambda: model(batch))
    example = batch[:1]
    capturing = seconds(lambda: analyse(model, example), 2)
    analysis = analyse(model, example)
    which = "trained" if trained.is_file() else "random weights"
    print(f"VGG-16, {which}: forward pass of 128 images {forward:.2f} s, capture {capturing:.2f} s")
    for merger in ("none", "cosine", "moments"):
        settings = CompressConfig(ratio={"feature": 0.5}, criterion="l2-gm", merger=merger, effort="fast")
        after = seconds(lambda s=settings: compress_analysis(analysis, s), 3)  # type: ignore[misc]
        ratio = after / forward
        print(f"  everything after capture, 13 layers, l2-gm, {merger:8} {after:.2f} s = {ratio:.2f} forward passes")


@torch.no_grad()
def resnet() -> None:
    model, example = models.create_network("resnet-56").eval(), torch.randn(1, 3, 32, 32)
    analysis = analyse(model, example)
    for merger in ("cosine", "moments"):
        after = seconds(lambda m=merger: compress_analysis(analysis, CompressConfig(merger=m, effort="fast")), 3)  # type: ignore[misc]
        print(f"ResNet-56: everything after capture, {merger:8} {after:.2f} s")


def scaling() -> None:
    """Check that the cost grows with N²D: doubling N at fixed D takes about four times as long."""
    times = {}
    for width in (1024, 2048, 4096):
        model, example = nn.Sequential(nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, 64)), torch.randn(1, 1024)
        analysis = analyse(model, example)
        settings = CompressConfig(criterion="l2-gm", merger="cosine")
        times[width] = seconds(lambda: compress_analysis(analysis, settings, verify=False), 3)  # noqa: B023
        product = torch.randn(width, 1024)
        bare = seconds(lambda: product @ product.T)  # noqa: B023
        print(f"linear 1024 -> {width}: {times[width] * 1e3:.0f} ms, one N×D×N product {bare * 1e3:.0f} ms")


@torch.no_grad()
def wide() -> None:
    """Merge correlated layers of 4k to 16k channels, half of them removed."""
    for width in (4096, 8192, 16_384):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 64)), torch.randn(512, 256)
        model[0].weight.copy_(torch.randn(width, 24) @ torch.randn(24, 256) / 78 + 0.02 * torch.randn(width, 256))
        analysis, want = analyse(model, x[:1]), model(x)
        for merger in ("none", "cosine", "moments"):
            start = time.perf_counter()
            small = compress_analysis(analysis, CompressConfig(merger=merger), verify=False, judge=False)
            took = time.perf_counter() - start
            error = float((small.model(x) - want).square().sum() / (want - want.mean(0)).square().sum())
            print(f"{width} channels, {merger:8} {took:.1f} s, relative squared error {error:.3f}")


@torch.no_grad()
def photographs() -> None:
    """Merge a ResNet-50 at 224² with the fast method; the unit is a forward pass of 16 images."""
    model, batch = sources.build_from_source("timm:resnet50", {}).eval(), torch.randn(16, 3, 224, 224)
    forward = seconds(lambda: model(batch), 3)
    analysis = analyse(model, batch[:1])
    for merger in ("none", "moments"):
        settings = CompressConfig(merger=merger, effort="fast")
        after = seconds(lambda s=settings: compress_analysis(analysis, s), 1)  # type: ignore[misc]
        print(f"ResNet-50 at 224², {merger:8} {after:.1f} s = {after / forward:.1f} forward passes of 16 images")


WIDTH = 16_384


def large() -> None:
    """Merge a 16,384² layer in a process of its own and compare its peak with its weights."""
    out = subprocess.run([sys.executable, __file__, "--large"], capture_output=True, text=True, check=True)
    print(out.stdout, end="")


@torch.no_grad()
def large_child() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    shapes = {
        "producer": (WIDTH, [layer, nn.ReLU(), nn.Linear(WIDTH, 8)]),
        "consumer": (8, [nn.Linear(8, WIDTH), nn.ReLU(), layer]),
    }
    for role, (width, layers) in shapes.items():
        model, example = nn.Sequential(*layers), torch.zeros(1, width)
        analysis = analyse(model, example)
        before, weights = resident("VmRSS"), layer.weight.numel() * 4
        forget_peak()
        clock = time.perf_counter()
        compress_analysis(analysis, CompressConfig(merger="cosine"), verify=False)
        took, extra = time.perf_counter() - clock, (resident("VmHWM") - before) / weights
        print(
            f"linear {WIDTH} x {WIDTH} as {role}: {took:.1f} s, peak memory {1 + extra:.2f} x its weights, "
            f"the weights and the smaller layer included"
        )


def resident(field: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) resident memory of this process, from Linux."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-large", action="store_true", help="leave out the 16,384² layer (4 GiB)")
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large:
        large_child()
    else:
        print(f"{torch.get_num_threads()} threads")
        vgg()
        resnet()
        scaling()
        wide()
        photographs()
        if not options.skip_large:
            large()
