"""Text that a language model writes itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.inputs.input_sets import make_fit_inputs
from neuron_merging.inputs.text import SELF_GENERATED_TEXT, generate_text

LETTERS = 11


class Counts(nn.Module):
    """Says that 4 comes after 3, and so on; `back` keeps it from looking ahead."""

    def __init__(self, back: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(LETTERS, LETTERS)
        self.up, self.down = nn.Linear(LETTERS, 24), nn.Linear(24, LETTERS)
        self.back = back
        with torch.no_grad():
            self.table.weight.copy_(20 * torch.eye(LETTERS).roll(1, 1))
            self.down.weight.mul_(0.01)

    def forward(self, text: Tensor) -> Tensor:
        x = self.table(text)
        seen = F.pad(x.cumsum(1) if self.back else x.flip(1).cumsum(1).flip(1), (0, 0))
        y: Tensor = x + 1e-3 * seen + self.down(torch.relu(self.up(x)))
        return y


def test_the_text_is_what_the_network_says() -> None:
    made = generate_text(nm.analyse(Counts().eval(), torch.zeros(2, 6, dtype=torch.long)), 40, 10**9, seed=0)
    assert made.source == SELF_GENERATED_TEXT and [len(batch[0]) for batch in made.batches] == [32, 8]
    text = torch.cat([batch[0] for batch in made.batches])
    assert torch.equal(text[:, 1:], (text[:, :-1] + 1) % LETTERS)
    assert len(text[:, 0].unique()) > 5


def test_it_depends_on_the_seed_alone() -> None:
    analysis = nm.analyse(Counts().eval(), torch.zeros(2, 6, dtype=torch.long))
    first, again, other = (generate_text(analysis, 8, 10**9, seed).batches[0][0] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("work", [0, 50])
def test_a_network_that_is_too_slow_does_not_write(work: int) -> None:
    analysis = nm.analyse(Counts().eval(), torch.zeros(2, 6, dtype=torch.long))
    assert "too long" in generate_text(analysis, 8, work, 0).refusal


def test_what_looks_ahead_or_gives_no_scores_does_not_write() -> None:
    text = torch.zeros(2, 6, dtype=torch.long)
    encoder = nn.Sequential(nn.Embedding(LETTERS, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    for model in (Counts(back=False), encoder):
        assert not make_fit_inputs(nm.analyse(model.eval(), text)).batches


def test_the_merge_is_made_on_it_and_says_so() -> None:
    small = nm.compress(Counts().eval(), torch.zeros(2, 6, dtype=torch.long), ratio=0.5)
    assert SELF_GENERATED_TEXT in str(small.summary.verdict)
