"""Baking: weights that torch computes from others, made plain in a copy.

`torch.nn.utils.parametrize` (and with it the new weight and spectral norm and `orthogonal`), the old weight norm and
spectral norm, and `torch.nn.utils.prune` keep something else than the weight and compute it at every call. A weight
that is computed cannot be given new columns; one that has been computed once and for all can.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook
from torch.nn.utils.weight_norm import WeightNorm

from neuron_merging.errors import ModelError, told
from neuron_merging.graph.copying import own_tensors, twin


def computed(model: nn.Module) -> dict[str, str]:
    """The tensors, by name, that torch's own tools compute at every call, and by what.

    >>> net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)))
    >>> computed(net)
    {'0.weight': '_WeightNorm'}
    """
    return {
        f"{path}.{name}" if path else name: kind for path, module in model.named_modules() for name, kind in _of(module)
    }


def _of(module: nn.Module) -> Iterator[tuple[str, str]]:
    if parametrize.is_parametrized(module):
        for name, steps in module.parametrizations.items():  # type: ignore[union-attr, operator]
            yield name, ", ".join(type(step).__name__ for step in steps)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            yield hook.name, type(hook).__name__
        if isinstance(hook, prune.BasePruningMethod):
            yield hook._tensor_name, type(hook).__name__


@torch.no_grad()
def baked(model: nn.Module) -> nn.Module:
    """The model itself if nothing in it is computed so; else a copy, of the same classes, with plain tensors.

    The values are those of evaluation. The model is not touched.
    """
    names = computed(model)
    if not names:
        return model
    copy = twin(model, {id(tensor): _own(tensor) for tensor in own_tensors(model)})
    modes = {module: module.training for module in copy.modules()}
    copy.eval()
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = copy.get_submodule(path)
        try:
            _refresh(module)
            values = {name: getattr(module, name).detach().clone() for name, _ in _of(module)}
            _undo(module)
        except (RuntimeError, ValueError) as error:
            what = f"its weights are computed, and that cannot be undone: {told(error)}"
            raise ModelError(what, where=path, fix="Store the weights themselves before.") from error
        for name, value in values.items():
            _store(module, name, value, model.get_submodule(path))
    for module, mode in modes.items():
        module.training = mode
    return copy


def _refresh(module: nn.Module) -> None:
    """What a hook computes at every call may be out of date: weights were loaded, or cast, since the last one."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm, prune.BasePruningMethod)):
            hook(module, ())


def _undo(module: nn.Module) -> None:
    """Take away what computes weights; torch's own way to do so would change the class that copies share."""
    hooks = [h for h in module._forward_pre_hooks.values() if isinstance(h, (WeightNorm, SpectralNorm))]
    for hook in hooks:
        (remove_weight_norm if isinstance(hook, WeightNorm) else remove_spectral_norm)(module, hook.name)
    _forget_files(module)
    for pruning in [h for h in module._forward_pre_hooks.values() if isinstance(h, prune.BasePruningMethod)]:
        prune.remove(module, pruning._tensor_name)  # type: ignore[no-untyped-call]
    if parametrize.is_parametrized(module):
        del module._modules["parametrizations"]
        module.__class__ = type(module).__bases__[0]


def _forget_files(module: nn.Module) -> None:
    """The old spectral norm also waits for files with its own tensors, and does not take that back itself."""
    for key, hook in list(module._load_state_dict_pre_hooks.items()):
        if isinstance(getattr(hook, "hook", hook), SpectralNormLoadStateDictPreHook):
            del module._load_state_dict_pre_hooks[key]


def _store(module: nn.Module, name: str, value: Tensor, source: nn.Module) -> None:
    """A plain parameter, frozen if all that it was made of is; a buffer if nothing of that was a parameter."""
    module._parameters.pop(name, None)
    module._buffers.pop(name, None)
    made_of = list(source.parameters())
    if made_of:
        module.register_parameter(name, nn.Parameter(value, any(tensor.requires_grad for tensor in made_of)))
    else:
        module.register_buffer(name, value)


def _own(tensor: Tensor) -> Tensor:
    new = tensor.detach().clone()
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
