"""Networks that are trained a little after a merge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from neuron_merging.calibration.output_divergence import Divergence, differentiate_divergence
from neuron_merging.graph.copying import copy_with_own_tensors
from neuron_merging.inputs.input_sets import OriginalOutputs
from neuron_merging.merging.distillation import Distillation, distill, make_low_rank_updates
from tests.conftest import import_or_fail


def make_classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 5)).eval()


def draw_batches(count: int, seed: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(32, 6, generator=generator),) for _ in range(count)]


def shift_vectors(model: nn.Module) -> nn.Module:
    """Return a copy whose vectors are wrong, and whose weights are right."""
    changed = copy_with_own_tensors(model)
    torch.manual_seed(1)
    for parameter in changed.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return changed


def distill_from(model: nn.Module, small: nn.Module, **more: Any) -> Distillation:
    options = {"batches": draw_batches(8, 0), "heldout": draw_batches(2, 1), "classes": frozenset([0]), "steps": 200}
    return distill(small, OriginalOutputs(model), **{**options, **more})


@pytest.mark.parametrize("classes", [frozenset([0]), frozenset()])
def test_wrong_scales_and_biases_are_found_again(classes: frozenset[int]) -> None:
    model = make_classifier()
    small = shift_vectors(model)
    found = distill_from(model, small, classes=classes)
    assert found.is_better and found.after < 0.2 * found.before


class Attention(nn.Module):
    """Linear layers of both layouts, one of them twice, one that shares its weight, and one that returns classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv1d = import_or_fail("transformers").pytorch_utils.Conv1D
        self.embedding, self.shared = nn.Embedding(6, 6), nn.Linear(6, 6, bias=False)
        self.shared.weight = self.embedding.weight
        self.first, self.second, self.head = nn.Linear(6, 12), conv1d(20, 12), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.second(self.first(self.shared(x)).relu()).relu())
        return y


def test_each_linear_layer_with_a_weight_of_its_own_gets_an_update_but_that_of_the_classes() -> None:
    network = Attention().eval()
    updates = make_low_rank_updates(network, frozenset([5]), seed=0)
    assert [update.layer for update in updates] == [network.first, network.second]
    (x,) = draw_batches(1, 0)[0]
    before = network(x)
    handles = [update.attach() for update in updates]
    assert torch.equal(network(x), before)
    for update in updates:
        update.up.data += 0.1 * torch.randn_like(update.up)
    trained = network(x)
    for handle in handles:
        handle.remove()
    assert torch.equal(network(x), before)
    for update in updates:
        update.fold()
    assert not torch.allclose(trained, before, atol=1e-2)
    torch.testing.assert_close(network(x), trained)


def test_wrong_weights_come_closer_to_right_ones() -> None:
    model = make_classifier()
    small = copy_with_own_tensors(model)
    small[0].weight.data += 0.2 * torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    found = distill_from(model, small)
    assert found.is_better and found.after < 0.3 * found.before


class Misleading(OriginalOutputs):
    """Teaches the outputs of one network, and compares held-out inputs with those of another."""

    def __init__(self, teacher: nn.Module, judge: nn.Module, heldout: list[tuple[Tensor]]) -> None:
        super().__init__(teacher)
        self.judge, self.heldout = OriginalOutputs(judge), heldout

    def compute(self, batch: Any) -> list[Tensor]:
        judged = any(batch is own for own in self.heldout)
        return self.judge.compute(batch) if judged else super().compute(batch)


def test_values_that_are_worse_on_held_out_inputs_are_not_kept() -> None:
    small, heldout = make_classifier(), draw_batches(2, 1)
    before = {name: value.clone() for name, value in small.state_dict().items()}
    original = Misleading(shift_vectors(small), copy_with_own_tensors(small), heldout)
    found = distill(small, original, draw_batches(8, 0), heldout, frozenset([0]), 20)
    assert not found.is_better and found.steps == 20
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


def test_it_depends_on_the_seed_alone() -> None:
    model = make_classifier()
    first, again, other = (shift_vectors(model) for _ in range(3))
    for small, seed in ((first, 0), (again, 0), (other, 1)):
        distill_from(model, small, steps=6, seed=seed)
    biases = [small.state_dict()["3.bias"] for small in (first, again, other)]
    assert torch.equal(biases[0], biases[1]) and not torch.equal(biases[0], biases[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_steps_that_are_smaller_than_its_own(dtype: torch.dtype) -> None:
    model = make_classifier().to(dtype)
    small = shift_vectors(model)
    batches = [(x.to(dtype),) for (x,) in draw_batches(8, 0)]
    found = distill_from(model, small, batches=batches, heldout=batches)
    assert found.after < 0.5 * found.before
    assert {parameter.dtype for parameter in small.parameters()} == {dtype}


class WritesInPlace(nn.Module):
    """Overwrites what the gradient of its scale needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.scale).exp()
        z = y * y
        y.zero_()
        return z


def test_a_network_without_gradients_stays_as_it_is() -> None:
    small = WritesInPlace()
    found = distill_from(shift_vectors(small), small)
    assert not found.is_better and torch.equal(small.scale, torch.ones(6))


def test_flags_and_gradients_are_as_before() -> None:
    model = make_classifier()
    small = shift_vectors(model)
    small[0].requires_grad_(False)
    distill_from(model, small, steps=2)
    assert [parameter.requires_grad for parameter in small.parameters()] == [False, False, *[True] * 4]
    assert all(parameter.grad is None for parameter in (*small.parameters(), *model.parameters()))


@pytest.mark.parametrize(
    ("shape", "classes"), [((12, 7), frozenset([0])), ((2, 6, 7), frozenset([0])), ((12, 7), frozenset())]
)
def test_the_gradient_is_that_of_the_divergence(shape: tuple[int, ...], classes: frozenset[int]) -> None:
    torch.manual_seed(0)
    before, after, along = (torch.randn(shape, dtype=torch.float64) for _ in range(3))

    def measure(step: float) -> float:
        divergence = Divergence(classes)
        divergence.add([before], [after + step * along])
        return divergence.value

    (gradient,) = differentiate_divergence([before], [after], classes)
    assert gradient is not None
    assert float((gradient * along).sum()) == pytest.approx((measure(1e-4) - measure(-1e-4)) / 2e-4, rel=1e-4)


def test_the_gradient_of_probabilities_is_that_of_the_divergence() -> None:
    torch.manual_seed(0)
    before, after, along = (torch.randn(12, 7, dtype=torch.float64) for _ in range(3))

    def measure(step: float) -> float:
        divergence = Divergence(frozenset([0]))
        divergence.add([before.softmax(1)], [(after + step * along).softmax(1)])
        return divergence.value

    scores = after.clone().requires_grad_(True)
    probabilities = scores.softmax(1)
    (gradient,) = differentiate_divergence([before.softmax(1)], [probabilities.detach()], frozenset([0]))
    assert gradient is not None
    probabilities.backward(gradient)
    assert scores.grad is not None
    assert float((scores.grad * along).sum()) == pytest.approx((measure(1e-4) - measure(-1e-4)) / 2e-4, rel=1e-4)
