"""Networks in half precision are computed in float32 on a CPU, because torch's own kernels are very slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.graph import half_precision
from neuron_merging.graph.capture import capture
from neuron_merging.graph.example_inputs import call_model
from neuron_merging.graph.half_precision import HALF_DTYPES
from neuron_merging.graph.interpreter import run_graph


class Mixed(nn.Module):
    """Convolutions, a product and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 8, 3)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, 2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.up(self.second(self.first(x).relu()).relu()).flatten(2)
        out: Tensor = self.last((maps @ maps.transpose(1, 2)).mean(2))
        return out


def list_computed_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Record the dtypes in which slow operators are computed."""
    seen: list[torch.dtype] = []
    original = half_precision.compute_in_float32

    def compute(function: Any, args: Any, kwargs: Any) -> Any:
        def record(*values: Any, **named: Any) -> Any:
            seen.extend(v.dtype for v in (*values, *named.values()) if isinstance(v, Tensor))
            return function(*values, **named)

        return original(record, args, kwargs)

    monkeypatch.setattr(half_precision, "compute_in_float32", compute)
    return seen


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@torch.no_grad()
def test_slow_operators_are_computed_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_precision, "has_native_bfloat16", lambda: False)
    torch.manual_seed(0)
    net, x = Mixed().to(dtype).eval(), torch.randn(2, 3, 8, 8).to(dtype)
    plain, graph = net(x), capture(net, x)
    seen = list_computed_dtypes(monkeypatch)
    for run in (lambda: call_model(net, (x,)), lambda: run_graph(graph, [x], graph.tensors)[0]):
        outputs = run()
        assert outputs.dtype == dtype and set(seen) == {torch.float32}
        torch.testing.assert_close(outputs, plain, rtol=5e-2, atol=5e-2)
        seen.clear()


def test_a_processor_that_multiplies_bfloat16_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_precision, "has_native_bfloat16", lambda: True)
    assert not half_precision.is_slow_in_half(torch.zeros(2, dtype=torch.bfloat16))
    assert half_precision.is_slow_in_half(torch.zeros(2, dtype=torch.float16))


@torch.no_grad()
def test_networks_in_float32_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_precision, "_HalfInFloat32Mode", lambda: pytest.fail("a mode was entered"))
    net, x = Mixed().eval(), torch.randn(2, 3, 8, 8)
    assert torch.equal(call_model(net, (x,)), net(x))


def test_a_compressed_network_stays_in_half_precision() -> None:
    torch.manual_seed(0)
    small = nm.compress(Mixed().half().eval(), torch.randn(2, 3, 8, 8).half(), ratio=0.25, effort="fast").model
    assert {tensor.dtype for tensor in small.parameters()} == {torch.float16}
