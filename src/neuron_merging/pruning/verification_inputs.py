"""Fresh inputs and fresh weights for verification. Inputs: like the example, with other values, another batch size
and, where the network takes it, another spatial size or length. Weights: a head of zeros or a tiny layer scale
hides what was cut, so the same cut is repeated in a copy with random parameters. A large network is not copied:
its parameters are drawn when an operator reads them, with the same values every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.example_inputs import InputTuple, draw_like, infer_batch_size, map_batched
from neuron_merging.graph.fake_module import LazyTensorMode
from neuron_merging.graph.graph import Graph, Shape
from neuron_merging.graph.process_state import release_free_memory
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs.synthetic import find_token_inputs, is_signal
from neuron_merging.merging.protocol import Merge, MergeResult
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.surgery import apply_plan, build_small_network


def make_fresh_inputs(analysis: Analysis, seed: int = 0) -> Iterator[InputTuple]:
    """Inputs like the example's, the most different first; whether the network takes them is not known yet."""
    batch = infer_batch_size(analysis.inputs)
    other = batch if analysis.may_fix_batch_size else (2 if batch in (1, 3) else 3)
    shapes = [(other, True), (other, False)] + ([(batch, False)] if other != batch else [])
    for count, resized in shapes:
        pick = torch.Generator("cpu").manual_seed(seed)
        yield _make_inputs(analysis, count, resized, pick)


def _make_inputs(analysis: Analysis, count: int, resized: bool, pick: torch.Generator) -> InputTuple:
    tokens = find_token_inputs(analysis.graph)
    signals = any(is_signal(value) for value in flatten_inputs(analysis.inputs))

    def make(i: int, value: Tensor) -> Tensor:
        return draw_like(value, (count, *_choose_sample_shape(value, signals, resized)), pick, tokens.get(i))

    return map_batched(analysis.inputs, make)


def _choose_sample_shape(value: Tensor, signals: bool, resized: bool) -> tuple[int, ...]:
    """What one entry of the batch measures: images and series another size, otherwise sequences another length."""
    if not resized or value.ndim < 2:
        return tuple(value.shape[1:])
    if signals:
        return (
            (value.shape[1], *map(_choose_other_size, value.shape[2:])) if is_signal(value) else tuple(value.shape[1:])
        )
    return (_choose_other_size(value.shape[1]), *value.shape[2:])


def _choose_other_size(size: int) -> int:
    """A smaller size where that is safe to pool, and cheaper: 224 → 96, 32 → 24, 8 → 12."""
    if size >= 64:
        return max(32, round(0.45 * size / 32) * 32)
    return size * 3 // 4 if size >= 16 else size * 3 // 2


MIN_CONSTANT_SCALE = 1e-3
"""A constant that is smaller hides what it multiplies."""
MAX_COPIED_PARAMETERS = 2**24
"""Parameters of a network that is held a second time."""
TensorSampler = Callable[[Tensor], Tensor]
"""A tensor in, one like it with fresh values out."""


@dataclass(frozen=True)
class ReinitNetworks:
    """The original with fresh values, what the merges make of it, and the same cut of it; only to be run `within`."""

    graph: Graph
    merged: MergeResult
    small: nn.Module
    within: AbstractContextManager[object]


def find_blocking_parameters(graph: Graph) -> list[str]:
    """Parameters that let nothing through: constants of zero or nearly so, beyond biases."""
    chosen = ((name, tensor.detach()) for name, tensor in _list_float_parameters(graph).items())
    return [
        name
        for name, t in chosen
        if not name.endswith("bias") and _is_constant(t) and float(t.abs().max()) < MIN_CONSTANT_SCALE
    ]


def reinit_networks(analysis: Analysis, plan: Plan, merged: MergeResult) -> ReinitNetworks:
    """Fresh values for all parameters, and the cut made in that copy."""
    own = _list_float_parameters(analysis.graph)
    if sum(tensor.numel() for tensor in own.values()) <= MAX_COPIED_PARAMETERS:
        seeds = iter(range(len(own) + len(merged.merges)))
        graph, model, merges = _reinit_tensors(analysis, merged, lambda like: _draw_parameter(like, next(seeds)))
        return ReinitNetworks(graph, merges, apply_plan(model, plan, merges), nullcontext())
    release_free_memory()
    drawing = LazyTensorMode()
    graph, model, merges = _reinit_tensors(analysis, merged, partial(_draw_lazily, drawing))
    return ReinitNetworks(
        graph, merges, build_small_network(model, plan, merges, partial(_hold_parameter, drawing)), drawing
    )


def _reinit_tensors(
    analysis: Analysis, merged: MergeResult, draw: TensorSampler
) -> tuple[Graph, nn.Module, MergeResult]:
    """The original and the merges with other values."""
    own = _list_float_parameters(analysis.graph)
    fresh = {name: draw(tensor) for name, tensor in own.items()}
    graph = replace(analysis.graph, tensors={**analysis.graph.tensors, **fresh})
    model = copy_without_hooks(analysis.model, {id(own[name]): tensor for name, tensor in fresh.items()})
    merges = tuple(_redraw_columns(merge, own, draw) for merge in merged.merges)
    return graph, model, MergeResult(merges, merged.tensors)


def _redraw_columns(merge: Merge, own: dict[str, Tensor], draw: TensorSampler) -> Merge:
    axis = merge.consumer.axis
    if merge.columns is None or axis is None or axis.tensor not in own:
        return merge
    return replace(merge, columns=draw(merge.columns.to(own[axis.tensor].dtype)).detach())


def _list_float_parameters(graph: Graph) -> dict[str, Tensor]:
    read = set(graph.parameters.values())
    return {
        name: tensor
        for name, tensor in graph.tensors.items()
        if name in read and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.numel()
    }


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _hold_parameter(drawing: LazyTensorMode, old: Tensor, shape: Shape, make: Callable[[], Tensor]) -> Tensor:
    """What the network's code may write into has to be there."""
    return (
        drawing.create_placeholder(old, shape, make)
        if isinstance(old, nn.Parameter) and old.is_floating_point()
        else make()
    )


def _draw_lazily(drawing: LazyTensorMode, like: Tensor) -> Tensor:
    return drawing.create_placeholder(like, tuple(like.shape), partial(_draw_parameter, like, drawing.count))


def _draw_parameter(like: Tensor, seed: int) -> nn.Parameter:
    """Weights that keep the size of a signal; scales and shifts around one half."""
    made = _draw_values(tuple(like.shape), torch.Generator("cpu").manual_seed(seed))
    return nn.Parameter(made.to(like.device, like.dtype), requires_grad=False)


def _draw_values(shape: Shape, pick: torch.Generator) -> Tensor:
    if len(shape) < 2:
        return torch.rand(shape, generator=pick, dtype=torch.float32, device="cpu").mul_(0.5).add_(0.25)
    made = torch.randn(shape, generator=pick, dtype=torch.float32, device="cpu")
    return made.mul_(max(1, made[0].numel()) ** -0.5)
