"""Trial cuts find the sizes that the model's own code depends on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import neuron_merging as nm
from tests.failing import Branching, compressing, failing
from tests.zoo.unusual import WORDS, CrossAttention


def test_layers_that_the_code_counts_on_stay_whole_with_the_line() -> None:
    found = nm.compress(CrossAttention(), (WORDS, torch.randn(2, 4, 9)))
    (why,) = [str(refusal) for refusal in found.summary.refusals if refusal.layer == "into"]
    assert "depends on" in why and "embedding dimension of 16" in why and "unusual.py" in why


class Insisting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.shape[1] != 8:
            raise ValueError("eight channels, please")
        return self.b(x.relu())


class SizeBranching(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(2 * x if x.shape[1] % 8 == 0 else x)


def test_a_smaller_network_that_goes_another_way_is_not_given_out() -> None:
    with pytest.raises(nm.NothingToPrune, match="differs from the original"):
        nm.compress(SizeBranching(), torch.randn(2, 6), merger="none")


class Concatenating(Branching):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        return self.b(torch.cat([y, y], 1)[:, :8])


def test_a_constant_that_breaks_the_smaller_network() -> None:
    failing(
        compressing(Insisting()), "eight channels, please", "test_trial_prune.py", 'raise ValueError("eight channels'
    )


class Asserting(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        assert x.shape[1] == 8
        return self.b(x.relu())


def test_a_smaller_network_that_fails_without_a_word() -> None:
    found = failing(compressing(Asserting()), "AssertionError", "test_trial_prune.py", "assert x.shape[1] == 8")
    assert isinstance(found, nm.NothingToPrune)


def test_a_constant_that_leaves_nothing_to_prune() -> None:
    failing(compressing(Concatenating()), "a:", "slice", "torch.cat([y, y], 1)[:, :8]")
