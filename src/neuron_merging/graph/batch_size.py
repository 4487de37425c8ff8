"""Change the batch size of a captured graph without capturing it again.

torch.export writes the example's batch size into views, expansions and new tensors. Where it is the leading size it is
replaced. A run on fresh samples then tells whether the graph still computes what the model does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from neuron_merging.errors import MergingError, describe_error, raise_if_out_of_memory
from neuron_merging.graph.compare import outputs_match
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.example_inputs import (
    add_batch_axis,
    call_model,
    clone_inputs,
    flatten_inputs,
    flatten_outputs,
    infer_batch_size,
    resample_inputs,
    take_sample,
    take_samples,
)
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import run_graph
from neuron_merging.graph.process_state import disable_fused_attention, restore_rng, seed_rng

SAME_GRAPH_TOLERANCE = 1e-4
"""Relative difference of a model and its graph: equal operators in equal order differ less than a rewritten network."""
OUTPUT_SIZE_ARGUMENTS = ("size", "shape", "sizes")
"""Names of the arguments that hold the shape of an operator's result."""
BATCH_SLICE_ARGUMENTS = ("start", "end", "length", "split_size", "split_sizes")
"""Arguments of the operators that cut a tensor along a dimension (slice, narrow, split): they say where."""
FEW_CHECK_BATCH_SIZES, MANY_CHECK_BATCH_SIZES = (1, 3), (1, 3, 16)
"""Batch sizes at which a file with a dynamic batch size is compared: one, an odd one, and a typical one where it is
cheap."""
MAX_CHECK_MACS = 2**36
"""Multiply-accumulates of the largest batch that a file is compared on, a second or two on a CPU. Both networks run it,
and a third sample in a batch shows what a sixteenth would."""


def change_batch_size(graph: Graph, old: int, new: int) -> Graph:
    """Return the graph with every leading size that is a multiple of the old batch size scaled to the new one."""
    return replace(graph, nodes=tuple(_change_node_batch_size(node, old, new) for node in graph.nodes))


def change_batch_size_and_slices(graph: Graph, old: int, new: int) -> Graph:
    """As `change_batch_size`, also where tensors are cut along the batch: `torch.cat([a, b])[: len(a)]`."""
    resized = change_batch_size(graph, old, new)
    return replace(resized, nodes=tuple(_change_node_slice(node, old, new) for node in resized.nodes))


def interpolate_batch_size(graphs: Mapping[int, Graph], new: int) -> Graph:
    """Return the graph at another batch size, given captures of one model at two batch sizes.

    Every integer argument that differs between the captures is taken as linear in the batch size. This finds the batch
    where it is not the leading size: the state of a recurrent layer, `reshape(1, batch * time, width)`.

    Raises
    ------
    ValueError
        The captures differ in more than that.
    """
    (old, graph), (other, twin) = graphs.items()
    pairs = zip(graph.nodes, twin.nodes, strict=True)
    nodes = tuple(_interpolate_node(a, b, (old, other), new) for a, b in pairs)
    return replace(graph, nodes=nodes)


def _interpolate_node(node: Node, twin: Node, sizes: tuple[int, int], new: int) -> Node:
    if (node.name, node.op, node.args.keys()) != (twin.name, twin.op, twin.args.keys()):
        raise ValueError(f"{node.name} and {twin.name} are different operators")
    if node.args == twin.args:
        return node
    return replace(
        node, args={key: _interpolate(value, twin.args[key], sizes, new) for key, value in node.args.items()}
    )


def _interpolate(value: Any, twin: Any, sizes: tuple[int, int], new: int) -> Any:
    if isinstance(value, (list, tuple)) and isinstance(twin, (list, tuple)):
        return type(value)(_interpolate(a, b, sizes, new) for a, b in zip(value, twin, strict=True))
    if type(value) is not type(twin) or (value != twin and type(value) is not int):
        raise ValueError(f"{value} and {twin} are not sizes")
    if value == twin:
        return value
    slope, rest = divmod(twin - value, sizes[1] - sizes[0])
    if rest:
        raise ValueError(f"{value} and {twin} are not linear in the batch size")
    return slope * new + (value - slope * sizes[0])


def _change_node_slice(node: Node, old: int, new: int) -> Node:
    found = {key: _scale_positions(value, old, new) for key, value in find_batch_slice(node, old).items()}
    return replace(node, args={**node.args, **found}) if found else node


