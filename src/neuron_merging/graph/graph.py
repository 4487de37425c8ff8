"""The graph of a network as data: operators (`Node`) in order of execution, and the tensors that they read."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from neuron_merging.errors import deprecated_members
from neuron_merging.graph.half_precision import compute_fast

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Ref:
    """A reference to a value: the result of another node, or a graph input, parameter or constant.

    Parameters
    ----------
    name
        The value's name in the graph.

    Examples
    --------
    >>> Ref("relu")
    Ref(name='relu')
    """

    name: str


@deprecated_members(place="location")
@dataclass(frozen=True)
class Node:
    """One operator call: the operator, its arguments, and the line of the model's code that it comes from.

    Attributes
    ----------
    name
        The name of the node and of the value that it computes.
    op
        The operator's name without overload and without the `_` of in-place variants.
    fn
        The function that computes it.
    args
        Its arguments by name. Tensors are `Ref`.
    shapes
        The shapes of its results.
    inplace
        Whether it writes into its first argument.
    module
        The dotted path of the module that calls it.
    module_type
        That module's class.
    source
        The line of the model's code.

    Examples
    --------
    >>> node = nm.analyse(net, torch.zeros(1, 4)).graph.nodes[0]
    >>> node.op, node.module, node.shape, node.args["weight"]
    ('linear', '0', (1, 8), Ref(name='p_0_weight'))
    """

    name: str
    op: str
    fn: Callable[..., Any]
    args: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    inplace: bool
    module: str
    module_type: str
    source: str
    returns_list: bool = False
    """Whether it returns a list, even if of a single tensor."""

    @property
    def has_several_outputs(self) -> bool:
        """Whether it returns several tensors, which `getitem` nodes pick one by one."""
        return self.returns_list or len(self.shapes) != 1

    @property
    def shape(self) -> Shape:
        return self.shapes[0] if self.shapes else ()

    @property
    def location(self) -> str:
        """`layer.name, file.py:12: the code` for messages."""
        return ", ".join(part for part in (self.module, self.source) if part)

    @property
    def is_range(self) -> bool:
        """Whether it is `arange` or the like: it creates the integers up to its argument `end`."""
        return "end" in self.args and "steps" not in self.args and next(self.refs(), None) is None

    def refs(self) -> Iterator[Ref]:
        yield from iter_refs(self.args.values())

    def compute(self, args: Mapping[str, Any]) -> Any:
        """Run the operator on bound arguments."""
        if "batch_first" in args:
            _check_recurrent_states(args)
        named = hasattr(self.fn, "_schema")
        return compute_fast(self.fn, (), args) if named else self.fn(*args.values())

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a torch operator by its name: the object itself cannot be pickled."""
        fn = self.fn
        named = (*fn._schema.name.split("::"), fn._overloadname) if isinstance(fn, OpOverload) else fn
        return {**vars(self), "fn": named}

    def __setstate__(self, state: dict[str, Any]) -> None:
        named = state["fn"]
        fn = reduce(getattr, named, torch.ops) if isinstance(named, tuple) else named
        self.__dict__.update(state, fn=fn)


def _check_recurrent_states(args: Mapping[str, Any]) -> None:
    """Raise a RuntimeError if a recurrent layer's state has another batch size than its input.

    torch's functional LSTM reads and writes beyond the end of a state that is too short; nn.LSTM checks that first.
    Packed sequences have no `batch_first` argument and are not checked.
    """
    states, samples = args["hx"], args["input"].shape[0 if args["batch_first"] else 1]
    for state in states if isinstance(states, (list, tuple)) else [states]:
        if state.shape[1] != samples:
            raise RuntimeError(f"a state has {state.shape[1]} samples in place of {samples}")


def iter_refs(values: Any) -> Iterator[Ref]:
    """Yield the references in nested lists and tuples."""
    waiting = list(values)[::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, (list, tuple)):
            waiting.extend(reversed(value))


