"""Rewrite an ONNX model so that its layers can be recognised, and undo the unneeded rewrites before writing.

Constants are folded. A constant added behind a layer becomes its bias. Layers without a bias get a zero bias, because
merging moves the mean of removed channels into the bias. Vectors that several nodes read get one copy per node.
Biases that are still zero and copies that are still equal are removed again before the file is written, and tables that
the file computed from fewer numbers are computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from neuron_merging.onnx import Array, onnx
from neuron_merging.onnx.model_file import evaluate_node

FIRST_IR_WITHOUT_INITIALIZER_INPUTS = 4
"""The IR version from which initialisers need not be listed among the graph's inputs."""
LARGE_CONSTANT_SIZE = 1 << 16
"""Entries. Larger constants are not folded if several nodes read them: each fold (a transpose, say) would store a copy,
and the file would grow."""
OPS_NOT_FOLDED = ("RandomNormal", "RandomUniform", "Multinomial", "Bernoulli", "If", "Loop", "Scan", "Constant")
"""Operators that are never folded: random ones, control flow, and constants, which have nothing to fold."""
CONV_OPS = ("Conv", "ConvTranspose")
"""Operators whose bias is the third input."""
OPS_WITH_OPTIONAL_OUTPUTS = ("Dropout", "MaxPool", "LayerNormalization")
"""Operators whose outputs after the first are optional and do not change the first."""
SHAPE_QUERY_OPS = ("Shape", "Size")
"""Operators that read the shape of a tensor but not its values."""
ADDED_BIAS_SUFFIX = "_made_bias"
"""The suffix that marks biases added here, so that `undo_normalization` finds them."""
VECTOR_COPY_MARK = "_copy_"
"""A copy of vector `v` is named `v_copy_1`, `v_copy_2`, ..."""


def collect_constant_tensors(model: Any) -> dict[str, Any]:
    """Return the constants of a model by name, as `TensorProto` messages."""
    return collect_graph_constant_tensors(model.graph)


def collect_graph_constant_tensors(graph: Any) -> dict[str, Any]:
    """Return the constants of one graph by name, without those of the subgraphs in its control flow."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                tensors[node.output[0]] = attribute.t
    return tensors


def read_constants(model: Any) -> dict[str, Array]:
    """Return the values of all constants, by name."""
    values: dict[str, Array] = {
        name: onnx.numpy_helper.to_array(t) for name, t in collect_constant_tensors(model).items()
    }
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] not in values:
            (values[node.output[0]],) = evaluate_node(node, [], read_opset_versions(model))
    return values


def is_larger_than(model: Any, limit: int) -> bool:
    """Return whether a model has more than `limit` bytes."""
    # ByteSize() fails beyond two gigabytes, so count the raw weights first.
    if sum(len(tensor.raw_data) for tensor in collect_constant_tensors(model).values()) > limit:
        return True
    return bool(model.ByteSize() > limit)


def read_opset_versions(model: Any) -> dict[str, int]:
    """Return the opset version of every operator domain."""
    return {entry.domain: entry.version for entry in model.opset_import}


def normalize_model(model: Any) -> Any:
    """Return a normalised copy of the model; the original does not change."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _ModelNormalizer(copy).normalize()
    return copy