def _scale_positions(value: int | list[int], old: int, new: int) -> int | list[int]:
    return [size // old * new for size in value] if isinstance(value, list) else value // old * new


def find_batch_slice(node: Node, batch: int) -> dict[str, int | list[int]]:
    """The arguments of a cut along the first dimension that are multiples of a batch size; the open end is none."""
    # A range has a start and an end too, but no tensor and no dimension; `change_batch_size` handles it.
    if node.is_range or "self" not in node.args or node.args.get("dim", 0) != 0:
        return {}
    given = {key: node.args.get(key) for key in BATCH_SLICE_ARGUMENTS}
    return {key: value for key, value in given.items() if _is_multiple(value, batch)}


def _is_multiple(value: Any, batch: int) -> TypeGuard[int | list[int]]:
    if isinstance(value, list):
        return all(_is_multiple(size, batch) for size in value)
    # sys.maxsize is how the exporter writes "to the end".
    return type(value) is int and 0 < value < sys.maxsize and value % batch == 0


def _change_node_batch_size(node: Node, old: int, new: int) -> Node:
    args = {
        key: _scale_leading_size(value, old, new) if key in OUTPUT_SIZE_ARGUMENTS else value
        for key, value in node.args.items()
    }
    # arange(batch) is an index into the batch; any other end may be a constant.
    if node.is_range and args["end"] == old:
        args["end"] = new
    changed = any(
        args[key] is not value for key, value in node.args.items()
    )  # by identity: comparing symbolic sizes would add a guard to an export
    return replace(node, args=args) if changed else node


def _scale_leading_size(value: Any, old: int, new: int) -> Any:
    # Multiples too: `view(batch * heads, …)` stores the product.
    if not isinstance(value, list) or not value or not isinstance(value[0], int) or value[0] < 1 or value[0] % old:
        return value
    return [value[0] // old * new, *value[1:]]


def align_node_names(graph: Graph, other: Graph) -> Graph:
    """Return a capture whose nodes have the names of the same nodes in another capture.

    torch.export numbers nodes by operator. One operator more or less shifts the numbers of all that follow.
    """
    signatures, other_signatures = ([_get_node_signature(g, node) for node in g.nodes] for g in (graph, other))
    # Align both sequences as a diff does; nodes without a counterpart get a name that no other node can have.
    blocks = SequenceMatcher(None, signatures, other_signatures, autojunk=False).get_matching_blocks()
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
    """Return what identifies a node apart from its name."""
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
    """Return the error that the model raises on a batch, on one line; an empty text if it runs."""
    try:
        with disable_fused_attention(), restore_rng():
            call_model(copy_without_hooks(model).eval(), clone_inputs(tuple(batch)))
    except Exception as error:  # noqa: BLE001 (the user's code may raise anything)
        raise_if_out_of_memory(error)
        return describe_error(error)
    return ""


@torch.no_grad()
def takes_larger_batch(model: nn.Module, batch: Sequence[Any], size: int) -> bool:
    """Return whether a model that takes `size` samples also takes a larger batch, and returns outputs for all of it.

    A reshape to (1, …) does not raise an error on two samples: it puts both into one row.
    """
    network = copy_without_hooks(model).eval()
    try:
        with disable_fused_attention(), restore_rng():
            runs = (
                flatten_outputs(call_model(network, clone_inputs(values)))
                for values in (take_samples(batch, size), tuple(batch))
            )
            few, more = ([tuple(value.shape) for value in outputs] for outputs in runs)
    except Exception:  # noqa: BLE001 (the user's code may raise anything)
        return False
    leads = any(shape[:1] == (size,) for shape in few)
    pairs = (pair for old, new in zip(few, more, strict=True) for pair in zip(old, new, strict=False))
    grows = any(a == size and b > size for a, b in pairs)
    # If no output leads with the batch, none has to grow: that it runs must do.
    return grows or not leads


@torch.no_grad()
def graph_matches_model(graph: Graph, model: nn.Module, batch: Sequence[Any]) -> bool:
    """Return whether the graph's outputs on a batch equal the model's, up to rounding."""
    try:
        with disable_fused_attention(), restore_rng():
            seed_rng(0)
            # Equal seeds before both runs, in case the network draws random numbers.
            want = flatten_outputs(call_model(copy_without_hooks(model).eval(), clone_inputs(tuple(batch))))
            seed_rng(0)
            got = flatten_outputs(run_graph(graph, flatten_inputs(batch), graph.tensors))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise_if_out_of_memory(error)
        return False  # the old batch size is left somewhere in the graph, or the model takes no other
    return outputs_match(got, want, SAME_GRAPH_TOLERANCE)


@torch.no_grad()
def choose_check_batch_sizes(model: nn.Module, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the batch sizes at which a file of this network is compared with it: fewer if it is expensive."""
    with FlopCounterMode(display=False) as counter, disable_fused_attention(), restore_rng():
        call_model(model, clone_inputs(tuple(inputs)))
    macs = counter.get_total_flops() // 2 // infer_batch_size(inputs)
    cheap = max(MANY_CHECK_BATCH_SIZES) * macs <= MAX_CHECK_MACS
    return MANY_CHECK_BATCH_SIZES if cheap else FEW_CHECK_BATCH_SIZES


@torch.no_grad()
def make_batch_of_one(model: nn.Module, sample: Sequence[Any]) -> tuple[Any, ...]:
    """Return a single sample with a leading batch dimension added.

    Raises
    ------
    MergingError
        The network takes no batch: the outputs of two samples together differ from those of each alone.
    """
    batch = add_batch_axis(sample)
    pair = resample_inputs(batch, 2)
    try:
        with disable_fused_attention(), torch.random.fork_rng(devices=[]):
            network = copy_without_hooks(model).eval()
            runs = (
                call_model(network, clone_inputs(inputs))
                for inputs in (pair, take_sample(pair, 0), take_sample(pair, 1))
            )
            both, *alone = map(flatten_outputs, runs)
            takes_batch = outputs_match(both, [torch.stack(values) for values in zip(*alone, strict=True)])
    except Exception:  # noqa: BLE001 (the user's code may raise anything on a batch)
        takes_batch = False
    if not takes_batch:
        what = "the example is one sample without a batch dimension, and the network takes no batch of such samples"
        fix = "Let the network's code take a leading batch dimension, and give a batch: x.unsqueeze(0)."
        raise MergingError(what, where="example_inputs", fix=fix)
    return batch
