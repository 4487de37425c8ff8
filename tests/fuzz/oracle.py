"""The oracle: build a full-size network that must compute the same as the smaller one, from the plan alone.

Plain pruning: in the original, at its full size, every entry that the plan cuts away is zero. A producer then makes
zeros, a reader does not see what the layers between make of them, so the result is the smaller network's. Norms over
channels are the one exception, and documented: their statistics are those of the channels that stay.
A merged network: the same, with its own tensors put back to where they were in the full network.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.utils._pytree import tree_leaves

from neuron_merging import Plan

from .site import Block

COMPUTED = (r"\.parametrizations\.(\w+)\.(original[01]?|0\.base)$", r"\.(\w+)_(orig|v)$")


class Mismatch(Exception):
    """The plan or the smaller network contradict each other or the original."""


# Weights that torch computes


def fold_computed_weights(model: nn.Module) -> nn.Module:
    """All weights as plain parameters."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for module in list(model.modules()):
            if parametrize.is_parametrized(module):
                for name in list(module.parametrizations):
                    parametrize.remove_parametrizations(module, name)
            for hook in list(module._forward_pre_hooks.values()):
                _fold_hook(module, hook)
    return model


def _fold_hook(module: nn.Module, hook: object) -> None:
    if isinstance(hook, prune.BasePruningMethod):
        prune.remove(module, hook._tensor_name)
    elif type(hook).__name__ == "WeightNorm":
        remove_weight_norm(module, hook.name)
    elif type(hook).__name__ == "SpectralNorm":
        remove_spectral_norm(module, hook.name)


def get_folded_name(name: str) -> str:
    """The weight that a stored tensor is the stuff of."""
    for pattern in COMPUTED:
        name = re.sub(pattern, r".\1", name)
    return name


def compute_effective_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a network that has run, its computed weights among them.

    Nothing is baked here: copies of a parametrized module share its class, and baking one breaks the other.
    """
    found = collect_tensors(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            computed = list(module.parametrizations) if parametrize.is_parametrized(module) else ["weight"]
            values = {f"{name}.{part}": getattr(module, part, None) for part in computed}
            found |= {key: value for key, value in values.items() if isinstance(value, Tensor)}
    return found


def collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


# Masks


def compute_keep_masks(plan: Plan, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """For every tensor that is cut: true where an entry stays."""
    found: dict[str, Tensor] = {}
    for cut in plan.cuts:
        name = cut.tensor if cut.tensor in full else get_folded_name(cut.tensor)
        tensor = full.get(name)
        if tensor is None or tensor.shape[cut.dim] * cut.blocks != cut.size:
            if name == cut.tensor and tensor is not None:
                raise Mismatch(
                    f"the plan says {cut.size} for dimension {cut.dim} of {cut.tensor} {tuple(tensor.shape)}"
                )
            continue
        found[name] = found.get(name, torch.ones(tensor.shape, dtype=torch.bool)) & _compute_keep_mask(
            cut, tensor.shape
        )
    shared = {id(full[name]): stays for name, stays in found.items()}
    return {name: shared[id(tensor)] for name, tensor in full.items() if id(tensor) in shared}


def _compute_keep_mask(cut: Any, shape: torch.Size) -> Tensor:
    """Blocks are rows of the first dimension, each with columns of its own."""
    stays = torch.zeros(cut.size, dtype=torch.bool)
    stays[list(cut.kept)] = True
    if cut.blocks == 1:
        return stays.view(*[-1 if i == cut.dim else 1 for i in range(len(shape))]).expand(shape)
    rows = stays.view(cut.blocks, -1).repeat_interleave(shape[0] // cut.blocks, 0)
    assert cut.dim == 1
    return rows.view(shape[0], shape[1], *[1] * (len(shape) - 2)).expand(shape)


# References


def build_pruned_reference(model: nn.Module, plan: Plan) -> nn.Module:
    """The original without what the plan removes; `model` is changed."""
    model = fold_computed_weights(model.double().eval())
    stays = compute_keep_masks(plan, collect_tensors(model))
    with torch.no_grad():
        for name, tensor in collect_tensors(model).items():
            if name in stays and not name.endswith("running_var"):
                tensor.masked_fill_(~stays[name], 0)
    return _normalise_over_kept(model, stays)


def build_merged_reference(model: nn.Module, plan: Plan, small: nn.Module) -> nn.Module:
    """The original with the smaller network's tensors in their places; `model` is changed, `small` has run."""
    model = fold_computed_weights(model.double().eval())
    for name, length in plan.biases.items():
        owner = model.get_submodule(name.removesuffix(".bias"))
        owner.bias = nn.Parameter(torch.zeros(length, dtype=torch.float64))
    full, own = collect_tensors(model), compute_effective_tensors(small)
    stays = compute_keep_masks(plan, full)
    for name in plan.biases:
        _cut_bias_like_filters(model.get_submodule(name.removesuffix(".bias")), name, stays)
    with torch.no_grad():
        for name, tensor in full.items():
            _restore_full_size(name, tensor, own.get(name), stays.get(name))
    return _normalise_over_kept(model, stays)