class _ModelNormalizer:
    """Normalises a model in place."""

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
            # The bias of Gemm is optional since opset 11; before, a Gemm of two inputs is not valid.
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
        """Give every node but the first its own copy of a vector, because each node may lose different channels."""
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
        """Remove optional outputs that nothing reads: handlers support these operators with one output only."""
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
        """Return the nodes whose values reach an output. The others contribute nothing but their shapes."""
        needed, nodes = set(self.output_names), list[Any]()
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                nodes.append(node)
                needed.update(() if node.op_type in SHAPE_QUERY_OPS else _iter_node_inputs(node))
        return nodes[::-1]

    def _make_copy_name(self, name: str) -> str:
        """Return a name for a copy that is not taken; a file that this package wrote may already contain copies."""
        return next(copy for n in count(1) if (copy := f"{name}{VECTOR_COPY_MARK}{n}") not in self.constants)

    def make_unique_name(self, name: str) -> str:
        """Prefix `name` with underscores until no value of the file has it."""
        taken = {*self.constants, *self.use_counts, *self.output_names}
        while name in taken:
            name = f"_{name}"
        return name

    def drop_unused_nodes(self) -> None:
        """Remove nodes whose outputs nothing reads, repeatedly, until none is left."""
        read = {*self.use_counts, *self.output_names}
        needed = [node for node in self.nodes if not node.output or read.intersection(node.output)]
        if len(needed) < len(self.nodes):
            self._replace_nodes(needed)
            self.drop_unused_nodes()

    def _replace_nodes(self, nodes: list[Any]) -> None:
        self.nodes, self.use_counts = nodes, count_uses(nodes)

    def _try_fold(self, node: Any) -> bool:
        """Replace a node by its value if all inputs are constants; return whether that was done.

        A node stays if the fold would store a large constant twice or produce a much larger one.
        """
        names = [name for name in node.input if name]
        if not names or node.op_type in OPS_NOT_FOLDED or not all(name in self.constants for name in names):
            return False
        if node.domain not in ("", "ai.onnx") or self.output_names.intersection(node.output):
            return False
        if any(self.constants[name].size > LARGE_CONSTANT_SIZE and self.use_counts[name] > 1 for name in names):
            return False
        values = evaluate_node(node, [self.constants[n] if n else None for n in node.input], self.opsets)
        # An Expand or a Tile of a small constant may be huge: storing the result would make the file larger.
        limit = max(LARGE_CONSTANT_SIZE, 2 * sum(self.constants[name].size for name in names))
        if sum(value.size for value in values) > limit:
            return False
        for name, value in zip(node.output, values, strict=False):
            self.constants[name] = value
        return True

    def _has_constant_weight(self, node: Any) -> bool:
        """Return whether the second input of a node is a constant matrix or kernel."""
        weight = self.constants.get(node.input[1]) if len(node.input) > 1 else None
        return weight is not None and weight.ndim > 1 and (node.op_type != "MatMul" or weight.ndim == 2)

    def _count_output_channels(self, node: Any) -> int:
        """Return the number of output channels of a layer."""
        shape, flags = self.constants[node.input[1]].shape, {a.name: a.i for a in node.attribute}
        if node.op_type == "ConvTranspose":  # its weight is (in, out / groups, ...)
            return int(shape[1]) * (flags.get("group", 1) or 1)
        if node.op_type == "Gemm":
            return int(shape[0 if flags.get("transB", 0) else 1])
        return int(shape[0] if node.op_type == "Conv" else shape[1])

    def _find_only_consumer(self, name: str) -> Any:
        """Return the only node that reads a value; None if there are several or if the value is an output."""
        if self.use_counts[name] != 1 or name in self.output_names:
            return None
        return next((node for node in self.nodes if name in node.input), None)

    def _absorb_conv_bias(self, node: Any) -> None:
        """Turn a per-channel constant that is added to a convolution's output into its bias; else add a zero bias."""
        consumer, size = self._find_only_consumer(node.output[0]), self._count_output_channels(node)
        ndim = self.constants[node.input[1]].ndim
        added = (
            self._find_added_constant(node, consumer, (size, *(1 for _ in range(ndim - 2))))
            if consumer is not None
            else None
        )
        has_bias = len(node.input) > 2 and bool(node.input[2])
        if added is None or (has_bias and node.input[2] not in self.constants):
            # A batch norm behind the convolution has a bias of its own.
            if not has_bias and (consumer is None or consumer.op_type != "BatchNormalization"):
                self._add_zero_bias(node, size)
            return
        old_bias = self.constants[node.input[2]] if has_bias else 0
        name = self.make_unique_name(f"{node.output[0]}_bias")
        self.constants[name] = (added.reshape(size) + old_bias).astype(added.dtype)
        del node.input[2:]
        node.input.append(name)
        node.output[0] = consumer.output[0]
        self._replace_nodes([other for other in self.nodes if other is not consumer])

    def _find_added_constant(self, node: Any, consumer: Any, shape: tuple[int, ...]) -> Array | None:
        """Return the constant that `consumer` adds to a layer's output, if its shape is `shape` up to leading ones."""
        if consumer.op_type != "Add" or list(consumer.input).count(node.output[0]) != 1:
            return None
        (other,) = (name for name in consumer.input if name != node.output[0])
        value = self.constants.get(other)
        if value is None or value.size != shape[0] or value.size == 1:
            return None
        trailing = tuple(value.shape[max(value.ndim - len(shape), 0) :])
        return value if trailing == shape and value.ndim <= len(shape) + 1 else None

    def _has_added_constant(self, node: Any) -> bool:
        consumer = self._find_only_consumer(node.output[0])
        return (
            consumer is not None
            and self._find_added_constant(node, consumer, (self._count_output_channels(node),)) is not None
        )

    def _add_zero_bias(self, node: Any, size: int) -> None:
        name = self.make_unique_name(f"{node.output[0]}{ADDED_BIAS_SUFFIX}")
        self.constants[name] = np.zeros(size, self.constants[node.input[1]].dtype)
        del node.input[2:]
        node.input.append(name)

    def _append_zero_bias(self, node: Any) -> None:
        """Insert an Add of zeros behind a MatMul, which has no bias input."""
        result, bias = node.output[0], self.make_unique_name(f"{node.output[0]}{ADDED_BIAS_SUFFIX}")
        self.constants[bias] = np.zeros(self._count_output_channels(node), self.constants[node.input[1]].dtype)
        node.output[0] = self.make_unique_name(f"{result}_unbiased")
        add_node = onnx.helper.make_node(
            "Add", [node.output[0], bias], [result], name=f"{node.name or result}{ADDED_BIAS_SUFFIX}"
        )
        self._replace_nodes(
            [part for other in self.nodes for part in ([other, add_node] if other is node else [other])]
        )

    def _write_back(self) -> None:
        """Write nodes and constants back, without the constants that nothing reads any longer."""
        read = {*count_uses(self.nodes), *self.output_names}
        known = collect_constant_tensors(self.model)
        self.nodes = [node for node in self.nodes if node.op_type != "Constant" or read.intersection(node.output)]
        in_nodes = {name for node in self.nodes if node.op_type == "Constant" for name in node.output}
        fresh = [name for name in self.constants if name in read and name not in known and name not in in_nodes]
        tensors = [onnx.numpy_helper.from_array(np.array(self.constants[name]), name) for name in fresh]
        if self.model.ir_version >= FIRST_IR_WITHOUT_INITIALIZER_INPUTS:
            self.graph.initializer.extend(tensors)
        else:
            # Older files list every initialiser as an input, which callers could then set: Constant nodes instead.
            constants = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors]
            self.nodes = [*constants, *self.nodes]
        read |= {value.name for value in self.graph.input}
        for tensor in [tensor for tensor in self.graph.initializer if tensor.name not in read]:
            self.graph.initializer.remove(tensor)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)


