"""Higher stakes: networks with fresh random values where theirs hide what was cut.

A head of zeros, a gate of zero or a tiny layer scale lets through nothing, so outputs that agree say nothing either.
The same cut is made once more, in a copy whose parameters say something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.cutting.plan import Plan
from neuron_merging.cutting.surgery import apply_plan
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.values import Graph
from neuron_merging.mergers.interface import Merge, Merged

TINY = 1e-3
"""A constant that is smaller hides what it multiplies."""


@dataclass(frozen=True)
class Raised:
    """The original with fresh values, what the merges make of it, and the same cut of it."""

    graph: Graph
    model: nn.Module
    merged: Merged
    small: nn.Module


def hiding(graph: Graph) -> list[str]:
    """Parameters that let nothing through: constants of zero or nearly so, beyond biases."""
    chosen = ((name, tensor.detach()) for name, tensor in _parameters(graph).items())
    return [name for name, t in chosen if not name.endswith("bias") and _constant(t) and float(t.abs().max()) < TINY]


def raised(analysis: Analysis, plan: Plan, merged: Merged) -> Raised:
    """Fresh values for all parameters, and the cut made in that copy."""
    pick = torch.Generator("cpu").manual_seed(0)
    own = _parameters(analysis.graph)
    fresh = {name: _fresh(tensor, pick) for name, tensor in own.items()}
    graph = replace(analysis.graph, tensors={**analysis.graph.tensors, **fresh})
    model = bare_copy(analysis.model, {id(own[name]): tensor for name, tensor in fresh.items()})
    merges = Merged(tuple(_refreshed(merge, fresh, pick) for merge in merged.merges), merged.tensors)
    return Raised(graph, model, merges, apply_plan(model, plan, merges))


def _parameters(graph: Graph) -> dict[str, Tensor]:
    read = set(graph.parameters.values())
    return {
        name: tensor
        for name, tensor in graph.tensors.items()
        if name in read and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.numel()
    }


def _constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _fresh(tensor: Tensor, pick: torch.Generator) -> nn.Parameter:
    """Weights that keep the size of a signal; scales and shifts around one half."""
    shape = tuple(tensor.shape)
    if tensor.ndim > 1:
        made = torch.randn(shape, generator=pick, dtype=torch.float64, device="cpu")
        made = made * max(1, tensor[0].numel()) ** -0.5
    else:
        made = 0.25 + 0.5 * torch.rand(shape, generator=pick, dtype=torch.float64, device="cpu")
    return nn.Parameter(made.to(tensor.device, tensor.dtype), requires_grad=False)


def _refreshed(merge: Merge, fresh: Mapping[str, Tensor], pick: torch.Generator) -> Merge:
    axis = merge.consumer.axis
    if merge.columns is None or axis is None or axis.tensor not in fresh:
        return merge
    return replace(merge, columns=_fresh(merge.columns, pick).detach())
