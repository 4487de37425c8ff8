"""Wrapped models, own ways to copy, code that decides by the data: supported, or one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def wrap_for_processes(model: nn.Module, folder: Path) -> nn.Module:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


@pytest.mark.parametrize("kind", ["parallel", "compiled", "both", "processes"])
def test_wrappers_are_taken_off(kind: str, tmp_path: Path) -> None:
    x, plain = torch.randn(2, 6), net()
    try:
        wrapped: Any = {
            "parallel": nn.DataParallel,
            "compiled": torch.compile,
            "both": lambda model: nn.DataParallel(torch.compile(model)),
            "processes": lambda model: wrap_for_processes(model, tmp_path),
        }[kind](plain)
        small = nm.compress(wrapped, x)
        assert type(small.model) is nn.Sequential and small.plan.groups[0].name == "0"
        assert nm.apply_plan(wrapped, small.plan)[0].out_features == 4
        small.save(tmp_path / "small")
        assert nm.load(tmp_path / "small", build=lambda: wrapped)[0].out_features == 4
        assert nm.compress(wrapped, x, output="graph").summary.parameters == small.summary.parameters
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_a_scripted_module_is_refused_with_the_fix() -> None:
    with pytest.raises(nm.ModelError, match=r"TorchScript module .* Give the module that it was made from"):
        nm.compress(torch.jit.trace(net(), torch.zeros(2, 6)), torch.zeros(2, 6))


class Uncopyable(nn.Sequential):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        raise RuntimeError("there is only one of me")


class ReturnsItself(nn.Sequential):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return self


class ReturnsNumber(nn.Sequential):
    def __deepcopy__(self, memo: dict[int, Any]) -> int:
        return 5


@pytest.mark.parametrize("cls", [Uncopyable, ReturnsItself, ReturnsNumber])
@pytest.mark.parametrize("inside", [False, True])
def test_a_deepcopy_of_its_own_is_one_clear_error(cls: type[nn.Sequential], inside: bool) -> None:
    model: nn.Module = cls(*net())
    model = nn.Sequential(model, nn.Linear(3, 3)) if inside else model
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(nm.ModelError, match="__deepcopy__"):
        nm.compress(model, torch.zeros(2, 6))
    assert model.training and len(model._forward_hooks) == 1


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.cond(x.sum() > 0, torch.relu, torch.sigmoid, (self.a(x),)))


@pytest.mark.parametrize("call", [nm.compress, nm.inspect])
def test_control_flow_by_the_data_is_one_clear_error(call: Any) -> None:
    with pytest.raises(nm.ModelError, match=r"cond decides by the data .*test_wrappers\.py:\d+"):
        call(Choosing(), torch.ones(2, 6))


class HalfPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).relu()).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.d(self.c(x).relu())


def test_layers_outside_of_an_autocast_block_are_cut_and_those_inside_named() -> None:
    small = nm.compress(HalfPrecision(), torch.randn(2, 6))
    assert [group.name for group in small.summary.groups] == ["a"]
    assert any("autocast block" in str(refusal) for refusal in small.summary.refusals)


class Box:
    def __init__(self) -> None:
        self.scale = torch.rand(6)


class ScaledByList(nn.Module):
    """Tensors in a list and in an object are neither parameters nor buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b, self.box = nn.Linear(6, 8), nn.Linear(8, 3), Box()
        self.scales: list[Any] = [torch.tensor(0.5, dtype=dtype), {"deep": torch.rand(6).to(dtype)}]

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scales[1]["deep"].float() * self.box.scale
        return self.b((self.a(scaled) * self.scales[0].float()).relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_float_tensor_in_a_list_does_not_refuse_the_network(dtype: torch.dtype) -> None:
    small = nm.compress(ScaledByList(dtype), torch.randn(2, 6), ratio=0.5)
    assert small.model.a.out_features == 4
    assert small.summary.verified is not None and small.summary.verified.precision == "float64"
