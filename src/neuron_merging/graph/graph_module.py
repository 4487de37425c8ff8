"""Modules whose sizes are data, and a captured graph as such a module.

Python code such as `x.view(b, 4, 16)` cannot be changed to 15 channels. A graph or an ONNX file can: the sizes that it
holds as constants are rewritten along with the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten

from neuron_merging.errors import MergingError, ModelError, describe_error
from neuron_merging.graph.batch_size import change_batch_size, graph_matches_model, interpolate_batch_size
from neuron_merging.graph.capture import capture
from neuron_merging.graph.copying import copy_with_own_tensors, copy_without_hooks
from neuron_merging.graph.example_inputs import (
    call_model,
    clone_inputs,
    flatten_inputs,
    flatten_outputs,
    infer_batch_size,
    normalize_inputs,
    resample_inputs,
)
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.interpreter import Interpreter

BatchResizing = Callable[[int], Graph]
"""Returns the graph at a batch size, without tensors."""
SizeOverrides = tuple[int | None, ...]
"""New sizes of an operator; None where the present size stays."""


class ResizableModule(nn.Module):
    """A network of named steps whose size arguments can be replaced through `sizes`.

    Every step is a submodule that is called once, so that the operators it runs can be found by its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Mapping[str, SizeOverrides] = {}


def build_size_key(step: str, kind: str) -> str:
    """Return the key of a step's sizes in `ResizableModule.sizes`.

    >>> build_size_key("/model.22/Reshape", "size")
    '/model.22/Reshape|size'
    """
    return f"{step}|{kind}"


def override_sizes(sizes: Sequence[int], new: SizeOverrides | None) -> list[int]:
    """Return an operator's sizes with the new ones in place.

    >>> override_sizes([1, 64, -1], (None, 48, None))
    [1, 48, -1]
    """
    if new is None or len(new) != len(sizes):
        return list(sizes)
    return [a if b is None else b for a, b in zip(sizes, new, strict=True)]


class _NamespaceModule(nn.Module):
    """An empty module for one part of a dotted name."""


def register_by_path(root: nn.Module, name: str, value: nn.Module | Tensor) -> str:
    """Register a module or tensor under its dotted name, and return that name.

    A `_` is appended to each part of the name that is taken already.
    """
    # torch refuses an empty name of a submodule, as in "a..b".
    *parts, last = name.split(".") if all(name.split(".")) else [name.replace(".", "_")]
    home, path = root, ""
    for part in parts:
        child = home._modules.get(part)
        if child is None:
            part = _find_free_name(home, part)
            child = _NamespaceModule()
            home.add_module(part, child)
        home, path = child, f"{path}{part}."
    last = _find_free_name(home, last)
    if isinstance(value, nn.Module):
        home.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        home.register_parameter(last, value)
    else:
        home.register_buffer(last, value)
    return path + last


def _find_free_name(home: nn.Module, name: str) -> str:
    while hasattr(home, name):
        name += "_"
    return name


SIZE_ARGUMENTS_BY_KIND = {
    "size": ("size", "shape", "sizes", "normalized_shape"),
    "pieces": ("split_sizes", "split_size"),
    "groups": ("groups", "num_groups"),
}
"""Names of operator arguments that hold sizes, by kind of size."""


class OperatorModule(nn.Module):
    """A submodule that runs one operator of the graph, with the sizes given for its path."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""

    def forward(self, node: Node, args: dict[str, Any], sizes: Mapping[str, SizeOverrides]) -> Any:
        return node.compute(_replace_size_arguments(self.path, args, sizes))


def _replace_size_arguments(path: str, args: dict[str, Any], sizes: Mapping[str, SizeOverrides]) -> dict[str, Any]:
    for kind, names in SIZE_ARGUMENTS_BY_KIND.items():
        new = sizes.get(build_size_key(path, kind))
        for name in names if new is not None else ():
            if isinstance(args.get(name), list):
                args = {**args, name: override_sizes(args[name], new)}
            elif isinstance(args.get(name), int):
                args = {**args, name: override_sizes([args[name]], new)[0]}
    for key in [key for key in sizes if key.startswith(build_size_key(path, "range."))]:
        start, end = sizes[key]
        args = {**args, **({} if start is None else {"start": start}), **({} if end is None else {"end": end})}
    return args


class _SharedGraph:
    """A graph that all copies of a module share. It holds no tensors: each copy has its own."""

    def __init__(self, graph: Graph, returns: TreeSpec, batch: int, resize: BatchResizing | None) -> None:
        self.graph, self.output_structure = replace(graph, tensors={}), returns
        self.example_batch_size, self.resize = batch, resize

    def __deepcopy__(self, memo: Any) -> _SharedGraph:
        return self  # immutable, and large for a deep network


class GraphNetwork(ResizableModule):
    """A network that runs a captured graph: the same tensors under the same names, without the model's own code.

    `any_batch_size` tells whether it takes other batch sizes than that of its example.
    """

    def __init__(self, graph: Graph, returns: TreeSpec, batch: int, resize: BatchResizing | None) -> None:
        super().__init__()
        self.shared_graph = _SharedGraph(graph, returns, batch, resize)
        self.tensor_paths = {
            name: register_by_path(
                self,
                name,
                tensor.detach().clone()
                if not isinstance(tensor, nn.Parameter)
                else nn.Parameter(tensor.detach(), tensor.requires_grad),
            )
            for name, tensor in graph.tensors.items()
        }
        self.steps: dict[str, OperatorModule] = {}
        for node in graph.nodes:
            self.steps[node.name] = step = OperatorModule()
            step.path = register_by_path(self, node.name, step)

    @property
    def any_batch_size(self) -> bool:
        return self.shared_graph.resize is not None

    @property
    def example_batch_size(self) -> int:
        """The batch size of the example that the graph was captured with."""
        return self.shared_graph.example_batch_size

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs, as in the original's forward()."""
        return [name for name in self.shared_graph.graph.inputs if name is not None]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        values, shared = flatten_inputs([inputs, list(named.values())]), self.shared_graph
        graph = shared.graph
        if shared.resize is not None:
            # shape[0] stays symbolic in an export; len() would make a constant of it.
            graph = shared.resize(next(v.shape[0] for v in values if isinstance(v, Tensor) and v.ndim))
        run = Interpreter(graph, values, self._collect_tensors(), self._run_operator)
        return tree_unflatten(run.run(), shared.output_structure)

    def _run_operator(self, node: Node, args: dict[str, Any]) -> Any:
        return self.steps[node.name](node, args, self.sizes)

    def _collect_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, path in self.tensor_paths.items():
            home, _, attribute = path.rpartition(".")
            tensors[name] = getattr(self.get_submodule(home), attribute)
        return tensors


