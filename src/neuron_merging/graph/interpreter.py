"""Run a graph node by node; a value is dropped after its last use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from neuron_merging import progress
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.pytree import clone_inputs


class Interpreter:
    """A run of a graph, node by node; values are dropped after their last use."""

    def __init__(self, graph: Graph, inputs: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        given = zip(graph.inputs, clone_inputs(inputs), strict=True)
        self.values: dict[str, Any] = {name: value for name, value in given if name is not None}
        self.values |= {**graph.constants, **graph.subgraphs}
        self.values |= {value: tensors[name] for value, name in graph.parameters.items()}
        self.values |= {value: self.values[value].clone() for value in graph.mutated_tensors}
        self._last = {ref.name: node.name for node in graph.nodes for ref in node.refs()}
        self._results = [ref.name for ref in graph.outputs]

    def arguments(self, node: Node) -> dict[str, Any]:
        return bind_arguments(node, self.values)

    def step(self, node: Node, value: Any) -> Any:
        """Take note of a node's value."""
        self.values[node.name] = value
        for ref in node.refs():
            if self._last[ref.name] == node.name and ref.name not in self._results:
                self.values.pop(ref.name, None)
        return value

    def fork(self) -> Interpreter:
        """The same run so far; what either does from here on is its own."""
        twin = copy.copy(self)
        twin.values = dict(self.values)
        return twin

    def outputs(self) -> list[Any]:
        return [self.values[name] for name in self._results]


def bind_arguments(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """The node's arguments with values in place of references."""
    return {name: _resolve_refs(value, values) for name, value in node.args.items()}


def _resolve_refs(value: Any, env: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return env[value.name]
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve_refs(item, env) for item in value)
    return value


def run_graph(
    graph: Graph,
    inputs: Sequence[Any],
    tensors: Mapping[str, Tensor],
    call: Callable[[Node, dict[str, Any]], Any] = Node.compute,
) -> list[Any]:
    """Execute the graph node by node; `call` computes a node from its bound arguments."""
    execution = Interpreter(graph, inputs, tensors)
    for node in progress.track_progress(graph.nodes, "running the network"):
        execution.step(node, call(node, execution.arguments(node)))
    return execution.outputs()
