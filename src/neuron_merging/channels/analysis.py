"""The analysis of a network, computed once and used by every later call: its graph, its channel groups, and the module
attributes that hold sizes. `Selection` adds the units that each group keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.channels.find_channels import find_channels
from neuron_merging.channels.groups import Channels, Group, Units
from neuron_merging.channels.weight_views import filters_of
from neuron_merging.errors import deprecated_members
from neuron_merging.graph.batch_size import (
    align_node_names,
    change_batch_size,
    change_batch_size_and_slices,
    find_batch_slice,
    graph_matches_model,
    takes_larger_batch,
)
from neuron_merging.graph.capture import capture
from neuron_merging.graph.copying import copy_with_own_tensors, to_working_precision
from neuron_merging.graph.example_inputs import (
    find_batch_size_change,
    flatten_inputs,
    flatten_outputs,
    infer_batch_size,
    move_tensors,
    resample_inputs,
    split_samples,
)
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.interpreter import run_graph

ChannelSearch = Callable[[Graph, Mapping[str, str], Mapping[str, str]], Channels]
"""Finds the channels of a graph, given the operators that trial cuts showed to be refused and held, with reasons."""


USUAL_BATCH_SIZE = 32
"""Samples of a batch for which the number of rows that statistics take is meant."""
SizeValue = int | Sequence[int] | Mapping[str, int]
"""The value of an attribute that holds sizes: an integer, or several by position or by name."""


@dataclass(frozen=True)
class SizeAttribute:
    """An integer in an attribute of a user's module that equals the size of a value, and must shrink with it.

    Attributes
    ----------
    module
        The module's dotted path.
    attribute
        The attribute's name; with `[index]` or `[key]` if it holds several numbers.
    value
        The name of the value in the graph.
    dim
        The dimension of the value that has this size.

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
        """The attribute's name without index or key."""
        return self.attribute.partition("[")[0]

    def replace_size(self, old: SizeValue, size: int) -> int | tuple[int, ...] | dict[str, int]:
        """Return the attribute's new value, given its old one and the new size."""
        if isinstance(old, int):
            return size
        key = self.attribute.rstrip("]").partition("[")[2]
        if isinstance(old, Mapping):
            return {**old, key: size}
        index = int(key)
        return (*old[:index], size, *old[index + 1 :])


