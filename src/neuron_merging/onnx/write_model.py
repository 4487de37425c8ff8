"""Write the pruned network as an edit of its ONNX file. Constants take the network's values, sizes that hold
channel counts are replaced, everything else stays as it was. The file is run by onnxruntime and compared with
the network before it takes its place.
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
from neuron_merging.graph.example_inputs import infer_batch_size, resample_inputs
from neuron_merging.graph.graph_module import SizeOverrides
from neuron_merging.onnx import Array, onnx
from neuron_merging.onnx.model_file import find_external_weight_files, open_ort_session
from neuron_merging.onnx.network import OnnxNetwork, tensor_to_array
from neuron_merging.onnx.normalize import collect_constant_tensors, is_larger_than, undo_normalization
from neuron_merging.onnx.open_model import (
    compare_with_ort,
    has_free_batch_size,
    is_close_to_ort,
    make_ort_feed,
    measure_rounding_error,
)
from neuron_merging.onnx.operators.shape_ops import infer_reshape_sizes
from neuron_merging.onnx.program import OnnxStep

ONNX_CHECK_BATCH_SIZES = (1, 3, 16)
"""Batch sizes at which a file whose batch is free is compared."""
MAX_PROTOBUF_BYTES = 2**31 - 2**20
"""Bytes that one file of this format can have; with more, the weights lie beside it."""
MIN_EXTERNAL_BYTES = 1024
"""Bytes of a weight that is written into a file of its own, where weights are."""
NOTE_COMPARED_UNOPTIMIZED = "onnxruntime's own optimisation changes what this file computes: it was compared without"


@dataclass(frozen=True)
class WrittenFile:
    """What was written, and how it compares with the network."""

    path: Path
    difference: float
    batches: tuple[int, ...]
    size: int
    note: str = ""
    """What is to be known of it, if anything is."""


@torch.no_grad()
def write_onnx_file(network: OnnxNetwork, target: str | Path) -> WrittenFile:
    """Write the network as an ONNX file, whole and checked, or not at all.

    Raises
    ------
    VerificationError
        The file does not compute what the network does.
    """
    atomic.check_output_file(target)
    place = atomic.resolve_path(target)
    inputs = network.origin.inputs
    model = _build_edited_model(network, inputs)
    apart = bool(network.origin.file.external_files) or is_larger_than(model, MAX_PROTOBUF_BYTES)
    if apart:
        _mark_external_weights(model, _choose_weights_file(place, network.origin.file.external_files))
    with atomic.stage_file(place) as part:
        onnx.save_model(model, str(part))
        difference, batches, note = _verify_written_file(network, part, inputs)
    return WrittenFile(place, difference, batches, place.stat().st_size, note)


def _mark_external_weights(model: Any, name: str) -> None:
    """Have all but small weights written into a file of this name, beside the model's."""
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= MIN_EXTERNAL_BYTES:
            onnx.external_data_helper.set_external_data(tensor, name)


def _choose_weights_file(place: Path, held: frozenset[Path]) -> str:
    """The name of the file for weights: a free one, or that of the file that is replaced; not the original's."""
    names = chain([f"{place.name}.data"], (f"{place.name}.{n}.data" for n in count(1)))
    own = find_external_weight_files(place) - held
    return next(path.name for path in map(place.with_name, names) if path in own or not path.exists())


def _build_edited_model(network: OnnxNetwork, inputs: Sequence[Tensor]) -> Any:
    model = onnx.ModelProto()
    model.CopyFrom(network.program.model)
    tensors, own = collect_constant_tensors(model), dict(network.named_constants())
    for name, tensor in own.items():
        value = tensor_to_array(tensor)
        known = network.program.constants[name]
        if value.shape != known.shape or not np.array_equal(value, known, equal_nan=True):
            tensors[name].CopyFrom(onnx.numpy_helper.from_array(value, name))
    values = network.compute_values(*inputs, every=True)
    _SizeWriter(network, model, values).write_sizes()
    _update_value_info(model, values, own)
    undo_normalization(model)
    return model


def _update_value_info(model: Any, values: dict[str, Any], own: dict[str, Tensor]) -> None:
    """The shapes that a file notes for values, where they have changed; notes on values that are not known go."""
    for entry in list(model.graph.value_info):
        if entry.name in values:
            _update_shape_info(entry, values[entry.name])
        else:
            model.graph.value_info.remove(entry)
    for entry in model.graph.input:
        if entry.name in own:
            _update_shape_info(entry, own[entry.name])


def _update_shape_info(entry: Any, value: Any) -> None:
    dims = entry.type.tensor_type.shape.dim
    for dim, size in zip(dims, np.shape(value) if not isinstance(value, Tensor) else value.shape, strict=False):
        if dim.dim_value > 0:
            dim.dim_value = int(size)


