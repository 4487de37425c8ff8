"""The simulated error of a cut equals that of the network that is really cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration.output_divergence import Divergence
from neuron_merging.pruning.plan import make_plan
from neuron_merging.pruning.surgery import apply_plan
from neuron_merging.selection.cut_simulator import CutSimulator
from tests.graph.test_interpreter import Transposed


class InfiniteInside(nn.Module):
    """Channels are minus infinity between a logarithm and its inverse; the weight that reads them is computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.weight = nn.Linear(6, 16), nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x).relu().log().exp(), self.weight.tanh())


class InfiniteInput(nn.Module):
    """A layer reads infinite channels, and what it makes of them is clipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)
        self.b.weight.data.abs_()
        self.a.bias.data[:14] += 5.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu().reciprocal()).clamp(-3.0, 3.0)


def simulator(model: nn.Module, batches: list[Tensor], *, merge: bool = False) -> CutSimulator:
    analysis = nm.analyse(model, batches[0])
    scores = {group.name: np.arange(float(group.size))[::-1] for group in analysis.channels.groups}
    return CutSimulator(analysis, [(batch,) for batch in batches], scores, merge=merge)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("model", [InfiniteInside(), InfiniteInput()])
def test_infinite_channels_leave_the_search_sighted(model: nn.Module, merge: bool) -> None:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    found = simulator(model, [x], merge=merge)
    few, many = found.measure_divergence({"a": 4}), found.measure_divergence({"a": 14})
    assert math.isfinite(few) and math.isfinite(many)
    assert nm.compress(model, x, budget={"macs": 0.6}, effort="fast").model.a.out_features < 16


def test_a_cut_of_a_weight_behind_a_view_is_simulated_as_it_is_made() -> None:
    model, x = Transposed(), torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    found = simulator(model, [x])
    analysis = found.analysis
    plan = make_plan(model, analysis.graph, analysis.channels, found.select_kept_units({"a": 3}))
    expected = found._divergence()
    with torch.no_grad():
        expected.add([model(x)], [apply_plan(model, plan)(x)])
    assert expected.value > 1e-3
    assert found.measure_variations({"a": 8}, {"a": [3]})["a", 3] == pytest.approx(expected.value, rel=1e-4)


def test_batches_of_one_tell_the_same_as_one_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    x = torch.randn(16, 3, 8, 8)
    whole, single = simulator(model, [x]), simulator(model, list(x.split(1)))
    expected = whole.measure_divergence({"0": 4})
    assert 0 < expected < 10
    assert single.measure_divergence({"0": 4}) == pytest.approx(expected, rel=1e-4)


def test_nearby_cuts_are_compared_on_half_of_many_probes() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(64, 6)
    first, both, few = (simulator(model, own) for own in ([x[:32]], [x[:32], x[32:]], [x[:16], x[16:32]]))
    base, near = both.measure_nearby({"0": 6}, {"0": [4, 7]})
    assert base == pytest.approx(first.measure_divergence({"0": 6}))
    assert near == pytest.approx(first.measure_variations({"0": 6}, {"0": [4, 7]}))
    assert both.measure_divergence({"0": 6}) != pytest.approx(base, rel=1e-3)
    assert few.measure_nearby({"0": 6}, {})[0] == pytest.approx(few.measure_divergence({"0": 6}))


def test_one_sample_has_a_divergence() -> None:
    before, after = torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 4)
    found = Divergence()
    found.add([before], [after])
    spread = (before - before.mean()).square().sum()
    assert found.value == pytest.approx(float((before - after).square().sum() / spread), rel=1e-5)


def test_outputs_that_are_no_numbers_in_the_original_say_nothing() -> None:
    before = torch.tensor([[1.0, -math.inf], [2.0, -math.inf]])
    kept, lost = Divergence(), Divergence()
    kept.add([before], [before + 0.5])
    lost.add([before], [torch.full_like(before, math.nan)])
    assert 0 < kept.value < math.inf and lost.value == math.inf


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 5, bias=False)),
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)),
    ],
)
def test_new_biases_are_counted_without_a_fit(model: nn.Module) -> None:
    found = simulator(model.eval(), [torch.randn(16, 6, generator=torch.Generator().manual_seed(0))], merge=True)
    assert found.new_biases == (0 if model[2].bias is not None else 5) and "_layer_stats" not in vars(found)
    effect = found._compute_effect({name: 1 for name in found.groups})
    assert sum(map(len, effect.edits.biases.values())) == found.new_biases
