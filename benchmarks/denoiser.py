"""Compress the denoiser DnCNN-S-25 without data, and measure it in decibels on seven pictures.

    python benchmarks/denoiser.py [--budgets 70%,50%] [--efforts fast,normal] [--patches 16]

Needs `dncnn_s25.safetensors` and `set12_256.npz` in NEURON_MERGING_DATA. The noise has a deviation of 25/255, seed 0.
`--patches` also fits to so many patches of one noisy picture.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import neuron_merging as nm

NOISE = 25 / 255


class DnCNN(nn.Module):
    """Seventeen convolutions that estimate the noise in a grey picture."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.ReLU()]
        for _ in range(15):
            layers += [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        self.dncnn = nn.Sequential(*layers, nn.Conv2d(64, 1, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dncnn(x)
        return y


def load() -> tuple[nn.Module, Tensor]:
    """Load the network and the clean pictures."""
    folder = Path(os.environ["NEURON_MERGING_DATA"])
    model = DnCNN()
    model.load_state_dict(load_file(folder / "dncnn_s25.safetensors"), strict=False)
    return model.eval(), torch.from_numpy(np.load(folder / "set12_256.npz")["x"])[:, None].float() / 255


def add_noise(clean: Tensor) -> Tensor:
    return clean + NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def decibels(model: nn.Module | None, clean: Tensor) -> float:
    """Return the mean signal-to-noise ratio of denoised pictures; of the noisy ones without a network."""
    noisy = add_noise(clean)
    found = noisy if model is None else torch.cat([x - model(x) for x in noisy.split(1)])
    errors = (found - clean).square().flatten(1).mean(1)
    return float((-10 * errors.log10()).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="70%,50%")
    parser.add_argument("--efforts", default="fast,normal")
    parser.add_argument("--patches", type=int, default=0)
    arguments = parser.parse_args()
    model, clean = load()
    print(f"original {decibels(model, clean):.2f} dB, noisy pictures {decibels(None, clean):.2f} dB", flush=True)
    analysis = nm.analyse(model, torch.randn(1, 1, 64, 64))
    for budget in arguments.budgets.split(","):
        for effort in arguments.efforts.split(","):
            report(analysis, clean, budget, effort)
        if arguments.patches:
            patches = add_noise(clean[:1]).unfold(2, 64, 64).unfold(3, 64, 64).reshape(-1, 1, 64, 64)
            report(analysis, clean, budget, "normal", calibration=[patches[: arguments.patches]])


def report(analysis: Any, clean: Tensor, budget: str, effort: str, **more: Any) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    small = nm.compress(analysis, budget=budget, effort=effort, **more)
    took, spent = time.perf_counter() - start, time.process_time() - cpu
    verdict = small.summary.verdict
    assert verdict is not None
    data = f", {len(more['calibration'][0])} patches" if more else ""
    print(
        f"{budget} of the MACs, {effort}{data}: {decibels(small.model, clean):.2f} dB, verdict {verdict.level} "
        f"{verdict.fidelity}, {took:.0f} s, {spent:.0f} s of CPU",
        flush=True,
    )
    print(f"  {small.summary.notes}", flush=True)


if __name__ == "__main__":
    main()
