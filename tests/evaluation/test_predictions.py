"""Accuracies, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from neuron_merging import evaluation
from neuron_merging.errors import MergingError


class Table(nn.Module):
    """Returns the rows that its input numbers."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.rows = torch.tensor(rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows[x]


ROWS = [[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.1, 0.7]]


def test_top_k_in_one_pass_over_uneven_batches() -> None:
    batches = [(torch.tensor([0, 1]), torch.tensor([1, 1])), (torch.tensor([2]), torch.tensor([0]))]
    calls = []
    model = Table(ROWS)
    model.register_forward_hook(lambda *_: calls.append(1))
    # Right first: image 0. Among two: image 0 (1 first), image 1 (0 and 2 lead, 1 is last), image 2 (2, then 0).
    assert evaluation.accuracies(model, batches, (1, 2, 5)) == {
        1: pytest.approx(100 / 3),
        2: pytest.approx(200 / 3),
        5: 100.0,
    }
    assert len(calls) == 2
    outputs, labels = evaluation.predict(model, batches)
    assert evaluation.accuracy(outputs, labels) == pytest.approx(100 / 3)
    assert evaluation.accuracy(outputs, labels, top=2) == pytest.approx(200 / 3)


def test_no_images_have_no_accuracy() -> None:
    with pytest.raises(MergingError, match="nothing to predict"):
        evaluation.accuracies(Table(ROWS), [])
