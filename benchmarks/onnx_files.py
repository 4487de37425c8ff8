"""Compress third-party ONNX files, as their packages ship them, and print a table: the gallery.

    pip download --no-deps --dest wheels nudenet rapidocr-onnxruntime silero-vad piper-tts magika ...
    python benchmarks/onnx_files.py wheels/ more.onnx [--budgets 80%,60%] [--seconds 300] [--effort fast] \\
        [--jsonl gallery.jsonl] [--table gallery.md]

Each file is a process of its own with a time limit. Columns: whether it could be captured; the share of the parameters
in layers that can be cut; multiply-accumulates and bytes before and after; the error of the outputs (squared error
relative to their variance, of the worst output) of the same cut pruned, merged without data, and merged with 16
samples; seconds; and the level of the verdict without data. Files that take pictures are measured on photographs in
$NEURON_MERGING_DATA (`imagenet_sample_500.zip`, scaled to 0..1), 16 to calibrate on and 16 others to measure on; all
other files on random inputs of the declared types. With `--jsonl`, files that are in the table already are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import neuron_merging as nm
from neuron_merging.channels.analysis import Analysis
from neuron_merging.config import CompressConfig
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.fidelity import build_compared_networks, compare_networks
from neuron_merging.evaluation.parameter_coverage import compute_parameter_coverage
from neuron_merging.graph.example_inputs import resample_inputs
from neuron_merging.inputs.input_scale import is_channels_last
from neuron_merging.pipeline import compress_analysis

SAMPLES = 16
"""Inputs to calibrate on, and as many others to measure on."""
COLUMNS = ("file", "MB", "prunable", "budget", "MACs", "bytes", "pruned", "merged", "16 samples", "s", "verdict")
Row = dict[str, Any]


def find_files(places: Iterable[Path], folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of every ONNX file: given ones, and those in wheels, which are unpacked."""
    for place in places:
        if place.suffix == ".onnx":
            yield place.name, place
        for archive in sorted([*place.glob("*.whl"), *place.glob("*.zip")] if place.is_dir() else ()):
            with zipfile.ZipFile(archive) as opened:
                for name in sorted(own for own in opened.namelist() if own.endswith(".onnx")):
                    yield f"{archive.name.split('-')[0]}: {Path(name).name}", Path(opened.extract(name, folder))


@cache
def read_photographs() -> tuple[Image.Image, ...]:
    place = Path(os.environ.get("NEURON_MERGING_DATA", "")) / "imagenet_sample_500.zip"
    if not place.is_file():
        return ()
    with zipfile.ZipFile(place) as archive:
        names = sorted(own for own in archive.namelist() if own.lower().endswith((".jpg", ".jpeg")))
        return tuple(Image.open(io.BytesIO(archive.read(own))).convert("RGB") for own in names[: 2 * SAMPLES])


def make_test_inputs(analysis: Analysis) -> tuple[list[tuple[Any, ...]], str]:
    """Return real or realistic batches, and what they are."""
    value = analysis.inputs[0] if len(analysis.inputs) == 1 else None
    last = is_channels_last(value)
    picture = isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[-1 if last else 1] in (1, 3)
    if not picture or not read_photographs():
        return analysis.split_batch(resample_inputs(analysis.inputs, 2 * SAMPLES)), "random inputs"
    height, width = value.shape[1:3] if last else value.shape[2:]
    mode = "L" if value.shape[-1 if last else 1] == 1 else "RGB"
    arrays = [np.asarray(own.convert(mode).resize((width, height)), np.float32) / 255 for own in read_photographs()]
    x = torch.from_numpy(np.stack(arrays))
    x = x[..., None] if x.ndim == 3 else x
    return analysis.split_batch((x if last else x.movedim(-1, 1).contiguous(),)), "photographs"


