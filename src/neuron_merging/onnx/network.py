"""Run an ONNX file as a torch module. torch runs every step that it can, onnxruntime the others.

Shape computations are evaluated in numpy, outside of the traced graph, so the module can be captured like any other
and runs with fewer channels. Parameters have the names of the file's constants, submodules those of its nodes. Steps
that onnxruntime runs appear as torch operators with the ONNX names; channels that reach them are not prunable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from neuron_merging.errors import ModelError, describe_error
from neuron_merging.graph.digests import compute_digest
from neuron_merging.graph.graph_module import ResizableModule, SizeOverrides, register_by_path
from neuron_merging.graph.half_precision import fast_half_precision
from neuron_merging.onnx import Array, onnx
from neuron_merging.onnx.model_file import OnnxFile, evaluate_node, open_ort_session
from neuron_merging.onnx.operators import OnnxOperator, OnnxValue, OpCall, Shapes, UnsupportedUsage
from neuron_merging.onnx.operators.table import lookup_onnx_operator
from neuron_merging.onnx.program import OnnxProgram, OnnxStep, can_be_weights

TORCH_NAMESPACE = "neuron_merging_onnx"
_TORCH_LIBRARY = torch.library.Library(TORCH_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_ORT_NODES: WeakValueDictionary[int, _OrtNode] = WeakValueDictionary()
"""Nodes by the number with which torch's operators are called. Weak values: a node lives as long as its network."""
PASS_THROUGH_NUMBER = 0
"""The number of a skipped node. Its operator returns its input, so that the graph shows what reads the value."""
MAX_SHAPE_VECTOR_SIZE = 8
"""Entries. Longer integer arrays are indices or token ids rather than shapes."""
ORT_COMPUTE_DTYPES = {np.dtype(np.float64): np.float32}
"""Dtypes to convert before a node runs: onnxruntime implements few operators in float64."""


class NodeRunError(ModelError, RuntimeError):
    """onnxruntime cannot run a node on these inputs, for example a fixed batch of one on two samples.

    Also a `RuntimeError`, as torch's operators raise.
    """


