"""Represent an ONNX graph as a list of steps, one per node or per group of nodes that form one operator.

Exporters decompose linear layers, layer norms and group norms. They are fused here, so that their channels can be
pruned; the written file keeps them decomposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neuron_merging.errors import ModelError
from neuron_merging.onnx import Array, onnx
from neuron_merging.onnx.channel_selections import MATRIX_SUFFIX
from neuron_merging.onnx.normalize import count_uses, iter_subgraph_tensors, read_constants, read_opset_versions
from neuron_merging.onnx.operators.table import lookup_onnx_operator

FLOAT_DTYPES = (np.float16, np.float32, np.float64)
"""Dtypes that weights can have."""

TEXT_ATTRIBUTE_SUFFIX = "_strings"
"""How the attributes of operators that read or return text are called."""
CONTROL_FLOW_OPS = ("If", "Loop", "Scan")
CONTROL_FLOW_FIX = "Export the network with that choice made, one file for each case."
NO_LAYERS_FIX = "Only convolutions and matrix products before it can be made smaller, and there are none."


@dataclass(frozen=True, eq=False)
class OnnxStep:
    """One operator with the names of its inputs and outputs."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(repr=False)
    node: Any = field(repr=False, default=None)
    """The node of the file; None for a fused step."""
    runs_in_ort: bool = False
    """Whether onnxruntime runs the step; its channels are then not prunable."""
    fused_outputs: tuple[str, ...] = ()
    """For a fused step: the first outputs of the inner nodes that store channel counts, which the writer updates."""


@dataclass(frozen=True, eq=False)
class SkippedPart:
    """The nodes that are not run, because their shapes depend on data, and everything behind them."""

    first_step: OnnxStep
    weights: tuple[tuple[str, Array], ...] = field(repr=False)
    """Name and value of every weight. Subgraphs have name spaces of their own, so names may repeat."""


@dataclass(frozen=True, eq=False)
class OnnxProgram:
    """The steps, constants, inputs and outputs of a file."""

    model: Any = field(repr=False)
    constants: Mapping[str, Array] = field(repr=False)
    opsets: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    boundary_values: Mapping[str, OnnxStep]
    """The values that skipped nodes read, each with the first skipped node that reads it."""
    steps: tuple[OnnxStep, ...] = field(repr=False)
    frozen_constants: frozenset[str] = frozenset()
    """Constants that skipped nodes read or that the file returns; they must not change."""
    skipped: SkippedPart | None = None
    """The skipped nodes, if there are any."""

    def __deepcopy__(self, memo: Any) -> OnnxProgram:
        return self


def build_program(model: Any, opaque: frozenset[str] = frozenset()) -> OnnxProgram:
    """Build the program of a normalised model; onnxruntime runs the steps whose names are in `opaque`."""
    constants, graph = read_constants(model), model.graph
    steps: list[OnnxStep] = []
    skipped_values: set[str] = set()
    read: dict[str, OnnxStep] = {}
    skipped_nodes: list[Any] = []
    for node in graph.node:
        skipped = lookup_onnx_operator(node.op_type).data_dependent or _is_text_node(node, constants)
        if skipped or skipped_values.intersection(node.input):
            skipped_values.update(node.output)
            skipped_nodes.append(node)
            read |= {name: _build_step(node, opaque) for name in count_uses([node]) if name not in read}
        elif node.op_type != "Constant":
            steps.append(_build_step(node, opaque))
    steps = _NodeFuser(steps, constants, {value.name for value in graph.output}).fuse()
    inputs = tuple(value.name for value in graph.input if value.name not in constants)
    computed = {*inputs, *(name for step in steps for name in step.outputs)}
    outputs = tuple(value.name for value in graph.output if value.name in computed)
    ends = {name: step for name, step in read.items() if name in computed and name not in (*outputs, *inputs)}
    _check_has_layers(steps, read, constants)
    returned = (value.name for value in graph.output)
    frozen = frozenset(name for name in (*read, *returned) if name in constants)
    skipped_part = (
        SkippedPart(_build_step(skipped_nodes[0], opaque), tuple(_iter_weights(skipped_nodes, constants)))
        if skipped_nodes
        else None
    )
    return OnnxProgram(
        model, constants, read_opset_versions(model), inputs, outputs, ends, tuple(steps), frozen, skipped_part
    )


