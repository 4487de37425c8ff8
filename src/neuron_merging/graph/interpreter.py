"""Run a captured graph: plainly, with other tensors, with a hook around every node, forked at a node, or node by
node beside another run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from neuron_merging import progress
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.pytree import clone_inputs

NodeHook = Callable[[Node, dict[str, Any]], Any]
"""Computes a node from its bound arguments."""


class Interpreter:
    """One run of a graph, node by node. A value is dropped after its last use.

    `inputs` are flat, as `flatten_inputs` gives them. `tensors` stand in for the graph's parameters and buffers, by
    name. `hook` computes each node in place of `Node.compute`.
    """

    def __init__(
        self, graph: Graph, inputs: Sequence[Any], tensors: Mapping[str, Tensor], hook: NodeHook = Node.compute
    ) -> None:
        given = zip(graph.inputs, clone_inputs(inputs), strict=True)
        self.graph, self.tensors, self.hook = graph, tensors, hook
        self.values: dict[str, Any] = {name: value for name, value in given if name is not None}
        self.values |= {**graph.constants, **graph.subgraphs}
        self.values |= {value: tensors[name] for value, name in graph.parameters.items()}
        self.values |= {value: self.values[value].clone() for value in graph.mutated_tensors}
        self._position = 0
        self._last = {ref.name: node.name for node in graph.nodes for ref in node.refs()}
        self._results = [ref.name for ref in graph.outputs]

    def arguments(self, node: Node) -> dict[str, Any]:
        """A node's arguments, with the values of this run in place of references."""
        return bind_arguments(node, self.values)

    def run_node(self, node: Node) -> Any:
        """Compute the next node."""
        value = self.values[node.name] = self.hook(node, bind_arguments(node, self.values))
        self._position += 1
        for ref in node.refs():
            if self._last[ref.name] == node.name and ref.name not in self._results:
                self.values.pop(ref.name, None)
        return value

    def run(self) -> list[Any]:
        """Compute all nodes that are left; what the graph returns."""
        for node in self.graph.nodes[self._position :]:
            self.run_node(node)
        return self.outputs()

    def outputs(self) -> list[Any]:
        return [self.values[name] for name in self._results]

    def fork(self) -> Interpreter:
        """The same run up to here. What either run does from here on leaves the other as it is."""
        twin = copy.copy(self)
        twin.values = dict(self.values)
        if any(node.inplace for node in self.graph.nodes[self._position :]):
            twin._copy_writable_values()
        return twin

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with other parameters and buffers, and with what views and casts have made of them."""
        changed = {name for name, tensor in tensors.items() if tensor is not self.tensors.get(name)}
        self.tensors = tensors
        for value, name in self.graph.parameters.items():
            if name in changed and value in self.values:
                new = tensors[name]
                self.values[value] = new.clone() if value in self.graph.mutated_tensors else new
        for node in self.graph.nodes[: self._position]:
            if node.name in self.values and changed & self.graph.stored_sources.get(node.name, frozenset()):
                self.values[node.name] = self._recompute(node)

    def _recompute(self, node: Node) -> Any:
        """What a node makes of stored tensors alone, whose values may have been dropped since it ran."""
        stored = {value: self.tensors[name] for value, name in self.graph.parameters.items()}
        stored |= {**self.graph.constants, **self.graph.subgraphs}
        above = (self.graph.node(ref.name) for ref in node.refs())
        stored |= {own.name: self._recompute(own) for own in above if own is not None}
        return self.hook(node, bind_arguments(node, stored))

    def _copy_writable_values(self) -> None:
        """Copy what a node may write into. Views of one memory stay views of one memory, since they share the memo."""
        memo: dict[int, Any] = {}
        stored = {*self.graph.parameters, *self.graph.constants, *self.graph.subgraphs} - self.graph.mutated_tensors
        for name in self.values.keys() - stored:
            self.values[name] = copy.deepcopy(self.values[name], memo)


def bind_arguments(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """The node's arguments with values in place of references."""
    bound = {}
    for name, value in node.args.items():
        bound[name] = _resolve_refs(values, value)
    return bound


def _resolve_refs(values: Mapping[str, Any], value: Any) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, (list, tuple)):
        return type(value)(map(partial(_resolve_refs, values), value))
    return value


def run_graph(
    graph: Graph, inputs: Sequence[Any], tensors: Mapping[str, Tensor], hook: NodeHook = Node.compute
) -> list[Any]:
    """Run a graph from its first node to its last, and report the progress."""
    run = Interpreter(graph, inputs, tensors, hook)
    for node in progress.track_progress(graph.nodes, "running the network"):
        run.run_node(node)
    return run.outputs()
