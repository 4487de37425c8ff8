"""Capturing: models and inputs that cannot be captured are one clear error."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.graph.capture import capture
from neuron_merging.graph.graph import Node
from neuron_merging.graph.macs import count_node_macs
from tests.failing import Branching, X, compressing, failing, small_net

# The model


def test_meta_device() -> None:
    failing(compressing(small_net().to("meta")), "meta", "0.weight")


@pytest.mark.parametrize("thing", [nn.Linear, {"a": 1}, None, lambda x: x], ids=["class", "dict", "none", "function"])
def test_not_a_module(thing: Any) -> None:
    with pytest.raises(nm.MergingError, match=r"torch\.nn\.Module"):
        nm.compress(thing, X)
    with pytest.raises(nm.MergingError, match=r"torch\.nn\.Module"):
        nm.inspect(thing, X)


def test_lazy_module() -> None:
    failing(compressing(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))), "lazy", "0.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_weights_that_are_not_finite(value: float, name: str) -> None:
    model = small_net()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    failing(compressing(model), "NaN or infinity", name)


def test_statistics_that_are_not_finite() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model[1].running_var[2] = torch.nan
    failing(compressing(model), "NaN or infinity", "1.running_var")


@pytest.mark.parametrize(("variance", "eps"), [(-1.0, 1e-5), (0.0, 0.0)])
def test_a_variance_without_a_root_is_an_error(variance: float, eps: float) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, eps), nn.ReLU(), nn.Linear(8, 3))
    model[1].running_var[2] = variance
    failing(compressing(model), f"variance of channel 2 is {variance:.3g}", "1.running_var")


def test_control_flow_that_depends_on_data() -> None:
    failing(compressing(Branching()), "failing.py", "if x.sum() > 0:", "control flow")


class DataNumbers(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x * x.max().item())


def test_a_number_taken_out_of_a_tensor_gives_a_network_or_an_error() -> None:
    try:
        assert nm.compress(DataNumbers(), torch.randn(2, 6)).summary.parameters[0] > 0
    except nm.MergingError as error:
        assert error.what and error.fix


def test_scripted_model() -> None:
    with pytest.warns(DeprecationWarning):
        model = torch.jit.script(small_net())
    with pytest.raises(nm.MergingError):
        nm.compress(model, X)


# The inputs


@pytest.mark.parametrize("inputs", [(X, X), ()], ids=["too many", "none"])
def test_wrong_number_of_inputs(inputs: tuple[Tensor, ...]) -> None:
    failing(compressing(inputs=inputs), "input")


@pytest.mark.parametrize("shape", [(2, 5), (6, 2), ()])
def test_wrong_shape_of_inputs(shape: tuple[int, ...]) -> None:
    failing(compressing(inputs=torch.zeros(shape)), "shape")


def test_wrong_dtype_of_inputs() -> None:
    failing(compressing(inputs=torch.zeros(2, 6, dtype=torch.int64)), "dtype", "example input")


def test_wrong_device_of_inputs() -> None:
    failing(compressing(inputs=torch.zeros(2, 6, device="meta")), "meta", "cpu")


def test_inputs_that_are_no_tensors() -> None:
    failing(compressing(inputs="image.png"), "input")


def test_a_node_can_be_computed_from_bound_arguments() -> None:
    graph = capture(nn.Linear(3, 2), torch.zeros(1, 3))
    assert isinstance(graph.nodes[0], Node) and sum(count_node_macs(graph).values()) == 6


class State:
    """An object that a network returns beside its output, of a class that torch does not know."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden, self.step = hidden, 3


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, State, str]:
        hidden = self.a(x * scale)
        return self.c(self.b(hidden.relu()).relu()), State(hidden), "done"


def test_tensors_inside_of_unknown_outputs_are_returned_and_stay_whole() -> None:
    found = nm.inspect(Stateful(), {"scale": torch.ones(1), "x": torch.zeros(2, 4)})
    assert [group.name for group in found.groups] == ["b"]
    assert {r.layer: r.why for r in found.refusals}["a"] == "is what the network returns"


def test_a_network_that_returns_no_tensor() -> None:
    class Silent(Branching):
        def forward(self, x: Tensor) -> str:
            return f"{self.a(x).shape}"

    failing(compressing(Silent()), "returns no tensor", "Silent.forward")


def linear_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def quantised_net() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: nn.Module = torch.ao.quantization.quantize_dynamic(linear_net(), {nn.Linear})
    return found


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (linear_net, (2, 8), r"not its shape: torch.randn\(2, 8\)"),
        (linear_net, np.zeros((2, 8), np.float32), "torch.from_numpy"),
        (linear_net, torch.eye(8).to_sparse(), "sparse.*to_dense"),
        (lambda: linear_net(torch.float8_e4m3fn), torch.zeros(2, 8), "float8_e4m3fn cannot be merged"),
        (
            lambda: nn.Sequential(nn.Linear(8, 4, dtype=torch.complex64)),
            torch.zeros(2, 8, dtype=torch.complex64),
            "complex64 cannot be merged",
        ),
        (quantised_net, torch.zeros(2, 8), "quantised.*Compress the float network"),
        (lambda: "resnet-20", torch.zeros(2, 8), r"load\(\) opens a folder"),
        (lambda: nm.compress(linear_net(), torch.zeros(2, 8), effort="fast"), torch.zeros(2, 8), r"holds: \.model"),
    ],
)
def test_what_a_newcomer_gives_by_mistake_has_its_fix(make: Any, inputs: Any, message: str) -> None:
    with pytest.raises(nm.ModelError, match=message):
        nm.compress(make(), inputs)


def test_a_network_made_in_inference_mode() -> None:
    with torch.inference_mode():
        net = linear_net()
    for output in ("module", "graph"):
        assert nm.compress(net, torch.zeros(2, 8), effort="fast", output=output).summary.parameters[1] < 212
