"""Differences of two networks, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import evaluation
from neuron_merging.errors import MergingError
from neuron_merging.evaluation import fidelity
from neuron_merging.graph import compare
from neuron_merging.reproduction import layer_metrics
from tests.evaluation.by_hand import linear, two_layers


def test_ware_is_the_mean_of_relative_errors() -> None:
    before, after = torch.tensor([[1.0, -2.0], [4.0, 8.0]]), torch.tensor([[1.5, -1.0], [4.0, 10.0]])
    assert layer_metrics.ware(before, after) == pytest.approx((0.5 + 0.5 + 0 + 0.25) / 4)


def test_ware_leaves_out_what_has_no_relative_error() -> None:
    assert layer_metrics.ware(torch.tensor([0.0, 2.0]), torch.tensor([5.0, 1.0])) == pytest.approx(0.5)
    with pytest.raises(MergingError, match="all zero"):
        layer_metrics.ware(torch.zeros(3), torch.ones(3))


def test_ware_at_the_logits_counts_entries_not_batches() -> None:
    original, small = linear([[1.0]], [1.0]), linear([[1.0]], [2.0])
    batches = [torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0]])]
    assert layer_metrics.ware_at(original, small, batches) == pytest.approx((1 + 1 / 2 + 1 / 4) / 3)
    assert layer_metrics.ware_at(original, small, [(x, None) for x in batches]) == pytest.approx(
        (1 + 1 / 2 + 1 / 4) / 3
    )


def test_ware_at_a_layer_that_kept_one_of_two_channels() -> None:
    model, x = two_layers(), torch.tensor([[1.0], [2.0]])
    small = nm.compress(model, x[:1], ratio=0.5, criterion="l2", merger="none")
    assert small.plan.groups[0].kept == (1,)
    for layer in ("0", "1"):  # the cut layer, and the activation behind it, which owns no weight
        assert layer_metrics.ware_at(model, small.model, [x], layer, small.plan) == 0
    assert layer_metrics.ware_at(model, small.model, [x], "2", small.plan) == pytest.approx(3 / 11)
    assert layer_metrics.ware_at(model, small.model, [x]) == pytest.approx(3 / 11)


def test_a_cut_layer_needs_the_plan() -> None:
    model, x = two_layers(), torch.ones(1, 1)
    small = nm.compress(model, x, merger="none").model
    with pytest.raises(MergingError, match=r"\(1, 2\) and \(1, 1\).*plan="):
        layer_metrics.ware_at(model, small, [x], "0")
    assert not model[0]._forward_hooks and not small.get_submodule("0")._forward_hooks


def test_unknown_layers_and_layers_without_a_tensor_are_refused() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.pair = nn.Linear(1, 1), Pair()

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(self.fc(x))[0]

    net = Net()
    with pytest.raises(MergingError, match=r"no layer 'fcc'.*fc"):
        layer_metrics.ware_at(net, net, [torch.ones(1, 1)], "fcc")
    with pytest.raises(MergingError, match=r"returns a tuple.*pair"):
        layer_metrics.ware_at(net, net, [torch.ones(1, 1)], "pair")
    assert not any(module._forward_hooks for module in net.modules())


def test_reconstruction_error_of_every_layer() -> None:
    model, batches = two_layers(), [torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]])]
    small = nm.compress(model, batches[0], ratio=0.5, criterion="l2", merger="none")
    found = layer_metrics.reconstruction_errors(model, small.model, batches, small.plan)
    assert found == {"0": 0.0, "2": pytest.approx(3 / 11)}  # 8x for 11x
    assert layer_metrics.reconstruction_errors(model, small.model, batches, small.plan, ["1"]) == {"1": 0.0}


def test_reconstruction_error_weighs_all_batches_together() -> None:
    original, small = linear([[1.0]], [1.0]), linear([[1.0]], [2.0])
    found = layer_metrics.reconstruction_errors(original, small, [torch.tensor([[0.0]]), torch.tensor([[2.0]])])
    assert found == {"": pytest.approx(math.sqrt(2 / (1 + 9)))}


def test_merging_parallel_channels_reconstructs_everything() -> None:
    model, x = two_layers(), torch.tensor([[1.0], [2.0]])
    small = nm.compress(model, x[:1], ratio=0.5, criterion="l2", merger="cosine")
    found = layer_metrics.reconstruction_errors(model, small.model, [x], small.plan)
    assert max(found.values()) < 1e-6


def test_layers_of_a_residual_network_line_up() -> None:
    from neuron_merging import models

    torch.manual_seed(1)
    model, x = models.create_network("resnet-20").eval(), torch.randn(4, 3, 16, 16)
    small = nm.compress(model, x[:1], ratio=0.5, merger="none")
    found = layer_metrics.reconstruction_errors(model, small.model, [x[:2], x[2:]], small.plan)
    assert set(found) == {name for name, module in model.named_modules() if hasattr(module, "weight")}
    assert found["conv1"] == found["layer1.0.conv1"] == found["layer1.0.bn1"] == 0  # nothing is cut before them
    assert all(value > 0 for name, value in found.items() if name.startswith("layer3"))
    assert (
        layer_metrics.reconstruction_errors(model, small.model, [x], small.plan, ["layer1.0", "layer3"])["layer3"] > 0
    )


def test_an_activation_that_writes_into_its_input_changes_no_figure() -> None:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)]
    plain = nn.Sequential(*layers)
    writing = nn.Sequential(*(nn.ReLU(inplace=True) if isinstance(part, nn.ReLU) else part for part in layers))
    x = torch.randn(16, 6)
    found = []
    for network in (plain, writing):
        small = nm.compress(network, x[:1], ratio=0.5, merger="none")
        wares = [layer_metrics.ware_at(network, small.model, [x], name, small.plan) for name in ("0", "2", "4")]
        found.append((wares, layer_metrics.reconstruction_errors(network, small.model, [x], small.plan)))
    assert found[0] == found[1] and found[0][0][1] > 0


def test_what_cannot_be_measured_is_told() -> None:
    class Partial(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self[0](x)
            return result

    network, x = Partial(nn.Linear(4, 3), nn.Linear(4, 3)), torch.ones(2, 4)
    with pytest.raises(nm.MergingError, match="nothing to predict"):
        evaluation.predict(network, [])
    with pytest.raises(nm.MergingError, match="nothing to predict"):
        evaluation.accuracy(torch.zeros(0, 3), torch.zeros(0))
    with pytest.raises(nm.MergingError, match="nothing to predict"):
        layer_metrics.reconstruction_errors(network, network, [])
    with pytest.raises(nm.MergingError, match="does not call this layer"):
        layer_metrics.ware_at(network, network, [x], "1")
    with pytest.raises(nm.MergingError, match="does not call this layer"):
        layer_metrics.reconstruction_errors(network, network, [x], layers=["1"])
    assert layer_metrics.reconstruction_errors(network, network, [x]) == {"0": 0.0}
    with pytest.raises(nm.MergingError, match=r"shapes \(2, 3\) and \(1, 3\)"):
        layer_metrics.ware(torch.ones(2, 3), torch.ones(1, 3))


@pytest.mark.parametrize("by_entry", [False, True])
@pytest.mark.parametrize("value", [0.0, math.inf, -1e9])
def test_large_outputs_are_compared_piece_by_piece(
    by_entry: bool, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    want = torch.randn(3, 7, 5)
    want[1, 2] = value
    got = want + 0.01 * torch.randn_like(want)
    (whole,) = compare.compare_outputs([got], [want], by_entry=by_entry)
    monkeypatch.setattr(compare, "MAX_ENTRIES_AT_ONCE", 40)
    (parts,) = compare.compare_outputs([got], [want], by_entry=by_entry)
    assert parts == whole and whole.relative > 0 and whole.fault == ""


def test_texts_are_compared_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    one, other, text = torch.randn(9, 6), torch.randn(9, 6), torch.randint(0, 6, (9,))
    whole, parts = fidelity.TokenSums(), fidelity.TokenSums()
    whole.add(one, other, text)
    monkeypatch.setattr(fidelity, "MAX_ENTRIES_AT_ONCE", 4 * 6)
    parts.add(one, other, text)
    assert parts.kl == pytest.approx(whole.kl) and parts.perplexity == pytest.approx(whole.perplexity)
    wanted = torch.nn.functional.cross_entropy(one[:-1].double(), text[1:])
    assert parts.perplexity == pytest.approx(float(wanted.exp()))
