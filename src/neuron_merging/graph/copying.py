"""Copy the user's model, with or without its hooks or in float64, and list its tensors by name.

`Float64Mode` runs a network in float64 even if its code names another dtype.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from neuron_merging.errors import ModelError, describe_error


def unwrap_model(model: Any) -> Any:
    """The network inside of DataParallel, DistributedDataParallel and torch.compile; anything else as it is.

    >>> unwrap_model(nn.DataParallel(nn.Linear(3, 2)))
    Linear(in_features=3, out_features=2, bias=True)
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        # torch.compile keeps the original under this name.
        elif isinstance(model, nn.Module) and "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]
        else:
            return model


def copy_without_hooks(model: nn.Module, replace: Mapping[int, Tensor] | None = None) -> nn.Module:
    """Copy the module tree as `copy_module` does, without the user's hooks; the network's own hooks stay."""
    copied = remove_backward_hooks(copy_module(model, replace))
    packages = _find_network_packages(model)
    for module in copied.modules():
        _remove_user_hooks(module, packages)
    return copied


def copy_module(model: nn.Module, replace: Mapping[int, Tensor] | None = None) -> nn.Module:
    """Return a copy of the module tree.

    `replace` maps the `id` of a tensor to its replacement. Other parameters are shared with the model; buffers and
    plain tensors, which the model's code may write into, are copied.
    """
    replacements = replace or {}
    others = [t for t in iter_module_tensors(model) if id(t) not in replacements]
    # This is the memo of deepcopy: an object whose id is in it is taken from there.
    tensors: dict[int, Any] = {id(t): t if isinstance(t, nn.Parameter) else t.detach().clone() for t in others}
    tensors |= replacements
    try:
        # Tensors in lists and other objects are copied one by one. A mode that is active, such as `Float64Mode`, would
        # change their dtype in the middle of that.
        with warnings.catch_warnings(), _disable_current_modes():
            warnings.simplefilter("ignore")
            found = copy.deepcopy(model, tensors)
    except Exception as error:
        raise ModelError(
            f"the model cannot be copied: {describe_error(error)}",
            where=type(model).__name__,
            fix="Remove the attribute that cannot be deep-copied (a lock, a file, a generator), or the class's own "
            "__deepcopy__.",
        ) from error
    _check_is_separate_copy(model, found)
    return found


def _check_is_separate_copy(model: nn.Module, found: object) -> None:
    """Refuse what a class's own `__deepcopy__` may return: no module, or a part of the user's model itself."""
    originals = {id(module) for module in model.modules()}
    try:
        separate = isinstance(found, nn.Module) and originals.isdisjoint(id(module) for module in found.modules())
    except AttributeError:  # the copy of a submodule is no module
        separate = False
    if separate:
        return
    what = "the model's own __deepcopy__ does not return a separate module"
    raise ModelError(what, where=type(model).__name__, fix="Remove it, or let it return a copy.")


