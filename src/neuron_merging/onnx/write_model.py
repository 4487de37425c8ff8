"""Write the pruned network as an edited copy of its ONNX file.

Constants get the network's values, and sizes that contain channel counts are replaced. Everything else is unchanged.
onnxruntime runs the file, and its outputs are compared with the network's before the file appears at its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging import atomic
from neuron_merging.errors import VerificationError, describe_error
from neuron_merging.graph.batch_size import choose_check_batch_sizes
from neuron_merging.graph.example_inputs import infer_batch_size, resample_inputs
from neuron_merging.graph.graph_module import SizeOverrides
from neuron_merging.onnx import Array, onnx
from neuron_merging.onnx.channel_selections import write_plain_indices
from neuron_merging.onnx.model_file import find_external_weight_files, open_ort_session
from neuron_merging.onnx.network import OnnxNetwork, tensor_to_array
from neuron_merging.onnx.normalize import (
    collect_constant_tensors,
    is_larger_than,
    restore_folded_nodes,
    undo_normalization,
)
from neuron_merging.onnx.open_model import (
    compare_with_ort,
    find_first_differing_step,
    has_free_batch_size,
    is_close_to_ort,
    make_ort_feed,
    measure_rounding_error,
)
from neuron_merging.onnx.operators.shape_ops import infer_reshape_sizes
from neuron_merging.onnx.program import OnnxStep

MAX_PROTOBUF_BYTES = 2**31 - 2**20
"""Bytes of the largest file: protobuf's limit of 2 GiB, less 1 MiB for what is not weights. Beyond that, the weights
are written to a second file."""
MIN_EXTERNAL_BYTES = 1024
"""Bytes from which a weight moves to the second file, if there is one; the threshold of the onnx package."""
NOTE_COMPARED_UNOPTIMIZED = "onnxruntime's own optimisation changes what this file computes: it was compared without"


@dataclass(frozen=True)
class WrittenFile:
    """A written file and its largest difference from the network."""

    path: Path
    difference: float
    batches: tuple[int, ...]
    size: int
    """Bytes."""
    note: str = ""
    """A remark on the comparison; empty if there is none."""


@torch.no_grad()
def write_onnx_file(network: OnnxNetwork, target: str | Path) -> WrittenFile:
    """Write the network as an ONNX file; if the check fails, no file appears.

    Raises
    ------
    VerificationError
        The outputs of the file differ from the network's.
    """
    atomic.check_output_file(target)
    place = atomic.resolve_path(target)
    inputs = network.origin.inputs
    model = _build_edited_model(network, inputs)
    external = bool(network.origin.file.external_files) or is_larger_than(model, MAX_PROTOBUF_BYTES)
    if external:
        _mark_external_weights(model, _choose_weights_file(place, network.origin.file.external_files))
    with atomic.stage_file(place) as part:
        onnx.save_model(model, str(part))
        difference, batches, note = _verify_written_file(network, part, inputs)
    return WrittenFile(place, difference, batches, place.stat().st_size, note)


def _mark_external_weights(model: Any, name: str) -> None:
    """Mark all but small weights to be written to a file of this name beside the model's."""
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= MIN_EXTERNAL_BYTES:
            onnx.external_data_helper.set_external_data(tensor, name)


def _choose_weights_file(place: Path, held: frozenset[Path]) -> str:
    """Return an unused name for the weights file, or that of the file to be replaced; never the original's.

    `held` are the weight files of the original, which must not be overwritten.
    """
    names = chain([f"{place.name}.data"], (f"{place.name}.{n}.data" for n in count(1)))
    replaceable = find_external_weight_files(place) - held
    return next(path.name for path in map(place.with_name, names) if path in replaceable or not path.exists())


def _build_edited_model(network: OnnxNetwork, inputs: Sequence[Tensor]) -> Any:
    model = onnx.ModelProto()
    model.CopyFrom(network.program.model)
    tensors, parameters = collect_constant_tensors(model), dict(network.named_constants())
    changed = set()
    for name, tensor in parameters.items():
        value = tensor_to_array(tensor)
        known = network.program.constants[name]
        if value.shape != known.shape or not np.array_equal(value, known, equal_nan=True):
            tensors[name].CopyFrom(onnx.numpy_helper.from_array(value, name))
            changed.add(name)
    values = network.compute_values(*inputs, every=True)
    _SizeWriter(network, model, values).write_sizes()
    _update_value_info(model, values, parameters)
    write_plain_indices(model)
    undo_normalization(model)
    restore_folded_nodes(model, network.origin.file.model, changed)
    return model


