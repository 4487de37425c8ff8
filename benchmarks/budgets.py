"""ResNet-56 within a budget of multiply-accumulates, beside a uniform cut, without data.

    python benchmarks/budgets.py [--limit 2000]

Needs, in NEURON_MERGING_DATA, the paper's checkpoint and the CIFAR-10 test images. The uniform cut is the ratio that is
named; what both really cost is printed beside the accuracy.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from safetensors.torch import load_file

import neuron_merging as nm
from neuron_merging import data, measuring, networks

BUDGETS = {0.7: 0.3, 0.5: 0.5}
"""Share of the multiply-accumulates, and the uniform ratio that comes nearest to it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=None, help="measure on the first so many test images")
    limit = parser.parse_args().limit
    model = networks.build("resnet-56")
    model.load_state_dict(load_file(Path(os.environ["NEURON_MERGING_DATA"]) / "paper_resnet56_cifar10.safetensors"))
    images = data.load("cifar-10", "test")
    images = images if limit is None else images.head(limit)
    analysis = nm.analyse(model.eval(), next(iter(images.batches(1)))[0])
    for share, ratio in BUDGETS.items():
        start = time.perf_counter()
        for name, options in {"uniform": {"ratio": ratio}, "allocated": {"budget": {"macs": share}}}.items():
            small = nm.compress(analysis, **options)  # type: ignore[arg-type]
            accuracy = measuring.accuracy(*measuring.predict(small.model, images.batches(250)))
            cost = small.summary.macs[1] / small.summary.macs[0]
            print(f"{share:.0%} {name}: {accuracy:.2f} % at {cost:.1%} of the MACs", *small.summary.notes, flush=True)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
