"""Fold parametrizations into plain weights, in a copy of the model. `torch.nn.utils.parametrize`, weight norm,
spectral norm and `torch.nn.utils.prune` compute a weight at every call; such a weight cannot be given new
columns, a folded one can.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook
from torch.nn.utils.weight_norm import WeightNorm

from neuron_merging.errors import ModelError, describe_error
from neuron_merging.graph.copying import copy_with_own_tensors


def find_computed_weights(model: nn.Module) -> dict[str, str]:
    """The tensors, by name, that torch's own tools compute at every call, and by what.

    >>> net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)))
    >>> find_computed_weights(net)
    {'0.weight': '_WeightNorm'}
    """
    return {
        f"{path}.{name}" if path else name: kind
        for path, module in model.named_modules()
        for name, kind in _iter_computed_weights(module)
    }


def _iter_computed_weights(module: nn.Module) -> Iterator[tuple[str, str]]:
    if parametrize.is_parametrized(module):
        for name, steps in module.parametrizations.items():  # type: ignore[union-attr, operator]
            yield name, ", ".join(type(step).__name__ for step in steps)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            yield hook.name, type(hook).__name__
        if isinstance(hook, prune.BasePruningMethod):
            yield hook._tensor_name, type(hook).__name__


@torch.no_grad()
def fold_parametrizations(model: nn.Module) -> nn.Module:
    """The model itself if nothing in it is computed so; else a copy, of the same classes, with plain tensors.

    The values are those of evaluation. The model is not touched.
    """
    names = find_computed_weights(model)
    if not names:
        return model
    copy = copy_with_own_tensors(model)
    modes = {module: module.training for module in copy.modules()}
    copy.eval()
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = copy.get_submodule(path)
        try:
            _recompute_weights(module)
            values = {name: getattr(module, name).detach().clone() for name, _ in _iter_computed_weights(module)}
            _remove_parametrizations(module)
        except (RuntimeError, ValueError) as error:
            what = f"its weights are computed, and that cannot be undone: {describe_error(error)}"
            raise ModelError(what, where=path, fix="Store the weights themselves before.") from error
        for name, value in values.items():
            _store_plain_tensor(module, name, value, model.get_submodule(path))
    for module, mode in modes.items():
        module.training = mode
    return copy


def _recompute_weights(module: nn.Module) -> None:
    """What a hook computes at every call may be out of date: weights were loaded, or cast, since the last one."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm, prune.BasePruningMethod)):
            hook(module, ())


def _remove_parametrizations(module: nn.Module) -> None:
    """Take away what computes weights; torch's own way to do so would change the class that copies share."""
    hooks = [h for h in module._forward_pre_hooks.values() if isinstance(h, (WeightNorm, SpectralNorm))]
    for hook in hooks:
        (remove_weight_norm if isinstance(hook, WeightNorm) else remove_spectral_norm)(module, hook.name)
    _remove_spectral_norm_load_hooks(module)
    for pruning in [h for h in module._forward_pre_hooks.values() if isinstance(h, prune.BasePruningMethod)]:
        prune.remove(module, pruning._tensor_name)  # type: ignore[no-untyped-call]
    if parametrize.is_parametrized(module):
        del module._modules["parametrizations"]
        module.__class__ = type(module).__bases__[0]


def _remove_spectral_norm_load_hooks(module: nn.Module) -> None:
    """The old spectral norm also waits for files with its own tensors, and does not take that back itself."""
    for key, hook in list(module._load_state_dict_pre_hooks.items()):
        if isinstance(getattr(hook, "hook", hook), SpectralNormLoadStateDictPreHook):
            del module._load_state_dict_pre_hooks[key]


def _store_plain_tensor(module: nn.Module, name: str, value: Tensor, source: nn.Module) -> None:
    """A plain parameter, frozen if all that it was made of is; a buffer if nothing of that was a parameter."""
    module._parameters.pop(name, None)
    module._buffers.pop(name, None)
    made_of = list(source.parameters())
    if made_of:
        module.register_parameter(name, nn.Parameter(value, any(tensor.requires_grad for tensor in made_of)))
    else:
        module.register_buffer(name, value)
