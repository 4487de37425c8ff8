"""Compressing from end to end: every network of the zoo, and networks as people write them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from tests.zoo import CASES
from tests.zoo.pruning import do_nothing, every_graph, output_cuts, prune
from tests.zoo.registry import around_flat
from tests.zoo.unusual import VECTORS, WORKING, Plain, TwoLayers


@every_graph
def test_the_layers_that_can_shrink_do(name: str) -> None:
    done = prune(name)
    assert set(done.case.cut) <= output_cuts(done), done.result.summary
    before, after = done.result.summary.parameters
    assert after < before


@every_graph
def test_the_users_model_is_untouched(name: str) -> None:
    done = prune(name)
    fresh = done.case.build()
    assert done.state.keys() == done.model.state_dict().keys()
    assert all(torch.equal(value, done.state[key]) for key, value in done.model.state_dict().items())
    assert all(parameter.grad is done.grads[key] for key, parameter in done.model.named_parameters())
    assert [p.requires_grad for p in done.model.parameters()] == [i % 3 != 0 for i in range(len(done.grads))]
    assert list(done.model._forward_hooks.values()) == [do_nothing]
    assert repr(done.model) == repr(fresh)
    assert all(module.training for module in done.model.modules())


# What else people do


class Scaling(TwoLayers):
    def forward(self, x: Tensor, scale: float = 1.0, shifted: bool = False) -> Tensor:
        return super().forward(x) * scale + shifted


def test_numbers_among_the_inputs() -> None:
    assert nm.compress(Scaling(), (torch.randn(2, 6), 2.0, True)).model.a.out_features == 4


class Mapped(TwoLayers):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["x"])


def test_a_dictionary_as_the_input() -> None:
    assert nm.compress(Mapped(), ({"x": torch.randn(2, 6)},)).model.a.out_features == 4


def test_a_parallel_wrapper() -> None:
    result = nm.compress(nn.DataParallel(TwoLayers()), torch.randn(2, 6))
    assert [group.name for group in result.plan.groups] == ["a"]


def test_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["slice literals"]
    with caplog.at_level("WARNING"):
        nm.inspect(case.build(), case.inputs())
    assert not caplog.records


OPTIONS: dict[str, dict[str, Any]] = {
    "moments": {},
    "pruned": {"merger": "none"},
    "cosine": {"merger": "cosine"},
    "everything": {"scope": "all"},
}


@pytest.mark.parametrize("name", list(WORKING))
def test_it_works_and_nothing_of_the_users_changes(name: str) -> None:
    build, inputs = WORKING[name]
    model = build().eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    chance = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        analysis = nm.analyse(model, inputs)
        results = [nm.compress(analysis, ratio=0.5, **options) for options in OPTIONS.values()]
    for found in results:
        assert found.summary.error is not None and found.summary.error < 1e-4
        assert found.summary.parameters[1] < found.summary.parameters[0]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(chance, torch.get_rng_state())


class Selecting(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), (x[:, 0] > 0).nonzero()


class KeywordOnly(Plain):
    def forward(self, *, x: Tensor) -> Any:
        return super().forward(x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: nm.compress(Selecting(), VECTORS),
            ("nonzero returns depends on the data", "test_pipeline", "mask"),
        ),
        (lambda: nm.compress(KeywordOnly(), VECTORS), ("example_inputs", "by position")),
        (lambda: nm.compress(Plain(), torch.zeros(0, 6)), ("empty batch", "(0, 6)")),
        (lambda: nm.compress(Plain(), VECTORS, calibration=[torch.zeros(0, 6)]), ("batch is empty", "calibration=")),
        (lambda: nm.compress(Plain(), VECTORS, calibration=[torch.full((2, 6), torch.nan)]), ("NaN or infinity",)),
        (lambda: nm.compress(Plain(), VECTORS, ignore=None), ("NoneType is not a pattern",)),  # type: ignore[arg-type]
        (lambda: nm.compress(Plain(), VECTORS, ignore=[3]), ("int is not a pattern",)),  # type: ignore[list-item]
        (lambda: nm.compress(nn.Linear(3, 2), torch.ones(1, 3), ratio={"a": 0.5}), ("nothing can be removed",)),
    ],
)
def test_one_clear_error(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(nm.MergingError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_inference_mode_leaves_no_trace() -> None:
    model = Plain()
    with torch.inference_mode():
        found = nm.compress(model, torch.randn(3, 6))
    found.model(VECTORS).sum().backward()
    assert all(parameter.grad is not None for parameter in found.model.parameters())


# Chance


@pytest.mark.parametrize("criterion", ["random", "l2"])
def test_the_generator_of_the_user_is_left_alone(criterion: str) -> None:
    model = around_flat(nn.Sequential(nn.Dropout(), nn.RReLU()))
    before = torch.get_rng_state()
    nm.compress(model, torch.zeros(1, 6), criterion=criterion, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("merger", ["none", "cosine"])
def test_two_runs_are_equal_to_the_bit(merger: str) -> None:
    case = CASES["inverted bottleneck"]
    first, again = (nm.compress(case.build(), case.inputs(), scope="all", merger=merger) for _ in range(2))
    assert first.plan == again.plan
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
