"""Synthetic inputs without statistics: images with edges and regions, and all tokens of a vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.inputs import synthetic


class Words(nn.Module):
    """Tokens without a layer norm behind them."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 16, mode="sum") if bag else nn.Embedding(50, 16)
        self.hidden, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, words: Tensor) -> Tensor:
        found = self.table(words)
        result: Tensor = self.last(self.hidden(found if found.ndim == 2 else found.mean(1)).relu())
        return result


class Table(Words):
    def forward(self, words: Tensor, numbers: Tensor | None = None) -> Tensor:
        assert numbers is not None
        result: Tensor = self.last(self.hidden(self.table(words).mean(1) + numbers).relu())
        return result


@pytest.mark.parametrize(
    ("model", "example", "many"),
    [
        (Words(True), (torch.zeros(3, 4, dtype=torch.int64),), (torch.randint(50, (200, 4)),)),
        (Words(False), (torch.zeros(3, 4, dtype=torch.int64),), (torch.randint(50, (200, 4)),)),
        (
            Table(False),
            (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 16)),
            (torch.randint(50, (200, 4)), torch.randn(200, 16)),
        ),
    ],
)
def test_made_up_tokens_are_all_that_there_are(
    model: nn.Module, example: tuple[Tensor, ...], many: tuple[Tensor, ...]
) -> None:
    with torch.no_grad():
        want = model(*many)
        errors = {
            merger: float((nm.compress(model, example, merger=merger).model(*many) - want).norm() / want.norm())
            for merger in ("none", "cosine", "moments")
        }
    assert errors["moments"] < errors["cosine"] and errors["moments"] < errors["none"], errors


def test_images_with_their_colours_last_are_images() -> None:
    (given,) = synthetic.synthesize_batches((torch.zeros(2, 32, 24, 3),), 16, 0, size=16)
    (plain,) = synthetic.synthesize_batches((torch.zeros(2, 3, 32, 24),), 16, 0, size=16)
    assert torch.equal(given[0], plain[0].movedim(1, 3))


def test_leaves_look_like_images() -> None:
    x = synthetic.draw_dead_leaves(64, (3, 32, 32), torch.Generator().manual_seed(0))
    assert x.shape == (64, 3, 32, 32)
    assert abs(float(x.mean())) < 1e-5 and abs(float(x.std()) - 1) < 1e-4
    neighbours = float((x[..., 1:] * x[..., :-1]).mean())
    far = float((x[..., 16:] * x[..., :-16]).mean())
    assert 0.6 < neighbours < 0.98 and far < 0.5 * neighbours
    assert 0.6 < float((x[:, 0] * x[:, 1]).mean()) < 0.98
    assert synthetic.draw_dead_leaves(2, (1, 64), torch.Generator()).shape == (2, 1, 64)
    assert synthetic.draw_dead_leaves(2, (1, 9, 8, 7), torch.Generator()).shape == (2, 1, 9, 8, 7)
