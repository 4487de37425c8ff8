"""Read and check an ONNX file, open onnxruntime sessions, and evaluate single nodes on constant inputs.

Files are not trusted: a file that is not ONNX, is truncated, or refers to weights outside of its folder is rejected
before any of it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neuron_merging.errors import ModelError, describe_error
from neuron_merging.onnx import Array, onnx, onnx_inliner, onnx_reference, onnxruntime

QUANTIZED_OPS = (
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul"),
    *("ConvInteger", "MatMulInteger", "QGemm", "QAttention", "QLinearAdd", "MatMulNBits", "DynamicQuantizeMatMul"),
)
"""Operators of quantised files, which are rejected unless they only unpack stored weights."""
UNPACKING_OPS = ("QuantizeLinear", "DequantizeLinear")
"""Of these, the operators that stored weights may go through: the result is stored in their place."""
FIX_NOT_ONNX = "Give the complete file, as its exporter wrote it."
FIXES_BY_FILE_START = {
    b"version https://git-lfs": "It is a pointer of Git LFS, not the file itself: git lfs pull fetches that.",
    b"<": "It is an HTML page: download the file itself.",
    b"PK": "It is an archive, as torch.save writes them: export the network to ONNX.",
}
"""What to do about files that are often mistaken for the model, by their first bytes."""
FIX_MUST_RUN = "Give a complete file whose operators and types onnxruntime supports."


@dataclass(frozen=True, eq=False)
class OnnxFile:
    """A checked model with an onnxruntime session that runs it."""

    path: Path
    model: Any = field(repr=False)
    session: Any = field(repr=False)
    """The onnxruntime session of the unchanged file."""
    external_files: frozenset[Path] = frozenset()
    """The files that store its external weights."""
    dequantized: tuple[str, ...] = ()
    """Weights that the file stores as whole numbers with a scale; `model` has their values in float."""

    def __deepcopy__(self, memo: Any) -> OnnxFile:
        return self

    @property
    def inputs(self) -> list[Any]:
        """The inputs, without the constants that older files list among them."""
        constants = {tensor.name for tensor in self.model.graph.initializer}
        return [value for value in self.model.graph.input if value.name not in constants]


MAX_LOCATION_LENGTH = 1024
"""Letters of a path to external weights; names that tools write are short."""


def read_onnx_file(path: str | Path, *, only_to_run: bool = False) -> OnnxFile:
    """Read and check an ONNX file. With `only_to_run`, operators that cannot be pruned are allowed.

    Raises
    ------
    ModelError
        The file is missing, not ONNX, truncated, or its weights are outside of its folder; or activations are
        quantised. Weights that are only stored in int8 are read as what they stand for.
    """
    place = Path(path)
    model = _parse_model(place)
    graphs = [graph for part in (model.graph, *model.functions) for graph in _iter_graphs(part)]
    tensors = [t for graph in graphs for t in _iter_graph_tensors(graph)]
    external = [t for t in tensors if t.data_location == onnx.TensorProto.EXTERNAL]
    beside = frozenset([_check_external_location(place, tensor) for tensor in external])
    if not only_to_run:
        _check_tensor_outputs(model.graph, place)
        _check_supported_operators(graphs, place)
    _check_unique_initializers(model.graph, place)
    checked = open_ort_session(str(place))
    if external:
        _load_external_data(model, place)
    if model.functions:
        model = onnx_inliner.inline_local_functions(model)
    return OnnxFile(place, model, checked, beside, () if only_to_run else _unpack_stored_weights(model))


def find_external_weight_files(place: Path) -> frozenset[Path]:
    """Return the files that store the external weights of an ONNX file; none if there is no such file."""
    try:
        model = _parse_model(place)
    except ModelError:
        return frozenset()
    entries = (
        e for graph in _iter_graphs(model.graph) for tensor in _iter_graph_tensors(graph) for e in tensor.external_data
    )
    return frozenset((place.parent / entry.value).resolve() for entry in entries if entry.key == "location")


def open_ort_session(model: str | bytes, threads: int = 0, *, plain: bool = False) -> Any:
    """Open a CPU session for a file or its bytes; `plain` turns graph optimisations off."""
    options = onnxruntime.SessionOptions()
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # fatal errors only: the others arrive as exceptions
    options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        where = model if isinstance(model, str) else "the written file"
        what = f"onnxruntime does not load the file: {describe_error(error)}"
        raise ModelError(what, where=where, fix=FIX_MUST_RUN) from error


def _parse_model(place: Path) -> Any:
    if not place.is_file():
        what = "that is a folder" if place.is_dir() else "there is no such file"
        raise ModelError(what, where=str(place), fix="Give the path of an .onnx file.")
    try:
        model = onnx.load(str(place), load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # protobuf's errors have no common class either
        raise ModelError(
            f"not an ONNX file, or cut off: {describe_error(error)}", where=str(place), fix=_suggest_file_fix(place)
        ) from error
    if not model.graph.node or not model.graph.output or not model.opset_import:
        raise ModelError(
            "not an ONNX file, or cut off: it has no graph", where=str(place), fix=_suggest_file_fix(place)
        )
    return model


def _suggest_file_fix(place: Path) -> str:
    with place.open("rb") as file:
        begins = file.read(max(map(len, FIXES_BY_FILE_START)))
    return next((fix for start, fix in FIXES_BY_FILE_START.items() if begins.startswith(start)), FIX_NOT_ONNX)


def _iter_graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph and the subgraphs of its control flow."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _iter_graphs(inner)


def _iter_graph_tensors(graph: Any) -> Iterator[Any]:
    yield from getattr(graph, "initializer", ())
    for node in graph.node:
        for attribute in node.attribute:
            yield from ([attribute.t] if attribute.HasField("t") else [])
            yield from attribute.tensors


def _check_external_location(place: Path, tensor: Any) -> Path:
    """Return the file of an external weight; raise if it is outside of the model's folder, missing or too short."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    folder = place.resolve().parent
    if "\0" in location or len(location) > MAX_LOCATION_LENGTH:
        what = f"the weights of {tensor.name!r} lie in no possible file: {location[:40]!r}…"
        raise ModelError(what, where=str(place), fix="Do not trust this file.")
    target: Path = (folder / location).resolve()
    if not location or Path(location).is_absolute() or not target.is_relative_to(folder):
        what = f"the weights of {tensor.name!r} are outside of the file's folder: {location!r}"
        raise ModelError(what, where=str(place), fix="Do not trust this file.")
    if not _is_existing_file(target):
        what = f"the weights of {tensor.name!r} lie in {location!r}, which is missing"
        raise ModelError(what, where=str(place), fix="Put that file into the model's folder.")
    start, length = (_parse_byte_count(entries.get(key, "0")) for key in ("offset", "length"))
    if min(start, length) < 0 or start + length > target.stat().st_size:
        what = f"the weights of {tensor.name!r} are beyond the end of {location!r}: it is truncated or another model's"
        raise ModelError(what, where=str(place), fix="Download both files again.")
    return target


