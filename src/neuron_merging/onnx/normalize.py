"""Rewrite an ONNX model so that its layers can be recognised, and undo what was not needed. Constants are folded;
a constant added behind a layer becomes its bias; layers without a bias get a zero bias, the place for the mean
of merged channels; vectors that several nodes read get one copy per node. Zero biases that stay zero and copies
that stay equal are removed before writing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from neuron_merging.onnx import Array, onnx
from neuron_merging.onnx.model_file import evaluate_node

FIRST_IR_WITHOUT_INITIALIZER_INPUTS = 4
"""The format's version from which on an initialiser need not be listed as an input."""
LARGE_CONSTANT_SIZE = 1 << 16
"""Entries of a constant that is not copied for the sake of a reader that sees it from another side."""
OPS_NOT_FOLDED = ("RandomNormal", "RandomUniform", "Multinomial", "Bernoulli", "If", "Loop", "Scan", "Constant")
CONV_OPS = ("Conv", "ConvTranspose")
OPS_WITH_OPTIONAL_OUTPUTS = ("Dropout", "MaxPool", "LayerNormalization")
"""Operators of which further results need not be made."""
SHAPE_QUERY_OPS = ("Shape", "Size")
"""Operators that ask for the sizes of a value alone."""
ADDED_BIAS_SUFFIX = "_made_bias"
"""How names of biases end that were not in the file."""
VECTOR_COPY_MARK = "_copy_"
"""What follows the name of a vector in those of its copies, before a number."""


def collect_constant_tensors(model: Any) -> dict[str, Any]:
    """The constants of a model by name, as the messages in which they are stored."""
    return collect_graph_constant_tensors(model.graph)


def collect_graph_constant_tensors(graph: Any) -> dict[str, Any]:
    """The same of a graph, without those inside of its control flow."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                found[node.output[0]] = attribute.t
    return found


def read_constants(model: Any) -> dict[str, Array]:
    """The values of all constants, by name."""
    found: dict[str, Array] = {
        name: onnx.numpy_helper.to_array(t) for name, t in collect_constant_tensors(model).items()
    }
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] not in found:
            (found[node.output[0]],) = evaluate_node(node, [], read_opset_versions(model))
    return found


def is_larger_than(model: Any, limit: int) -> bool:
    """Whether a model is larger than so many bytes: of those beyond two gigabytes, protobuf cannot tell the size."""
    if sum(len(tensor.raw_data) for tensor in collect_constant_tensors(model).values()) > limit:
        return True
    return bool(model.ByteSize() > limit)


def read_opset_versions(model: Any) -> dict[str, int]:
    """The versions of the operators, by domain."""
    return {entry.domain: entry.version for entry in model.opset_import}


def normalize_model(model: Any) -> Any:
    """A tidy copy."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _ModelNormalizer(copy).normalize()
    return copy


