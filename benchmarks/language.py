"""Measure the benefit of self-generated text for a language model without data.

    python benchmarks/language.py [--steps 1500] [--ratios 0.25,0.5]

Trains a small transformer on the texts of Python's own help (letters, two blocks), removes hidden units of its
feed-forward layers, and prints the loss in bits per letter on texts that it has not seen: pruned, merged by the paper,
merged on letters at random, on text that the network wrote, and on real text.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--ratios", default="0.25,0.5")
    options = parser.parse_args()
    seen, unseen, kinds = texts()
    model = trained(seen, kinds, options.steps)
    print(f"original: {bits(model, unseen):.3f} bits per letter, {kinds} letters", flush=True)
    real = batch(seen, 256, torch.Generator().manual_seed(2))[0]
    analysis = nm.analyse(model, real[:2])
    ways: dict[str, dict[str, Any]] = {
        "pruned": {"merger": "none"},
        "paper": {"merger": "cosine"},
        "letters at random": {"merger": nm.Moments(effort="fast")},
        "text of its own": {"merger": nm.Moments()},
        "real text": {"merger": nm.Calibrated([real])},
    }
    for ratio in map(float, options.ratios.split(",")):
        for name, asked in ways.items():
            small = nm.compress(analysis, ratio={"*": 0, "*.up": ratio}, criterion="l2", **asked)
            print(f"{ratio:.0%} {name}: {bits(small.model, unseen):.3f}; {small.summary.verdict}", flush=True)


if __name__ == "__main__":
    main()