def _is_existing_file(target: Path) -> bool:
    try:
        return target.is_file()
    except OSError:  # a part of the path is longer than the file system allows
        return False


def _parse_byte_count(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def _load_external_data(model: Any, place: Path) -> None:
    try:
        onnx.external_data_helper.load_external_data_for_model(model, str(place.resolve().parent))
    except (OSError, ValueError, RuntimeError) as error:
        fix = "Put the file that was written with it beside it."
        raise ModelError(f"its weights cannot be read: {describe_error(error)}", where=str(place), fix=fix) from error
    except onnx.checker.ValidationError as error:
        raise ModelError(
            f"its external weights are rejected: {describe_error(error)}", where=str(place), fix=FIX_NOT_ONNX
        ) from error


def _check_unique_initializers(graph: Any, place: Path) -> None:
    """Raise if two constants have the same name: onnxruntime silently picks one of them."""
    (name, times), *_ = [*Counter(tensor.name for tensor in graph.initializer).most_common(1), ("", 0)]
    if times > 1:
        what = f"the file stores {name!r} {times} times"
        raise ModelError(what, where=str(place), fix="Export it again, or take out all of them but one.")


def _check_tensor_outputs(graph: Any, place: Path) -> None:
    """Raise if an output is a sequence or a map, as classifiers of scikit-learn have: they cannot be compared."""
    for value in graph.output:
        if value.type.WhichOneof("value") not in (None, "tensor_type"):
            fix = "Export it with tensors as outputs; for scikit-learn, that is options={'zipmap': False}."
            raise ModelError(f"the output {value.name!r} is not a tensor", where=str(place), fix=fix)


def _check_supported_operators(graphs: list[Any], place: Path) -> None:
    for graph in graphs:
        unpacking = {node.output[0] for node in _list_unpacking_nodes(graph)}
        for node in graph.node:
            if node.op_type in QUANTIZED_OPS and node.output[0] not in unpacking:
                raise ModelError(
                    f"the file is quantised ({node.op_type}): its channels share scales, and merging would round again",
                    where=f"{place}, {node.name or node.output[0]}",
                    fix="Compress the float file that it was made from; --int8 quantises the result.",
                )
    if any(getattr(graph, "sparse_initializer", ()) for graph in graphs):
        raise ModelError("sparse initialisers are not supported", where=str(place), fix="Store the weights densely.")


def _list_unpacking_nodes(graph: Any) -> list[Any]:
    """Return the nodes that quantise or dequantise nothing but stored tensors, in order."""
    stored = {tensor.name for tensor in getattr(graph, "initializer", ())}
    found = []
    for node in graph.node:
        if node.op_type == "Constant":
            stored.update(node.output)
        elif node.op_type in UNPACKING_OPS and stored.issuperset(name for name in node.input if name):
            stored.update(node.output)
            found.append(node)
    return found


def _unpack_stored_weights(model: Any) -> tuple[str, ...]:
    """Replace nodes that dequantise stored weights by their values; return the names of these."""
    nodes = _list_unpacking_nodes(model.graph)
    if not nodes:
        return ()
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    values = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
    for node in model.graph.node:
        if node.op_type == "Constant":
            (values[node.output[0]],) = evaluate_node(node, [], opsets)
    for node in nodes:
        given = [values[name] if name else None for name in node.input]
        (values[node.output[0]],) = evaluate_node(node, given, opsets)
        model.graph.node.remove(node)
    read = {name for graph in _iter_graphs(model.graph) for node in graph.node for name in node.input}
    unpacked = [node.output[0] for node in nodes if node.output[0] in read]
    packed = {name for node in nodes for name in node.input} - read
    for name in packed & tensors.keys():
        model.graph.initializer.remove(tensors[name])
    model.graph.initializer.extend(onnx.numpy_helper.from_array(values[name], name) for name in unpacked)
    return tuple(unpacked)


def evaluate_node(node: Any, inputs: Sequence[Array | None], opsets: Mapping[str, int]) -> list[Array]:
    """Compute the outputs of a node with onnx's reference implementation, or with onnxruntime if that fails."""
    feed = {name: value for name, value in zip(node.input, inputs, strict=False) if name and value is not None}
    plain = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in feed]
    try:
        with np.errstate(all="ignore"):
            outputs = onnx_reference.ReferenceEvaluator(_build_single_node_model(node, plain, opsets)).run(None, feed)
    except Exception:  # noqa: BLE001 (the reference implementation does not cover all cases of some operators)
        outputs = _evaluate_with_ort(node, feed, opsets)
    return [np.asarray(value) for value in outputs]


def _build_single_node_model(node: Any, given: Sequence[Any], opsets: Mapping[str, int]) -> Any:
    """Build a model that contains this node only."""
    make = onnx.helper
    made = [make.make_value_info(name, onnx.TypeProto()) for name in node.output if name]
    imports = [make.make_opsetid(domain, version) for domain, version in opsets.items()]
    return make.make_model(make.make_graph([node], "one", given, made), opset_imports=imports, ir_version=8)


def _evaluate_with_ort(node: Any, feed: Mapping[str, Array], opsets: Mapping[str, int]) -> Sequence[Any]:
    make = onnx.helper
    try:
        given = [
            make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in feed.items()
        ]
        outputs: Sequence[Any] = open_ort_session(
            _build_single_node_model(node, given, opsets).SerializeToString()
        ).run(None, feed)
    except Exception as error:  # onnxruntime's exceptions have no common base class
        what = f"{node.op_type} cannot be computed: {describe_error(error)}"
        raise ModelError(
            what, where=node.name or node.output[0], fix="Check that onnxruntime runs the file."
        ) from error
    return outputs
