"""Export the zoo's networks to ONNX and prune the files: is as much prunable as in the module, and is the result right?

    python benchmarks/onnx_zoo.py [--only timm:test_,torchvision] [--limit 300] [--csv onnx_zoo.csv] [--old]

Every network runs in a process of its own with a limit of time; what the CSV file has is not run again. For each:
groups and reachable share of the parameters in the module and in the file; how far the file lies from its own original
when it is written with nothing removed; then a quarter of every group removed, plainly, verified, and the written file
run and compared at several batch sizes. `--old` takes torch's older exporter, whose files look different.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import zoo_networks
from processes import Row, alone
from zoo import settle

import neuron_merging as nm
from neuron_merging.config import CompressConfig
from neuron_merging.errors import describe_error
from neuron_merging.evaluation.parameter_coverage import compute_parameter_coverage
from neuron_merging.graph.example_inputs import flatten_outputs, normalize_inputs, resample_inputs
from neuron_merging.onnx.export import export_model, open_ort_callable
from neuron_merging.onnx.network import OnnxNetwork
from neuron_merging.onnx.write_model import write_onnx_file
from neuron_merging.pipeline import compress_analysis

BATCHES = (1, 3, 16)
RATIO = 0.25
SAME = 1e-5
"""Tolerance of an unpruned file against its original, relative to the largest entry."""
LIMIT = 300
STAGES = ("exported", "read", "equal", "cut", "compared")
"""What a network goes through; each row says how far it came, and what stopped it."""
COLUMNS = (
    *("network", "reached", "why", "groups", "groups_file", "reachable", "reachable_file", "drift"),
    *("removed", "batches", "seconds"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="networks whose names begin so, several separated by commas")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one network")
    parser.add_argument("--csv", type=Path, default=Path("onnx_zoo.csv"))
    parser.add_argument("--old", action="store_true", help="torch's older exporter")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    known = zoo_networks.everything()
    names = dict.fromkeys(n for part in given.only.split(",") for n in known if n.startswith(part))
    rows = {row["network"]: row for row in _kept(given.csv)}
    for name in [name for name in names if name not in rows]:
        found = alone(judged, (name, given.old), given.limit)
        rows[name] = {"network": name, "reached": "", "why": found.get("crash", ""), **found}
        _keep(given.csv, rows[name])
        print(f"{name}: {rows[name]['reached']} {rows[name]['why']}", file=sys.stderr, flush=True)
    print("\n".join(table([rows[name] for name in names])))


def judged(name: str, old: bool) -> Row:
    """The last stage that a network passed, and its measurements."""
    row: Row = {"reached": "", "why": ""}
    start = time.perf_counter()
    try:
        for stage, facts in _stages(name, old):
            row |= {"reached": stage, **facts}
    except Exception as error:  # noqa: BLE001 (whatever stops a network is the finding)
        row["why"] = f"{type(error).__name__}: {describe_error(error)}"[:300]
    return {**row, "seconds": round(time.perf_counter() - start)}


def _stages(name: str, old: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    entry = zoo_networks.everything()[name]
    torch.manual_seed(0)
    model, given = entry.make(), entry.inputs()
    settle(model, given)
    _without_cache(model)
    inputs = normalize_inputs(given, model)
    with tempfile.TemporaryDirectory() as folder:
        source, same, small = (Path(folder) / f"{part}.onnx" for part in ("source", "same", "small"))
        (_by_old_exporter if old else export_model)(model, inputs, source)
        yield "exported", {}
        tensors = tuple(flatten_outputs(inputs))
        module, file = (
            compute_parameter_coverage(analysis := nm.analyse(model, given)),
            compute_parameter_coverage(read := nm.analyse(source, tensors)),
        )
        yield "read", {
            "groups": len(analysis.channels.groups), "groups_file": len(read.channels.groups),
            "reachable": f"{module.reachable[1]:.4f}", "reachable_file": f"{file.reachable[1]:.4f}",
        }  # fmt: skip
        assert isinstance(read.model, OnnxNetwork)
        write_onnx_file(read.model, same)
        drift = max(apart(source, same, tensors))
        if not drift <= SAME:
            raise nm.VerificationError(f"written with nothing removed it is {drift:.1e} away")
        yield "equal", {"drift": f"{drift:.0e}"}
        found = compress_analysis(read, CompressConfig(ratio=RATIO, scope="all", merger="none"), judge=False)
        before, after = found.summary.parameters
        yield "cut", {"removed": f"{1 - after / before:.3f}"}
        batches = write_onnx_file(found.model, small).batches  # type: ignore[arg-type]
        yield "compared", {"batches": " ".join(map(str, batches))}


def _without_cache(model: nn.Module) -> None:
    """Disable the key-value cache of a language model, which would be among the outputs."""
    if hasattr(config := getattr(model, "config", None), "use_cache"):
        config.use_cache = False


def _by_old_exporter(model: nn.Module, inputs: tuple[Any, ...], path: Path) -> None:
    names = [f"x{i}" for i in range(len(flatten_outputs(inputs)))]
    free = {name: {0: "batch"} for name in names}
    with redirect_stdout(io.StringIO()):
        torch.onnx.export(model, inputs, path, dynamo=False, input_names=names, dynamic_axes=free)


def apart(before: Path, after: Path, inputs: tuple[Tensor, ...]) -> Iterator[float]:
    """Return the largest difference of two files' outputs, relative to the largest entry, over all batch sizes."""
    old, new = (open_ort_callable(str(path), 1) for path in (before, after))
    for values in (inputs, *(resample_inputs(inputs, batch) for batch in BATCHES)):
        try:
            want = old(*values)
        except Exception:  # noqa: BLE001 (a file whose batch is fixed; onnxruntime has no common class of errors)
            continue
        for a, b in zip(want, new(*values), strict=True):
            yield float(abs(a.astype(float) - b).max() / max(abs(a.astype(float)).max(), 1e-12)) if a.size else 0.0


def table(rows: list[Row]) -> Iterator[str]:
    """Print by package how many networks passed each stage, and how files compare with modules."""
    yield f"| package | networks | {' | '.join(STAGES)} | as many groups |"
    yield "|---|---:|" + "---:|" * (len(STAGES) + 1)
    for package in dict.fromkeys(str(row["network"]).partition(":")[0] for row in rows):
        own = [row for row in rows if str(row["network"]).startswith(f"{package}:")]
        reached = Counter(STAGES.index(row["reached"]) for row in own if row["reached"])
        counts = [sum(count for stage, count in reached.items() if stage >= i) for i in range(len(STAGES))]
        alike = sum(bool(row.get("groups")) and int(row["groups_file"]) >= int(row["groups"]) for row in own)
        yield f"| {package} | {len(own)} | {' | '.join(map(str, counts))} | {alike} |"
    yield from (f"{row['network']}: after {row['reached'] or 'nothing'}: {row['why']}" for row in rows if row["why"])


def _kept(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _keep(path: Path, row: Row) -> None:
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