@deprecated_members(readers="nodes_reading")
@dataclass(frozen=True, eq=False)
class Graph:
    """A captured network: operators in order of execution, parameters by dotted name.

    Attributes
    ----------
    nodes
        The operators.
    inputs
        One name for each flat example input; None for an input that is no tensor.
    outputs
        The values that the network returns.
    parameters
        Maps names in the graph to dotted names of parameters and buffers.
    constants
        Tensors that the model's code creates from literals.
    shapes
        The shape of each value, by its name in the graph.
    dtypes
        The dtype of each tensor, by its name in the graph.
    tensors
        Parameters and buffers by dotted name.
    subgraphs
        The bodies of blocks such as `with torch.autocast():`, which the exporter keeps as graphs of their own.

    Examples
    --------
    >>> [node.op for node in nm.analyse(net, torch.zeros(1, 4)).graph.nodes]
    ['linear', 'relu', 'linear']
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[Ref, ...]
    parameters: Mapping[str, str]
    constants: Mapping[str, Tensor] = field(repr=False)
    shapes: Mapping[str, Shape] = field(repr=False)
    dtypes: Mapping[str, torch.dtype] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)
    subgraphs: Mapping[str, Any] = field(repr=False, default_factory=dict)

    def node(self, name: str) -> Node | None:
        """Return the node of this name; None for an input, parameter or constant."""
        return self._nodes_by_name.get(name)

    def users(self, name: str) -> list[Node]:
        """Return the nodes that read a value."""
        return self._users_by_value.get(name, [])

    def iter_downstream(self, starts: Iterable[Node], onwards: Callable[[Node], bool]) -> Iterator[Node]:
        """Yield the start nodes and the nodes downstream of them, in order of execution.

        The users of a node are visited only if `onwards(node)` is true once it was yielded.
        """
        # A heap of positions: nodes come out in execution order, whichever branch they were found on.
        ahead = sorted({self._order[node.name] for node in starts})
        visited = set(ahead)
        while ahead:
            node = self.nodes[heapq.heappop(ahead)]
            yield node
            for user in self.users(node.name) if onwards(node) else ():
                if self._order[user.name] not in visited:
                    visited.add(self._order[user.name])
                    heapq.heappush(ahead, self._order[user.name])

    def is_before(self, name: str, other: str) -> bool:
        """Return whether a node is executed before another."""
        return self._order[name] < self._order[other]

    @cached_property
    def mutated_tensors(self) -> frozenset[str]:
        """Stored tensors that the network writes into while it runs: counters, moving averages, caches."""
        origins = (self._find_origin(node.name) for node in self.nodes if node.inplace)
        return frozenset(name for name in origins if name in self.parameters or name in self.constants)

    @property
    def writes_to_weights(self) -> bool:
        """Whether the network changes its own parameters while it runs, as an embedding with `max_norm` does."""
        written = (self.tensors.get(self.parameters.get(name, "")) for name in self.mutated_tensors)
        return any(isinstance(tensor, nn.Parameter) for tensor in written)

    @cached_property
    def stored_sources(self) -> dict[str, frozenset[str]]:
        """For each node computed from stored tensors alone, the dotted names of these tensors."""
        sources = {value: frozenset({name}) for value, name in self.parameters.items()}
        sources |= dict.fromkeys(self.constants, frozenset())
        for node in self.nodes:
            refs = [ref.name for ref in node.refs()]
            if refs and not node.inplace and all(ref in sources for ref in refs):
                sources[node.name] = frozenset().union(*(sources[ref] for ref in refs))
        return {node.name: sources[node.name] for node in self.nodes if node.name in sources}

    def _find_origin(self, name: str) -> str:
        """Return the value at the start of a chain of first operands."""
        # In-place operators and views act on their first operand, so the chain leads to the memory that they share.
        while (node := self.node(name)) is not None and (first := next(node.refs(), None)) is not None:
            name = first.name
        return name

    def nodes_reading(self, tensor: str) -> set[str]:
        """Return the names of the nodes that read a stored tensor, under any of its names in the graph."""
        return self._nodes_reading_by_tensor.get(tensor, set())

    def first_node_reading(self, tensor: str) -> Node:
        """Return the first node that reads a stored tensor. There must be one."""
        return self._nodes_by_name[min(self._nodes_reading_by_tensor[tensor], key=self._order.__getitem__)]

    @cached_property
    def _nodes_reading_by_tensor(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            for ref in node.refs():
                if ref.name in self.parameters:
                    found.setdefault(self.parameters[ref.name], set()).add(node.name)
        return found

    @cached_property
    def _order(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def _nodes_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _users_by_value(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for ref in dict.fromkeys(node.refs()):
                found.setdefault(ref.name, []).append(node)
        return found
