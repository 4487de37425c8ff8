"""Modules without stored weights.

`FakeModule` has fake tensors (shapes without values), on which the model's code runs at no cost. `LazyTensorMode`
creates a parameter's values when an operator reads them, and drops them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from neuron_merging.graph.capture import trace_graph
from neuron_merging.graph.copying import copy_without_hooks, iter_module_tensors
from neuron_merging.graph.example_inputs import call_model, clone_inputs
from neuron_merging.graph.graph import Graph, Shape
from neuron_merging.graph.module_rewrites import make_heads_prunable
from neuron_merging.graph.process_state import disable_fused_attention, silence_logging, simulate_export


class FakeModule:
    """A copy of a network whose tensors have the given shapes and no values.

    With `exported`, `torch.compiler.is_exporting()` is true while it runs: some code has a path for fake tensors only
    under export.

    >>> narrow = FakeModule(nn.Linear(4, 8), lambda weight: (3, *weight.shape[1:]))
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
        self._export_context = simulate_export if exported else nullcontext
        # The model's code may combine fake tensors with real ones that it keeps outside of its modules.
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake_mode:
            empty = {
                id(tensor): _create_empty_tensor(tensor, shape_of(tensor)) for tensor in iter_module_tensors(model)
            }
        self.model = _register_tensors_as_buffers(copy_without_hooks(model, empty).eval())
        if prepare is not None:
            with self._fake_mode:
                prepare(self.model)
        make_heads_prunable(self.model)

    def run(self, inputs: tuple[Any, ...], within: AbstractContextManager[Any] | None = None) -> Any:
        """Run the network's code and return fake outputs. `within` is a context to run in, such as a flop counter."""
        with (
            silence_logging(),
            disable_fused_attention(),
            torch.no_grad(),
            self._export_context(),
            self._fake_mode,
            within or nullcontext(),
        ):
            return call_model(self.model, clone_inputs(self._convert_inputs_to_fake(inputs)))

    def trace(self, inputs: tuple[Any, ...]) -> Graph:
        """Capture the network's graph."""
        with self._fake_mode:
            return trace_graph(self.model, self._convert_inputs_to_fake(inputs))

    def _convert_inputs_to_fake(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        fake_inputs: tuple[Any, ...] = tree_map(self._convert_to_fake, inputs)
        return fake_inputs

    def _convert_to_fake(self, value: Any) -> Any:
        return self._fake_mode.from_tensor(value) if isinstance(value, Tensor) else value


def _register_tensors_as_buffers(model: nn.Module) -> nn.Module:
    """Turn plain tensor attributes into buffers. Return the network.

    torch.export stores plain tensors as constants, with their values, and fake tensors have none.
    """
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if isinstance(value, Tensor)]:
            value = module.__dict__.pop(name)
            if hasattr(type(module), name):  # a class attribute would hide the buffer
                module.__class__ = _subclass_with_buffer(type(module), name)
            module._buffers[name] = value
            module._non_persistent_buffers_set.add(name)
    return model


def _subclass_with_buffer(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """Return a subclass that reads this attribute from the buffers."""
    return type(kind.__name__, (kind,), {name: property(lambda module: module._buffers[name])})


def _create_empty_tensor(tensor: Tensor, shape: Shape) -> Tensor:
    empty = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


class LazyTensorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Give placeholder tensors their values while an operator reads them, so that one weight is in memory at a time.

    >>> lazy = LazyTensorMode()
    >>> ones = lazy.create_placeholder(torch.zeros(2), (3,), lambda: torch.ones(3))
    >>> with lazy:
    ...     ones + ones
    tensor([2., 2., 2.])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value_makers: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    @property
    def count(self) -> int:
        """The number of placeholders created so far."""
        return len(self._value_makers)

    def create_placeholder(self, like: Tensor, shape: tuple[int, ...], make: Callable[[], Tensor]) -> Tensor:
        """Return a placeholder of this shape that takes up no memory; `make` computes its values when they are read.

        Outside of the mode it is NaN everywhere, so that an accidental use is noticed.
        """
        memory = torch.full((), torch.nan, dtype=like.dtype, device=like.device)
        self._value_makers[_get_storage_address(memory)] = memory, make
        return nn.Parameter(memory.expand(shape), requires_grad=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._materialize, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _materialize(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or _get_storage_address(value) not in self._value_makers:
            return value
        like, make = self._value_makers[_get_storage_address(value)]
        with self:  # `make` may read other placeholders
            return make().to(like)


def _get_storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which identifies a placeholder: detached copies and views share it."""
    return tensor.untyped_storage().data_ptr()
