"""The analysis of a network, made once and used by every later call: its graph, its channel groups, the module
attributes that hold sizes. `Selection` adds the units that each group keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.channels.find_channels import find_channels
from neuron_merging.channels.groups import Channels, Group
from neuron_merging.channels.labels import Units
from neuron_merging.channels.weight_views import filters_of
from neuron_merging.errors import deprecated_members
from neuron_merging.graph.batch_size import align_node_names, change_batch_size, get_forward_error, graph_matches_model
from neuron_merging.graph.capture import capture
from neuron_merging.graph.copying import copy_with_own_tensors
from neuron_merging.graph.example_inputs import find_batch_size_change, infer_batch_size, resample_inputs
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.precision import to_working_precision
from neuron_merging.graph.pytree import flatten_inputs, move_tensors

ChannelSearch = Callable[[Graph, Mapping[str, str], Mapping[str, str]], Channels]
"""From a graph, and what trial cuts have shown to be refused and held, to channels."""


SizeValue = int | Sequence[int] | Mapping[str, int]
"""A whole number that a module keeps, or several, by place or by name."""


@dataclass(frozen=True)
class SizeAttribute:
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
    >>> SizeAttribute("transformer.h.0.mlp.c_fc", "nf", "view", 2).replace_size(64, 48)
    48
    >>> SizeAttribute("norm", "normalized_shape[1]", "layer_norm", 2).replace_size((4, 64), 48)
    (4, 48)
    >>> SizeAttribute("split", "axes_lengths[h]", "reshape", 2).replace_size({"h": 8}, 6)
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

    def replace_size(self, known: SizeValue, size: int) -> int | tuple[int, ...] | dict[str, int]:
        """What the attribute becomes, given what it is."""
        if isinstance(known, int):
            return size
        where = self.attribute.rstrip("]").partition("[")[2]
        if isinstance(known, Mapping):
            return {**known, where: size}
        place = int(where)
        return (*known[:place], size, *known[place + 1 :])


@deprecated_members(
    followers="size_attributes",
    baked="folded_weights",
    exported="needs_export_flag",
    made="input_cache",
    refused="refused_operators",
    held="held_operators",
    without="exclude_operators",
    beside="add_heads",
)
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
    refused_operators
        Operators, by name, that trial cuts have shown to refuse all channels, and why.
    held_operators
        Operators that trial cuts have shown to need all channels that they make, and why.
    folded_weights
        Weights that the user's model computes at every call, and by what; `model` is then a copy with plain ones.
    size_attributes
        Attributes of the user's own modules that are sizes, and have to shrink with them.
    needs_export_flag
        Whether the model's code runs without values only if it is told that it is being exported.
    input_cache
        Inputs that were made for this network, so that they are made once.
    user_device
        Where the user's model is, if it cannot be worked on there: `model` and `inputs` are then copies on the CPU.
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
    refused_operators: Mapping[str, str] = field(default_factory=dict, repr=False)
    held_operators: Mapping[str, str] = field(default_factory=dict, repr=False)
    folded_weights: Mapping[str, str] = field(default_factory=dict, repr=False)
    size_attributes: tuple[SizeAttribute, ...] = field(default=(), repr=False)
    needs_export_flag: bool = field(default=False, repr=False)
    input_cache: dict[object, Any] = field(default_factory=dict, repr=False)
    user_device: torch.device | None = field(default=None, repr=False)
    search: ChannelSearch = field(default=find_channels, repr=False)
    _graphs_by_shape: dict[str, Graph] = field(default_factory=dict, repr=False)
    _batch_size_changers: dict[int, Callable[[Graph, int, int], Graph]] = field(default_factory=dict, repr=False)

    def move_to_user(self, value: Any) -> Any:
        """A network, or inputs, on the device of the user's model."""
        if self.user_device is None:
            return value
        if isinstance(value, nn.Module):
            return copy_with_own_tensors(value, self.user_device)
        return move_tensors(value, self.user_device)

    def exclude_operators(self, refused: Mapping[str, str], held: Mapping[str, str]) -> Analysis:
        """What is left of its channels when these operators refuse theirs, too, or hold what they make."""
        refused, held = {**self.refused_operators, **refused}, {**self.held_operators, **held}
        return replace(
            self, channels=self.search(self.graph, refused, held), refused_operators=refused, held_operators=held
        )

    def add_heads(self, heads: Analysis) -> Analysis:
        """The same network with its whole heads as well, which were looked at on their own."""

        def search(graph: Graph, refused: Mapping[str, str], held: Mapping[str, str]) -> Channels:
            new = {name: why for name, why in refused.items() if name not in self.refused_operators}
            kept = {name: why for name, why in held.items() if name not in self.held_operators}
            found = heads.search(graph, {**heads.refused_operators, **new}, {**heads.held_operators, **kept})
            return self.search(graph, refused, held).add_heads(found)

        followers = tuple(dict.fromkeys((*self.size_attributes, *heads.size_attributes)))
        return replace(self, channels=self.channels.add_heads(heads.channels), search=search, size_attributes=followers)

    @cached_property
    def may_fix_batch_size(self) -> bool:
        """Whether the batch size may be written into the graph."""
        sizes = {v.shape[0] for v in flatten_inputs(self.inputs) if isinstance(v, Tensor) and v.ndim}
        return any(_has_size_argument(node, sizes) for node in self.graph.nodes)

    @cached_property
    def has_channels_along_batch(self) -> bool:
        """Whether channels lie along the batch somewhere: which entries they are is known for the example alone."""
        made = {name for name in self.graph.inputs if name is not None}
        for node in self.graph.nodes:
            if any(ref.name in made for ref in node.refs()):
                made.add(node.name)
                if any(dim == 0 for dim, _ in self.channels.iter_axis_units(node.name)):
                    return True
        return False

    @cached_property
    def requires_example_batch_size(self) -> bool:
        """Whether the network itself takes no other number of samples than the example has."""
        if not self.may_fix_batch_size:
            return False
        return bool(get_forward_error(self.model, self._generate_longer_inputs(infer_batch_size(self.inputs))))

    def graph_for(self, batch: Sequence[Any]) -> Graph:
        """The graph for a batch: with its size in place of the example's, or captured anew where that does not do."""
        pairs = zip(flatten_inputs(self.inputs), flatten_inputs(batch), strict=True)
        same = all(a.shape == b.shape for a, b in pairs if isinstance(a, Tensor))
        if same or not self.may_fix_batch_size:
            return self.graph
        shapes = str([getattr(value, "shape", value) for value in flatten_inputs(batch)])
        if shapes not in self._graphs_by_shape:
            self._graphs_by_shape[shapes] = self._build_graph_for(batch)
        return self._graphs_by_shape[shapes]

    def _build_graph_for(self, batch: Sequence[Any]) -> Graph:
        lengths = find_batch_size_change(flatten_inputs(self.inputs), flatten_inputs(batch))
        way = (
            None
            if lengths is None
            else self._batch_size_changers.get(lengths[0]) or self._find_batch_size_changer(lengths[0])
        )
        if way is None or lengths is None:
            return align_node_names(capture(self.model, tuple(batch)), self.graph)
        return way(self.graph, *lengths)

    def _find_batch_size_changer(self, length: int) -> Callable[[Graph, int, int], Graph] | None:
        """How to get the graph of another batch size from this one: tried once, on samples of their own."""
        batch = self._generate_longer_inputs(length)
        for way in (change_batch_size, _keep_batch_size):
            if graph_matches_model(way(self.graph, length, length + 1), self.model, batch):
                self._batch_size_changers[length] = way
                return way
        return None

    def _generate_longer_inputs(self, length: int) -> Sequence[Any]:
        """Inputs with a sample more."""
        return resample_inputs(self.inputs, length + 1, length)


