"""An analysis: a network that was captured and understood once, for every later call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging.channels.find import find_channels
from neuron_merging.channels.groups import Channels
from neuron_merging.graph.capture import capture
from neuron_merging.graph.rebatching import answers_alike, batched_like, named_like, objection, other_length, rebatched
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Graph, Node

Search = Callable[[Graph, Mapping[str, str], Mapping[str, str]], Channels]
"""From a graph, and what trial cuts have shown to be refused and held, to channels."""


Held = int | Sequence[int] | Mapping[str, int]
"""A whole number that a module keeps, or several, by place or by name."""


@dataclass(frozen=True)
class Follower:
    """A whole number that a module of the user's keeps as an attribute, or in one, and that is the size of a value.

    Attributes
    ----------
    module
        The module's dotted path.
    attribute
        The attribute's name, with the place or name where the number is one of several.
    value
        The value, by its name in the graph.
    dim
        The dimension of the value whose size it is.

    Examples
    --------
    >>> Follower("transformer.h.0.mlp.c_fc", "nf", "view", 2).put(64, 48)
    48
    >>> Follower("norm", "normalized_shape[1]", "layer_norm", 2).put((4, 64), 48)
    (4, 48)
    >>> Follower("split", "axes_lengths[h]", "reshape", 2).put({"h": 8}, 6)
    {'h': 6}
    """

    module: str
    attribute: str
    value: str
    dim: int

    @property
    def name(self) -> str:
        """The attribute's name alone."""
        return self.attribute.partition("[")[0]

    def put(self, known: Held, size: int) -> int | tuple[int, ...] | dict[str, int]:
        """What the attribute becomes, given what it is."""
        if isinstance(known, int):
            return size
        where = self.attribute.rstrip("]").partition("[")[2]
        if isinstance(known, Mapping):
            return {**known, where: size}
        place = int(where)
        return (*known[:place], size, *known[place + 1 :])