class _ModelNormalizer:
    """Changes a model in place."""

    def __init__(self, model: Any) -> None:
        self.model, self.graph = model, model.graph
        self.opsets = read_opset_versions(model)
        self.constants = read_constants(model)
        self.output_names = {value.name for value in self.graph.output}
        self.nodes = [_copy_node(node) for node in self.graph.node]
        self.use_counts = count_uses(self.nodes)

    def normalize(self) -> None:
        self._replace_nodes([node for node in self.nodes if not self._try_fold(node)])
        _StridedViewRewriter(self).rewrite_views()
        self._drop_unused_outputs()
        for node in self._list_value_nodes():
            if node.op_type in CONV_OPS and self._has_constant_weight(node):
                self._absorb_conv_bias(node)
            elif (
                node.op_type == "Gemm"
                and len(node.input) == 2
                and self.opsets.get("", 1) >= 11
                and self._has_constant_weight(node)
            ):
                self._add_zero_bias(node, self._count_output_channels(node))
            elif node.op_type == "MatMul" and self._has_constant_weight(node) and not self._has_added_constant(node):
                self._append_zero_bias(node)
        self._copy_shared_vectors()
        self._write_back()

    def _copy_shared_vectors(self) -> None:
        """A copy of a vector for every node but the first that reads it: one may lose other channels than the next."""
        floats = {name: value for name, value in self.constants.items() if value.dtype.kind == "f"}
        vectors = {name for name, value in floats.items() if value.size == max(value.shape, default=0)}
        seen: Counter[str] = Counter()
        for node in self._list_value_nodes():
            for slot, name in enumerate(node.input):
                if name in vectors and self.constants[name].size > 1:
                    if seen[name]:
                        node.input[slot] = self._make_copy_name(name)
                        self.constants[node.input[slot]] = self.constants[name]
                    seen[name] += 1

    def _drop_unused_outputs(self) -> None:
        """Take out results that nothing reads, where the first is the same without them."""
        for node in self.nodes:
            while (
                node.op_type in OPS_WITH_OPTIONAL_OUTPUTS
                and len(node.output) > 1
                and not self._is_used(node.output[-1])
            ):
                del node.output[-1]

    def _is_used(self, name: str) -> bool:
        return name in self.use_counts or name in self.output_names

    def _list_value_nodes(self) -> list[Any]:
        """The nodes whose values matter; of the others, nothing but their sizes is asked for."""
        asked, found = set(self.output_names), list[Any]()
        for node in reversed(self.nodes):
            if asked.intersection(node.output):
                found.append(node)
                asked.update(() if node.op_type in SHAPE_QUERY_OPS else _iter_node_inputs(node))
        return found[::-1]

    def _make_copy_name(self, name: str) -> str:
        """One that is free: a file that was written here before has copies already."""
        return next(copy for n in count(1) if (copy := f"{name}{VECTOR_COPY_MARK}{n}") not in self.constants)

    def make_unique_name(self, name: str) -> str:
        """A name like this that nothing in the file has."""
        taken = {*self.constants, *self.use_counts, *self.output_names}
        while name in taken:
            name = f"_{name}"
        return name

    def drop_unused_nodes(self) -> None:
        """Leave out nodes that nothing reads."""
        read = {*self.use_counts, *self.output_names}
        left = [node for node in self.nodes if not node.output or read.intersection(node.output)]
        if len(left) < len(self.nodes):
            self._replace_nodes(left)
            self.drop_unused_nodes()

    def _replace_nodes(self, nodes: list[Any]) -> None:
        self.nodes, self.use_counts = nodes, count_uses(nodes)

    def _try_fold(self, node: Any) -> bool:
        """Whether a node was computed, from constants alone; not if that would copy what others read too."""
        names = [name for name in node.input if name]
        if not names or node.op_type in OPS_NOT_FOLDED or not all(name in self.constants for name in names):
            return False
        if node.domain not in ("", "ai.onnx") or self.output_names.intersection(node.output):
            return False
        if any(self.constants[name].size > LARGE_CONSTANT_SIZE and self.use_counts[name] > 1 for name in names):
            return False
        values = evaluate_node(node, [self.constants[n] if n else None for n in node.input], self.opsets)
        room = max(LARGE_CONSTANT_SIZE, 2 * sum(self.constants[name].size for name in names))
        if sum(value.size for value in values) > room:
            return False
        for name, value in zip(node.output, values, strict=False):
            self.constants[name] = value
        return True

    def _has_constant_weight(self, node: Any) -> bool:
        """Whether a node is a layer with a constant for its weight."""
        weight = self.constants.get(node.input[1]) if len(node.input) > 1 else None
        return weight is not None and weight.ndim > 1 and (node.op_type != "MatMul" or weight.ndim == 2)

    def _count_output_channels(self, node: Any) -> int:
        """How many channels a layer makes."""
        shape, flags = self.constants[node.input[1]].shape, {a.name: a.i for a in node.attribute}
        if node.op_type == "ConvTranspose":
            return int(shape[1]) * (flags.get("group", 1) or 1)
        if node.op_type == "Gemm":
            return int(shape[0 if flags.get("transB", 0) else 1])
        return int(shape[0] if node.op_type == "Conv" else shape[1])

    def _find_only_consumer(self, name: str) -> Any:
        """The one node that reads a value, if nothing else does."""
        if self.use_counts[name] != 1 or name in self.output_names:
            return None
        return next((node for node in self.nodes if name in node.input), None)

    def _absorb_conv_bias(self, node: Any) -> None:
        """What is added behind a convolution, one number for each channel, becomes its bias."""
        reader, size = self._find_only_consumer(node.output[0]), self._count_output_channels(node)
        ndim = self.constants[node.input[1]].ndim
        added = (
            self._find_added_constant(node, reader, (size, *(1 for _ in range(ndim - 2))))
            if reader is not None
            else None
        )
        has = len(node.input) > 2 and bool(node.input[2])
        if added is None or (has and node.input[2] not in self.constants):
            if not has and (reader is None or reader.op_type != "BatchNormalization"):
                self._add_zero_bias(node, size)
            return
        own = self.constants[node.input[2]] if has else 0
        name = self.make_unique_name(f"{node.output[0]}_bias")
        self.constants[name] = (added.reshape(size) + own).astype(added.dtype)
        del node.input[2:]
        node.input.append(name)
        node.output[0] = reader.output[0]
        self._replace_nodes([other for other in self.nodes if other is not reader])

    def _find_added_constant(self, node: Any, reader: Any, shape: tuple[int, ...]) -> Array | None:
        """The constant of this shape, but for leading ones, that a sum adds to a layer's output."""
        if reader.op_type != "Add" or list(reader.input).count(node.output[0]) != 1:
            return None
        (other,) = (name for name in reader.input if name != node.output[0])
        value = self.constants.get(other)
        if value is None or value.size != shape[0] or value.size == 1:
            return None
        plain = tuple(value.shape[max(value.ndim - len(shape), 0) :])
        return value if plain == shape and value.ndim <= len(shape) + 1 else None

    def _has_added_constant(self, node: Any) -> bool:
        reader = self._find_only_consumer(node.output[0])
        return (
            reader is not None
            and self._find_added_constant(node, reader, (self._count_output_channels(node),)) is not None
        )

    def _add_zero_bias(self, node: Any, size: int) -> None:
        name = self.make_unique_name(f"{node.output[0]}{ADDED_BIAS_SUFFIX}")
        self.constants[name] = np.zeros(size, self.constants[node.input[1]].dtype)
        del node.input[2:]
        node.input.append(name)

    def _append_zero_bias(self, node: Any) -> None:
        """A product has no bias of its own: a sum behind it."""
        result, bias = node.output[0], self.make_unique_name(f"{node.output[0]}{ADDED_BIAS_SUFFIX}")
        self.constants[bias] = np.zeros(self._count_output_channels(node), self.constants[node.input[1]].dtype)
        node.output[0] = self.make_unique_name(f"{result}_unbiased")
        added = onnx.helper.make_node(
            "Add", [node.output[0], bias], [result], name=f"{node.name or result}{ADDED_BIAS_SUFFIX}"
        )
        self._replace_nodes([part for other in self.nodes for part in ([other, added] if other is node else [other])])

    def _write_back(self) -> None:
        """Write nodes and constants back, without the constants that nothing reads any more."""
        read = {*count_uses(self.nodes), *self.output_names}
        known = collect_constant_tensors(self.model)
        self.nodes = [node for node in self.nodes if node.op_type != "Constant" or read.intersection(node.output)]
        left = {name for node in self.nodes if node.op_type == "Constant" for name in node.output}
        fresh = [name for name in self.constants if name in read and name not in known and name not in left]
        tensors = [onnx.numpy_helper.from_array(np.array(self.constants[name]), name) for name in fresh]
        if self.model.ir_version >= FIRST_IR_WITHOUT_INITIALIZER_INPUTS:
            self.graph.initializer.extend(tensors)
        else:
            made = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors]
            self.nodes = [*made, *self.nodes]
        read |= {value.name for value in self.graph.input}
        for tensor in [tensor for tensor in self.graph.initializer if tensor.name not in read]:
            self.graph.initializer.remove(tensor)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)


