"""Make fresh inputs and fresh weights for verification. Inputs resemble the example, with other values, another batch
size and, where the network accepts it, another spatial size or length. Weights: a head of zeros or a tiny layer
scale hides what was cut, so the same cut is repeated in a copy with random parameters. A large network is not
copied: its parameters are drawn when an operator reads them, with the same values every time.
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
from neuron_merging.inputs.input_scale import is_signal
from neuron_merging.inputs.synthetic import find_token_inputs
from neuron_merging.merging.protocol import Merge, MergeResult
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.surgery import apply_plan, build_small_network


def make_fresh_inputs(analysis: Analysis, seed: int = 0) -> Iterator[InputTuple]:
    """Yield inputs like the example's, the most different first. The network may reject them."""
    batch = infer_batch_size(analysis.inputs)
    other = batch if analysis.may_fix_batch_size else (2 if batch in (1, 3) else 3)
    shapes = [(other, True), (other, False)] + ([(batch, False)] if other != batch else [])
    for count, resized in shapes:
        generator = torch.Generator("cpu").manual_seed(seed)
        yield _make_inputs(analysis, count, resized, generator)


def _make_inputs(analysis: Analysis, count: int, resized: bool, generator: torch.Generator) -> InputTuple:
    tokens = find_token_inputs(analysis.graph)
    signals = any(is_signal(value) for value in flatten_inputs(analysis.inputs))

    def make(i: int, value: Tensor) -> Tensor:
        return draw_like(value, (count, *_choose_sample_shape(value, signals, resized)), generator, tokens.get(i))

    return map_batched(analysis.inputs, make)


def _choose_sample_shape(value: Tensor, signals: bool, resized: bool) -> tuple[int, ...]:
    """Choose the shape of one sample: another spatial size for images and series, otherwise another length."""
    if not resized or value.ndim < 2:
        return tuple(value.shape[1:])
    if signals:
        return (
            (value.shape[1], *map(_choose_other_size, value.shape[2:])) if is_signal(value) else tuple(value.shape[1:])
        )
    return (_choose_other_size(value.shape[1]), *value.shape[2:])


def _choose_other_size(size: int) -> int:
    """Choose another size: smaller and cheaper where pooling still works, else larger: 224 → 96, 32 → 24, 8 → 12."""
    if size >= 64:  # a multiple of 32, the total stride of most backbones
        return max(32, round(0.45 * size / 32) * 32)
    return size * 3 // 4 if size >= 16 else size * 3 // 2


MIN_CONSTANT_SCALE = 1e-3
"""A constant parameter below this absolute value hides what it multiplies. Layer scales start at 1e-4 to 1e-6."""
MAX_COPIED_PARAMETERS = 2**24
"""Parameters up to which a second copy is held in memory (64 MiB in float32); larger networks are drawn lazily."""
TensorSampler = Callable[[Tensor], Tensor]
"""Returns a tensor like its argument, with fresh values."""


@dataclass(frozen=True)
class ReinitNetworks:
    """The original with fresh weights, the merges with fresh columns, and the same cut of that network.

    Run them only inside the context manager `within`, which draws lazy parameters.
    """

    graph: Graph
    merged: MergeResult
    small: nn.Module
    within: AbstractContextManager[object]


def find_blocking_parameters(graph: Graph) -> list[str]:
    """Return parameters that block the signal: tensors of one constant near zero, except biases."""
    parameters = ((name, tensor.detach()) for name, tensor in _list_float_parameters(graph).items())
    return [
        name
        for name, t in parameters
        if not name.endswith("bias") and _is_constant(t) and float(t.abs().max()) < MIN_CONSTANT_SCALE
    ]


def reinit_networks(analysis: Analysis, plan: Plan, merged: MergeResult) -> ReinitNetworks:
    """Draw fresh values for all parameters, and repeat the cut in that copy."""
    parameters = _list_float_parameters(analysis.graph)
    if sum(tensor.numel() for tensor in parameters.values()) <= MAX_COPIED_PARAMETERS:
        seeds = iter(range(len(parameters) + len(merged.merges)))
        graph, model, merges = _reinit_tensors(analysis, merged, lambda like: _draw_parameter(like, next(seeds)))
        return ReinitNetworks(graph, merges, apply_plan(model, plan, merges), nullcontext())
    release_free_memory()
    lazy_mode = LazyTensorMode()
    graph, model, merges = _reinit_tensors(analysis, merged, partial(_draw_lazily, lazy_mode))
    return ReinitNetworks(
        graph, merges, build_small_network(model, plan, merges, partial(_hold_parameter, lazy_mode)), lazy_mode
    )


def _reinit_tensors(
    analysis: Analysis, merged: MergeResult, draw: TensorSampler
) -> tuple[Graph, nn.Module, MergeResult]:
    """Return the original's graph and module, and the merges, with values from `draw`."""
    parameters = _list_float_parameters(analysis.graph)
    fresh = {name: draw(tensor) for name, tensor in parameters.items()}
    graph = replace(analysis.graph, tensors={**analysis.graph.tensors, **fresh})
    model = copy_without_hooks(analysis.model, {id(parameters[name]): tensor for name, tensor in fresh.items()})
    merges = tuple(_redraw_columns(merge, parameters, draw) for merge in merged.merges)
    return graph, model, MergeResult(merges, merged.tensors)


def _redraw_columns(merge: Merge, parameters: dict[str, Tensor], draw: TensorSampler) -> Merge:
    # Random columns verify the surgery as well as fitted ones, and need no second fit.
    axis = merge.consumer.axis
    if merge.columns is None or axis is None or axis.tensor not in parameters:
        return merge
    return replace(merge, columns=draw(merge.columns.to(parameters[axis.tensor].dtype)).detach())


def _list_float_parameters(graph: Graph) -> dict[str, Tensor]:
    read = set(graph.parameters.values())
    return {
        name: tensor
        for name, tensor in graph.tensors.items()
        if name in read and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.numel()
    }


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _hold_parameter(lazy_mode: LazyTensorMode, old: Tensor, shape: Shape, make: Callable[[], Tensor]) -> Tensor:
    """Return a placeholder for a parameter, and real values for a buffer: the network's code may write into it."""
    return (
        lazy_mode.create_placeholder(old, shape, make)
        if isinstance(old, nn.Parameter) and old.is_floating_point()
        else make()
    )


def _draw_lazily(lazy_mode: LazyTensorMode, like: Tensor) -> Tensor:
    # The seed is fixed now, so every read of the placeholder draws the same values.
    return lazy_mode.create_placeholder(like, tuple(like.shape), partial(_draw_parameter, like, lazy_mode.count))


def _draw_parameter(like: Tensor, seed: int) -> nn.Parameter:
    """Draw a parameter: weights that preserve the signal's variance; scales and shifts in 0.25..0.75."""
    values = _draw_values(tuple(like.shape), torch.Generator("cpu").manual_seed(seed))
    return nn.Parameter(values.to(like.device, like.dtype), requires_grad=False)


def _draw_values(shape: Shape, generator: torch.Generator) -> Tensor:
    if len(shape) < 2:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(0.5).add_(0.25)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return values.mul_(max(1, values[0].numel()) ** -0.5)  # variance 1 / fan_in