def _get_version(tensor: Tensor) -> int:
    """Return the number of writes into a tensor; those of inference tensors are not counted."""
    return 0 if tensor.is_inference() else tensor._version


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

    `neuron_merging.analyse` returns it. `compress`, `inspect` and the report take it in place of the model, and then
    neither capture nor search again.

    Attributes
    ----------
    model
        The network.
    inputs
        The example inputs, as a tuple.
    graph
        The operators in order of execution.
    channels
        Groups of channels that can be removed, and refusals.
    refused_operators
        Operators, by name, whose channels cannot be removed according to trial cuts, with the reason.
    held_operators
        Operators whose output channels cannot be removed according to trial cuts, with the reason.
    folded_weights
        Weights that the user's model computes at every call, with the class that does so. `model` is then a copy with
        plain weights.
    size_attributes
        Attributes of the user's modules that hold sizes, and shrink with the channels.
    needs_export_flag
        Whether the model's code runs on fake tensors only while `torch.compiler.is_exporting()` is true.
    input_cache
        Inputs that were synthesised for this network, so that each set is computed once.
    search_cache
        What the last search for a cut measured. Later cuts reuse it; it is not pickled.
    user_device
        The device of the user's model, if it lacks float64. `model` and `inputs` are then copies on the CPU.
    search
        The function that finds the channels again when trial cuts exclude operators.

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
    search_cache: dict[str, Any] = field(default_factory=dict, repr=False)
    user_device: torch.device | None = field(default=None, repr=False)
    search: ChannelSearch = field(default=find_channels, repr=False)
    _graphs_by_shape: dict[str, Graph] = field(default_factory=dict, repr=False)
    _batch_size_changers: dict[int, Callable[[Graph, int, int], Graph]] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the statistics of a search, which may be larger than the network."""
        return {**vars(self), "search_cache": {}}

    def drop_outdated_caches(self) -> None:
        """Drop inputs and statistics of earlier cuts if weights were changed in place since, as training does."""
        versions = [_get_version(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())]
        if self.search_cache.get("versions", versions) != versions:
            self.input_cache.clear()
            self.search_cache.clear()
        self.search_cache["versions"] = versions

    def move_to_user(self, value: Any) -> Any:
        """Return a network, or inputs, on the device of the user's model."""
        if self.user_device is None:
            return value
        if isinstance(value, nn.Module):
            return copy_with_own_tensors(value, self.user_device)
        return move_tensors(value, self.user_device)

    def exclude_operators(self, refused: Mapping[str, str], held: Mapping[str, str]) -> Analysis:
        """Return the analysis without the channels of `refused` operators and the output channels of `held` ones."""
        refused, held = {**self.refused_operators, **refused}, {**self.held_operators, **held}
        return replace(
            self, channels=self.search(self.graph, refused, held), refused_operators=refused, held_operators=held
        )

    def add_heads(self, heads: Analysis) -> Analysis:
        """Return the analysis with groups of attention heads added, which `heads` found in the same network."""

        def search(graph: Graph, refused: Mapping[str, str], held: Mapping[str, str]) -> Channels:
            # Refusals from the search for single channels do not concern heads; only later ones hold for both.
            new_refused = {name: why for name, why in refused.items() if name not in self.refused_operators}
            new_held = {name: why for name, why in held.items() if name not in self.held_operators}
            head_channels = heads.search(
                graph, {**heads.refused_operators, **new_refused}, {**heads.held_operators, **new_held}
            )
            return self.search(graph, refused, held).add_heads(head_channels)

        attributes = tuple(dict.fromkeys((*self.size_attributes, *heads.size_attributes)))
        return replace(
            self, channels=self.channels.add_heads(heads.channels), search=search, size_attributes=attributes
        )

    @cached_property
    def may_fix_batch_size(self) -> bool:
        """Whether some size in the graph may be the example's batch size."""
        sizes = {v.shape[0] for v in flatten_inputs(self.inputs) if isinstance(v, Tensor) and v.ndim}
        return any(_has_size_argument(node, sizes) for node in self.graph.nodes)

    @cached_property
    def has_channels_along_batch(self) -> bool:
        """Whether an activation has channels along dimension 0. Their indices hold for one batch size only."""
        activations = {name for name in self.graph.inputs if name is not None}
        for node in self.graph.nodes:
            if any(ref.name in activations for ref in node.refs()):
                activations.add(node.name)
                if any(dim == 0 for dim, _ in self.channels.iter_axis_units(node.name)):
                    return True
        return False

    @cached_property
    def fixed_batch_size(self) -> int | None:
        """The only batch size that the network, or its graph, takes; None if it takes others than the example's."""
        size = infer_batch_size(self.inputs)
        if self.has_channels_along_batch:
            return size
        return None if takes_larger_batch(self.model, self._generate_longer_inputs(size), size) else size

    def split_batch(self, batch: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return batches of the only size that the network takes, without a remainder; one batch if it takes any."""
        return [tuple(batch)] if self.fixed_batch_size is None else split_samples(batch, self.fixed_batch_size)

    def round_up_samples(self, count: int) -> int:
        """Return the least number of samples, at least `count`, that batches of the network's size add up to."""
        # The double negation rounds up.
        size = self.fixed_batch_size or 1
        return -(-count // size) * size

    @property
    def row_share(self) -> float:
        """The share of the usual rows of a batch to take for statistics: networks of a small fixed batch size run more
        batches.
        """
        return 1.0 if self.fixed_batch_size is None else min(1.0, self.fixed_batch_size / USUAL_BATCH_SIZE)

    def graph_for(self, batch: Sequence[Any]) -> Graph:
        """Return the graph for a batch of any size: with changed sizes, or captured again if that is not exact."""
        pairs = zip(flatten_inputs(self.inputs), flatten_inputs(batch), strict=True)
        same = all(a.shape == b.shape for a, b in pairs if isinstance(a, Tensor))
        # A graph without the batch size among its arguments runs on any batch as it is.
        if same or not self.may_fix_batch_size:
            return self.graph
        # Inputs that are no tensors count by value: a flag may select other operators.
        shapes = str([getattr(value, "shape", value) for value in flatten_inputs(batch)])
        if shapes not in self._graphs_by_shape:
            self._graphs_by_shape[shapes] = self._build_graph_for(batch)
        return self._graphs_by_shape[shapes]

    def _build_graph_for(self, batch: Sequence[Any]) -> Graph:
        lengths = find_batch_size_change(flatten_inputs(self.inputs), flatten_inputs(batch))
        changer = (
            None
            if lengths is None
            else self._batch_size_changers.get(lengths[0]) or self._find_batch_size_changer(lengths[0])
        )
        if changer is None or lengths is None:
            return align_node_names(capture(self.model, tuple(batch)), self.graph)
        return changer(self.graph, *lengths)

    def _find_batch_size_changer(self, length: int) -> Callable[[Graph, int, int], Graph] | None:
        """Return the function that changes the graph's batch size, tested on more samples; None if none works."""
        batch = self._generate_longer_inputs(length)
        longer = infer_batch_size(batch)
        # The simplest rewriting that gives the model's outputs for this size is taken for all other sizes.
        for changer in (change_batch_size, change_batch_size_and_slices, _keep_batch_size):
            if graph_matches_model(changer(self.graph, length, longer), self.model, batch):
                self._batch_size_changers[length] = changer
                return changer
        return None

    def _generate_longer_inputs(self, length: int) -> Sequence[Any]:
        """Return inputs with one sample more, or so many more that no input has this length already.

        An input of another batch size would fit by chance.
        """
        lengths = {len(value) for value in flatten_inputs(self.inputs) if isinstance(value, Tensor) and value.ndim}
        longer = next(size for size in count(length + 1) if size not in lengths)
        return resample_inputs(self.inputs, longer, length)


def _keep_batch_size(graph: Graph, old: int, new: int) -> Graph:
    """Return the graph unchanged: what looks like the batch size is a constant of the model's code."""
    return graph


def _has_size_argument(node: Node, sizes: set[int]) -> bool:
    """Return whether a size is in an operator's shape argument, or divides the end of a range or of a slice."""
    if node.is_range:
        end = node.args["end"]
        return isinstance(end, int) and any(end % size == 0 for size in sizes)
    if any(find_batch_slice(node, size) for size in sizes):
        return True
    shapes = (node.args.get(name) for name in ("size", "shape", "sizes", "repeats"))
    return any(isinstance(shape, list) and sizes & set(shape) for shape in shapes)


@dataclass(frozen=True)
class Selection:
    """The input of a merger: the network, the units that stay, and calibration batches if there are any.

    Attributes
    ----------
    analysis
        The analysed network. `graph`, `channels` and `inputs` are shortcuts to its fields.
    kept
        The units that stay in each group that is pruned, by the group's name.
    calibration
        The unlabelled batches of `compress(calibration=)`, if given.
    new_biases
        Whether layers without a bias may get one.
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

    def compute_original_outputs(self, batch: Sequence[Any]) -> list[Tensor]:
        """Return the original's outputs for a batch; inside a compression, each batch runs once."""
        if self.input_sets is not None and self.input_sets.original is not None:
            outputs: list[Tensor] = self.input_sets.original.compute(batch)
            return outputs
        return flatten_outputs(run_graph(self.analysis.graph_for(batch), flatten_inputs(batch), self.graph.tensors))

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer, detached, in the precision that merging computes in."""
        return to_working_precision(self.graph.tensors[name].detach())

    def sites(self) -> list[Site]:
        """Return a `Site` for each group that is pruned."""
        chosen = (group for group in self.channels.groups if group.name in self.kept)
        return [Site(self.graph, self.channels, group, self.kept[group.name]) for group in chosen]


@dataclass(frozen=True)
class Site:
    """One group that is pruned, the units that it keeps, and the network around it.

    Attributes
    ----------
    graph
        The network's operators and tensors.
    channels
        All groups of the network.
    group
        The group.
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
        """The units that are removed."""
        return np.setdiff1d(np.arange(self.group.size), self.kept)

    @cached_property
    def rows(self) -> Tensor:
        """The filters of all units, one row each."""
        return filters_of(self.graph, self.group)

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer, detached, in the precision that merging computes in."""
        return to_working_precision(self.graph.tensors[name].detach())
