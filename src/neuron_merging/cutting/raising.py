"""Higher stakes: networks with fresh random values where theirs hide what was cut.

A head of zeros, a gate of zero or a tiny layer scale lets through nothing, so outputs that agree say nothing either.
The same cut is made once more, in a copy whose parameters say something. A large network is not held twice for that:
stand-ins without values take the place of its tensors, and every operator that reads one is given values that are
drawn then and there, the same every time (`graph.drawing`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.cutting.plan import Plan
from neuron_merging.cutting.surgery import apply_plan, smaller
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.drawing import Drawing
from neuron_merging.graph.memory import hand_back
from neuron_merging.graph.values import Graph, Shape
from neuron_merging.mergers.interface import Merge, Merged

TINY = 1e-3
"""A constant that is smaller hides what it multiplies."""
LARGEST = 2**24
"""Parameters of a network that is held a second time."""
Draw = Callable[[Tensor], Tensor]
"""A tensor in, one like it with fresh values out."""


@dataclass(frozen=True)
class Raised:
    """The original with fresh values, what the merges make of it, and the same cut of it; only to be run `within`."""

    graph: Graph
    merged: Merged
    small: nn.Module
    within: AbstractContextManager[object]


def hiding(graph: Graph) -> list[str]:
    """Parameters that let nothing through: constants of zero or nearly so, beyond biases."""
    chosen = ((name, tensor.detach()) for name, tensor in _parameters(graph).items())
    return [name for name, t in chosen if not name.endswith("bias") and _constant(t) and float(t.abs().max()) < TINY]


def raised(analysis: Analysis, plan: Plan, merged: Merged) -> Raised:
    """Fresh values for all parameters, and the cut made in that copy."""
    own = _parameters(analysis.graph)
    if sum(tensor.numel() for tensor in own.values()) <= LARGEST:
        seeds = iter(range(len(own) + len(merged.merges)))
        graph, model, merges = _refreshed(analysis, merged, lambda like: _fresh(like, next(seeds)))
        return Raised(graph, merges, apply_plan(model, plan, merges), nullcontext())
    hand_back()
    drawing = Drawing()
    graph, model, merges = _refreshed(analysis, merged, partial(_later, drawing))
    return Raised(graph, merges, smaller(model, plan, merges, partial(_held, drawing)), drawing)


def _refreshed(analysis: Analysis, merged: Merged, draw: Draw) -> tuple[Graph, nn.Module, Merged]:
    """The original and the merges with other values."""
    own = _parameters(analysis.graph)
    fresh = {name: draw(tensor) for name, tensor in own.items()}
    graph = replace(analysis.graph, tensors={**analysis.graph.tensors, **fresh})
    model = bare_copy(analysis.model, {id(own[name]): tensor for name, tensor in fresh.items()})
    merges = tuple(_with_columns(merge, own, draw) for merge in merged.merges)
    return graph, model, Merged(merges, merged.tensors)


def _with_columns(merge: Merge, own: dict[str, Tensor], draw: Draw) -> Merge:
    axis = merge.consumer.axis
    if merge.columns is None or axis is None or axis.tensor not in own:
        return merge
    return replace(merge, columns=draw(merge.columns.to(own[axis.tensor].dtype)).detach())


def _parameters(graph: Graph) -> dict[str, Tensor]:
    read = set(graph.parameters.values())
    return {
        name: tensor
        for name, tensor in graph.tensors.items()
        if name in read and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.numel()
    }


def _constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _held(drawing: Drawing, old: Tensor, shape: Shape, make: Callable[[], Tensor]) -> Tensor:
    """What the network's code may write into has to be there."""
    return drawing.hold(old, shape, make) if isinstance(old, nn.Parameter) and old.is_floating_point() else make()


def _later(drawing: Drawing, like: Tensor) -> Tensor:
    return drawing.hold(like, tuple(like.shape), partial(_fresh, like, drawing.count))


def _fresh(like: Tensor, seed: int) -> nn.Parameter:
    """Weights that keep the size of a signal; scales and shifts around one half."""
    made = _values(tuple(like.shape), torch.Generator("cpu").manual_seed(seed))
    return nn.Parameter(made.to(like.device, like.dtype), requires_grad=False)


def _values(shape: Shape, pick: torch.Generator) -> Tensor:
    if len(shape) < 2:
        return torch.rand(shape, generator=pick, dtype=torch.float32, device="cpu").mul_(0.5).add_(0.25)
    made = torch.randn(shape, generator=pick, dtype=torch.float32, device="cpu")
    return made.mul_(max(1, made[0].numel()) ** -0.5)