def compress_file(file: Path, budget: str, effort: str) -> Row:
    """Compress one file in the three ways, and return its row."""
    analysis = nm.analyse(file)
    costs, coverage = Costs(analysis), compute_parameter_coverage(analysis)
    row: Row = {"prunable": (coverage.internal + coverage.residual) / max(1, coverage.parameters)}
    row["batch"] = analysis.fixed_batch_size
    row["macs"], row["bytes"] = [costs.macs({})], [file.stat().st_size]
    batches, row["inputs"] = make_test_inputs(analysis)
    half = len(batches) // 2 or 1
    fit, test = batches[:half], batches[half:] or batches
    start = time.perf_counter()
    small = compress_analysis(analysis, CompressConfig(budget=budget, effort=effort, scope="all"))
    with tempfile.TemporaryDirectory() as folder:
        small.save(Path(folder) / "small.onnx")
        row["seconds"] = time.perf_counter() - start
        row["bytes"].append((Path(folder) / "small.onnx").stat().st_size)
    row["macs"].append(small.summary.macs[1])
    row["verdict"] = small.summary.verdict.level if small.summary.verdict else ""
    networks = build_compared_networks(analysis.model, small.model, small.plan)
    given = CompressConfig(budget=budget, effort=effort, scope="all", calibration=[own for own in fit])
    networks["16 samples"] = compress_analysis(analysis, given).model
    found = compare_networks(networks, [(own, None) for own in test], row["inputs"])
    row["errors"] = {own.network: None if own.fidelity is None else 1 - own.fidelity for own in found.scores[1:]}
    return row


def work(file: str, budget: str, effort: str, answers: Any) -> None:
    """Run in a process of its own: a crash of the interpreter must not end the table."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    try:
        answers.put(compress_file(Path(file), budget, effort))
    except MergingError as error:
        answers.put({"refused": str(error)})
    except Exception as error:  # noqa: BLE001 (a crash is a result, too)
        answers.put({"crashed": f"{type(error).__name__}: {error}"})


def run_limited(file: Path, budget: str, effort: str, seconds: float) -> Row:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=work, args=(str(file), budget, effort, answers))
    process.start()
    try:
        return dict(answers.get(timeout=seconds))
    except queue.Empty:
        return {"late": f"not done after {seconds:.0f} s"}
    finally:
        process.kill()
        process.join()


def format_row(row: Row) -> tuple[str, ...]:
    """Return the cells of one line of the table."""
    start = (row["file"], f"{row['size'] / 1e6:.1f}")
    for key in ("refused", "crashed", "late"):
        if key in row:
            return (*start, "", row["budget"], "", "", "", "", "", "", f"{key}: {row[key][:140]}")
    macs, sizes, errors = row["macs"], row["bytes"], row["errors"]
    figures = ("" if errors.get(own) is None else f"{errors[own]:.3f}" for own in ("pruned", "merged", "16 samples"))
    return (
        *start, f"{row['prunable']:.0%}", row["budget"], f"{macs[0] / 1e6:,.1f} → {macs[1] / 1e6:,.1f} M",
        f"{sizes[0] / 1e6:.2f} → {sizes[1] / 1e6:.2f} MB", *figures, f"{row['seconds']:.0f}", row["verdict"],
    )  # fmt: skip


def write_table(rows: Sequence[Row], target: Path | None) -> None:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += [
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in format_row(own)) + " |" for own in rows
    ]
    text = "\n".join(lines) + "\n"
    if target is None:
        print(text)
    else:
        target.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", type=Path, help="ONNX files, or folders of wheels")
    parser.add_argument("--budgets", default="80%,60%", help="shares of the multiply-accumulates")
    parser.add_argument("--seconds", type=float, default=300, help="time limit of a file and budget")
    parser.add_argument("--effort", default="fast", help="what may be spent on synthesised inputs")
    parser.add_argument("--jsonl", type=Path, help="results, one a line; those that are there are not computed again")
    parser.add_argument("--table", type=Path, help="the table to write; default: print it")
    arguments = parser.parse_args()
    known = arguments.jsonl.read_text().splitlines() if arguments.jsonl and arguments.jsonl.is_file() else []
    rows = [json.loads(line) for line in known]
    done = {(row["file"], row["budget"]) for row in rows}
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        found = sorted(find_files(arguments.places, Path(folder)), key=lambda pair: pair[1].stat().st_size)
        for name, file in found:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            if digest in seen:
                continue
            seen.add(digest)
            for budget in arguments.budgets.split(","):
                if (name, budget) in done:
                    continue
                row = {"file": name, "size": file.stat().st_size, "budget": budget}
                row |= run_limited(file, budget, arguments.effort, arguments.seconds)
                rows.append(row)
                print(" | ".join(format_row(row)), file=sys.stderr, flush=True)
                if arguments.jsonl:
                    with arguments.jsonl.open("a") as out:
                        out.write(json.dumps(row) + "\n")
    write_table(rows, arguments.table)


if __name__ == "__main__":
    main()
