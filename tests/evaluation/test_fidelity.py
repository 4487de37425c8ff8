"""Fidelity: how close the outputs of a smaller network are to the original's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import report
from neuron_merging.evaluation import fidelity
from neuron_merging.inputs.input_sets import InputSet, make_heldout_inputs
from neuron_merging.reproduction import datasets
from tests.report.small_result import net


def concordance(x: np.ndarray, y: np.ndarray) -> float:
    """By its definition, over all outputs."""
    covariance = ((x - x.mean(0)) * (y - y.mean(0))).sum()
    return float(2 * covariance / (x.var(0) + y.var(0) + (x.mean(0) - y.mean(0)) ** 2).sum() / len(x))


def test_scores_by_hand() -> None:
    torch.manual_seed(1)
    x, a, b = torch.randn(40, 6), nn.Linear(6, 4), nn.Linear(6, 4)
    labels = torch.randint(4, (40,))
    parts: Any = [((x[i : i + 7],), labels[i : i + 7]) for i in range(0, 40, 7)]
    got = fidelity.compare_networks({"original": a, "other": b}, parts, "random rows")
    left, right = a(x).detach(), b(x).detach()
    assert (got.scores[0].same, got.scores[0].agreement) == (100, pytest.approx(1))
    assert got.scores[1].agreement == pytest.approx(concordance(left.numpy(), right.numpy()), abs=1e-6)
    assert got.scores[1].same == pytest.approx(100 * float((left.argmax(1) == right.argmax(1)).double().mean()))
    for output, score in zip((left, right), got.scores, strict=True):
        assert score.accuracy == pytest.approx(100 * float((output.argmax(1) == labels).double().mean()))
    assert got.favourite == pytest.approx(100 * left.argmax(1).bincount().max().item() / 40)
    assert not got.synthetic


def test_a_shift_costs_agreement() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 5

    a, b = nn.Linear(6, 3), Shifted(6, 3)
    b.load_state_dict(a.state_dict())
    got = fidelity.compare_networks({"original": a, "other": b}, [((torch.randn(64, 6),), None)], "rows")
    assert got.scores[1].agreement < 0.2 and got.scores[1].same == 100 and got.synthetic


def test_networks_are_left_as_they_are() -> None:
    model = net().train()
    fidelity.compare_networks({"original": model}, [((torch.randn(4, 1, 8, 8),), None)], "noise")
    assert model.training and all(m.training for m in model.modules())


class Fixed(nn.Module):
    """Takes two rows at a time and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(2, 3)


def take_inputs(analysis: nm.Analysis) -> InputSet:
    return fidelity.take_eval_inputs(analysis, make_heldout_inputs(analysis))


def test_inputs_in_place_of_data_come_in_sizes_that_the_network_takes() -> None:
    for model, example in ((Fixed(), torch.zeros(2, 6)), (nn.Linear(6, 3), torch.zeros(5, 6))):
        inputs = take_inputs(nm.analyse(model, example))
        got = [len(model(*batch)) for batch in inputs.batches]
        assert sum(got) == fidelity.SAMPLE_LIMITS[1] and str(inputs) == f"{sum(got)} random numbers"
    words = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    inputs = take_inputs(nm.analyse(words, torch.zeros(2, 4, dtype=torch.int64)))
    assert str(inputs) == f"{fidelity.SAMPLE_LIMITS[1]} random tokens"
    assert sum(len(tokens) for (tokens,) in inputs.batches) == fidelity.SAMPLE_LIMITS[1]


def test_accuracy_needs_class_scores() -> None:
    with pytest.raises(nm.MergingError, match="class scores"):
        fidelity.compare_networks(
            {"original": nn.Conv2d(1, 2, 3)}, *fidelity.make_image_batches(datasets.load_digits("test").head(4))
        )


def test_to_agree_with_a_network_that_says_one_thing_is_worth_nothing() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[3].weight.zero_()
    got = fidelity.compare_networks({"original": model, "small": model}, [((torch.randn(32, 1, 8, 8),), None)], "noise")
    assert [score.agreement for score in got.scores] == [None, None]
    small = nm.compress(model, torch.randn(1, 1, 8, 8))
    assert "the same output for all inputs" in report.render_report(small, model, torch.randn(1, 1, 8, 8))


class Picky(nn.Linear):
    """Code that breaks on inputs like none that its author had in mind."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 3:
            raise AttributeError("no such size")
        return super().forward(x)


def test_inputs_of_our_own_making_that_a_network_refuses_say_nothing() -> None:
    networks = {"original": Picky(6, 4), "other": Picky(6, 4)}
    good, bad = [((torch.randn(3, 6),), None)] * 4, [((torch.randn(2, 6),), None)]
    found = fidelity.compare_networks(networks, [*bad, *good], "made up", synthetic=True)
    assert found.scores == fidelity.compare_networks(networks, good, "made up", synthetic=True).scores and not found.why
    assert "rejects" in fidelity.compare_networks(networks, bad, "made up", synthetic=True).why
    with pytest.raises(AttributeError, match="no such size"):
        fidelity.compare_networks(networks, bad, "the user's own")
