"""Copy the user's model, with or without its hooks, and list its tensors by name."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.errors import MergingError, describe_error


def copy_without_hooks(model: nn.Module, replace: Mapping[int, Tensor] | None = None) -> nn.Module:
    """Copy the module tree as `copy_module` does, without the user's hooks; the network's own hooks stay."""
    found = copy_module(model, replace)
    packages = _find_network_packages(model)
    for module in found.modules():
        _remove_user_hooks(module, packages)
    return found


def copy_module(model: nn.Module, replace: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A copy of the module tree.

    Tensors are those in `replace` (by identity). Otherwise parameters are the model's own; all that its code may write
    into is copied.
    """
    known = replace or {}
    own = [t for t in iter_module_tensors(model) if id(t) not in known]
    tensors: dict[int, Any] = {id(t): t if isinstance(t, nn.Parameter) else t.detach().clone() for t in own}
    tensors |= known
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return copy.deepcopy(model, tensors)
    except Exception as error:
        raise MergingError(
            f"the model cannot be copied: {describe_error(error)}",
            where=type(model).__name__,
            fix="Remove the attribute that cannot be deep-copied (a lock, a file, a generator).",
        ) from error


def copy_with_own_tensors(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A copy of the module tree that shares no tensor with it, on another device if one is given."""
    return copy_module(model, {id(tensor): _clone_tensor(tensor, device) for tensor in iter_module_tensors(model)})


def _clone_tensor(tensor: Tensor, device: torch.device | None) -> Tensor:
    new = tensor.detach().to(device, copy=True)
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def iter_module_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and plain tensor attributes of every submodule."""
    for module in model.modules():
        yield from (t for t in module._parameters.values() if t is not None)
        yield from (t for t in module._buffers.values() if t is not None)
        yield from (t for t in vars(module).values() if isinstance(t, Tensor))


def list_dropped_hooks(model: nn.Module) -> list[str]:
    """The modules whose forward hooks a copy does not carry."""
    tables, own = ("_forward_hooks", "_forward_pre_hooks"), _find_network_packages(model)
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if any(not _is_network_hook(hook, own) for t in tables for hook in getattr(module, t).values())
    ]


def _remove_user_hooks(module: nn.Module, packages: frozenset[str]) -> None:
    module._backward_hooks.clear()
    module._backward_pre_hooks.clear()
    for table in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in table.items() if not _is_network_hook(hook, packages)]:
            del table[key]
            for flags in (module._forward_hooks_with_kwargs, module._forward_pre_hooks_with_kwargs):
                flags.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def _is_network_hook(hook: Any, packages: frozenset[str]) -> bool:
    """Whether a hook is part of the network: its weights are computed there, or its own library has put it there."""
    inner = getattr(hook, "hook", hook)
    computes_weight = type(inner).__module__.startswith("torch.nn.utils")
    return computes_weight or str(getattr(inner, "__module__", "")).partition(".")[0] in packages


def _find_network_packages(model: nn.Module) -> frozenset[str]:
    """The installed packages that the network's classes come from; torch has no networks, only layers."""
    names = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch"}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    return frozenset(name for name, file in files.items() if Path(file).parent.parent.name.endswith("-packages"))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tensor with two names is listed under its first."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def named_tensors_with_aliases(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    buffers = model.named_buffers(remove_duplicate=False)
    return dict(model.named_parameters(remove_duplicate=False)) | dict(buffers)