def _cut_bias_like_filters(layer: nn.Module, name: str, stays: dict[str, Tensor]) -> None:
    """A bias that merging added is cut as its layer's filters are."""
    rows = stays.get(name.removesuffix("bias") + "weight")
    if rows is None or name in stays:
        return
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        stays[name] = rows.unflatten(0, (layer.groups, -1)).flatten(3).any(3).any(1).flatten()
    else:
        stays[name] = rows.flatten(1).any(1)


def _restore_full_size(name: str, tensor: Tensor, own: Tensor | None, stays: Tensor | None) -> None:
    if own is None:
        raise Mismatch(f"{name} is missing in the smaller network")
    count = tensor.numel() if stays is None else int(stays.sum())
    if own.numel() != count or (stays is None and own.shape != tensor.shape):
        raise Mismatch(f"{name} has shape {tuple(own.shape)}, the plan keeps {count} of {tuple(tensor.shape)}")
    if stays is None:
        tensor.copy_(own)
        return
    if not name.endswith("running_var"):
        tensor.zero_()
    tensor[stays] = own.flatten().to(tensor.dtype)


# Norms over channels


class KeptChannelNorm(nn.Module):
    """A norm whose statistics are those of the channels that stay."""

    def __init__(self, norm: nn.Module, stays: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, getattr(norm, "bias", None), norm.eps
        self.groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else 0
        self.centred = not isinstance(norm, nn.RMSNorm)
        self.register_buffer("stays", stays.double())

    def forward(self, x: Tensor) -> Tensor:
        if not self.groups:
            y = self.normalised(x, self.stays, tuple(range(-self.stays.dim(), 0)))
            return y * self.weight + (0 if self.bias is None else self.bias)
        parts = x.unflatten(1, (self.groups, -1))
        stays = self.stays.view(self.groups, -1, *[1] * (x.dim() - 2)).expand(parts.shape[1:])
        y = self.normalised(parts, stays, tuple(range(2, parts.dim()))).view_as(x)
        shape = (-1, *[1] * (x.dim() - 2))
        return y * self.weight.view(shape) + self.bias.view(shape)

    def normalised(self, x: Tensor, stays: Tensor, dims: tuple[int, ...]) -> Tensor:
        count = stays.expand_as(x).sum(dims, keepdim=True).clamp(min=1)
        if self.centred:
            x = x - (x * stays).sum(dims, keepdim=True) / count
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return x / ((x.square() * stays).sum(dims, keepdim=True) / count + eps).sqrt()


def _normalise_over_kept(model: nn.Module, stays: dict[str, Tensor]) -> nn.Module:
    """Norms over channels count only those that stay."""
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)) and f"{name}.weight" in stays:
            model.set_submodule(name, KeptChannelNorm(module, stays[f"{name}.weight"]))
        if isinstance(module, Block) and module.tap and f"{name}.{module.tap}" in stays:
            module.keep = stays[f"{name}.{module.tap}"].flatten().nonzero().flatten().tolist()
    return model


# Comparison


@contextmanager
def disable_fast_attention() -> Iterator[None]:
    """Without torch's shortcut for whole layers, which reads the norms' weights itself."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def run_network(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """All tensors that a network returns."""
    with torch.no_grad(), disable_fast_attention():
        return [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]


def measure_difference(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference of an entry, by the entry's own size and the usual size in its tensor."""
    if [t.shape for t in got] != [t.shape for t in want]:
        raise Mismatch(f"shapes {[tuple(t.shape) for t in got]}, expected {[tuple(t.shape) for t in want]}")
    return max((_measure_entry_difference(a, b) for a, b in zip(got, want, strict=True)), default=0.0)


def _measure_entry_difference(got: Tensor, want: Tensor) -> float:
    if got.dtype != want.dtype:
        raise Mismatch(f"dtype {got.dtype}, expected {want.dtype}")
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if not got.is_floating_point():
        return float((got != want).any())
    same = (got == want) | (got.isnan() & want.isnan())
    usual = want[want.isfinite() & (want.abs() < 1e6)].square().mean().sqrt().nan_to_num(0)
    apart = ((got - want).abs() / (want.abs() + usual + 1e-9)).masked_fill(same, 0)
    return float(apart.nan_to_num(float("inf")).max()) if apart.numel() else 0.0
