"""Change the batch size of a captured graph without capturing it again. The example's batch size is written into
views, expansions and new tensors; where it is the leading size it is replaced, and fresh samples show whether
the result equals the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.errors import describe_error
from neuron_merging.graph.compare import outputs_match
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.graph import Graph, Node, Ref, Shape
from neuron_merging.graph.interpreter import run_graph
from neuron_merging.graph.process_state import disable_fused_attention, restore_rng, seed_rng
from neuron_merging.graph.pytree import call_model, clone_inputs, flatten_inputs, flatten_outputs

OUTPUT_SIZE_ARGUMENTS = ("size", "shape", "sizes")
"""Arguments that are the size of what an operator returns."""


def change_batch_size(graph: Graph, old: int, new: int) -> Graph:
    """The graph with every leading size that is a multiple of the old batch size scaled to the new one."""
    return replace(graph, nodes=tuple(_change_node_batch_size(node, old, new) for node in graph.nodes))


def _change_node_batch_size(node: Node, old: int, new: int) -> Node:
    args = {
        key: _scale_leading_size(value, old, new) if key in OUTPUT_SIZE_ARGUMENTS else value
        for key, value in node.args.items()
    }
    if node.is_range and args["end"] == old:
        args["end"] = new
    changed = any(args[key] is not value for key, value in node.args.items())  # a free size is not compared
    return replace(node, args=args) if changed else node


def _scale_leading_size(value: Any, old: int, new: int) -> Any:
    if not isinstance(value, list) or not value or not isinstance(value[0], int) or value[0] < 1 or value[0] % old:
        return value
    return [value[0] // old * new, *value[1:]]


def align_node_names(graph: Graph, other: Graph) -> Graph:
    """A capture with the names of another: one operator more or less, and all names behind it are counted otherwise."""
    mine, theirs = ([_get_node_signature(own, node) for node in own.nodes] for own in (graph, other))
    blocks = SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
    names = {graph.nodes[a + i].name: other.nodes[b + i].name for a, b, size in blocks for i in range(size)}
    new = {node.name: names.get(node.name, f"{node.name}, of {len(graph.nodes)}") for node in graph.nodes}
    return replace(
        graph,
        nodes=tuple(replace(node, name=new[node.name], args=_rename_refs(node.args, new)) for node in graph.nodes),
        outputs=_rename_refs(graph.outputs, new),
        shapes={new.get(name, name): shape for name, shape in graph.shapes.items()},
        dtypes={new.get(name, name): dtype for name, dtype in graph.dtypes.items()},
    )


def _get_node_signature(graph: Graph, node: Node) -> tuple[object, ...]:
    """What a node is, whatever it is called."""
    stored = tuple(graph.parameters[ref.name] for ref in node.refs() if ref.name in graph.parameters)
    return node.op, node.module, node.source, len(node.shape), stored


def _rename_refs(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    if isinstance(value, (list, tuple)):
        return type(value)(_rename_refs(item, names) for item in value)
    return {key: _rename_refs(item, names) for key, item in value.items()} if isinstance(value, Mapping) else value


@torch.no_grad()
def get_forward_error(model: nn.Module, batch: Sequence[Any]) -> str:
    """What a network's own code says against a batch; nothing if it runs."""
    try:
        with disable_fused_attention(), restore_rng():
            call_model(copy_without_hooks(model).eval(), clone_inputs(tuple(batch)))
    except Exception as error:  # noqa: BLE001 (whatever the user's code raises is the answer)
        return describe_error(error)
    return ""


@torch.no_grad()
def graph_matches_model(graph: Graph, model: nn.Module, batch: Sequence[Any]) -> bool:
    """Whether the graph computes on a batch what the model itself does."""
    try:
        with disable_fused_attention(), restore_rng():
            seed_rng(0)
            want = flatten_outputs(call_model(copy_without_hooks(model).eval(), clone_inputs(tuple(batch))))
            seed_rng(0)
            got = flatten_outputs(run_graph(graph, flatten_inputs(batch), graph.tensors))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False  # another size stands somewhere else, or the model takes no other batch
    return outputs_match(got, want)


def generate_inputs_of_length(values: Sequence[Any], old: int, new: int) -> list[Any]:
    """Fresh values like these, with another length where they have the old one."""
    pick = torch.Generator("cpu").manual_seed(0)
    return [_generate_tensor_of_length(value, old, new, pick) for value in values]


def _generate_tensor_of_length(value: Any, old: int, new: int, pick: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != old:
        return value
    longer = value[torch.arange(new, device=value.device) % old].clone()
    if not value.is_floating_point() or not bool(value.isfinite().all()):
        return longer
    noise = torch.randn(longer.shape, generator=pick, dtype=torch.float64, device="cpu")
    return longer + noise.to(longer)


def find_batch_size_change(example: Sequence[Any], batch: Sequence[Any]) -> tuple[int, int] | None:
    """The batch sizes of two sets of inputs that differ in nothing else; None where they do."""
    sizes = {
        (_get_input_length(a), _get_input_length(b))
        for a, b in zip(example, batch, strict=True)
        if _get_input_shape(a) != _get_input_shape(b)
    }
    alike = all(_get_input_shape(a)[1:] == _get_input_shape(b)[1:] for a, b in zip(example, batch, strict=True))
    return next(iter(sizes)) if alike and len(sizes) == 1 else None


def _get_input_shape(value: Any) -> Shape:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _get_input_length(value: Any) -> int:
    return len(value) if isinstance(value, Tensor) and value.ndim else 0
