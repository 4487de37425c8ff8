"""Measure the cost of verification, relative to the capture of the same network.

    python benchmarks/verification.py

Fails if it is more than one.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn

from neuron_merging import models
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.config import CompressConfig
from neuron_merging.merging import Prune
from neuron_merging.pipeline import prepare_inputs, select_kept_channels
from neuron_merging.pruning.plan import make_plan
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.pruning.verify import verify_small_network


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2, self.conv3 = nn.BatchNorm2d(width), nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        same = stride == 1 and inside == out
        around = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.around = nn.Identity() if same else around

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        z: Tensor = (self.bn3(self.conv3(y)) + self.around(x)).relu()
        return z


def resnet50() -> nn.Sequential:
    """Build a network with the shape of a ResNet-50."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(blocks):
            layers.append(Bottleneck(inside, width, stride if i == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


@torch.no_grad()
def ratio(name: str, model: nn.Module, example: Tensor, repeat: int = 3) -> float:
    """Return the time of the fastest verification divided by that of the fastest capture."""
    model.eval()
    captures, checks = [], []
    for _ in range(repeat):
        start = time.perf_counter()
        analysis = analyse(model, example)
        captures.append(time.perf_counter() - start)
        config = CompressConfig()
        kept = select_kept_channels(analysis, config, prepare_inputs(analysis, config, judge=False)).kept
        merged = Prune().merge(Selection(analysis, kept))
        plan = make_plan(model, analysis.graph, analysis.channels, kept, merged.merges)
        small, stays = apply_plan(model, plan, merged), build_keep_mask(analysis.channels, kept)
        start = time.perf_counter()
        found = verify_small_network(analysis, plan, stays, small, merged)
        checks.append(time.perf_counter() - start)
    print(f"{name}: capture {min(captures):.2f} s, verification {min(checks):.2f} s, {found}")
    return min(checks) / min(captures)


def main() -> int:
    ratios = {
        "ResNet-56": ratio("ResNet-56", models.create_network("resnet-56"), torch.randn(1, 3, 32, 32)),
        "ResNet-50, 224 x 224": ratio("ResNet-50, 224 x 224", resnet50(), torch.randn(1, 3, 224, 224)),
    }
    for name, value in ratios.items():
        print(f"{name}: verification takes {value:.2f} of the capture")
    return int(max(ratios.values()) >= 1)


if __name__ == "__main__":
    sys.exit(main())
