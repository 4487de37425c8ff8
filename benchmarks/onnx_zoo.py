"""Networks of the zoo, exported by torch and read back: is as much found in the file as in the module, and is it right?

    python benchmarks/onnx_zoo.py [torchvision:resnet18 timm:test_vit ...] [--old]

For each: groups and reachable share of the parameters in the module and in the file; how far the file lies from its own
original when it is written with nothing removed; then a quarter of every group removed, and the written file run at
several batch sizes. `--old` takes torch's older exporter, whose files look different.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import zoo_networks

import neuron_merging as nm
from neuron_merging.errors import told
from neuron_merging.files.opening import open_file
from neuron_merging.files.writing import write
from neuron_merging.folder.exporting import file_in_onnxruntime
from neuron_merging.measuring.accounting import account

NETWORKS = (
    *("torchvision:resnet18", "torchvision:mobilenet_v3_small", "torchvision:shufflenet_v2_x0_5"),
    *("torchvision:densenet121", "torchvision:efficientnet_b0", "torchvision:squeezenet1_1", "torchvision:googlenet"),
    *("timm:test_vit", "timm:test_convnext", "timm:test_byobnet", "timm:test_efficientnet", "timm:test_resnet"),
)
BATCHES = (1, 3, 16)
RATIO = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--old", action="store_true", help="torch's older exporter")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| network | groups | in the file | reachable | in the file | written again | cut, merged | seconds |")
    print("|---|---:|---:|---:|---:|---:|---|---:|")
    for name in arguments.networks:
        try:
            cells = row(name, arguments.old)
        except Exception as error:  # noqa: BLE001 (one network's fault is not the next one's)
            cells = [told(error)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def row(name: str, old: bool) -> list[str]:
    """What there is to say of one network."""
    entry = zoo_networks.everything()[name]
    torch.manual_seed(0)
    model, x = entry.make().eval(), entry.inputs()
    inner = account(analysis := nm.analyse(model, x))
    with tempfile.TemporaryDirectory() as folder:
        source, same, small = (Path(folder) / f"{part}.onnx" for part in ("source", "same", "small"))
        exported(model, x, source, old)
        start = time.perf_counter()
        file = nm.analyse(source, x)
        outer = account(file)
        written = write(open_file(source, (x,))[0], same)
        nm.compress(file, ratio=RATIO, scope="all", effort="fast").save(small)
        seconds = time.perf_counter() - start
        drift = max(apart(source, same, x, batch) for batch in BATCHES)
        shapes = all(apart(source, small, x, batch) >= 0 for batch in BATCHES)
    groups = f"{len(analysis.channels.groups)} | {len(file.channels.groups)}"
    reach = f"{inner.reachable[1]:.1%} | {outer.reachable[1]:.1%}"
    batches = "runs at 1, 3, 16" if shapes and written.batches else "differs"
    return [groups, reach, f"{drift:.0e}", batches, f"{seconds:.0f}"]


def exported(model: nn.Module, x: torch.Tensor, path: Path, old: bool) -> None:
    with redirect_stdout(io.StringIO()):
        if old:
            free = {"x": {0: "batch"}, "y": {0: "batch"}}
            torch.onnx.export(model, (x,), path, dynamo=False, input_names=["x"], output_names=["y"], dynamic_axes=free)
        else:
            free = ({0: torch.export.Dim("batch", min=1)},)
            torch.onnx.export(model, (x,), path, dynamo=True, external_data=False, dynamic_shapes=free, verbose=False)


def apart(before: Path, after: Path, x: torch.Tensor, batch: int) -> float:
    """The largest difference of two files' answers, of the largest entry."""
    values: Any = x[torch.arange(batch) % len(x)] * torch.linspace(1, 0.5, batch).view(-1, 1, 1, 1)
    pairs = zip(*(file_in_onnxruntime(str(path), 1)(values) for path in (before, after)), strict=True)
    return max(float(abs(a - b).max() / abs(a).max()) for a, b in pairs)


if __name__ == "__main__":
    main()
