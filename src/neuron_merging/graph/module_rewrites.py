"""Rewrite modules before they are captured. Computed weights (parametrizations, weight norm) become plain ones, and
multi-head attention becomes the separate projections that it consists of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook
from torch.nn.utils.weight_norm import WeightNorm

from neuron_merging.errors import ModelError, describe_error
from neuron_merging.graph.copying import copy_with_own_tensors


def find_computed_weights(model: nn.Module) -> dict[str, str]:
    """Return the tensors, by name, that torch's own tools compute at every call, and the class that does so.

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
    """Return a copy with plain tensors in place of computed weights; the model itself if it has none.

    The values are those of evaluation mode. The model is not changed.
    """
    names = find_computed_weights(model)
    if not names:
        return model
    copy = copy_with_own_tensors(model)
    modes = {module: module.training for module in copy.modules()}
    copy.eval()  # spectral norm takes a step of power iteration at every access in training mode
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = copy.get_submodule(path)
        try:
            _recompute_weights(module)
            values = {name: getattr(module, name).detach().clone() for name, _ in _iter_computed_weights(module)}
            _remove_parametrizations(module)
        except (RuntimeError, ValueError) as error:
            what = f"its computed weights cannot be replaced by plain ones: {describe_error(error)}"
            raise ModelError(what, where=path, fix="Remove what computes them, and keep plain weights.") from error
        for name, value in values.items():
            _store_plain_tensor(module, name, value, model.get_submodule(path))
    for module, mode in modes.items():
        module.training = mode
    return copy


def _recompute_weights(module: nn.Module) -> None:
    """Run the hooks that compute weights: these may be outdated, if tensors were loaded or cast since the last call."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm, prune.BasePruningMethod)):
            hook(module, ())


def _remove_parametrizations(module: nn.Module) -> None:
    """Remove hooks and parametrizations.

    `parametrize.remove_parametrizations` is not used: it deletes a property of the class, which copies share.
    """
    hooks = [h for h in module._forward_pre_hooks.values() if isinstance(h, (WeightNorm, SpectralNorm))]
    for hook in hooks:
        (remove_weight_norm if isinstance(hook, WeightNorm) else remove_spectral_norm)(module, hook.name)
    _remove_spectral_norm_load_hooks(module)
    for pruning in [h for h in module._forward_pre_hooks.values() if isinstance(h, prune.BasePruningMethod)]:
        prune.remove(module, pruning._tensor_name)  # type: ignore[no-untyped-call]
    if parametrize.is_parametrized(module):
        del module._modules["parametrizations"]
        # `parametrize` replaced the class by a subclass of it, which reads the weight from the parametrization.
        module.__class__ = type(module).__bases__[0]


def _remove_spectral_norm_load_hooks(module: nn.Module) -> None:
    """Remove the hook with which the old spectral norm reads its tensors from state dicts: torch leaves it behind."""
    for key, hook in list(module._load_state_dict_pre_hooks.items()):
        if isinstance(getattr(hook, "hook", hook), SpectralNormLoadStateDictPreHook):
            del module._load_state_dict_pre_hooks[key]


def _store_plain_tensor(module: nn.Module, name: str, value: Tensor, source: nn.Module) -> None:
    """Store a computed weight as a parameter, frozen if all its sources are; as a buffer if none is a parameter."""
    module._parameters.pop(name, None)
    module._buffers.pop(name, None)
    sources = list(source.parameters())
    if sources:
        module.register_parameter(name, nn.Parameter(value, any(tensor.requires_grad for tensor in sources)))
    else:
        module.register_buffer(name, value)


class PrunableMultiheadAttention(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` whose heads or input channels may have been removed.

    torch's own forward takes the number of heads and the widths from attributes, this one from its weights.

    Examples
    --------
    >>> attention = nn.MultiheadAttention(8, 2)
    >>> x = torch.randn(3, 1, 8)
    >>> before, _ = attention(x, x, x)
    >>> after, _ = make_heads_prunable(attention)(x, x, x)
    >>> bool(torch.allclose(before, after, atol=1e-6))
    True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what `nn.MultiheadAttention` does. Inside, the batch comes first."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal needs attn_mask")
        # How inputs reach batch-first layout: None as they are, 0 by adding a batch dimension, 1 by a transposition.
        front = None if query.ndim == 3 and self.batch_first else 0 if query.ndim == 2 else 1
        q, k, v = self._project_qkv(*_move_batch_first((query, key, value), front))
        q, k, v = (self._split_heads(part) for part in (q, k, v))
        # As in torch, `is_causal` is a hint that the kernel can use only if no other mask is added.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._build_attention_mask(attn_mask, key_padding_mask, q)
        if self.add_zero_attn:
            k, v, mask = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), None if mask is None else F.pad(mask, (0, 1))
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = q * math.sqrt(1.0 / q.shape[-1]) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout, self.training)
            read = weights @ v
        else:
            read = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        out: Tensor = self.out_proj(read.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if front == 0 else weights
        return out if front is None else out.squeeze(0) if front == 0 else out.transpose(0, 1), weights

    def _project_qkv(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if query is key is value and self.in_proj_weight is not None:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            packed = self.in_proj_weight is not None
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = self.in_proj_weight.chunk(3) if packed else separate
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), -1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        return q, k, v

    def _split_heads(self, x: Tensor) -> Tensor:
        # The number of heads is inferred (-1): some may have been removed.
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _build_attention_mask(self, pairs: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Return the mask to add to the scores, from attention mask and key padding mask; None without both."""
        parts = []
        if pairs is not None:
            parts.append(pairs.view(len(q), -1, *pairs.shape[1:]) if pairs.ndim == 3 else pairs[None, None])
        if padding is not None:
            parts.append(padding.view(len(q), 1, 1, -1))
        padding_for_bias = (0, 0 if self.bias_k is None else 1)  # bias_k is one more key, which is never masked
        added = [F.pad(_to_additive_mask(part, q.dtype), padding_for_bias) for part in parts]
        return sum(added[1:], added[0]) if added else None


def _move_batch_first(values: tuple[Tensor, ...], front: int | None) -> list[Tensor]:
    """Return the tensors with the batch first. Identical inputs stay identical, which marks self-attention."""
    if front is None:
        return list(values)
    batch_first = {id(x): x.unsqueeze(0) if front == 0 else x.transpose(0, 1) for x in values}
    return [batch_first[id(x)] for x in values]


def _to_additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def make_heads_prunable(model: nn.Module, paths: Iterable[str] | None = None) -> nn.Module:
    """Turn `nn.MultiheadAttention` modules (those at `paths`, or all) into `PrunableMultiheadAttention`, in place.

    Return the model. Call it on copies only, never on the user's model.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for module in modules.values() if paths is None else (modules[path] for path in paths):
        # Not of a subclass: its forward() may compute something else.
        if type(module) in (nn.MultiheadAttention, PrunableMultiheadAttention):
            _make_attention_prunable(module)
    for module in modules.values():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(m, PrunableMultiheadAttention) for m in module.modules()
        ):
            module.use_nested_tensor = False  # nested tensors are for the fused kernels only
    return model


def _make_attention_prunable(module: nn.MultiheadAttention) -> None:
    module.__class__ = PrunableMultiheadAttention
    module._qkv_same_embed_dim = False  # keeps torch from its fused kernels, which assume that no head is removed
    weight = module.in_proj_weight if module.in_proj_weight is not None else module.q_proj_weight
    module.num_heads = module.out_proj.weight.shape[1] // module.head_dim
    module.embed_dim = weight.shape[1]
