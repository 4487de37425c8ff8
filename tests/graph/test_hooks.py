"""Hooks of the user's: those that only observe are dropped, those that change outputs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))


def halve_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5


def clamp_in_place(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.clamp_(max=0.1)


def shift_input(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0] + 1


def stop_here(module: nn.Module, inputs: Any, output: Tensor) -> None:
    raise StopIteration("enough")


@pytest.mark.parametrize("output", ["module", "graph"])
@pytest.mark.parametrize("hook", [halve_output, clamp_in_place, stop_here])
def test_a_forward_hook_that_changes_outputs_is_refused(hook: Any, output: str) -> None:
    model = net()
    model[0].register_forward_hook(hook)
    with pytest.raises(nm.ModelError, match=r"hook.* \(at 0\)\. Write what the hook does into forward"):
        nm.compress(model, torch.zeros(2, 6), output=output)  # zeros stay zeros: other inputs show the change


def test_a_hook_that_changes_inputs_is_refused() -> None:
    model = net()
    model.register_forward_pre_hook(shift_input)
    with pytest.raises(nm.ModelError, match=r"a forward hook changes the model's outputs \(at Sequential\)"):
        nm.inspect(model, torch.zeros(2, 6))


def test_hooks_that_only_observe_stay_harmless() -> None:
    model, seen = net(), []

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(output.shape)
        output.register_hook(lambda gradient: None)  # as for heat maps: raises where gradients are off

    handle = model[0].register_forward_hook(watch)
    model[2].register_full_backward_hook(lambda *_: None)
    plain, hooked = nm.compress(net(), torch.randn(2, 6)), nm.compress(model, torch.randn(2, 6))
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), hooked.model.parameters(), strict=True))
    assert any("hooks of 0 are not carried over" in note for note in hooked.summary.notes)
    assert len(model[0]._forward_hooks) == 1 and handle.id in model[0]._forward_hooks
    assert len(seen) <= 2 and all(parameter.grad is None for parameter in model.parameters())