class _StridedViewRewriter:
    """Replaces the strided views of torch's exporter by reshapes.

    The exporter writes `as_strided` as a Gather from the flattened tensor, for example for global pooling in
    channels-last layout. If the gathered indices are 0, 1, 2, ... it is a reshape, whose channels can be traced.
    """

    def __init__(self, normalizer: _ModelNormalizer) -> None:
        self.normalizer, self.constants = normalizer, normalizer.constants
        self.producers = {name: node for node in normalizer.nodes for name in node.output}

    def rewrite_views(self) -> None:
        for node in self.normalizer.nodes:
            sizes = self._match_sample_sizes(node) if node.op_type == "Gather" else None
            if sizes is not None:
                shape = self.normalizer.make_unique_name(f"{node.output[0]}_sizes")
                self.constants[shape] = np.array([-1, *sizes])
                source = self.producers[node.input[0]].input[0]
                node.CopyFrom(onnx.helper.make_node("Reshape", [source, shape], [node.output[0]], name=node.name))
        self.normalizer.drop_unused_nodes()

    def _match_sample_sizes(self, node: Any) -> tuple[int, ...] | None:
        """Return the shape of one sample if a Gather takes all entries in order, sample by sample; else None."""
        flat = self._find_producer(node.input[0], "Reshape")
        if flat is None or any(a.i for a in node.attribute) or self._get_constant_list(flat.input[1]) != [-1]:
            return None
        # The index is a sum of constant offsets inside a sample and of one computed term, the offset of each sample.
        terms = list(self._iter_sum_terms(node.input[1]))
        offsets = sum((self.constants[name] for name in terms if name in self.constants), np.zeros((), int))
        (samples, *more) = [name for name in terms if name not in self.constants] or [""]
        in_order = np.array_equal(offsets.ravel(), np.arange(offsets.size)) and offsets.shape[:1] == (1,)
        return offsets.shape[1:] if in_order and not more and self._are_sample_offsets(samples, offsets) else None

    def _are_sample_offsets(self, name: str, offsets: Array) -> bool:
        """Return whether a value is `arange(batch) * entries per sample`, the offset at which each sample begins."""
        unsqueeze = self._find_producer(name, "Unsqueeze")
        product = self._find_producer(unsqueeze.input[0], "Mul") if unsqueeze is not None else None
        sample_range = self._find_producer(product.input[0], "Range") if product is not None else None
        if unsqueeze is None or product is None or sample_range is None or len(unsqueeze.input) < 2:
            return False
        from_zero = self._get_constant_list(sample_range.input[0]) == [0] and self._get_constant_list(
            sample_range.input[2]
        ) == [1]
        on_first_axis = self._get_constant_list(unsqueeze.input[1]) == list(range(1, offsets.ndim))
        return from_zero and on_first_axis and self._get_constant_list(product.input[1]) == [offsets.size]

    def _iter_sum_terms(self, name: str) -> Iterator[str]:
        add_node = None if name in self.constants else self._find_producer(name, "Add")
        for part in add_node.input if add_node is not None else ():
            yield from self._iter_sum_terms(part)
        if add_node is None:
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
    """Return how often each value is read, including from inside control flow."""
    return Counter(name for node in nodes for name in _iter_node_inputs(node))


