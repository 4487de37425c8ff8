"""Every parameter is counted as prunable, not prunable or unused; equal refusals of many layers are merged."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.evaluation.parameter_coverage import ParameterCoverage
from tests.zoo import CASES


def counted(account: ParameterCoverage) -> int:
    return account.internal + account.residual + sum(p.parameters for p in account.refused) + account.unused.parameters


@pytest.mark.parametrize(
    "name",
    ["residual", "grouped transposed", "depthwise times two", "flatten", "half of a stream is fixed", "embedding"],
)
def test_figures_add_up(name: str) -> None:
    case = CASES[name]
    model = case.build()
    account = nm.inspect(model, case.inputs()).account
    assert counted(account) == account.parameters == sum(p.numel() for p in model.parameters())
    shares = [account.share(count) for _, count, _ in account.lines]
    assert sum(shares) == pytest.approx(1) and min(shares) >= 0


def test_what_is_reachable_can_go() -> None:
    """By hand: of 4-8-2, all but the last bias is at one of eight hidden units."""
    account = nm.inspect(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4)).account
    assert (account.internal, account.residual, account.unused.parameters) == (56, 0, 0)
    assert [(part.why, part.parameters, part.layers) for part in account.refused] == [
        ("output is what the network returns", 2, ("2",))
    ]


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, 6, 1, groups=2, bias=False)
        self.c = nn.Conv2d(6, 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)).cumsum(1))


def test_blocks_of_a_grouped_layer_are_counted_by_their_own_channels() -> None:
    """`b` keeps its rows, but all its columns can go; `c` is left with what nothing makes smaller."""
    account = nm.inspect(Grouped(), torch.zeros(1, 3, 4, 4)).account
    assert (account.internal, account.parameters) == (3 * 8 + 6 * 4, 3 * 8 + 6 * 4 + 12)


class Parts(nn.Module):
    """An LSTM, a head that nothing calls, and a scale that is no channel's."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.memory, self.out = nn.Linear(4, 8), nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 2)
        self.spare, self.scale = nn.Linear(8, 100), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.memory(self.into(x))[0]) * self.scale


def test_recurrent_layers_and_unused_heads_are_mentioned() -> None:
    found = nm.inspect(Parts(), torch.zeros(2, 3, 4))
    account = found.account
    assert account.unused.parameters == 900 and account.unused.layers == ("spare",)
    assert counted(account) == account.parameters
    assert any(refusal.layer == "memory" and "lstm" in refusal.operator for refusal in found.refusals)
    refused = {part.layers: part.parameters for part in account.refused}
    assert refused["into", "memory"] == 8 * (4 + 1) + 4 * 6 * (8 + 6 + 2)
    assert refused["scale",] == 1


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).softmax(-1)
        return x


def test_the_same_refusal_of_many_layers_is_one_line() -> None:
    text = nm.inspect(Deep(), torch.zeros(1, 8)).details()
    lines = [line for line in text.splitlines() if line.startswith("not prunable: ")]
    assert len(lines) == 1
    assert lines[0].startswith("not prunable: blocks.* (24 layers): softmax mixes all channels (test_par")


def test_a_printed_inspection_has_one_line_for_each_group_and_reason() -> None:
    class Mixed(Deep):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks[:12]:
                x = block(x).softmax(-1)
            for block in self.blocks[12:]:
                x = x.relu() + block(x).sort(-1)[0]
            return x

    found = nm.inspect(Mixed(), torch.zeros(1, 8))
    lines = str(found).splitlines()
    reasons = [line for line in lines if line.startswith("not prunable: ")]
    assert len(lines) == len(found.groups) + len(reasons) + 1 and len(reasons) <= 3
    assert "test_parameter_coverage.py" not in str(found) and "test_parameter_coverage.py" in found.details()
    assert sum(int(re.findall(r"[\d,]+ channels", line)[0].split()[0]) for line in reasons) == sum(
        refusal.channels for refusal in found.refusals
    )
    assert lines[-1].endswith("parameters") and "not prunable" in lines[-1]
