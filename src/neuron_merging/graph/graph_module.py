"""Modules whose sizes are data, and a captured graph as such a module. Code that says `x.view(b, 4, 16)` cannot be
made to say 15; a graph or an ONNX file can, since the sizes it holds as constants are rewritten along with the
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten

from neuron_merging.errors import ModelError, describe_error
from neuron_merging.graph.batch_size import change_batch_size, graph_matches_model
from neuron_merging.graph.capture import capture
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.example_inputs import infer_batch_size, resample_inputs
from neuron_merging.graph.graph import Graph, Node
from neuron_merging.graph.interpreter import Interpreter
from neuron_merging.graph.pytree import call_model, clone_inputs, flatten_inputs, flatten_outputs, normalize_inputs

SizeOverrides = tuple[int | None, ...]
"""New sizes of an operator; None where the operator's own stays."""


class ResizableModule(nn.Module):
    """A network made of named steps, the sizes of which can be replaced.

    Every step is a module of its own, called once, so that its name is that of the operators that it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Mapping[str, SizeOverrides] = {}


def build_size_key(step: str, kind: str) -> str:
    """The name of an operator's sizes.

    >>> build_size_key("/model.22/Reshape", "size")
    '/model.22/Reshape|size'
    """
    return f"{step}|{kind}"


def override_sizes(own: Sequence[int], new: SizeOverrides | None) -> list[int]:
    """An operator's own sizes, with the new ones in place.

    >>> override_sizes([1, 64, -1], (None, 48, None))
    [1, 48, -1]
    """
    if new is None or len(new) != len(own):
        return list(own)
    return [a if b is None else b for a, b in zip(own, new, strict=True)]


class _NamespaceModule(nn.Module):
    """What lies between the dots of a name."""


def register_by_path(root: nn.Module, name: str, what: nn.Module | Tensor) -> str:
    """Register something under its dotted name, or under one like it where that is taken; the name it got."""
    *parts, last = name.split(".") if all(name.split(".")) else [name.replace(".", "_")]
    home, path = root, ""
    for part in parts:
        found = home._modules.get(part)
        if found is None:
            part = _find_free_name(home, part)
            found = _NamespaceModule()
            home.add_module(part, found)
        home, path = found, f"{path}{part}."
    last = _find_free_name(home, last)
    if isinstance(what, nn.Module):
        home.add_module(last, what)
    elif isinstance(what, nn.Parameter):
        home.register_parameter(last, what)
    else:
        home.register_buffer(last, what)
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
"""The arguments of operators that hold sizes, by kind."""


class OperatorModule(nn.Module):
    """One operator of the graph."""

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
    """A graph that all copies of a module share; its tensors are the module's own."""

    def __init__(self, graph: Graph, returns: TreeSpec, batch: int, free: bool) -> None:
        self.graph, self.output_structure, self.example_batch_size, self.any_batch_size = (
            replace(graph, tensors={}),
            returns,
            batch,
            free,
        )

    def __deepcopy__(self, memo: Any) -> _SharedGraph:
        return self


class GraphNetwork(ResizableModule):
    """A network that runs a captured graph: the same tensors under the same names, and no code of the class.

    `any_batch_size` says whether it takes other batch sizes than that of its example.
    """

    def __init__(self, graph: Graph, returns: TreeSpec, batch: int, free: bool) -> None:
        super().__init__()
        self.shared_graph = _SharedGraph(graph, returns, batch, free)
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
        return self.shared_graph.any_batch_size

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs, as the original's code has them."""
        return [name for name in self.shared_graph.graph.inputs if name is not None]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        values, known = flatten_inputs([inputs, list(named.values())]), self.shared_graph
        graph = known.graph
        if known.any_batch_size:
            # shape[0] stays symbolic in an export; len() would make a constant of it.
            batch = next(v.shape[0] for v in values if isinstance(v, Tensor) and v.ndim)
            graph = change_batch_size(graph, known.example_batch_size, batch)
        run = Interpreter(graph, values, self._collect_tensors(), self._run_operator)
        return tree_unflatten(run.run(), known.output_structure)

    def _run_operator(self, node: Node, args: dict[str, Any]) -> Any:
        return self.steps[node.name](node, args, self.sizes)

    def _collect_tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, path in self.tensor_paths.items():
            home, _, attribute = path.rpartition(".")
            found[name] = getattr(self.get_submodule(home), attribute)
        return found


@torch.no_grad()
def build_graph_network(model: nn.Module, example_inputs: Any) -> tuple[GraphNetwork, tuple[Any, ...]]:
    """A model's graph as a module, and example inputs for it; for any batch size where its code allows that.

    Raises
    ------
    ModelError
        The model cannot be captured, or does not run.
    """
    inputs = normalize_inputs(example_inputs, model)
    batch = infer_batch_size(inputs)
    for size in dict.fromkeys((batch if batch > 1 else 2, batch)):
        values = inputs if size == batch else resample_inputs(inputs, size)
        found = _try_capture(model, values, size, last=size == batch)
        if found is not None:
            return found.eval(), inputs if found.any_batch_size else values
    raise ModelError("the model could not be captured", where="example_inputs")


def _try_capture(model: nn.Module, inputs: tuple[Any, ...], batch: int, last: bool) -> GraphNetwork | None:
    """The network of one batch size; None if it is not that for others too, and another size is left to try."""
    try:
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
    other = resample_inputs(inputs, batch + 1)
    free = graph_matches_model(change_batch_size(graph, batch, batch + 1), model, other)
    if not free and not last:
        return None
    return GraphNetwork(graph, _get_output_structure(returned), batch, free)


def _get_output_structure(returned: Any) -> TreeSpec:
    if hasattr(returned, "to_tuple"):
        returned = returned.to_tuple()
    if len(flatten_outputs(returned)) != len(flatten_inputs(returned)):
        raise ModelError(
            "the model returns more than tensors", where="forward()", fix="Return tensors in tuples, lists or dicts."
        )
    return tree_structure(returned)