def _iter_node_inputs(node: Any) -> Iterator[str]:
    """Yield the values that a node reads, including those that its control flow reads."""
    yield from (name for name in node.input if name)
    for graph in _iter_subgraphs(node):
        yield from (name for inner in graph.node for name in _iter_node_inputs(inner))
        yield from (value.name for value in graph.output)


def iter_subgraph_tensors(node: Any) -> Iterator[Any]:
    """Yield the constants that the subgraphs of a node's control flow contain, as `TensorProto` messages."""
    for graph in _iter_subgraphs(node):
        yield from collect_graph_constant_tensors(graph).values()
        for inner in graph.node:
            yield from iter_subgraph_tensors(inner)


def _iter_subgraphs(node: Any) -> Iterator[Any]:
    """Yield the graphs of a node's control flow."""
    for attribute in node.attribute:
        yield from ([attribute.g] if attribute.HasField("g") else [])
        yield from attribute.graphs


def _iter_vector_copies(constants: dict[str, Array]) -> Iterator[tuple[str, str]]:
    """Yield the name of every copied vector with the name of its original."""
    for name in constants:
        base, mark, number = name.rpartition(VECTOR_COPY_MARK)
        if mark and number.isdigit() and base in constants:
            yield name, base


def undo_normalization(model: Any) -> None:
    """Remove the added biases that are still zero and the copies that still equal their original."""
    graph = model.graph
    constants = read_constants(model)
    unneeded = {name for name, value in constants.items() if name.endswith(ADDED_BIAS_SUFFIX) and not value.any()}
    zero_adds = {
        n.input[0]: n
        for n in graph.node
        if n.op_type == "Add" and n.input[1] in unneeded and n.name.endswith(ADDED_BIAS_SUFFIX)
    }
    for node in graph.node:
        if node.output and node.output[0] in zero_adds:
            node.output[0] = zero_adds[node.output[0]].output[0]
        elif node.op_type in (*CONV_OPS, "Gemm") and len(node.input) > 2 and node.input[2] in unneeded:
            del node.input[2:]
    equal_copies = {
        name: base for name, base in _iter_vector_copies(constants) if np.array_equal(constants[name], constants[base])
    }
    for node in graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = equal_copies.get(name, name)
    unneeded |= equal_copies.keys()
    for node in zero_adds.values():
        graph.node.remove(node)
    for node in [n for n in graph.node if n.op_type == "Constant" and n.output[0] in unneeded]:
        graph.node.remove(node)
    for tensor in [t for t in graph.initializer if t.name in unneeded]:
        graph.initializer.remove(tensor)


