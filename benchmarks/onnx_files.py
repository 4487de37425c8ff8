"""Prune third-party ONNX files: what is prunable, and the error and savings of a cut of one fifth.

    pip download --no-deps nudenet rapidocr-onnxruntime        # wheels that ship files; unzip them
    python benchmarks/onnx_files.py a.onnx b.onnx [--input a=1,3,320,320] [--text b] [--budget 80%]

For each file: groups, the share of the parameters that lie in them, then the best cut within the budget of
multiply-accumulates, merged without data; how far its outputs agree with the original's, and those of the same cut
without merging; seconds from file to file; and the latency in onnxruntime before and after. Inputs of one's own making
say little about a network that reads text: `--text` compares it on written words too.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import neuron_merging as nm
from neuron_merging.channels.analysis import Analysis
from neuron_merging.config import CompressConfig
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.fidelity import build_compared_networks, compare_networks
from neuron_merging.evaluation.latency import measure_timings
from neuron_merging.onnx.export import open_ort_callable
from neuron_merging.onnx.model_file import read_onnx_file
from neuron_merging.onnx.open_model import make_onnx_inputs
from neuron_merging.pipeline import compress_analysis
from neuron_merging.selection.budget import parse_budget

RUNS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--input", action="append", default=[], help="a file's example, as NAME=1,3,320,320")
    parser.add_argument("--text", action="append", default=[], help="a file that reads text, by a part of its name")
    parser.add_argument("--budget", default="80%", help="share of the multiply-accumulates")
    parser.add_argument("--effort", default="fast", help="what may be spent on made-up inputs: fast, normal or best")
    arguments = parser.parse_args()
    shapes = dict(entry.split("=", 1) for entry in arguments.input)
    for file in arguments.files:
        print(file.name, flush=True)
        shape = next((text for name, text in shapes.items() if name in file.name), None)
        reads = any(name in file.name for name in arguments.text)
        for line in lines(file, shape, arguments.budget, arguments.effort, reads):
            print(f"  {line}", flush=True)


def lines(file: Path, shape: str | None, budget: str, effort: str, reads: bool) -> Iterator[str]:
    """Print the results of one file as soon as they are known."""
    start = time.perf_counter()
    given = None if shape is None else make_onnx_inputs(read_onnx_file(file), [tuple(int(n) for n in shape.split(","))])
    analysis = nm.analyse(file, given)
    found, costs = analysis.channels, Costs(analysis)
    reached = 1 - costs.parameters({group.name: 0 for group in found.groups}) / costs.parameters({})
    yield f"{len(found.groups)} groups, {reached:.0%} of {costs.parameters({}):,} parameters in them"
    yield from (f"kept: {refusal}" for refusal in found.refusals)
    settings = CompressConfig(budget=parse_budget({"macs": budget}), effort=effort)
    small = compress_analysis(analysis, settings, pruned=True)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "small.onnx"
        small.save(target)
        yield f"{time.perf_counter() - start:.0f} s from file to file"
        yield from (str(note) for note in small.summary.notes)
        yield from (f"{key}: {a:,} -> {b:,} ({b / a - 1:+.1%})" for key, (a, b) in sizes(small).items())
        yield f"verified: {small.summary.verified}"
        yield latency(file, target, analysis.inputs)
        yield agreement(small)
        if reads:
            yield from on_text(analysis, small)


def sizes(small: nm.Compressed) -> dict[str, tuple[int, int]]:
    return {"parameters": small.summary.parameters, "MACs": small.summary.macs}


def agreement(small: nm.Compressed) -> str:
    assert small.compared is not None
    scores = [score for score in small.compared.scores[1:] if score.agreement is not None]
    told = ", ".join(f"{score.network} {score.agreement:.3f}" for score in scores)
    return f"agreement of outputs on {small.compared.inputs}: {told}"


def on_text(analysis: Analysis, small: nm.Compressed) -> Iterator[str]:
    """The same on written words, and how often the likeliest class is the original's, at each place that has one."""
    images = words(tuple(analysis.inputs[0].shape[1:]))
    networks = build_compared_networks(analysis.model, small.model, small.plan)
    found = compare_networks(
        networks, [((batch,), None) for batch in images.split(8)], f"{len(images)} images of words"
    )
    told = ", ".join(f"{score.network} {score.agreement or 0:.3f}" for score in found.scores[1:])
    yield f"agreement of outputs on {found.inputs}: {told}"
    with torch.no_grad():
        original, *others = (torch.cat([run(batch)[0] for batch in images.split(8)]) for run in networks.values())
    if original.ndim < 4:
        same = ((other.argmax(-1) == original.argmax(-1)).double().mean().item() for other in others)
        told = ", ".join(f"{name} {share:.1%}" for name, share in zip([*networks][1:], same, strict=True))
        yield f"the same likeliest class: {told}"


def words(shape: tuple[int, ...], count: int = 64) -> torch.Tensor:
    """Images of dark words on a light ground, from -1 to 1; lines of them where there is room."""
    pick, (_, height, width) = random.Random(0), shape
    size = min(height * 2 // 3, 32)
    font, made = ImageFont.load_default(size=size), []
    for _ in range(count):
        image = Image.new("RGB", (width, height), tuple(pick.randint(180, 255) for _ in range(3)))
        for top in range(height // 8, height - size, size * 2):
            text = "".join(
                pick.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ") for _ in range(40)
            )
            ink = tuple(pick.randint(0, 90) for _ in range(3))
            ImageDraw.Draw(image).text((pick.randint(2, 8), top), text, ink, font=font)
        made.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    return torch.stack(made).float() / 127.5 - 1


def latency(before: Path, after: Path, inputs: tuple[torch.Tensor, ...]) -> str:
    networks = {"before": open_ort_callable(str(before), 1), "after": open_ort_callable(str(after), 1)}
    found = measure_timings(networks, inputs, (1,), RUNS)
    old, new = found["before"][1], found["after"][1]
    return f"onnxruntime, one thread, batch 1: {old} -> {new} ms, {old.median / new.median:.2f}x"


if __name__ == "__main__":
    main()
