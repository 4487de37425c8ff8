"""Train a small network on scikit-learn's digits, then compress it to a MAC budget in three ways."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import atomic, data, report
from neuron_merging import evaluation as metrics
from neuron_merging.checkpoint import save_folder
from neuron_merging.checkpoint.manifest import REPORT_FILE
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.evaluation.latency import measure_latencies
from neuron_merging.models.state_dicts import write_safetensors
from neuron_merging.reproduction import datasets
from neuron_merging.reproduction.networks import DigitNet

DEMO_EPOCHS = 12
"""Passes over the images; training takes about a minute."""
DEMO_BUDGET = {"macs": "25%"}
"""The share of the MACs that may remain."""
DEMO_LATENCY_BATCH = 64


def train_demo_network(model: nn.Module, images: data.Images, console: Console) -> None:
    """Train for about a minute with SGD and a one-cycle schedule."""
    x, y = (torch.cat(part) for part in zip(*images.batches(512), strict=True))
    steps = DEMO_EPOCHS * -(-len(x) // 64)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=steps)
    model.train()
    for _ in track(range(DEMO_EPOCHS), "training on digits", console=console):
        for batch in torch.randperm(len(x)).split(64):  # type: ignore[no-untyped-call]
            optimiser.zero_grad()
            F.cross_entropy(model(_shift_images(x[batch])), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    model.eval()


def _shift_images(x: Tensor) -> Tensor:
    """Shift a batch by up to one pixel, as augmentation against overfitting."""
    dy, dx = torch.randint(-1, 2, (2,)).tolist()
    return x.roll((dy, dx), (2, 3))


DEMO_METHODS: dict[str, str | nm.Cosine | None] = {
    "pruned": "none",
    "merged (paper)": nm.Cosine(),
    "merged (default)": None,
}


def run_demo(out: str | Path = "neuron-merging-demo") -> int:
    """Train, compress in three ways, compare, and write the folder and page of the default method."""
    torch.manual_seed(0)
    messages, console = Console(stderr=True), Console()
    test = datasets.load_digits("test")
    place = Path(out).resolve()
    check_demo_folder(place)
    model = DigitNet()
    train_demo_network(model, datasets.load_digits("train"), messages)
    example = next(iter(test.batches(1)))[0]
    with messages.status("compressing and measuring"):
        analysis = nm.analyse(model, example)
        results = {
            name: nm.compress(analysis, budget=DEMO_BUDGET, merger=merger) for name, merger in DEMO_METHODS.items()
        }
        networks = {"original": model, **{name: small.model for name, small in results.items()}}
        scores = {name: metrics.accuracy(*metrics.predict(net, test.batches(256))) for name, net in networks.items()}
        fidelities = {"original": 1.0, **{name: _get_fidelity(small) for name, small in results.items()}}
        console.print(_build_table(networks, scores, fidelities, example))
        page = _write_results(place, analysis, results["merged (default)"], test)
    console.print(
        f"The verdict, without data: {results['merged (default)'].summary.verdict}\n"
        f"The truth, on {len(test)} images: {scores['original']:.1f} % → {scores['merged (default)']:.1f} %\n"
        f"The page about it: {page}\n\nYour own model:\n"
        '  import neuron_merging as nm\n  small = nm.compress(model, example_inputs, budget={"macs": 0.5})',
        highlight=False,
        soft_wrap=True,
    )
    return 0


def check_demo_folder(place: Path) -> None:
    """Raise if the folder contains anything but an earlier demo, before the training."""
    if place.exists() and not (place / "original.safetensors").is_file() and any(place.iterdir()):
        raise nm.MergingError("something else is there", where=str(place), fix="Give another place with --out.")


def _get_fidelity(small: nm.Compressed) -> float | None:
    return small.summary.verdict.fidelity if small.summary.verdict else None


def _build_table(
    networks: Mapping[str, nn.Module],
    scores: Mapping[str, float],
    fidelities: Mapping[str, float | None],
    example: Tensor,
) -> Table:
    title = f"Digits, {DEMO_BUDGET['macs']} of the MACs left, no data and no retraining"
    table = Table(title=title, title_justify="left")
    table.add_column("network")
    for title in ("accuracy", "fidelity", "parameters", "MACs", f"ms per {DEMO_LATENCY_BATCH}"):
        table.add_column(title, justify="right")
    times = measure_latencies(networks, (example,), (DEMO_LATENCY_BATCH,), runs=50)
    for name, network in networks.items():
        sizes = (metrics.count_parameters(network), metrics.count_macs(network, example))
        known = fidelities[name]
        marks = f"{scores[name]:.1f} %", "–" if known is None else f"{known:.3f}"
        table.add_row(name, *marks, *(f"{size:,}" for size in sizes), f"{times[name][DEMO_LATENCY_BATCH] * 1e3:.2f}")
    return table


def _write_results(place: Path, analysis: nm.Analysis, small: nm.Compressed, test: data.Images) -> Path:
    """Write the original's weights and the folder that the command line would write; return its page."""
    place.mkdir(parents=True, exist_ok=True)
    weights = place / "original.safetensors"
    atomic.replace_file(weights, lambda part: write_safetensors(part, analysis.model.state_dict()))
    recipe = Recipe(
        model="digit-net",
        weights=str(weights),
        input=["1,1,8,8"],
        budget=dict(DEMO_BUDGET),
        merger="moments",
        eval="digits",
    )
    small = replace(report.measure_figures(small, analysis, images=test), recipe=recipe, remarks=())
    save_folder.save(small, place / "small", overwrite=True, page=report.render_report(small))
    return place / "small" / REPORT_FILE


if __name__ == "__main__":
    sys.exit(run_demo())