class _OrtNode:
    """A node with the onnxruntime sessions that run it, one per combination of input dtypes and ranks."""

    def __init__(self, step: OnnxStep, versions: Mapping[str, int], known: Mapping[str, Array]) -> None:
        self.step, self.opset_versions, self.known_inputs = step, versions, known
        self.sessions: dict[Any, Any] = {}
        self.output_shapes: dict[Any, list[tuple[Any, Any]]] = {}

    def compute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the node; float64 inputs are computed in float32 and converted back."""
        arrays = [tensor.detach().cpu().contiguous().numpy() for tensor in inputs]
        wide = any(array.dtype == np.float64 for array in arrays)
        found = self._run_session([array.astype(ORT_COMPUTE_DTYPES.get(array.dtype, array.dtype)) for array in arrays])
        tensors = [torch.from_numpy(np.array(array)) for array in found]
        return [tensor.double() if wide and tensor.is_floating_point() else tensor for tensor in tensors]

    def expand_input_shapes(self, shapes: Shapes) -> Shapes:
        """Return the shapes of all inputs of the node, known arrays included, from those of the tensors."""
        remaining = iter(shapes)
        names = [name for name in dict.fromkeys(self.step.node.input) if name]
        found = {
            name: self.known_inputs[name].shape if name in self.known_inputs else next(remaining) for name in names
        }
        return [found.get(name, ()) for name in self.step.node.input]

    def _run_session(self, arrays: Sequence[Array]) -> list[Array]:
        names = [name for name in dict.fromkeys(self.step.node.input) if name and name not in self.known_inputs]
        key = tuple((array.dtype.str, array.ndim) for array in arrays)
        if key not in self.sessions:
            self.sessions[key] = open_ort_session(self._build_model(names, arrays).SerializeToString())
        try:
            found: list[Array] = self.sessions[key].run(None, dict(zip(names, arrays, strict=True)))
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise NodeRunError(f"{self.step.op} does not run: {describe_error(error)}", where=self.step.name) from error
        return found

    def _build_model(self, names: Sequence[str], arrays: Sequence[Array]) -> Any:
        make = onnx.helper
        given = [
            make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
            for name, array in zip(names, arrays, strict=True)
        ]
        made = [make.make_empty_tensor_value_info(name) for name in self.step.node.output if name]
        known = [onnx.numpy_helper.from_array(array, name) for name, array in self.known_inputs.items()]
        graph = make.make_graph([self.step.node], "one", given, made, known)
        imports = [make.make_opsetid(domain, version) for domain, version in self.opset_versions.items()]
        return make.make_model(graph, opset_imports=imports, ir_version=8)


def pass_through_opaque(op: str, value: Tensor, weights: Sequence[Tensor] = ()) -> Tensor:
    """Pass `value` through an operator named `op`; channels of `value` and `weights` are then not prunable."""
    output: Tensor = _define_torch_operator(op)([value, *weights], PASS_THROUGH_NUMBER, [])[0]
    return output


def run_with_ort(shared: _SharedStep, versions: Mapping[str, int], inputs: Sequence[OnnxValue]) -> list[OnnxValue]:
    """Compute the outputs of a step with onnxruntime."""
    step = shared.value
    if step.node is None:
        raise ModelError(f"{step.op} cannot be run on its own", where=step.name)
    by_name = {name: value for name, value in zip(step.inputs, inputs, strict=True) if name and value is not None}
    known = {name: np.array(value) for name, value in by_name.items() if not isinstance(value, Tensor)}
    number = shared.register_node(versions, known)
    tensors = [value for value in by_name.values() if isinstance(value, Tensor)]
    found = _define_torch_operator(step.op)(tensors, number, list(_iter_possible_sizes(known.values())))
    results = iter(found)
    return [next(results) if name else None for name in step.outputs]


def _iter_possible_sizes(known: Iterable[Array]) -> Iterator[int]:
    """Yield known integers of a node that may be sizes of the example.

    They become arguments of the torch operator, so that the analysis sees that the node depends on them.
    """
    for array in known:
        yield from array.shape
        yield from (array.ravel().tolist() if array.dtype.kind == "i" and array.size <= MAX_SHAPE_VECTOR_SIZE else [])


@cache
def _define_torch_operator(op: str) -> Any:
    """Define the torch operator of an ONNX operator, with its fake implementation and its FLOP formula."""
    _TORCH_LIBRARY.define(f"{op}(Tensor[] inputs, int number, int[] sizes) -> Tensor[]")  # type: ignore[no-untyped-call]
    name = f"{TORCH_NAMESPACE}::{op}"
    torch.library.impl(name, "CPU", lib=_TORCH_LIBRARY)(_compute_node)
    torch.library.register_fake(name, _make_fake_outputs, lib=_TORCH_LIBRARY)
    packet = getattr(getattr(torch.ops, TORCH_NAMESPACE), op)
    if lookup_onnx_operator(op).macs is not None:
        register_flop_formula(packet)(_count_node_flops)
    return packet.default


def _count_node_flops(inputs: Shapes, number: int, sizes: Sequence[int] = (), *, out_shape: Shapes) -> int:
    """Return the FLOPs of a node for torch's counter: two per multiply-accumulate."""
    if number == PASS_THROUGH_NUMBER:
        return 0
    known = _ORT_NODES[number]
    count = lookup_onnx_operator(known.step.op).macs
    return 0 if count is None else 2 * count(known.expand_input_shapes(inputs), out_shape[0])


def _compute_node(inputs: list[Tensor], number: int, sizes: Sequence[int] = ()) -> list[Tensor]:
    if number == PASS_THROUGH_NUMBER:
        return [inputs[0].clone()]
    known = _ORT_NODES[number]
    tensors = known.compute(inputs)
    known.output_shapes.setdefault(_make_input_key(inputs), [(tuple(t.shape), t.dtype) for t in tensors])
    return tensors


def _make_input_key(inputs: Sequence[Tensor]) -> Any:
    return tuple((tuple(t.shape), t.dtype) for t in inputs)