@dataclass(frozen=True, eq=False)
class Analysis:
    """A model, example inputs, its graph, and the channels that were found in it.

    It is made by `neuron_merging.analyse`. `compress`, `inspect` and the report take one in place of the model, and
    then neither capture nor search again.

    Attributes
    ----------
    model
        The network itself.
    inputs
        The example inputs, as a tuple.
    graph
        Its operators in order of execution.
    channels
        Groups of channels that can be removed, and refusals.
    refused
        Operators, by name, that trial cuts have shown to refuse all channels, and why.
    held
        Operators that trial cuts have shown to need all channels that they make, and why.
    baked
        Weights that the user's model computes at every call, and by what; `model` is then a copy with plain ones.
    followers
        Attributes of the user's own modules that are sizes, and have to shrink with them.
    exported
        Whether the model's code runs without values only if it is told that it is being exported.
    made
        Inputs that were made for this network, so that they are made once.
    search
        How its channels are found when trial cuts have shown more.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> [nm.compress(analysis, ratio=ratio).model[0].out_features for ratio in (0.25, 0.5)]
    [6, 4]
    """

    model: nn.Module = field(repr=False)
    inputs: tuple[Any, ...] = field(repr=False)
    graph: Graph = field(repr=False)
    channels: Channels
    refused: Mapping[str, str] = field(default_factory=dict, repr=False)
    held: Mapping[str, str] = field(default_factory=dict, repr=False)
    baked: Mapping[str, str] = field(default_factory=dict, repr=False)
    followers: tuple[Follower, ...] = field(default=(), repr=False)
    exported: bool = field(default=False, repr=False)
    made: dict[object, Any] = field(default_factory=dict, repr=False)
    search: Search = field(default=find_channels, repr=False)
    _others: dict[str, Graph] = field(default_factory=dict, repr=False)
    _ways: dict[int, Callable[[Graph, int, int], Graph]] = field(default_factory=dict, repr=False)

    def without(self, refused: Mapping[str, str], held: Mapping[str, str]) -> Analysis:
        """What is left of its channels when these operators refuse theirs, too, or hold what they make."""
        refused, held = {**self.refused, **refused}, {**self.held, **held}
        return replace(self, channels=self.search(self.graph, refused, held), refused=refused, held=held)

    def beside(self, heads: Analysis) -> Analysis:
        """The same network with its whole heads as well, which were looked at on their own."""

        def search(graph: Graph, refused: Mapping[str, str], held: Mapping[str, str]) -> Channels:
            new = {name: why for name, why in refused.items() if name not in self.refused}
            kept = {name: why for name, why in held.items() if name not in self.held}
            found = heads.search(graph, {**heads.refused, **new}, {**heads.held, **kept})
            return self.search(graph, refused, held).beside(found)

        followers = tuple(dict.fromkeys((*self.followers, *heads.followers)))
        return replace(self, channels=self.channels.beside(heads.channels), search=search, followers=followers)

    @cached_property
    def fixes_batch(self) -> bool:
        """Whether the batch size may be written into the graph."""
        sizes = {v.shape[0] for v in flat(self.inputs) if isinstance(v, Tensor) and v.ndim}
        return any(_holds(node, sizes) for node in self.graph.nodes)

    @cached_property
    def channels_along_batch(self) -> bool:
        """Whether channels lie along the batch somewhere: which entries they are is known for the example alone."""
        made = {name for name in self.graph.inputs if name is not None}
        for node in self.graph.nodes:
            if any(ref.name in made for ref in node.refs()):
                made.add(node.name)
                if any(dim == 0 for dim, _ in self.channels.lines(node.name)):
                    return True
        return False

    @cached_property
    def one_size_only(self) -> bool:
        """Whether the network itself takes no other number of samples than the example has."""
        if not self.fixes_batch:
            return False
        length = next(len(value) for value in flat(self.inputs) if isinstance(value, Tensor) and value.ndim)
        return bool(objection(self.model, self._longer(length)))

    def graph_for(self, batch: Sequence[Any]) -> Graph:
        """The graph for a batch: with its size in place of the example's, or captured anew where that does not do."""
        pairs = zip(flat(self.inputs), flat(batch), strict=True)
        same = all(a.shape == b.shape for a, b in pairs if isinstance(a, Tensor))
        if same or not self.fixes_batch:
            return self.graph
        shapes = str([getattr(value, "shape", value) for value in flat(batch)])
        if shapes not in self._others:
            self._others[shapes] = self._resized(batch)
        return self._others[shapes]

    def _resized(self, batch: Sequence[Any]) -> Graph:
        lengths = other_length(flat(self.inputs), flat(batch))
        way = None if lengths is None else self._ways.get(lengths[0]) or self._way(lengths[0])
        if way is None or lengths is None:
            return named_like(capture(self.model, tuple(batch)), self.graph)
        return way(self.graph, *lengths)

    def _way(self, length: int) -> Callable[[Graph, int, int], Graph] | None:
        """How to get the graph of another batch size from this one: tried once, on samples of their own."""
        batch = self._longer(length)
        for way in (rebatched, _as_it_is):
            if answers_alike(way(self.graph, length, length + 1), self.model, batch):
                self._ways[length] = way
                return way
        return None

    def _longer(self, length: int) -> Sequence[Any]:
        """Inputs with a sample more."""
        made = batched_like(flat(self.inputs), length, length + 1)
        found: Sequence[Any] = tree_unflatten(made, tree_structure(list(self.inputs)))
        return found


def _as_it_is(graph: Graph, old: int, new: int) -> Graph:
    """What looks like the batch size is a constant of the model's code."""
    return graph


def _holds(node: Node, sizes: set[int]) -> bool:
    """Whether one of these sizes is written into an operator's shape argument, or may be the end of a range."""
    if node.op == "arange":
        end = node.args.get("end")
        return isinstance(end, int) and any(end % size == 0 for size in sizes)
    shapes = (node.args.get(name) for name in ("size", "shape", "sizes", "repeats"))
    return any(isinstance(shape, list) and sizes & set(shape) for shape in shapes)