@torch.no_grad()
def build_graph_network(model: nn.Module, example_inputs: Any) -> tuple[GraphNetwork, tuple[Any, ...]]:
    """Return a model's graph as a module, and example inputs for it. It takes any batch size if the model's code does.

    Raises
    ------
    ModelError
        The model cannot be captured, or does not run.
    """
    inputs = normalize_inputs(example_inputs, model)
    batch = infer_batch_size(inputs)
    # A batch of one is tried as two first: a size of 1 in the graph could be anything, not only the batch.
    for size in dict.fromkeys((batch if batch > 1 else 2, batch)):
        values = inputs if size == batch else resample_inputs(inputs, size)
        network = _try_capture(model, values, size, last=size == batch)
        if network is not None:
            return network.eval(), inputs if network.any_batch_size else values
    raise ModelError("the model could not be captured", where="example_inputs")


def _try_capture(model: nn.Module, inputs: tuple[Any, ...], batch: int, last: bool) -> GraphNetwork | None:
    """Capture the network at one batch size.

    Return None if that fails or holds for no other batch size, unless this is the `last` size to try.
    """
    try:
        graph = capture(model, inputs)
        if graph.writes_to_weights:  # running it must not change the user's weights
            model = copy_with_own_tensors(model)
            graph = capture(model, inputs)
        returned = call_model(copy_without_hooks(model).eval(), clone_inputs(inputs))
    except ModelError:
        if last:
            raise
        return None
    except Exception as error:
        if last:
            raise ModelError(f"the model does not run: {describe_error(error)}", where="example_inputs") from error
        return None
    resize = _find_batch_resizing(model, graph, inputs, batch)
    if resize is None and not last:
        return None
    return GraphNetwork(graph, _get_output_structure(returned), batch, resize)


def _find_batch_resizing(model: nn.Module, graph: Graph, inputs: tuple[Any, ...], batch: int) -> BatchResizing | None:
    """Return a function that gives the graph at any batch size; None if no way was found that matches the model."""
    scale = partial(change_batch_size, replace(graph, tensors={}), batch)
    if _matches_at(scale, model, graph, resample_inputs(inputs, batch + 1)):
        return scale
    try:
        twin = capture(model, resample_inputs(inputs, batch + 1))
        captures = {batch: replace(graph, tensors={}), batch + 1: replace(twin, tensors={})}
        interpolate = partial(interpolate_batch_size, captures)
        # Sizes that were not captured: two points lie on a line, whatever they are.
        if all(_matches_at(interpolate, model, graph, resample_inputs(inputs, batch + n)) for n in (2, 5)):
            return interpolate
    except (MergingError, ValueError):  # the model takes no other size, or the captures are different programs
        pass
    return None


def _matches_at(resize: BatchResizing, model: nn.Module, graph: Graph, inputs: tuple[Any, ...]) -> bool:
    resized = replace(resize(infer_batch_size(inputs)), tensors=graph.tensors)
    return graph_matches_model(resized, model, inputs)


def _get_output_structure(returned: Any) -> TreeSpec:
    if hasattr(returned, "to_tuple"):
        returned = returned.to_tuple()
    if len(flatten_outputs(returned)) != len(flatten_inputs(returned)):
        raise ModelError(
            "the model returns more than tensors", where="forward()", fix="Return tensors in tuples, lists or dicts."
        )
    return tree_structure(returned)
