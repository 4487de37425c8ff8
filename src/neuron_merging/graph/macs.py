"""Count multiply-accumulates with torch's flop counter (two flops each), on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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

from neuron_merging.graph.example_inputs import normalize_inputs
from neuron_merging.graph.fake_module import FakeModule
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import bind_arguments
from neuron_merging.graph.process_state import disable_fused_attention, silence_logging


def count_macs(model: nn.Module, example_inputs: Any) -> int:
    """Count the multiply-accumulates of one forward pass of a network's own code.

    Parameters
    ----------
    model
        The network. It is run on fake tensors, without its values.
    example_inputs
        A tensor, or a tuple of the network's positional inputs.

    Returns
    -------
    int
        Half of what torch's flop counter counts: a multiply-accumulate is two flops.

    Examples
    --------
    >>> count_macs(nn.Linear(3, 2), torch.zeros(1, 3))
    6
    """
    counter = FlopCounterMode(display=False)
    FakeModule(model, lambda tensor: tuple(tensor.shape)).run(normalize_inputs(example_inputs, model), counter)
    return int(counter.get_total_flops()) // 2


def count_graph_macs(graph: Graph) -> int:
    """Count the multiply-accumulates of one run of a graph."""
    return sum(count_node_macs(graph).values())


def count_node_macs(graph: Graph) -> Mapping[str, int]:
    """Return the multiply-accumulates of every node of a graph, by name. They are counted once per graph."""
    if graph not in _NODE_MACS_CACHE:
        _NODE_MACS_CACHE[graph] = _count_distinct_calls(graph)
    return _NODE_MACS_CACHE[graph]


_NODE_MACS_CACHE: WeakKeyDictionary[Graph, dict[str, int]] = WeakKeyDictionary()


def _count_distinct_calls(graph: Graph) -> dict[str, int]:
    """Count every node of a graph. Calls with equal operator, arguments and shapes are counted once."""
    macs_by_call: dict[object, int] = {}
    macs: dict[str, int] = {}
    counter = _NodeMacCounter(graph)
    with silence_logging(), disable_fused_attention(), torch.no_grad(), counter.mode, counter.counter:
        for node in graph.nodes:
            # By shapes and dtypes: repeated layers, which are most of a deep network, are run once.
            key = (node.fn, repr(bind_arguments(node, counter.describe_operands(node))))
            if key not in macs_by_call:
                macs_by_call[key] = counter.count_single_node(node)
            macs[node.name] = macs_by_call[key]
    return macs


class _NodeMacCounter:
    """Count single operators of a graph by running them on fake tensors."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.counter = FlopCounterMode(display=False)
        self._device = next((tensor.device for tensor in graph.tensors.values()), torch.device("cpu"))

    def describe_operands(self, node: Node) -> dict[str, object]:
        """Return shape and dtype of the node's operands: all that its cost depends on."""
        shapes, dtypes = self.graph.shapes, self.graph.dtypes
        return {r.name: (shapes.get(r.name), dtypes.get(r.name)) if r.name in dtypes else r for r in node.refs()}

    def count_single_node(self, node: Node) -> int:
        """Run one node on fake operands and return its multiply-accumulates."""
        call = self._prepare_call(node)
        before = self.counter.get_total_flops()
        try:
            call()
        except (DataDependentOutputException, DynamicOutputShapeException):
            return 0  # the output depends on values, as in nonzero(): no arithmetic to count
        return int(self.counter.get_total_flops() - before) // 2

    def _prepare_call(self, node: Node) -> Callable[[], object]:
        """Return a function that runs the node; for a block of operators, its subgraph."""
        refs = list(node.refs())
        if not all(ref.name in self.graph.dtypes or ref.name in self.graph.subgraphs for ref in refs):
            return lambda: None  # an operand is a list or a scalar: getitem, or size arithmetic
        values = {ref.name: self._create_operand(ref) for ref in refs}
        subgraph = next((values[ref.name] for ref in refs if ref.name in self.graph.subgraphs), None)
        if subgraph is not None:
            operands = [value for value in values.values() if isinstance(value, Tensor)]
            return lambda: subgraph(*operands)
        return lambda: node.compute(bind_arguments(node, values))

    def _create_operand(self, ref: Ref) -> Any:
        if ref.name in self.graph.subgraphs:
            return self.graph.subgraphs[ref.name]
        shape, dtype = self.graph.shapes[ref.name], self.graph.dtypes[ref.name]
        return torch.empty(shape, dtype=dtype, device=self._device)


ENTRY_COST = 30
"""Multiply-accumulates that take as long as writing one entry of an activation, on a CPU."""


def estimate_work(graph: Graph, nodes: Iterable[Node] | None = None) -> int:
    """Estimate the time of a forward pass, of all or of some nodes, in multiply-accumulates of a dense layer.

    Small convolutions and element-wise operators are limited by memory: MACs alone would underestimate networks such as
    MobileNet by a factor of two or more.
    """
    costs = count_node_macs(graph)
    chosen = graph.nodes if nodes is None else nodes
    return sum(costs.get(node.name, 0) + ENTRY_COST * math.prod(node.shape or (0,)) for node in chosen)