class _StridedViewRewriter:
    """Finds views that torch's exporter writes by their strides: a gather from the list of all entries, in order.

    Global pooling of channels that come last is written so. As what it is, a view, it has channels.
    """

    def __init__(self, home: _ModelNormalizer) -> None:
        self.normalizer, self.constants = home, home.constants
        self.producers = {name: node for node in home.nodes for name in node.output}

    def rewrite_views(self) -> None:
        for node in self.normalizer.nodes:
            sizes = self._match_sample_sizes(node) if node.op_type == "Gather" else None
            if sizes is not None:
                shape = self.normalizer.make_unique_name(f"{node.output[0]}_sizes")
                self.constants[shape] = np.array([-1, *sizes])
                whole = self.producers[node.input[0]].input[0]
                node.CopyFrom(onnx.helper.make_node("Reshape", [whole, shape], [node.output[0]], name=node.name))
        self.normalizer.drop_unused_nodes()

    def _match_sample_sizes(self, node: Any) -> tuple[int, ...] | None:
        """The sizes of a sample, where a gather takes all entries as they come, sample by sample."""
        flat = self._find_producer(node.input[0], "Reshape")
        if flat is None or any(a.i for a in node.attribute) or self._get_constant_list(flat.input[1]) != [-1]:
            return None
        terms = list(self._iter_sum_terms(node.input[1]))
        offsets = sum((self.constants[name] for name in terms if name in self.constants), np.zeros((), int))
        (samples, *more) = [name for name in terms if name not in self.constants] or [""]
        in_order = np.array_equal(offsets.ravel(), np.arange(offsets.size)) and offsets.shape[:1] == (1,)
        return offsets.shape[1:] if in_order and not more and self._are_sample_offsets(samples, offsets) else None

    def _are_sample_offsets(self, name: str, offsets: Array) -> bool:
        """Whether this is where each sample begins: its number, times the entries of one."""
        spread = self._find_producer(name, "Unsqueeze")
        times = self._find_producer(spread.input[0], "Mul") if spread is not None else None
        count = self._find_producer(times.input[0], "Range") if times is not None else None
        if spread is None or times is None or count is None or len(spread.input) < 2:
            return False
        from_zero = self._get_constant_list(count.input[0]) == [0] and self._get_constant_list(count.input[2]) == [1]
        placed = self._get_constant_list(spread.input[1]) == list(range(1, offsets.ndim))
        return from_zero and placed and self._get_constant_list(times.input[1]) == [offsets.size]

    def _iter_sum_terms(self, name: str) -> Iterator[str]:
        added = None if name in self.constants else self._find_producer(name, "Add")
        for part in added.input if added is not None else ():
            yield from self._iter_sum_terms(part)
        if added is None:
            yield name

    def _find_producer(self, name: str, op: str) -> Any:
        node = self.producers.get(name)
        return node if node is not None and node.op_type == op else None

    def _get_constant_list(self, name: str) -> list[Any] | None:
        return self.constants[name].ravel().tolist() if name in self.constants else None