def _update_value_info(model: Any, values: dict[str, Any], parameters: dict[str, Tensor]) -> None:
    """Update the shapes that the file records for intermediate values; remove those of unknown values."""
    for entry in list(model.graph.value_info):
        if entry.name in values:
            _update_shape_info(entry, values[entry.name])
        else:
            model.graph.value_info.remove(entry)
    for entry in model.graph.input:
        if entry.name in parameters:
            _update_shape_info(entry, parameters[entry.name])


def _update_shape_info(entry: Any, value: Any) -> None:
    dims = entry.type.tensor_type.shape.dim
    for dim, size in zip(dims, np.shape(value) if not isinstance(value, Tensor) else value.shape, strict=False):
        if dim.dim_value > 0:
            dim.dim_value = int(size)


class _SizeWriter:
    """Writes the sizes after pruning into a model."""

    def __init__(self, network: OnnxNetwork, model: Any, values: dict[str, Any]) -> None:
        self.network, self.model, self.values = network, model, values
        self.nodes = {node.output[0]: node for node in model.graph.node if node.output}
        self.steps = {module.path: module.step.value for module in network.step_modules}
        self.nodes_to_insert: list[tuple[str, list[Any]]] = []

    def write_sizes(self) -> None:
        for key, sizes in self.network.sizes.items():
            path, _, kind = key.rpartition("|")
            step = self.steps[path]
            node = self.nodes.get(step.outputs[0]) if step.node is not None else None
            if step.fused_outputs and sizes[0] is not None:
                view, norm, _ = (self.nodes[name] for name in step.fused_outputs)
                self._write_decomposed_group_norm(view, norm, sizes[0])
            elif node is not None:
                self._writers_by_kind[kind.partition(".")[0]](node, step, sizes, kind)
        for step in (step for step in self.steps.values() if step.fused_outputs):
            self._write_closing_reshape(self.nodes[step.fused_outputs[-1]], self.values[step.outputs[0]].shape[1])
        self._insert_nodes()

    @property
    def _writers_by_kind(self) -> dict[str, Callable[[Any, OnnxStep, SizeOverrides, str], None]]:
        return {
            "size": self._write_shape,
            "pieces": self._write_split_sizes,
            "range": self._write_slice_range,
            "groups": self._write_group_count,
        }

    def _write_shape(self, node: Any, step: OnnxStep, sizes: SizeOverrides, kind: str) -> None:
        if node.op_type in ("Reshape", "Expand") and len(node.input) > 1:
            current = np.asarray(self.values[step.inputs[1]]).ravel()
            inferred = (0, -1) if node.op_type == "Reshape" else ()
            new = [
                None if a in inferred else b
                for a, b in zip(current[-len(sizes) :], sizes[-len(current) :], strict=True)
            ]
            if node.op_type == "Reshape":
                filled = infer_reshape_sizes(
                    current.tolist(), [a if b is None else b for a, b in zip(current.tolist(), new, strict=True)]
                )
                new = [None if b is None else a for a, b in zip(filled, new, strict=True)]
            self._write_input(node, 1, current, new)
        elif node.op_type == "Reshape":
            self._write_attribute(node, "shape", sizes)

    def _write_split_sizes(self, node: Any, step: OnnxStep, sizes: SizeOverrides, kind: str) -> None:
        if len(node.input) > 1 and node.input[1]:
            self._write_input(node, 1, np.asarray(self.values[step.inputs[1]]).ravel(), sizes)
        else:
            self._write_attribute(node, "split", sizes)

    def _write_slice_range(self, node: Any, step: OnnxStep, sizes: SizeOverrides, kind: str) -> None:
        """Replace the pruned axis's entry in the lists of starts and ends, which have one entry per sliced axis."""
        dim = int(kind.partition(".")[2])
        ndim = self.values[step.outputs[0]].ndim
        axes = self._read_list_argument(node, step, 3, "axes")
        starts = self._read_list_argument(node, step, 1, "starts")
        axes = list(range(len(starts))) if axes is None or not len(axes) else [int(axis) % ndim for axis in axes]
        for slot, name, size in ((1, "starts", sizes[0]), (2, "ends", sizes[1])):
            new = tuple(size if axis == dim else None for axis in axes)
            if len(node.input) > 1:
                self._write_input(node, slot, np.asarray(self._read_list_argument(node, step, slot, name)), new)
            else:
                self._write_attribute(node, name, new)

    def _read_list_argument(self, node: Any, step: OnnxStep, slot: int, name: str) -> Any:
        if len(step.inputs) > slot and step.inputs[slot]:
            return np.asarray(self.values[step.inputs[slot]]).ravel()
        return step.attributes.get(name, ())

    def _write_group_count(self, node: Any, step: OnnxStep, sizes: SizeOverrides, kind: str) -> None:
        name = "num_groups" if node.op_type == "GroupNormalization" else "group"
        for attribute in node.attribute:
            if attribute.name == name and sizes[0] is not None:
                attribute.i = sizes[0]

    def _write_decomposed_group_norm(self, view: Any, norm: Any, groups: int) -> None:
        """Update a group norm that is stored as a reshape and an instance norm with weight 1 and bias 0 per group."""
        known = self.network.program.constants
        self._write_input(view, 1, np.asarray(known[view.input[1]]).ravel(), (None, groups, None))
        for slot in (1, 2):
            new_name = f"{norm.input[slot]}_of_{norm.output[0]}"
            self.nodes_to_insert.append(
                (norm.output[0], [_make_constant_node(new_name, np.resize(known[norm.input[slot]], groups))])
            )
            norm.input[slot] = new_name

    def _write_closing_reshape(self, view: Any, channels: int) -> None:
        """Update the channel count of the reshape behind a decomposed group norm, if it is a constant."""
        current = self.network.program.constants.get(view.input[1])
        if current is not None and current[1] > 0:
            self._write_input(view, 1, current, (None, channels, *(None for _ in current[2:])))

    def _write_attribute(self, node: Any, name: str, sizes: SizeOverrides) -> None:
        for attribute in node.attribute:
            if attribute.name == name:
                new = [a if b is None else b for a, b in zip(attribute.ints, sizes, strict=True)]
                del attribute.ints[:]
                attribute.ints.extend(new)

    def _write_input(self, node: Any, slot: int, current: Array, sizes: Sequence[int | None]) -> None:
        """Replace an input by a new constant; if it is computed, overwrite the changed entries with a Where node."""
        wrong = np.array([new is not None and new != old for old, new in zip(current, sizes, strict=True)])
        if not wrong.any():
            return
        name = node.input[slot]
        new = np.array([b if bad else a for a, b, bad in zip(current, sizes, wrong, strict=True)], current.dtype)
        new_name = f"{name}_of_{node.output[0]}"
        if name in self.network.program.constants:
            self.nodes_to_insert.append((node.output[0], [_make_constant_node(new_name, new)]))
        else:
            parts = [_make_constant_node(f"{new_name}_where", wrong), _make_constant_node(f"{new_name}_new", new)]
            inputs = [f"{new_name}_where", f"{new_name}_new", name]
            self.nodes_to_insert.append(
                (node.output[0], [*parts, onnx.helper.make_node("Where", inputs, [new_name], name=new_name)])
            )
        node.input[slot] = new_name

    def _insert_nodes(self) -> None:
        """Insert each new node right before the node that reads it, to keep the topological order."""
        if not self.nodes_to_insert:
            return
        before: dict[str, list[Any]] = {}
        for consumer, nodes in self.nodes_to_insert:
            before.setdefault(consumer, []).extend(nodes)
        old = [onnx.NodeProto.FromString(node.SerializeToString()) for node in self.model.graph.node]
        del self.model.graph.node[:]
        for node in old:
            self.model.graph.node.extend([*before.get(node.output[0] if node.output else "", ()), node])