def restore_folded_nodes(model: Any, original: Any, changed: Collection[str]) -> None:
    """Replace folded constants by the nodes that computed them, where these and what they read take fewer bytes.

    An exporter may compute a large table from a few numbers. `changed` are the constants with new values.
    """
    restorer = _FoldRestorer(model, original, changed)
    for name, value in restorer.stored.items():
        if name not in restorer.known and name not in changed:
            restorer.try_restore(name, value.nbytes)
    restorer.write_back()


class _FoldRestorer:
    """Collects the nodes of the original model that compute unchanged constants."""

    def __init__(self, model: Any, original: Any, changed: Collection[str]) -> None:
        self.graph, self.changed = model.graph, changed
        self.stored, self.known = read_constants(model), read_constants(original)
        self.producers = {name: node for node in original.graph.node for name in node.output}
        self.taken = {*self.stored, *(name for node in model.graph.node for name in node.output)}
        self.order = {node.output[0]: k for k, node in enumerate(original.graph.node) if node.output}
        self.nodes: dict[str, Any] = {}
        self.restored: set[str] = set()

    def try_restore(self, name: str, size: int) -> None:
        """Take the nodes that compute a constant, if all of them can be had and are smaller than `size` bytes."""
        found: dict[str, Any] = {}
        if self._trace(name, name, found) and sum(node.ByteSize() for node in found.values()) < size:
            self.nodes |= found
            self.restored.add(name)

    def _trace(self, name: str, root: str, found: dict[str, Any]) -> bool:
        """Add the nodes that compute `name` to `found`; return whether the file can compute it."""
        if name in found or name in self.nodes or (name in self.stored and name not in self.changed and name != root):
            return True
        if name in self.known and name not in self.taken:
            tensor = onnx.numpy_helper.from_array(np.array(self.known[name]), name)
            found[name] = onnx.helper.make_node("Constant", [], [name], value=tensor)
            return True
        node = self.producers.get(name)
        # A node with several outputs would define those again that are still stored.
        if node is None or len(node.output) > 1 or (name in self.taken and name != root):
            return False
        found[name] = node
        return all(self._trace(own, root, found) for own in node.input if own)

    def write_back(self) -> None:
        if not self.restored:
            return
        kept = [_copy_node(node) for node in self.graph.node if not self.restored.intersection(node.output)]
        # Constants come first, because restored nodes read them.
        constants = [node for node in (*kept, *self.nodes.values()) if node.op_type == "Constant"]
        computed = [node for node in self.nodes.values() if node.op_type != "Constant"]
        computed.sort(key=lambda node: self.order[node.output[0]])
        del self.graph.node[:]
        self.graph.node.extend([*constants, *computed, *(node for node in kept if node.op_type != "Constant")])
        for tensor in [tensor for tensor in self.graph.initializer if tensor.name in self.restored]:
            self.graph.initializer.remove(tensor)