class _SizeWriter:
    """Writes new sizes into a model."""

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
            own = np.asarray(self.values[step.inputs[1]]).ravel()
            inferred = (0, -1) if node.op_type == "Reshape" else ()
            new = [None if a in inferred else b for a, b in zip(own[-len(sizes) :], sizes[-len(own) :], strict=True)]
            if node.op_type == "Reshape":
                filled = infer_reshape_sizes(
                    own.tolist(), [a if b is None else b for a, b in zip(own.tolist(), new, strict=True)]
                )
                new = [None if b is None else a for a, b in zip(filled, new, strict=True)]
            self._write_input(node, 1, own, new)
        elif node.op_type == "Reshape":
            self._write_attribute(node, "shape", sizes)

    def _write_split_sizes(self, node: Any, step: OnnxStep, sizes: SizeOverrides, kind: str) -> None:
        if len(node.input) > 1 and node.input[1]:
            self._write_input(node, 1, np.asarray(self.values[step.inputs[1]]).ravel(), sizes)
        else:
            self._write_attribute(node, "split", sizes)

    def _write_slice_range(self, node: Any, step: OnnxStep, sizes: SizeOverrides, kind: str) -> None:
        """Starts and ends lie in two lists, one entry for each axis that is named."""
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
        """A group norm as a view and an instance norm, with a one and a zero for every group."""
        known = self.network.program.constants
        self._write_input(view, 1, np.asarray(known[view.input[1]]).ravel(), (None, groups, None))
        for slot in (1, 2):
            here = f"{norm.input[slot]}_of_{norm.output[0]}"
            self.nodes_to_insert.append(
                (norm.output[0], [_make_constant_node(here, np.resize(known[norm.input[slot]], groups))])
            )
            norm.input[slot] = here

    def _write_closing_reshape(self, view: Any, channels: int) -> None:
        """The view behind it, where that holds all sizes as numbers."""
        own = self.network.program.constants.get(view.input[1])
        if own is not None and own[1] > 0:
            self._write_input(view, 1, own, (None, channels, *(None for _ in own[2:])))

    def _write_attribute(self, node: Any, name: str, sizes: SizeOverrides) -> None:
        for attribute in node.attribute:
            if attribute.name == name:
                new = [a if b is None else b for a, b in zip(attribute.ints, sizes, strict=True)]
                del attribute.ints[:]
                attribute.ints.extend(new)

    def _write_input(self, node: Any, slot: int, own: Array, sizes: Sequence[int | None]) -> None:
        """Another constant in place of this one, or, of what is computed, other entries."""
        wrong = np.array([new is not None and new != old for old, new in zip(own, sizes, strict=True)])
        if not wrong.any():
            return
        name = node.input[slot]
        new = np.array([b if bad else a for a, b, bad in zip(own, sizes, wrong, strict=True)], own.dtype)
        here = f"{name}_of_{node.output[0]}"
        if name in self.network.program.constants:
            self.nodes_to_insert.append((node.output[0], [_make_constant_node(here, new)]))
        else:
            parts = [_make_constant_node(f"{here}_where", wrong), _make_constant_node(f"{here}_new", new)]
            inputs = [f"{here}_where", f"{here}_new", name]
            self.nodes_to_insert.append(
                (node.output[0], [*parts, onnx.helper.make_node("Where", inputs, [here], name=here)])
            )
        node.input[slot] = here

    def _insert_nodes(self) -> None:
        """New nodes stand right before those that read them."""
        if not self.nodes_to_insert:
            return
        before: dict[str, list[Any]] = {}
        for reader, nodes in self.nodes_to_insert:
            before.setdefault(reader, []).extend(nodes)
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
    """The comparison, without onnxruntime's optimisation where that changes the original file as well."""
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
    """The largest difference between the file and the network, at every batch size that both take."""
    run, names = _open_session_with_ends(network, part, plain=plain)
    worst, done = 0.0, list[int]()
    for batch, values in _iter_accepted_batches(network, inputs):
        try:
            found = run.run(names or None, make_ort_feed(network.origin.file, values))
        except Exception as error:  # onnxruntime has a class for every fault, and no common one
            raise VerificationError(
                f"the written file does not run: {describe_error(error)}", where=str(part.name)
            ) from error
        where = f"{part.name}, batch size {batch}"
        worst = max(worst, _check_largest_difference(network, values, dict(zip(names, found, strict=False)), where))
        done.append(batch)
    return worst, tuple(done)


def _open_session_with_ends(network: OnnxNetwork, part: Path, *, plain: bool) -> tuple[Any, list[str]]:
    """The file in onnxruntime, and what it is asked for: also what nodes read behind which it is left as it is."""
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
    network: OnnxNetwork, inputs: Sequence[Tensor], found: dict[str, Any], where: str
) -> float:
    """The largest difference of any output, none of which may be more than the order of sums or rounding makes."""
    wanted = network(*inputs)
    wrong = [name for name, mine in zip(found, wanted, strict=False) if not is_close_to_ort(mine, found[name])]
    if wrong:  # few networks make much of their rounding: what it is, is found out where it matters
        own = measure_rounding_error(network, inputs)
        triples = zip(found, wanted, own, strict=False)
        wrong = [name for name, mine, least in triples if not is_close_to_ort(mine, found[name], least)]
    if wrong:
        what = f"the written file's output {wrong[0]} is not the network's"
        raise VerificationError(what, where=where, fix="Report the file.")
    return max(
        (compare_with_ort(mine, theirs).absolute for mine, theirs in zip(wanted, found.values(), strict=False)),
        default=0.0,
    )


def _iter_accepted_batches(network: OnnxNetwork, inputs: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The example itself, and other batch sizes if the file's is free and the original takes them."""
    own = infer_batch_size(inputs)
    yield own, tuple(inputs)
    file = network.origin.file
    for batch in ONNX_CHECK_BATCH_SIZES if has_free_batch_size(file) else ():
        values = resample_inputs(inputs, batch)
        if batch == own:
            continue
        try:
            file.session.run(None, make_ort_feed(file, values))
        except Exception:  # noqa: BLE001 (a file may say that its batch is free and mean one)
            continue
        yield batch, values