def _make_constant_node(name: str, value: Array) -> Any:
    return onnx.helper.make_node("Constant", [], [name], name=name, value=onnx.numpy_helper.from_array(value, name))


# Checking


def _verify_written_file(
    network: OnnxNetwork, part: Path, inputs: Sequence[Tensor]
) -> tuple[float, tuple[int, ...], str]:
    """Compare file and network, without graph optimisation if that changes the original file's outputs too."""
    try:
        return *_compare_written_file(network, part, inputs), ""
    except VerificationError:
        if not _is_changed_by_optimizing(network, inputs):
            raise
    return *_compare_written_file(network, part, inputs, plain=True), NOTE_COMPARED_UNOPTIMIZED


def _is_changed_by_optimizing(network: OnnxNetwork, inputs: Sequence[Tensor]) -> bool:
    file = network.origin.file
    runs = (file.session, open_ort_session(str(file.path), plain=True))
    optimised, plain = (run.run(None, make_ort_feed(file, inputs)) for run in runs)
    pairs = zip(optimised, plain, strict=True)
    return not all(is_close_to_ort(torch.from_numpy(a), b) for a, b in pairs if isinstance(a, np.ndarray))


def _compare_written_file(
    network: OnnxNetwork, part: Path, inputs: Sequence[Tensor], *, plain: bool = False
) -> tuple[float, tuple[int, ...]]:
    """Return the largest difference between file and network, and the batch sizes that were compared."""
    run, names = _open_session_with_ends(network, part, plain=plain)
    worst, done = 0.0, list[int]()
    for batch, values in _iter_accepted_batches(network, inputs):
        try:
            found = run.run(names or None, make_ort_feed(network.origin.file, values))
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise VerificationError(
                f"the written file does not run: {describe_error(error)}", where=str(part.name)
            ) from error
        where = f"{part.name}, batch size {batch}"
        outputs = dict(zip(names, found, strict=False))
        worst = max(worst, _check_largest_difference(network, values, outputs, part, where))
        done.append(batch)
    return worst, tuple(done)