def copy_with_own_tensors(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Return a copy of the module tree that shares no tensor with it, on `device` if one is given."""
    return copy_module(model, {id(tensor): _clone_tensor(tensor, device) for tensor in iter_module_tensors(model)})


def leave_inference_mode(model: nn.Module) -> nn.Module:
    """Return the model, or a copy of it if it has tensors made in inference mode: nothing else could use them."""
    made_there = any(tensor.is_inference() for tensor in iter_module_tensors(model))
    return copy_with_own_tensors(model) if made_there else model


def _clone_tensor(tensor: Tensor, device: torch.device | None) -> Tensor:
    new = tensor.detach().to(device, copy=True)
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def make_meta_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor like this one that takes no memory, on the meta device."""
    meta = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def iter_module_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters, buffers and plain tensor attributes of every submodule."""
    for module in model.modules():
        yield from (t for t in module._parameters.values() if t is not None)
        yield from (t for t in module._buffers.values() if t is not None)
        yield from (t for t in vars(module).values() if isinstance(t, Tensor))


def list_dropped_hooks(model: nn.Module) -> list[str]:
    """Return the names of modules whose forward hooks `copy_without_hooks` drops, unless torch.export made them."""
    tables, packages = ("_forward_hooks", "_forward_pre_hooks"), _find_network_packages(model)
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if any(
            not _is_network_hook(hook, packages) and not str(getattr(hook, "__module__", "")).startswith("torch.export")
            for t in tables
            for hook in getattr(module, t).values()
        )
    ]


def remove_backward_hooks(model: nn.Module) -> nn.Module:
    """The model itself, without any backward hook."""
    for module in model.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return model


def _remove_user_hooks(module: nn.Module, packages: frozenset[str]) -> None:
    for table in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in table.items() if not _is_network_hook(hook, packages)]:
            del table[key]
            for flags in (module._forward_hooks_with_kwargs, module._forward_pre_hooks_with_kwargs):
                flags.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def _is_network_hook(hook: Any, packages: frozenset[str]) -> bool:
    """Return whether a hook belongs to the network: it computes a weight, or comes from the network's own library."""
    # torch wraps some hooks in an object that holds the function.
    inner = getattr(hook, "hook", hook)
    computes_weight = type(inner).__module__.startswith("torch.nn.utils")
    return computes_weight or str(getattr(inner, "__module__", "")).partition(".")[0] in packages


def _find_network_packages(model: nn.Module) -> frozenset[str]:
    """Return the installed packages, other than torch, that define the network's classes.

    torch is left out, since it defines layers and no networks.
    """
    names = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch"}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    # site-packages, or Debian's dist-packages: code of the user's own folder is no library.
    return frozenset(name for name, file in files.items() if Path(file).parent.parent.name.endswith("-packages"))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name. A tensor with several names has its first one."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def named_tensors_with_aliases(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all of their names."""
    buffers = model.named_buffers(remove_duplicate=False)
    return dict(model.named_parameters(remove_duplicate=False)) | dict(buffers)


def to_working_precision(tensor: Tensor) -> Tensor:
    """Return a float32 or float64 tensor unchanged, any other as float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64. Apple's GPUs do not."""
    return device.type != "mps"


WIDER_DTYPES = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
"""The dtypes that `Float64Mode` replaces, and by what."""


class Float64Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make every operator read, create and return float64 in place of narrower floats."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._assert_tensor_metadata.default:
            return None  # the exporter's check of a cast's dtype, which no longer holds
        if kwargs or not all(_needs_no_widening(value) for value in args):
            args, kwargs = tree_map(to_float64, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        return result if _needs_no_widening(result) else tree_map(to_float64, result)


def _needs_no_widening(value: Any) -> bool:
    """Return whether a value is known to stay. Containers are not looked into, so they count as unknown."""
    # A quick test that covers most arguments: tree_map is slow beside small operators.
    if isinstance(value, Tensor):
        return value.dtype not in WIDER_DTYPES
    return value is None or isinstance(value, (int, float, str))


def to_float64(value: Any) -> Any:
    """Widen a tensor, or a dtype argument, to float64. Return anything else unchanged."""
    if isinstance(value, torch.dtype):
        return WIDER_DTYPES.get(value, value)
    return value.to(WIDER_DTYPES[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDER_DTYPES else value


def copy_to_float64(model: nn.Module, *, weights: bool = True) -> nn.Module:
    """Return a copy of the module with float64 tensors; without `weights`, only vectors are widened.

    A convolution compares the dtypes of input and bias before `Float64Mode` sees the call. Other tensors can be widened
    by the mode when they are read.
    """
    chosen = [tensor for tensor in iter_module_tensors(model) if weights or tensor.ndim < 2]
    return copy_without_hooks(model, {id(tensor): _clone_as_float64(tensor) for tensor in chosen})


def _clone_as_float64(tensor: Tensor) -> Tensor:
    new = to_float64(tensor.detach()).clone()
    return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
