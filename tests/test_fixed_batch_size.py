"""Networks of one fixed batch size run batch by batch of that size, in every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.inputs.input_sets import make_fit_inputs, split_batches_3_to_1
from neuron_merging.merging.protocol import MergeKind

BATCH = 2


class Shuffle(nn.Module):
    """Shuffles channels with reshapes that hold the batch size, as exporters write them; then classifies."""

    def __init__(self, norm: bool, batch: int = BATCH) -> None:
        super().__init__()
        self.batch = batch
        self.one, self.two = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(6, 10, 3, padding=1)
        self.norm = nn.BatchNorm2d(12) if norm else nn.Identity()
        self.last = nn.Linear(10, 4)
        if isinstance(self.norm, nn.BatchNorm2d):
            nn.init.normal_(self.norm.running_mean), nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.one(x)).relu().reshape(self.batch * 6, 2, 64).transpose(0, 1)
        half = mixed.reshape(2, self.batch, 6, 8, 8)[1]
        out: Tensor = self.last(self.two(half).relu().mean((2, 3)))
        return out


def analyse(norm: bool = False, batch: int = BATCH) -> Any:
    torch.manual_seed(0)
    return nm.analyse(Shuffle(norm, batch).eval(), torch.randn(batch, 3, 8, 8))


def list_kinds(small: nm.Compressed) -> set[MergeKind]:
    return {reader.kind for group in small.plan.groups for reader in group.readers}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("options", [{"ratio": 0.4}, {"budget": {"macs": 0.7}}])
def test_layers_are_fitted_without_data(norm: bool, options: dict[str, Any]) -> None:
    small = nm.compress(analyse(norm), **options)
    assert list_kinds(small) == {MergeKind.FITTED}
    assert small.summary.verdict is not None and small.summary.verdict.fidelity is not None


def test_batch_norms_are_inverted_over_all_samples_together() -> None:
    made = make_fit_inputs(analyse(norm=True))
    assert len(made.batches) > 8 and {len(batch[0]) for batch in made.batches} == {BATCH}
    assert made.after < 0.8 * made.before


@pytest.mark.parametrize("options", [{"ratio": 0.4}, {"budget": {"macs": 0.7}}])
def test_larger_batches_of_data_are_split(options: dict[str, Any]) -> None:
    data = [(torch.randn(17, 3, 8, 8), torch.arange(17) % 4)]
    small = nm.compress(analyse(), calibration=data, evaluate=data, **options)
    assert list_kinds(small) == {MergeKind.FITTED}
    verdict = small.summary.verdict
    assert verdict is not None and verdict.accuracy is not None and "16 samples" in verdict.inputs


def test_a_batch_that_is_too_small_is_an_error() -> None:
    with pytest.raises(nm.MergingError, match="only batches of 2"):
        nm.compress(analyse(), ratio=0.4, calibration=[torch.randn(1, 3, 8, 8)])


class OneRow(nn.Module):
    """Returns one row for any batch, without an error, as many exported detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).relu()).reshape(1, -1, 4)
        return out


def test_a_network_that_puts_all_samples_into_one_row_has_a_fixed_batch_size() -> None:
    assert nm.analyse(OneRow(), torch.randn(1, 3, 8, 8)).fixed_batch_size == 1


def test_other_networks_take_any_batch_size() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    assert nm.analyse(net, torch.randn(1, 3)).fixed_batch_size is None
    recurrent = nn.LSTM(3, 8, batch_first=True)  # its states have a leading dimension of 1 that is not the batch
    assert nm.analyse(recurrent, torch.randn(1, 5, 3)).fixed_batch_size is None


def test_small_batches_are_dealt_out_whole() -> None:
    fit, held = split_batches_3_to_1([(torch.full((1, 2), float(i)),) for i in range(9)])
    assert [int(x[0, 0]) for (x,) in held] == [3, 7] and len(fit) == 7


class Sum(nn.Module):
    """Adds what it makes of two inputs, which may have one sample and several."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(8, 16), nn.Linear(5, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        out: Tensor = self.last((self.one(x) + self.other(z)).relu())
        return out


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (2, 1)])
def test_inputs_of_different_batch_sizes(sizes: tuple[int, int]) -> None:
    """One sample more of the first may fit the second by chance; the sample after that does not."""
    torch.manual_seed(0)
    inputs = torch.randn(sizes[0], 8), torch.randn(sizes[1], 5)
    if 1 not in sizes:
        with pytest.raises(nm.MergingError):
            nm.compress(Sum(), inputs, ratio=0.4)
        return
    small = nm.compress(Sum(), inputs, ratio=0.4)
    assert small.summary.verdict is not None and small.model(*inputs).shape == (2, 4)