def _keep_batch_size(graph: Graph, old: int, new: int) -> Graph:
    """What looks like the batch size is a constant of the model's code."""
    return graph


def _has_size_argument(node: Node, sizes: set[int]) -> bool:
    """Whether one of these sizes is written into an operator's shape argument, or may be the end of a range."""
    if node.is_range:
        end = node.args["end"]
        return isinstance(end, int) and any(end % size == 0 for size in sizes)
    shapes = (node.args.get(name) for name in ("size", "shape", "sizes", "repeats"))
    return any(isinstance(shape, list) and sizes & set(shape) for shape in shapes)


@dataclass(frozen=True)
class Selection:
    """What a merger is given: the network, the units that stay, and unlabelled batches if there are any.

    Attributes
    ----------
    analysis
        The network, captured and understood; `graph`, `channels` and `inputs` are short for its parts.
    kept
        The units that stay, for each group that takes part, by the group's name.
    calibration
        Batches, where `compress(calibration=)` has them.
    new_biases
        Whether layers that have no bias may be given one.
    input_sets
        Inputs that were synthesised for this compression (`inputs.input_sets.InputSets`); None outside of one.

    Examples
    --------
    >>> selection = Selection(nm.analyse(net, torch.zeros(1, 4)), {"0": np.array([0, 1, 2])})
    >>> [(site.group.name, site.removed.tolist()) for site in selection.sites()]
    [('0', [3, 4, 5, 6, 7])]
    """

    analysis: Analysis
    kept: Mapping[str, Units]
    calibration: Iterable[Any] | None = field(default=None, repr=False)
    new_biases: bool = True
    input_sets: Any = field(default=None, repr=False)

    @property
    def graph(self) -> Graph:
        return self.analysis.graph

    @property
    def channels(self) -> Channels:
        return self.analysis.channels

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.analysis.inputs

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer, detached, in the precision that merging computes in."""
        return to_working_precision(self.graph.tensors[name].detach())

    def sites(self) -> list[Site]:
        """One for each group that takes part."""
        chosen = (group for group in self.channels.groups if group.name in self.kept)
        return [Site(self.graph, self.channels, group, self.kept[group.name]) for group in chosen]


@dataclass(frozen=True)
class Site:
    """One group, what it keeps, and the network around it.

    Attributes
    ----------
    graph
        The network's operators and tensors.
    channels
        All of its groups.
    group
        This one.
    kept
        The units that stay, counted from the group's first.

    Examples
    --------
    >>> (site,) = Selection(nm.analyse(net, torch.zeros(1, 4)), {"0": np.array([1, 2])}).sites()
    >>> site.rows.shape, site.removed.tolist()
    (torch.Size([8, 5]), [0, 3, 4, 5, 6, 7])
    """

    graph: Graph
    channels: Channels
    group: Group
    kept: Units

    @cached_property
    def removed(self) -> Units:
        """The units that go."""
        return np.setdiff1d(np.arange(self.group.size), self.kept)

    @cached_property
    def rows(self) -> Tensor:
        """The filters of all units, one row each."""
        return filters_of(self.graph, self.group)

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer, detached, in the precision that merging computes in."""
        return to_working_precision(self.graph.tensors[name].detach())
