"""Zero the removed channels in the original module itself, from the plan's cuts: the expected result of pruning."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from neuron_merging.pruning.plan import Cut, Plan


def leaves(value: Any) -> list[Tensor]:
    """All tensors of an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, (int, float)):
        return []
    items = value.values() if isinstance(value, Mapping) else value
    return [leaf for item in items for leaf in leaves(item)]


@torch.no_grad()
def run(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs in evaluation mode; the model's own mode is put back."""
    training = [(module, module.training) for module in model.modules()]
    outputs = leaves(model.eval()(*inputs))
    for module, mode in training:
        module.training = mode
    return outputs


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry of its tensor."""
    assert [t.shape for t in got] == [t.shape for t in want]
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True)]
    assert all(a.isfinite().all() and b.isfinite().all() for a, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


def input_dims(model: nn.Module, reads: Mapping[str, int]) -> dict[str, int]:
    """For every weight that reads channels: the dimension of its input channels."""
    found = {}
    for name, module in model.named_modules():
        transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            found[f"{name}.weight"] = 0 if transposed else 1
        if isinstance(module, nn.MultiheadAttention):
            found[f"{name}.in_proj_weight"] = 1
    return found | dict(reads)


def removed(cut: Cut, tensor: Tensor) -> list[int]:
    return sorted(set(range(tensor.shape[cut.dim] * cut.blocks)) - set(cut.kept))


@torch.no_grad()
def zero(tensor: Tensor, cut: Cut) -> None:
    """Set the entries that the cut removes to zero; with blocks, the index runs through the groups."""
    share = tensor.shape[cut.dim]
    for index in removed(cut, tensor):
        block, place = divmod(index, share)
        part = tensor.chunk(cut.blocks, 1 - cut.dim)[block] if cut.blocks > 1 else tensor
        part.select(cut.dim, place).zero_()


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def plain(model: nn.Module) -> nn.Module:
    """A copy whose weights are stored, not computed at every call."""
    twin = copy.deepcopy(model).eval()
    for module in twin.modules():
        if parametrize.is_parametrized(module):
            values = {name: getattr(module, name).detach() for name in module.parametrizations}
            del module._modules["parametrizations"]
            module.__class__ = type(module).__bases__[0]
            for name, value in values.items():
                module.register_parameter(name, nn.Parameter(value))
    return twin


def without_readers(model: nn.Module, plan: Plan, reads: Mapping[str, int], contracts: bool = False) -> nn.Module:
    """The original whose next layers do not read what was removed.

    Where two activations are multiplied with one another no weight reads them: `contracts` zeroes them themselves.
    """
    twin = plain(model)
    tensors, dims = named(twin), input_dims(twin, reads)
    for cut in plan.cuts:
        if contracts or dims.get(cut.tensor) == cut.dim:
            zero(tensors[cut.tensor], cut)
    return twin


def with_dead_channels(model: nn.Module, plan: Plan, reads: Mapping[str, int]) -> nn.Module:
    """The original whose removed channels are zero from their producer on; every reader is as it was."""
    twin = plain(model)
    tensors, dims = named(twin), input_dims(twin, reads)
    for cut in plan.cuts:
        if dims.get(cut.tensor) != cut.dim and not cut.tensor.endswith("running_var"):
            zero(tensors[cut.tensor], cut)
    return twin
