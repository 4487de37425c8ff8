"""Run a captured graph: with its own or other tensors, with a hook for every node, forked at a node, or node by node
in step with another run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from neuron_merging import progress
from neuron_merging.graph.example_inputs import clone_inputs
from neuron_merging.graph.graph import Graph, Node, Ref

NodeHook = Callable[[Node, dict[str, Any]], Any]
"""Takes a node and its bound arguments, returns the node's result."""


class Interpreter:
    """One run of a graph, node by node. A value is dropped after its last use, to save memory.

    `inputs` are flat, as `flatten_inputs` returns them. `tensors` replace the graph's parameters and buffers, by
    name. `hook` computes each node in place of `Node.compute`. `position` is the index of the next node.
    """

    def __init__(
        self, graph: Graph, inputs: Sequence[Any], tensors: Mapping[str, Tensor], hook: NodeHook = Node.compute
    ) -> None:
        given = zip(graph.inputs, clone_inputs(inputs), strict=True)
        self.graph, self.tensors, self.hook = graph, tensors, hook
        self.values: dict[str, Any] = {name: value for name, value in given if name is not None}
        self.values |= {**graph.constants, **graph.subgraphs}
        self.values |= {value: tensors[name] for value, name in graph.parameters.items()}
        # Cloned, so that a run does not change the caller's tensors.
        self.values |= {value: self.values[value].clone() for value in graph.mutated_tensors}
        self.position = 0
        # Nodes run in order and later entries win, so this is the last reader of each value.
        self._last = {ref.name: node.name for node in graph.nodes for ref in node.refs()}
        self._results = [ref.name for ref in graph.outputs]

    def arguments(self, node: Node) -> dict[str, Any]:
        """Return a node's arguments, with the values of this run in place of references."""
        return bind_arguments(node, self.values)

    def run_node(self, node: Node) -> Any:
        """Compute the next node and return its result."""
        value = self.values[node.name] = self.hook(node, bind_arguments(node, self.values))
        self.position += 1
        for ref in node.refs():
            if self._last[ref.name] == node.name and ref.name not in self._results:
                self.values.pop(ref.name, None)
        return value

    def run(self) -> list[Any]:
        """Compute all remaining nodes and return the graph's outputs."""
        for node in self.graph.nodes[self.position :]:
            self.run_node(node)
        return self.outputs()

    def outputs(self) -> list[Any]:
        return [self.values[name] for name in self._results]

    def count_held_bytes(self) -> int:
        """Count the bytes of the values that are held for later nodes, without stored tensors."""
        stored = {*self.graph.parameters, *self.graph.constants, *self.graph.subgraphs}
        held = tree_leaves([value for name, value in self.values.items() if name not in stored])
        return sum(value.numel() * value.element_size() for value in held if isinstance(value, Tensor))

    def fork(self) -> Interpreter:
        """Return a second run with the same values so far. From here on the two runs are independent."""
        twin = copy.copy(self)
        twin.values = dict(self.values)
        if any(node.inplace for node in self.graph.nodes[self.position :]):
            twin._copy_writable_values()
        return twin

    def replace_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with other parameters and buffers. Views and casts of them that exist already are updated."""
        changed = {name for name, tensor in tensors.items() if tensor is not self.tensors.get(name)}
        self.tensors = tensors
        for value, name in self.graph.parameters.items():
            if name in changed and value in self.values:
                new = tensors[name]
                self.values[value] = new.clone() if value in self.graph.mutated_tensors else new
        for node in self.graph.nodes[: self.position]:
            if node.name in self.values and changed & self.graph.stored_sources.get(node.name, frozenset()):
                self.values[node.name] = self._recompute(node)

    def _recompute(self, node: Node) -> Any:
        """Recompute a node that depends on stored tensors alone. Its operands may have been dropped since it ran."""
        stored = {value: self.tensors[name] for value, name in self.graph.parameters.items()}
        stored |= {**self.graph.constants, **self.graph.subgraphs}
        operands = (self.graph.node(ref.name) for ref in node.refs())
        stored |= {operand.name: self._recompute(operand) for operand in operands if operand is not None}
        return self.hook(node, bind_arguments(node, stored))

    def _copy_writable_values(self) -> None:
        """Copy the values that a node may write into. With one memo, views that share a storage still share it."""
        memo: dict[int, Any] = {}
        stored = {*self.graph.parameters, *self.graph.constants, *self.graph.subgraphs} - self.graph.mutated_tensors
        for name in self.values.keys() - stored:
            self.values[name] = copy.deepcopy(self.values[name], memo)


def bind_arguments(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node's arguments with values in place of references."""
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


def list_needed_nodes(graph: Graph, names: Collection[str]) -> list[Node]:
    """Return the nodes that these nodes depend on, and themselves, in order; nodes that write in place stay, too."""
    needed = set(names)
    found: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in needed or (node.inplace and found):
            needed |= {ref.name for ref in node.refs()}
            found.append(node)
    return found[::-1]


def run_graph(
    graph: Graph, inputs: Sequence[Any], tensors: Mapping[str, Tensor], hook: NodeHook = Node.compute
) -> list[Any]:
    """Run a graph from its first node to its last, and report the progress."""
    run = Interpreter(graph, inputs, tensors, hook)
    for node in progress.track_progress(graph.nodes, "running the network"):
        run.run_node(node)
    return run.outputs()


def run_until(run: Interpreter, last: Collection[str]) -> None:
    """Continue a run until the last of these nodes, whose values the hook reads; what follows is not computed."""
    nodes = run.graph.nodes
    end = max((i for i, node in enumerate(nodes) if node.name in last), default=-1)
    for node in progress.track_progress(nodes[run.position : end + 1], "running the network"):
        run.run_node(node)