def _make_fake_outputs(inputs: list[Tensor], number: int, sizes: Sequence[int] = ()) -> list[Tensor]:
    """Return empty outputs with the shapes of the first real run; without one, run the node on zeros."""
    if number == PASS_THROUGH_NUMBER:
        return [torch.empty_like(inputs[0])]
    known = _ORT_NODES[number]
    if _make_input_key(inputs) not in known.output_shapes:
        with torch._C._DisableTorchDispatch():
            _compute_node([torch.zeros(tuple(t.shape), dtype=t.dtype) for t in inputs], number)
    return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in known.output_shapes[_make_input_key(inputs)]]


class StepModule(nn.Module):
    """A step as a module, so that its name appears in the traced graph."""

    def __init__(self, step: OnnxStep, versions: Mapping[str, int]) -> None:
        super().__init__()
        self.step = _SharedStep(step)
        self.opset_versions = versions
        self.path = ""

    def forward(self, inputs: Sequence[OnnxValue], sizes: Mapping[str, SizeOverrides]) -> Sequence[OnnxValue]:
        step = self.step.value
        # Shape arithmetic: all inputs are known, so evaluate it in numpy and keep it out of the traced graph.
        if step.node is not None and not any(isinstance(value, Tensor) for value in inputs):
            return self.step.evaluate_cached(inputs, self.opset_versions)
        call = OpCall(
            self.path, list(inputs), step.attributes, self.opset_versions.get("", 1), len(step.outputs), sizes
        )
        handler = lookup_onnx_operator(step.op).handler
        is_standard = step.node is None or step.node.domain in ("", "ai.onnx")
        if handler is not None and is_standard and not step.runs_in_ort:
            try:
                with fast_half_precision(inputs):
                    found = handler(call)
                return list(found) if isinstance(found, (list, tuple)) else [found]
            except UnsupportedUsage:
                pass  # onnxruntime runs it, below
        return run_with_ort(self.step, self.opset_versions, inputs)