def _copy_node(node: Any) -> Any:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def count_uses(nodes: Sequence[Any]) -> Counter[str]:
    return Counter(name for node in nodes for name in _iter_node_inputs(node))


def _iter_node_inputs(node: Any) -> Iterator[str]:
    """The values that a node reads, those inside of its control flow among them."""
    yield from (name for name in node.input if name)
    for graph in _iter_subgraphs(node):
        yield from (name for inner in graph.node for name in _iter_node_inputs(inner))
        yield from (value.name for value in graph.output)


def iter_subgraph_tensors(node: Any) -> Iterator[Any]:
    """The constants that a node's control flow has of its own, as the messages in which they are stored."""
    for graph in _iter_subgraphs(node):
        yield from collect_graph_constant_tensors(graph).values()
        for inner in graph.node:
            yield from iter_subgraph_tensors(inner)


def _iter_subgraphs(node: Any) -> Iterator[Any]:
    """The graphs of a node's control flow."""
    for attribute in node.attribute:
        yield from ([attribute.g] if attribute.HasField("g") else [])
        yield from attribute.graphs


def _iter_vector_copies(constants: dict[str, Array]) -> Iterator[tuple[str, str]]:
    """The copies of vectors, each with the vector's own name."""
    for name in constants:
        base, mark, number = name.rpartition(VECTOR_COPY_MARK)
        if mark and number.isdigit() and base in constants:
            yield name, base


def undo_normalization(model: Any) -> None:
    """Take out the biases that were made and are still zero, and copies that are still equal."""
    graph = model.graph
    constants = read_constants(model)
    idle = {name for name, value in constants.items() if name.endswith(ADDED_BIAS_SUFFIX) and not value.any()}
    sums = {
        n.input[0]: n
        for n in graph.node
        if n.op_type == "Add" and n.input[1] in idle and n.name.endswith(ADDED_BIAS_SUFFIX)
    }
    for node in graph.node:
        if node.output and node.output[0] in sums:
            node.output[0] = sums[node.output[0]].output[0]
        elif node.op_type in (*CONV_OPS, "Gemm") and len(node.input) > 2 and node.input[2] in idle:
            del node.input[2:]
    same = {
        name: base for name, base in _iter_vector_copies(constants) if np.array_equal(constants[name], constants[base])
    }
    for node in graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = same.get(name, name)
    idle |= same.keys()
    for node in sums.values():
        graph.node.remove(node)
    for node in [n for n in graph.node if n.op_type == "Constant" and n.output[0] in idle]:
        graph.node.remove(node)
    for tensor in [t for t in graph.initializer if t.name in idle]:
        graph.initializer.remove(tensor)