def _is_text_node(node: Any, constants: Mapping[str, Array]) -> bool:
    """Return whether a node produces or reads strings, which torch tensors cannot hold."""
    written = any(a.name == "to" and a.i == onnx.TensorProto.STRING for a in node.attribute)
    # Classifiers and encoders of scikit-learn: classlabels_strings, keys_strings, cats_strings and others.
    written = written or any(a.name.endswith(TEXT_ATTRIBUTE_SUFFIX) and len(a.strings) for a in node.attribute)
    return written or any(constants[name].dtype.kind in "OSU" for name in node.input if name in constants)


def _iter_weights(nodes: Sequence[Any], constants: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Yield the weights that nodes read, including those inside their control flow."""
    read = {name: constants[name] for name in count_uses(nodes) if name in constants}
    inside = ((t.name, onnx.numpy_helper.to_array(t)) for node in nodes for t in iter_subgraph_tensors(node))
    yield from ((name, value) for name, value in (*read.items(), *inside) if can_be_weights(value) and value.size > 1)


def can_be_weights(value: Array) -> bool:
    """Return whether a constant can be a weight: a floating-point array with at least one dimension."""
    return value.dtype in FLOAT_DTYPES and value.ndim > 0 and value.size > 0


def _check_has_layers(steps: Sequence[OnnxStep], read: Mapping[str, OnnxStep], constants: Mapping[str, Array]) -> None:
    """Raise if every layer of the file is inside or behind a skipped node."""
    first = next(iter(read.values()), None)
    layer_steps = [step for step in steps if lookup_onnx_operator(step.op).layer]
    layers = (constants[name] for step in layer_steps for name in step.inputs if name in constants)
    if first is None or any(weight.ndim > 1 for weight in layers):
        return
    what = f"all layers of the file are inside or behind {first.op}, which is not pruned"
    fix = CONTROL_FLOW_FIX if first.op in CONTROL_FLOW_OPS else NO_LAYERS_FIX
    raise ModelError(what, where=first.name, fix=fix)


def _build_step(node: Any, opaque: frozenset[str]) -> OnnxStep:
    name = node.name or f"{node.op_type}({next(n for n in node.output if n)})"
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return OnnxStep(name, node.op_type, tuple(node.input), tuple(node.output), attributes, node, name in opaque)


class _NodeFuser:
    """Finds operators that exporters decompose and replaces their nodes by one step."""

    def __init__(self, steps: Sequence[OnnxStep], constants: Mapping[str, Array], results: set[str]) -> None:
        self.all_steps, self.constants, self.output_names = list(steps), constants, results
        self.producers = {name: step for step in steps for name in step.outputs}
        self.consumers: dict[str, list[OnnxStep]] = {}
        for step in steps:
            for name in step.inputs:
                self.consumers.setdefault(name, []).append(step)

    def fuse(self) -> list[OnnxStep]:
        inner: set[int] = set()
        fused_by_last: dict[int, OnnxStep] = {}
        for step in self.all_steps:
            for match in (
                self._match_linear,
                self._match_layer_norm,
                self._match_group_norm,
                self._match_channel_selection,
            ):
                matched = match(step)
                if matched is not None and not any(part.runs_in_ort for part in (step, *matched[1])):
                    fused, inside = matched
                    fused_by_last[id(step)] = fused
                    inner |= {id(part) for part in inside}
        return [fused_by_last.get(id(step), step) for step in self.all_steps if id(step) not in inner]

    def _has_only_consumers(self, name: str, count: int = 1) -> bool:
        """Return whether `count` steps read a value and nothing else does: only then may fusion remove it."""
        return len(self.consumers.get(name, ())) == count and name not in self.output_names

    def _get_other_input(self, step: OnnxStep, name: str) -> str:
        return next((other for other in step.inputs if other != name), "")

    def _match_linear(self, step: OnnxStep) -> tuple[OnnxStep, list[OnnxStep]] | None:
        """Match MatMul(x, matrix) + vector."""
        for name in step.inputs if step.op == "Add" and len(step.inputs) == 2 else ():
            product = self.producers.get(name)
            bias = self.constants.get(self._get_other_input(step, name))
            weight = self.constants.get(product.inputs[1]) if product is not None and product.op == "MatMul" else None
            if (
                product is None
                or bias is None
                or weight is None
                or weight.ndim != 2
                or not self._has_only_consumers(name)
            ):
                continue
            if bias.shape == weight.shape[1:] and bias.size > 1:
                reads = (product.inputs[0], product.inputs[1], self._get_other_input(step, name))
                return OnnxStep(product.name, "Linear", reads, step.outputs, {}), [product]
        return None

    def _match_channel_selection(self, step: OnnxStep) -> tuple[OnnxStep, list[OnnxStep]] | None:
        """Match a Gather along the channels whose indices are computed from a matrix (`channel_selections`)."""
        indices = self.producers.get(step.inputs[1]) if step.op == "Gather" else None
        if indices is None or indices.op != "ArgMax" or not indices.inputs[0].endswith(MATRIX_SUFFIX):
            return None
        return OnnxStep(step.name, "SelectChannels", (step.inputs[0], indices.inputs[0]), step.outputs, {}), [indices]

    def _match_layer_norm(self, last: OnnxStep) -> tuple[OnnxStep, list[OnnxStep]] | None:
        """Match (x - mean) / sqrt(mean((x - mean)²) + ε) · weight + bias over the last dimension."""
        if last.op != "Add" or len(last.inputs) != 2:
            return None
        for name in last.inputs:
            scaled = self.producers.get(name)
            if scaled is None or scaled.op != "Mul" or self._get_other_input(last, name) not in self.constants:
                continue
            for inner in scaled.inputs:
                norm = self._match_normalization(inner)
                weight, bias = self._get_other_input(scaled, inner), self._get_other_input(last, name)
                if (
                    norm is not None
                    and weight in self.constants
                    and self._has_only_consumers(name)
                    and self._has_only_consumers(inner)
                ):
                    if self.constants[weight].ndim != 1 or self.constants[weight].shape != self.constants[bias].shape:
                        return None
                    x, epsilon, inside = norm
                    facts = {"axis": -1, "epsilon": epsilon}
                    name = inside[0].name
                    return OnnxStep(name, "LayerNormalization", (x, weight, bias), last.outputs, facts), [
                        *inside,
                        scaled,
                    ]
        return None

    def _match_group_norm(self, last: OnnxStep) -> tuple[OnnxStep, list[OnnxStep]] | None:
        """Match reshape to (batch, groups, -1), instance norm, reshape back, · weight + bias."""
        for name in last.inputs if last.op == "Add" and len(last.inputs) == 2 else ():
            scaled, bias = self.producers.get(name), self._get_other_input(last, name)
            if scaled is None or scaled.op != "Mul" or not self._has_only_consumers(name):
                continue
            for inner in scaled.inputs:
                norm, weight = self._match_grouped_instance_norm(inner), self._get_other_input(scaled, inner)
                if (
                    norm is not None
                    and self._has_only_consumers(inner)
                    and self._is_per_channel_constant(weight)
                    and self._is_per_channel_constant(bias)
                ):
                    view, plain, back, groups = norm
                    facts = {"num_groups": groups, "epsilon": plain.attributes.get("epsilon", 1e-5)}
                    reads = (view.inputs[0], weight, bias)
                    inside = (view.outputs[0], plain.outputs[0], back.outputs[0])
                    new = OnnxStep(plain.name, "GroupNormalization", reads, last.outputs, facts, fused_outputs=inside)
                    return new, [view, plain, back, scaled]
        return None

    def _is_per_channel_constant(self, name: str) -> bool:
        """Return whether a value is a constant of shape (..., channels, 1, ...): one number per channel."""
        shape = self.constants[name].shape if name in self.constants else ()
        return len(shape) > 1 and shape[-1] == 1 and sum(size > 1 for size in shape) == 1

    def _match_grouped_instance_norm(self, name: str) -> tuple[OnnxStep, OnnxStep, OnnxStep, int] | None:
        """Match the two reshapes and the instance norm between them; return them with the number of groups."""
        back = self.producers.get(name)
        norm = self.producers.get(back.inputs[0]) if back is not None and back.op == "Reshape" else None
        view = self.producers.get(norm.inputs[0]) if norm is not None and norm.op == "InstanceNormalization" else None
        if back is None or norm is None or view is None or view.op != "Reshape" or len(view.inputs) < 2:
            return None
        to, ones, zeros = (self.constants.get(each) for each in (view.inputs[1], *norm.inputs[1:3]))
        if to is None or ones is None or zeros is None or len(back.inputs) < 2:
            return None
        plain = to.size == 3 and int(to[2]) == -1 and int(to[1]) > 0 and bool((ones == 1).all() and not zeros.any())
        shape = self.producers.get(back.inputs[1])
        same = shape is not None and shape.op == "Shape" and shape.inputs == view.inputs[:1]
        restores_shape = same or back.inputs[1] in self.constants
        alone = self._has_only_consumers(view.outputs[0]) and self._has_only_consumers(norm.outputs[0])
        return (view, norm, back, int(to[1])) if plain and restores_shape and alone else None

    def _match_normalization(self, name: str) -> tuple[str, float, list[OnnxStep]] | None:
        """Match (x - mean) / sqrt(variance + ε); return x, ε and the inner steps."""
        divided = self.producers.get(name)
        if divided is None or divided.op != "Div":
            return None
        centred, root = self.producers.get(divided.inputs[0]), self.producers.get(divided.inputs[1])
        if centred is None or centred.op != "Sub" or root is None or root.op != "Sqrt":
            return None
        x, mean = centred.inputs[0], self.producers.get(centred.inputs[1])
        shifted = self.producers.get(root.inputs[0])
        if mean is None or not self._is_mean_over_last_dim(mean, x) or shifted is None or shifted.op != "Add":
            return None
        for part in shifted.inputs:
            variance, epsilon = self.producers.get(part), self.constants.get(self._get_other_input(shifted, part))
            if variance is None or epsilon is None or epsilon.size != 1 or variance.op != "ReduceMean":
                continue
            square = self.producers.get(variance.inputs[0])
            if (
                square is None
                or not self._is_square_of(square, x, centred)
                or not self._is_mean_over_last_dim(variance, square.outputs[0])
            ):
                continue
            inside = [mean, centred, square, variance, shifted, root, divided]
            if all(self._is_internal(step, inside) for step in inside[:-1]):
                return x, float(epsilon.reshape(())), inside
        return None

    def _is_internal(self, step: OnnxStep, parts: list[OnnxStep]) -> bool:
        """Return whether nothing outside `parts` reads a step's outputs."""
        part_ids = {id(part) for part in parts}
        users = [user for name in step.outputs for user in self.consumers.get(name, ())]
        return not self.output_names.intersection(step.outputs) and all(id(user) in part_ids for user in users)

    def _is_mean_over_last_dim(self, step: OnnxStep, x: str) -> bool:
        """Return whether a step is the mean of `x` over the last dimension only."""
        axes = step.attributes.get("axes")
        if axes is None and len(step.inputs) > 1 and step.inputs[1] in self.constants:
            axes = self.constants[step.inputs[1]].ravel().tolist()
        return step.op == "ReduceMean" and step.inputs[0] == x and list(axes or ()) == [-1]

    def _is_square_of(self, step: OnnxStep, x: str, centred: OnnxStep) -> bool:
        mine = centred.outputs[0]
        if step.op == "Mul":
            return step.inputs == (mine, mine)
        if step.op != "Pow" or step.inputs[0] != mine:
            return False
        power = self.constants.get(step.inputs[1])
        return power is not None and power.size == 1 and float(power.reshape(())) == 2.0