class SkippedNode(nn.Module):
    """A skipped node as a module, so that refusals of the channels that it reads contain its name."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def forward(self, value: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return pass_through_opaque(self.op, value, weights)


class _SharedStep:
    """A step with its caches, shared by all copies of a module."""

    def __init__(self, value: OnnxStep) -> None:
        self.value = value
        self.cached_results: dict[Any, list[Array]] = {}
        self.ort_nodes: dict[int, _OrtNode] = {}

    def evaluate_cached(self, inputs: Sequence[Any], versions: Mapping[str, int]) -> list[Array]:
        """Evaluate a step on known arrays, once per set of values."""
        key = tuple(None if value is None else (value.dtype.str, value.shape, value.tobytes()) for value in inputs)
        if key not in self.cached_results:
            self.cached_results[key] = evaluate_node(self.value.node, inputs, versions)
        return self.cached_results[key]

    def register_node(self, versions: Mapping[str, int], known: Mapping[str, Array]) -> int:
        """Return the number by which torch's operator finds this step with these known inputs while the step lives.

        The number is a digest of the node's content, so that equal networks have equal graphs in every process.
        """
        arrays = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in known.items()}
        number = int(compute_digest(self._content, dict(versions), arrays)[:15], 16)  # 60 bits, which fit an int64
        if number not in self.ort_nodes:
            self.ort_nodes[number] = _ORT_NODES.setdefault(number, _OrtNode(self.value, versions, known))
        return number

    @cached_property
    def _content(self) -> bytes:
        content: bytes = self.value.node.SerializeToString(deterministic=True)
        return content

    def __deepcopy__(self, memo: Any) -> _SharedStep:
        return self


@dataclass(frozen=True, eq=False)
class OnnxOrigin:
    """The file of a network, and example inputs for it."""

    file: OnnxFile
    inputs: tuple[Tensor, ...] = field(repr=False)

    def __deepcopy__(self, memo: Any) -> OnnxOrigin:
        return self


class OnnxNetwork(ResizableModule):
    """Runs a program. Takes tensors in the file's order; returns the file's outputs and the boundary values."""

    def __init__(self, program: OnnxProgram, origin: OnnxOrigin) -> None:
        super().__init__()
        self.program, self.origin = program, origin
        self.parameter_names: dict[str, str] = {}
        """The dotted path of the parameter, by the constant's name in the file."""
        self.step_modules: list[StepModule] = []
        for step in program.steps:
            module = StepModule(step, program.opsets)
            module.path = register_by_path(self, step.name, module)
            self.step_modules.append(module)
        self.skipped_nodes = {name: SkippedNode(step.op) for name, step in _find_skipped_values(program).items()}
        for name, step in _find_skipped_values(program).items():
            register_by_path(self, step.name, self.skipped_nodes[name])
        for name, kind in _classify_constants(program).items():
            tensor = torch.from_numpy(np.array(program.constants[name]))
            held = nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor
            self.parameter_names[name] = register_by_path(self, name, held)
        self.unprunable_parameters = [
            register_by_path(self, name, nn.Parameter(torch.from_numpy(np.array(value)), requires_grad=False))
            for name, value in (program.skipped.weights if program.skipped is not None and self.skipped_nodes else ())
        ]
        """The weights of skipped nodes, as parameters: they are counted in the size and reported as not prunable."""
        self._last_consumer = {name: i for i, step in enumerate(program.steps) for name in step.inputs}
        self._result_names = {*program.outputs, *program.boundary_values}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = {name: _value_to_tensor(value) for name, value in self.compute_values(*inputs).items()}
        left = [self._get_tensor_at(path) for path in self.unprunable_parameters]
        for name, stop in self.skipped_nodes.items():
            values[name], left = stop(values[name], left), []
        return tuple(values.values())

    @property
    def input_names(self) -> tuple[str, ...]:
        """The file's inputs, in order."""
        return self.program.inputs

    def compute_values(self, *inputs: Tensor, every: bool = False) -> dict[str, Any]:
        """Return the network's outputs by name, or all intermediate values with `every`."""
        values: dict[str, Any] = {**self.program.constants, **dict(self.named_constants())}
        if len(inputs) != len(self.input_names):
            names = ", ".join(self.input_names)
            raise ValueError(f"the file takes {len(self.input_names)} inputs ({names}), not {len(inputs)}")
        values |= dict(zip(self.input_names, inputs, strict=True))
        for i, module in enumerate(self.step_modules):
            step = module.step.value
            outputs = module([values.get(name) for name in step.inputs], self.sizes)
            values |= {name: value for name, value in zip(step.outputs, outputs, strict=False) if name}
            for name in step.inputs:
                # Free intermediate values after their last use, to bound the memory.
                if self._last_consumer[name] == i and name not in self._result_names and not every:
                    values.pop(name, None)
        return (
            values if every else {name: values[name] for name in (*self.program.outputs, *self.program.boundary_values)}
        )

    def named_constants(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by the names of the file's constants."""
        yield from ((name, self._get_tensor_at(path)) for name, path in self.parameter_names.items())

    def _get_tensor_at(self, path: str) -> Tensor:
        owner, _, attribute = path.rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(owner), attribute)
        return tensor


def _find_skipped_values(program: OnnxProgram) -> Mapping[str, OnnxStep]:
    """Return the values that skipped nodes read; if there are none, the first output, so that they are reported."""
    if program.boundary_values or program.skipped is None:
        return program.boundary_values
    return {name: program.skipped.first_step for name in program.outputs[:1]}


def _classify_constants(program: OnnxProgram) -> dict[str, str]:
    """Return which constants are weights: "parameter", or "buffer" for running statistics.

    Constants with infinite entries are attention masks, not weights.
    """
    uses: dict[str, list[tuple[OnnxOperator, int]]] = {}
    for step in program.steps:
        for slot, name in enumerate(step.inputs):
            if (
                name in program.constants
                and name not in program.frozen_constants
                and slot not in lookup_onnx_operator(step.op).numeric_inputs
            ):
                uses.setdefault(name, []).append((lookup_onnx_operator(step.op), slot))
    kinds = {}
    for name, rows_and_slots in uses.items():
        value = program.constants[name]
        layer = any(row.small_weights for row, _ in rows_and_slots)
        if can_be_weights(value) and (layer or (value.size > 1 and np.isfinite(value).all())):
            kinds[name] = (
                "buffer" if any(slot in row.statistics_inputs for row, slot in rows_and_slots) else "parameter"
            )
    return kinds


def _value_to_tensor(value: OnnxValue) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(np.array(value))


def tensor_to_array(tensor: Tensor) -> Array:
    """Return a parameter as a numpy array, as the file stores it."""
    return tensor.detach().cpu().contiguous().numpy()
