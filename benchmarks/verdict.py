"""Measure how well fidelity on synthesised inputs predicts fidelity on real images.

    python benchmarks/verdict.py [--networks resnet-56,vgg-16,norm-relu,separable-relu6] [--limit 2000] [--out F.csv]

Every network is cut in twelve ways or more. Printed are the rank correlation of both fidelities over a network's cuts,
their levels, and how often the original's answer was given. Needs what `accuracy.py` needs.
"""

from __future__ import annotations

import argparse
import csv
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import own
import torch
from budgets import WEIGHTS, case
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.inputs.input_sets import make_heldout_inputs

RATIOS = (0.1, 0.2, 0.3, 0.5)
MERGERS: dict[str, Any] = {"none": "none", "cosine": "cosine", "moments": nm.Moments()}


class Cut(NamedTuple):
    network: str
    merger: str
    ratio: float
    remembered: float
    """Fidelity on the inputs of the verdict."""
    real: float
    same: float
    """Share of images with the original's predicted class."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="resnet-56,vgg-16,norm-relu,separable-relu6")
    parser.add_argument("--limit", type=int, default=2000, help="real images")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    cuts = []
    for name in options.networks.split(","):
        cuts += network(name, options.limit)
        own_cuts = [cut for cut in cuts if cut.network == name]
        print(f"{name}: rank correlation {rank_correlation(own_cuts):.3f} over {len(own_cuts)} cuts", flush=True)
    if options.out is not None:
        with open(options.out, "w", newline="") as stream:
            csv.writer(stream).writerows([Cut._fields, *cuts])
    print(f"all: {rank_correlation(cuts):.3f} over {len(cuts)} cuts")


def network(name: str, limit: int) -> list[Cut]:
    model, images = loaded(name, limit)
    analysis = nm.analyse(model, images[:1])
    made = torch.cat([batch[0] for batch in make_heldout_inputs(analysis).batches])
    before, found = answers(model, images), []
    for (merger, method), ratio in product(MERGERS.items(), RATIOS):
        small = nm.compress(analysis, ratio=ratio, merger=method, verify=False).model
        after = answers(small, images)
        guessed = fidelity(answers(model, made), answers(small, made))
        same = float((after.argmax(1) == before.argmax(1)).double().mean())
        found.append(Cut(name, merger, ratio, guessed, fidelity(before, after), round(same, 4)))
        print(*found[-1], flush=True)
    return found


def loaded(name: str, limit: int) -> tuple[nn.Module, Tensor]:
    if name in WEIGHTS or name == "efficientnet-lite0":
        known = case(name, limit, 128)
        model, images = known.model, known.images
    else:
        model, _, images = own.load(name)
        images = images.head(limit)
    return model.eval(), torch.cat([x for x, _ in images.batches(250)])


@torch.no_grad()
def answers(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(batch) for batch in images.split(125)]).double()


def fidelity(before: Tensor, after: Tensor) -> float:
    """Return the fidelity as in the verdict, but not clamped at zero."""
    return round(1 - float((after - before).square().sum() / (before - before.mean(0)).square().sum()), 4)


def rank_correlation(cuts: list[Cut]) -> float:
    ranks = torch.tensor([[cut.remembered, cut.real] for cut in cuts]).argsort(0).argsort(0).double()
    return float(torch.corrcoef(ranks.T)[0, 1])


if __name__ == "__main__":
    main()
