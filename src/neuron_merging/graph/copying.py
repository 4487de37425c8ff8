"""Copies of the user's model, and its tensors by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from neuron_merging.errors import MergingError, told


def bare_copy(model: nn.Module, replace: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A copy of the module tree without the user's hooks, its tensors as in `twin`."""
    found = twin(model, replace)
    for module in found.modules():
        _drop_hooks(module)
    return found


def twin(model: nn.Module, replace: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A copy of the module tree.

    Tensors are those in `replace` (by identity). Otherwise parameters are the model's own; all that its code may write
    into is copied.
    """
    known = replace or {}
    own = [t for t in own_tensors(model) if id(t) not in known]
    tensors: dict[int, Any] = {id(t): t if isinstance(t, nn.Parameter) else t.detach().clone() for t in own}
    tensors |= known
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return copy.deepcopy(model, tensors)
    except Exception as error:
        raise MergingError(
            f"the model cannot be copied: {told(error)}",
            where=type(model).__name__,
            fix="Remove the attribute that cannot be deep-copied (a lock, a file, a generator).",
        ) from error


def own_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and plain tensor attributes of every submodule."""
    for module in model.modules():
        yield from (t for t in module._parameters.values() if t is not None)
        yield from (t for t in module._buffers.values() if t is not None)
        yield from (t for t in vars(module).values() if isinstance(t, Tensor))


def dropped_hooks(model: nn.Module) -> list[str]:
    """The modules whose forward hooks a copy does not carry."""
    tables = ("_forward_hooks", "_forward_pre_hooks")
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if any(not _computes_weight(hook) for t in tables for hook in getattr(module, t).values())
    ]


def _drop_hooks(module: nn.Module) -> None:
    module._forward_hooks.clear()
    module._backward_hooks.clear()
    module._backward_pre_hooks.clear()
    for key, hook in list(module._forward_pre_hooks.items()):
        if not _computes_weight(hook):
            del module._forward_pre_hooks[key]


def _computes_weight(hook: Any) -> bool:
    """torch's own weight_norm and spectral_norm live in a pre-hook: they are part of the network."""
    return type(hook).__module__.startswith("torch.nn.utils")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tensor with two names is listed under its first."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    buffers = model.named_buffers(remove_duplicate=False)
    return dict(model.named_parameters(remove_duplicate=False)) | dict(buffers)
