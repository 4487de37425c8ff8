"""Data that does not fit the network is refused; unusual data gets a note."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.evaluation.fidelity import check_eval_data


def trained() -> nn.Module:
    """A network whose batch norm knows standardised images."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    )
    net.train()(torch.randn(64, 3, 8, 8))
    return net.eval()


@pytest.mark.parametrize(
    ("factor", "shift", "said"), [(1, 0, ""), (0.2, 0, "may not be normalised"), (1, 4, "may not"), (60, 100, "range")]
)
def test_the_range_is_that_of_the_training(factor: float, shift: float, said: str) -> None:
    batch = (factor * torch.randn(16, 3, 8, 8) + shift,)
    if said == "range":
        with pytest.raises(nm.MergingError, match="range of the data differs from the training data's") as caught:
            check_eval_data(trained(), batch, where="photos")
        assert "--mean" in caught.value.fix and caught.value.where == "photos"
    else:
        assert [said in note and "photos" in note for note in check_eval_data(trained(), batch, where="photos")] == (
            [True] if said else []
        )


def test_sizes_and_classes() -> None:
    net, x = trained(), torch.randn(4, 3, 8, 8)
    assert check_eval_data(net, (x,), torch.tensor([0, 1, 2, 4]), 5, where="d") == []
    assert "right only if" in check_eval_data(net, (x,), torch.tensor([0, 1, 1, 0]), 2, where="d")[0]
    for batch, labels, words in (
        ((torch.randn(4, 1, 8, 8),), None, "does not take a batch of"),
        ((x,), torch.tensor([0, 1, 2, 7]), "8 classes, the network has 5 outputs"),
        ((x,), torch.tensor([0, 1, 2, -1]), "negative"),
        ((x,), torch.zeros(4, 2, dtype=torch.int64), "one row of class scores"),
        ((x * float("nan"),), None, "not finite"),
        ((x[:0],), None, "empty"),
    ):
        with pytest.raises(nm.MergingError, match=words):
            check_eval_data(net, batch, labels, where="d")


def test_the_network_is_left_as_it_was() -> None:
    net = trained()
    check_eval_data(net, (torch.randn(4, 3, 8, 8),), where="d")
    assert not net[1]._forward_pre_hooks and not net.training