def _open_session_with_ends(network: OnnxNetwork, part: Path, *, plain: bool) -> tuple[Any, list[str]]:
    """Open the file with the boundary values as further outputs; return the session and the names of its outputs."""
    run, names, ends = (
        open_ort_session(str(part), plain=plain),
        list(network.program.outputs),
        list(network.program.boundary_values),
    )
    model = onnx.load(str(part)) if ends else None
    if model is None or is_larger_than(model, MAX_PROTOBUF_BYTES):
        return run, names
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in ends)
    return open_ort_session(model.SerializeToString(), plain=plain), [*names, *ends]


def _check_largest_difference(
    network: OnnxNetwork, inputs: Sequence[Tensor], found: dict[str, Any], part: Path, where: str
) -> float:
    """Return the largest difference of any output; raise if one exceeds what rounding explains."""
    wanted = network(*inputs)
    wrong = [name for name, mine in zip(found, wanted, strict=False) if not is_close_to_ort(mine, found[name])]
    if wrong:
        # Some networks amplify rounding: measure how much against float64, which is slow, only if it matters.
        rounding = measure_rounding_error(network, inputs)
        triples = zip(found, wanted, rounding, strict=False)
        wrong = [name for name, mine, least in triples if not is_close_to_ort(mine, found[name], least)]
    if wrong and not _agrees_step_by_step(network, inputs, found, part):
        what = f"the written file's output {wrong[0]} is not the network's"
        raise VerificationError(what, where=where, fix="Report the file.")
    return max(
        (compare_with_ort(mine, theirs).absolute for mine, theirs in zip(wanted, found.values(), strict=False)),
        default=0.0,
    )


def _agrees_step_by_step(network: OnnxNetwork, inputs: Sequence[Tensor], found: dict[str, Any], part: Path) -> bool:
    """Return whether every step agrees with onnxruntime's on onnxruntime's inputs; `found` are the file's outputs.

    Outputs may differ all the same: a norm that divides by nearly nothing amplifies the rounding before it, and the
    two programs round differently.
    """
    model = onnx.load(str(part))
    values = network.compute_values(*inputs, every=True)
    made = {name for node in model.graph.node for name in node.output}
    named = [name for name, value in values.items() if name in made and isinstance(value, Tensor)]
    if is_larger_than(model, MAX_PROTOBUF_BYTES):
        return False
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in named)
    run = open_ort_session(model.SerializeToString(), plain=True)
    known = dict(zip(named, run.run(named, make_ort_feed(network.origin.file, inputs)), strict=True))
    # Steps are compared without graph optimisation, so that has to give the same outputs.
    same = all(is_close_to_ort(torch.from_numpy(np.array(found[name])), known[name]) for name in found if name in known)
    return same and find_first_differing_step(network, values, known) is None


def _iter_accepted_batches(network: OnnxNetwork, inputs: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield the example, and other batch sizes if the file's is dynamic and the original runs on them."""
    example_size = infer_batch_size(inputs)
    yield example_size, tuple(inputs)
    file = network.origin.file
    for batch in choose_check_batch_sizes(network, inputs) if has_free_batch_size(file) else ():
        values = resample_inputs(inputs, batch)
        if batch == example_size:
            continue
        try:
            file.session.run(None, make_ort_feed(file, values))
        except Exception:  # noqa: BLE001 (a file may declare a dynamic batch and still fix it inside)
            continue
        yield batch, values
