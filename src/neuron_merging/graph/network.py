"""A captured graph as a module of its own: where a class holds sizes as constants, its graph holds them as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_map, tree_structure, tree_unflatten

from neuron_merging.errors import ModelError, told
from neuron_merging.graph.capture import capture
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.execution import Execution
from neuron_merging.graph.rebatching import answers_alike, batched_like, rebatched
from neuron_merging.graph.resizing import Resizable, Sizes, register, resized, size_key
from neuron_merging.graph.trees import as_inputs, called, copied, flat, flatten_outputs
from neuron_merging.graph.values import Graph, Node

SIZES = {
    "size": ("size", "shape", "sizes", "normalized_shape"),
    "pieces": ("split_sizes", "split_size"),
    "groups": ("groups", "num_groups"),
}
"""The arguments of operators that hold sizes, by kind."""


class Step(nn.Module):
    """One operator of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""

    def forward(self, node: Node, args: dict[str, Any], sizes: Mapping[str, Sizes]) -> Any:
        return node.compute(_with_sizes(self.path, args, sizes))


def _with_sizes(path: str, args: dict[str, Any], sizes: Mapping[str, Sizes]) -> dict[str, Any]:
    for kind, names in SIZES.items():
        new = sizes.get(size_key(path, kind))
        for name in names if new is not None else ():
            if isinstance(args.get(name), list):
                args = {**args, name: resized(args[name], new)}
            elif isinstance(args.get(name), int):
                args = {**args, name: resized([args[name]], new)[0]}
    for key in [key for key in sizes if key.startswith(size_key(path, "range."))]:
        start, end = sizes[key]
        args = {**args, **({} if start is None else {"start": start}), **({} if end is None else {"end": end})}
    return args


class _Shared:
    """A graph that all copies of a module share; its tensors are the module's own."""

    def __init__(self, graph: Graph, returns: TreeSpec, batch: int, free: bool) -> None:
        self.graph, self.returns, self.batch, self.free = replace(graph, tensors={}), returns, batch, free

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


class GraphNetwork(Resizable):
    """A network that runs a captured graph: the same tensors under the same names, and no code of the class.

    `free` says whether it takes other batch sizes than that of its example.
    """

    def __init__(self, graph: Graph, returns: TreeSpec, batch: int, free: bool) -> None:
        super().__init__()
        self.captured = _Shared(graph, returns, batch, free)
        self.names = {
            name: register(
                self,
                name,
                tensor.detach().clone()
                if not isinstance(tensor, nn.Parameter)
                else nn.Parameter(tensor.detach(), tensor.requires_grad),
            )
            for name, tensor in graph.tensors.items()
        }
        self.steps: dict[str, Step] = {}
        for node in graph.nodes:
            self.steps[node.name] = step = Step()
            step.path = register(self, node.name, step)

    @property
    def free(self) -> bool:
        return self.captured.free

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs, as the original's code has them."""
        return [name for name in self.captured.graph.inputs if name is not None]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        values, known = flat([inputs, list(named.values())]), self.captured
        graph = known.graph
        if known.free:
            batch = next(v.shape[0] for v in values if isinstance(v, Tensor) and v.ndim)
            graph = rebatched(graph, known.batch, batch)
        execution = Execution(graph, values, self._tensors())
        for node in graph.nodes:
            args = execution.arguments(node)
            execution.step(node, self.steps[node.name](node, args, self.sizes))
        return tree_unflatten(execution.outputs(), known.returns)

    def _tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, path in self.names.items():
            home, _, attribute = path.rpartition(".")
            found[name] = getattr(self.get_submodule(home), attribute)
        return found


@torch.no_grad()
def as_graph(model: nn.Module, example_inputs: Any) -> tuple[GraphNetwork, tuple[Any, ...]]:
    """A model's graph as a module, and example inputs for it; for any batch size where its code allows that.

    Raises
    ------
    ModelError
        The model cannot be captured, or does not run.
    """
    inputs = as_inputs(example_inputs, model)
    batch = next((len(v) for v in flat(inputs) if isinstance(v, Tensor) and v.ndim), 1)
    for size in dict.fromkeys((batch if batch > 1 else 2, batch)):
        values: tuple[Any, ...] = tree_map(lambda v, size=size: batched_like([v], batch, size)[0], inputs)
        if size == batch:
            values = inputs
        found = _captured(model, values, size, last=size == batch)
        if found is not None:
            return found.eval(), inputs if found.free else values
    raise ModelError("the model could not be captured", where="example_inputs")


def _captured(model: nn.Module, inputs: tuple[Any, ...], batch: int, last: bool) -> GraphNetwork | None:
    """The network of one batch size; None if it is not that for others too, and another size is left to try."""
    try:
        graph = capture(model, inputs)
        returned = called(bare_copy(model).eval(), copied(inputs))
    except ModelError:
        if last:
            raise
        return None
    except Exception as error:
        if last:
            raise ModelError(f"the model does not run: {told(error)}", where="example_inputs") from error
        return None
    other: tuple[Any, ...] = tree_map(lambda v: batched_like([v], batch, batch + 1)[0], inputs)
    free = answers_alike(rebatched(graph, batch, batch + 1), model, other)
    if not free and not last:
        return None
    return GraphNetwork(graph, _structure(returned), batch, free)


def _structure(returned: Any) -> TreeSpec:
    if hasattr(returned, "to_tuple"):
        returned = returned.to_tuple()
    if len(flatten_outputs(returned)) != len(flat(returned)):
        raise ModelError(
            "the model returns more than tensors", where="forward()", fix="Return tensors in tuples, lists or dicts."
        )
    return tree_structure(returned)
