"""Count multiply-accumulates with torch's flop counter (two flops each), on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils.flop_counter import FlopCounterMode

from neuron_merging.graph.fake_module import FakeModule
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import bind_arguments
from neuron_merging.graph.process_state import disable_fused_attention, silence_logging
from neuron_merging.graph.pytree import normalize_inputs


def count_macs(model: nn.Module, example_inputs: Any) -> int:
    """Multiply-accumulates of one forward pass of a network's own code.

    Parameters
    ----------
    model
        The network; it is not run with its values.
    example_inputs
        A tensor, or a tuple of the network's positional inputs.

    Returns
    -------
    What torch's flop counter counts, halved.

    Examples
    --------
    >>> count_macs(nn.Linear(3, 2), torch.zeros(1, 3))
    6
    """
    counter = FlopCounterMode(display=False)
    FakeModule(model, lambda tensor: tuple(tensor.shape)).run(normalize_inputs(example_inputs, model), counter)
    return int(counter.get_total_flops()) // 2


def count_graph_macs(graph: Graph) -> int:
    """Multiply-accumulates of one run of a graph."""
    return sum(count_node_macs(graph).values())


def count_node_macs(graph: Graph) -> Mapping[str, int]:
    """Multiply-accumulates of every operator of a graph, counted when it is first asked."""
    if graph not in _NODE_MACS_CACHE:
        _NODE_MACS_CACHE[graph] = _count_distinct_calls(graph)
    return _NODE_MACS_CACHE[graph]


_NODE_MACS_CACHE: WeakKeyDictionary[Graph, dict[str, int]] = WeakKeyDictionary()


def _count_distinct_calls(graph: Graph) -> dict[str, int]:
    """Operators that are called alike are counted once."""
    known: dict[object, int] = {}
    found: dict[str, int] = {}
    counter = _NodeMacCounter(graph)
    with silence_logging(), disable_fused_attention(), torch.no_grad(), counter.mode, counter.counter:
        for node in graph.nodes:
            key = (node.fn, repr(bind_arguments(node, counter.describe_operands(node))))
            if key not in known:
                known[key] = counter.count_single_node(node)
            found[node.name] = known[key]
    return found


class _NodeMacCounter:
    """Runs single operators of a graph on tensors that have the right shapes and no values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.counter = FlopCounterMode(display=False)
        self._device = next((tensor.device for tensor in graph.tensors.values()), torch.device("cpu"))

    def describe_operands(self, node: Node) -> dict[str, object]:
        """What distinguishes the node's operands, as far as its cost goes."""
        shapes, dtypes = self.graph.shapes, self.graph.dtypes
        return {r.name: (shapes.get(r.name), dtypes.get(r.name)) if r.name in dtypes else r for r in node.refs()}

    def count_single_node(self, node: Node) -> int:
        work = self._prepare_call(node)
        before = self.counter.get_total_flops()
        try:
            work()
        except (DataDependentOutputException, DynamicOutputShapeException):
            return 0  # it looks at values, which is no arithmetic
        return int(self.counter.get_total_flops() - before) // 2

    def _prepare_call(self, node: Node) -> Callable[[], object]:
        """The call; of a block of operators, its inside."""
        refs = list(node.refs())
        if not all(ref.name in self.graph.dtypes or ref.name in self.graph.subgraphs for ref in refs):
            return lambda: None  # it takes a list apart, or computes with a number
        values = {ref.name: self._create_operand(ref) for ref in refs}
        inside = next((values[ref.name] for ref in refs if ref.name in self.graph.subgraphs), None)
        if inside is not None:
            operands = [value for value in values.values() if isinstance(value, Tensor)]
            return lambda: inside(*operands)
        return lambda: node.compute(bind_arguments(node, values))

    def _create_operand(self, ref: Ref) -> Any:
        if ref.name in self.graph.subgraphs:
            return self.graph.subgraphs[ref.name]
        shape, dtype = self.graph.shapes[ref.name], self.graph.dtypes[ref.name]
        return torch.empty(shape, dtype=dtype, device=self._device)
