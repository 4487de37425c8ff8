"""Check the values that a correct implementation reproduces on the paper's checkpoints.

    python benchmarks/oracle.py [--data FOLDER]

LeNet-300-100: the 24 accuracies of table 1, to the digit. ResNet-56: 24 accuracies and parameter counts of the authors'
program and the 24 WARE of table 3. Needs FashionMNIST and, in NEURON_MERGING_DATA, the checkpoints and the CIFAR-10
test images. Fails if a figure differs; what was measured is kept in reproduce/oracle.
"""

from __future__ import annotations

import sys

from neuron_merging.cli import app

TARGETS = ("table1", "figure3", "table3")


def main() -> int:
    out = ["--out", "reproduce/oracle", *sys.argv[1:]]
    return max(app.main(["reproduce", target, "--check", *out]) for target in TARGETS)


if __name__ == "__main__":
    sys.exit(main())
