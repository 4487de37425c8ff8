"""Hollow networks: shapes without values, on which code runs in no time and needs no memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from neuron_merging.graph.attention import with_free_heads
from neuron_merging.graph.capture import trace
from neuron_merging.graph.copying import bare_copy, own_tensors
from neuron_merging.graph.quiet import as_exported, plain_attention, quiet
from neuron_merging.graph.trees import called, copied
from neuron_merging.graph.values import Graph, Shape


class Hollow:
    """A copy of a network whose tensors have the given shapes and no values.

    With `exported` its code is told that it is being exported: some operators know no shapes of their own elsewhere.

    >>> narrow = Hollow(nn.Linear(4, 8), lambda weight: (3, *weight.shape[1:]))
    >>> narrow.run((torch.zeros(2, 4),)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        shape_of: Callable[[Tensor], Shape],
        prepare: Callable[[nn.Module], None] | None = None,
        exported: bool = False,
    ) -> None:
        self._way = as_exported if exported else nullcontext
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            made = {id(tensor): _empty(tensor, shape_of(tensor)) for tensor in own_tensors(model)}
        self.model = _with_buffers(bare_copy(model, made).eval())
        if prepare is not None:
            with self._mode:
                prepare(self.model)
        with_free_heads(self.model)

    def run(self, inputs: tuple[Any, ...], within: AbstractContextManager[Any] | None = None) -> Any:
        """What the network's own code returns, as shapes; `within` sees every operator."""
        with quiet(), plain_attention(), torch.no_grad(), self._way(), self._mode, within or nullcontext():
            return called(self.model, copied(self._hollow(inputs)))

    def trace(self, inputs: tuple[Any, ...]) -> Graph:
        """The graph that its code amounts to."""
        with self._mode:
            return trace(self.model, self._hollow(inputs))

    def _hollow(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        found: tuple[Any, ...] = tree_map(self._like, inputs)
        return found

    def _like(self, value: Any) -> Any:
        return self._mode.from_tensor(value) if isinstance(value, Tensor) else value


def _with_buffers(model: nn.Module) -> nn.Module:
    """The network with its plain tensors as buffers: an export takes those for values, of which these have none."""
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if isinstance(value, Tensor)]:
            value = module.__dict__.pop(name)
            if hasattr(type(module), name):
                module.__class__ = _seeing(type(module), name)
            module._buffers[name] = value
            module._non_persistent_buffers_set.add(name)
    return model


def _seeing(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """A class whose own attribute of this name does not hide the buffer."""
    return type(kind.__name__, (kind,), {name: property(lambda module: module._buffers[name])})


def _empty(tensor: Tensor, shape: Shape) -> Tensor:
    made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made
