"""Count the files, functions and stack frames that one `compress(budget=)` uses.

    python benchmarks/census.py [--files] [--stacks FRAMES]

A stranger who follows one call must read this much. Only functions of this package count, without module bodies; a
comprehension belongs to the function that it stands in.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import neuron_merging as nm

PACKAGE = str(Path(nm.__file__).parent)
INLINE = ("<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class CallCensus:
    """Counts the calls of this package's functions and the depth of their stack."""

    def __init__(self, shown_from: int = 1000) -> None:
        self.shown_from = shown_from
        self.functions: Counter[tuple[str, str, int]] = Counter()
        self.depth = self.deepest = 0
        self.stacks: Counter[tuple[str, ...]] = Counter()
        """Return the stacks of at least `shown_from` frames."""

    def __enter__(self) -> CallCensus:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in INLINE:
            return
        if event == "call":
            self.functions[code.co_filename, code.co_qualname, code.co_firstlineno] += 1
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            if self.depth >= self.shown_from:
                self.stacks[tuple(_package_stack(frame))] += 1
        elif event == "return":
            self.depth -= 1

    @property
    def files(self) -> Counter[str]:
        """Return the called functions by file."""
        return Counter(os.path.relpath(file, PACKAGE) for file, _, _ in self.functions)


def _package_stack(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name not in INLINE:
            found.append(f"{os.path.relpath(frame.f_code.co_filename, PACKAGE)} {frame.f_code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


def count_compress(shown_from: int = 1000) -> CallCensus:
    """Compress a network of three layers to a budget with all defaults."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip
    example = torch.randn(2, 3, 16, 16)
    os.environ["NEURON_MERGING_CACHE"] = ""  # a run that finds its inputs on the disk makes none
    nm.compress(net, example, budget={"macs": 0.6})  # the first call imports modules, which runs class bodies
    with CallCensus(shown_from) as census:
        nm.compress(net, example, budget={"macs": 0.6})
    return census


def main() -> None:
    """Print the census."""
    census = count_compress(int(sys.argv[sys.argv.index("--stacks") + 1]) if "--stacks" in sys.argv else 1000)
    modules = len(list(Path(PACKAGE).rglob("*.py")))
    print(f"modules in the package: {modules}")
    print(
        f"one compress(budget=): {len(census.files)} files, {len(census.functions)} functions, {census.deepest} frames"
    )
    for stack in census.stacks:
        print(" > ".join(stack))
    if "--files" in sys.argv:
        print(*(f"{count:4d} {name}" for name, count in sorted(census.files.items())), sep="\n")


if __name__ == "__main__":
    main()
