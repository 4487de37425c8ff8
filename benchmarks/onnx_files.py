"""ONNX files that nobody here exported: what can be removed, what a cut of a fifth costs, and what it saves.

    pip download --no-deps nudenet rapidocr-onnxruntime        # wheels that ship files; unzip them
    python benchmarks/onnx_files.py a.onnx b.onnx [--input a=1,3,320,320] [--budget 80%]

For each file: groups, the share of the parameters that lie in them, then the best cut within the budget of
multiply-accumulates, merged without data; how far its outputs agree with the original's, and those of the same cut
without merging; seconds from file to file; and the latency in onnxruntime before and after.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import neuron_merging as nm
from neuron_merging.choosing.budget import parse_budget
from neuron_merging.files.examples import made
from neuron_merging.files.reading import read
from neuron_merging.folder.exporting import file_in_onnxruntime
from neuron_merging.measuring.latency import timings
from neuron_merging.measuring.size import Costs
from neuron_merging.pipeline import compress_analysed
from neuron_merging.settings import Settings

RUNS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--input", action="append", default=[], help="a file's example, as NAME=1,3,320,320")
    parser.add_argument("--budget", default="80%", help="share of the multiply-accumulates")
    parser.add_argument("--effort", default="fast", help="what may be spent on made-up inputs: fast, normal or best")
    arguments = parser.parse_args()
    shapes = dict(entry.split("=", 1) for entry in arguments.input)
    for file in arguments.files:
        print(file.name, flush=True)
        shape = next((text for name, text in shapes.items() if name in file.name), None)
        for line in lines(file, shape, arguments.budget, arguments.effort):
            print(f"  {line}", flush=True)


def lines(file: Path, shape: str | None, budget: str, effort: str) -> Iterator[str]:
    """What there is to say of one file, as soon as it is known."""
    start = time.perf_counter()
    given = None if shape is None else made(read(file), [tuple(int(n) for n in shape.split(","))])
    analysis = nm.analyse(file, given)
    found, costs = analysis.channels, Costs(analysis)
    reached = 1 - costs.parameters({group.name: 0 for group in found.groups}) / costs.parameters({})
    yield f"{len(found.groups)} groups, {reached:.0%} of {costs.parameters({}):,} parameters in them"
    yield from (f"kept: {refusal}" for refusal in found.refusals)
    settings = Settings(budget=parse_budget({"macs": budget}), effort=effort)
    small = compress_analysed(analysis, settings, pruned=True)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "small.onnx"
        small.save(target)
        yield f"{time.perf_counter() - start:.0f} s from file to file"
        yield from (str(note) for note in small.summary.notes)
        yield from (f"{key}: {a:,} -> {b:,} ({b / a - 1:+.1%})" for key, (a, b) in sizes(small).items())
        yield f"verified: {small.summary.verified}"
        yield latency(file, target, analysis.inputs)
        yield agreement(small)


def sizes(small: nm.Compressed) -> dict[str, tuple[int, int]]:
    return {"parameters": small.summary.parameters, "MACs": small.summary.macs}


def agreement(small: nm.Compressed) -> str:
    assert small.compared is not None
    scores = [score for score in small.compared.scores[1:] if score.agreement is not None]
    told = ", ".join(f"{score.network} {score.agreement:.3f}" for score in scores)
    return f"agreement of outputs on {small.compared.inputs}: {told}"


def latency(before: Path, after: Path, inputs: tuple[torch.Tensor, ...]) -> str:
    networks = {"before": file_in_onnxruntime(str(before), 1), "after": file_in_onnxruntime(str(after), 1)}
    found = timings(networks, inputs, (1,), RUNS)
    old, new = found["before"][1], found["after"][1]
    return f"onnxruntime, one thread, batch 1: {old} -> {new} ms, {old.median / new.median:.2f}x"


if __name__ == "__main__":
    main()
