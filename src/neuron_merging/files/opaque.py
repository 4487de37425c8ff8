"""Opaque steps: operators that onnxruntime runs, because torch has none of their kind.

To torch they are operators with the file's own names, of which nothing is known: they refuse the channels that reach
them, and the rest of the network goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from neuron_merging.errors import ModelError, told
from neuron_merging.files.needed import onnx
from neuron_merging.files.operators.calls import Value
from neuron_merging.files.program import Step
from neuron_merging.files.reading import session

Array = NDArray[Any]
NAMESPACE = "neuron_merging_onnx"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_KNOWN: list[_Opaque | _Kept] = []
_NUMBERED: dict[Any, int] = {}
MOST_DIMENSIONS = 8
TYPES = {np.dtype(np.float64): np.float32}
Shapes = Sequence[Sequence[int]]


def _recurrent(given: Shapes, made: Sequence[int]) -> int:
    """Every entry of both matrices, once for each step of each sample."""
    return prod(given[0][:2]) * (prod(given[1]) + prod(given[2]))


def _convolution(given: Shapes, made: Sequence[int]) -> int:
    """Every entry of the weight, once for each place of the result."""
    return prod(given[1]) * prod(made) // made[1]


def _transposed(given: Shapes, made: Sequence[int]) -> int:
    """Every entry of the weight, once for each place of what is read."""
    return prod(given[1]) * prod(given[0]) // given[0][1]


MACS: dict[str, Callable[[Shapes, Sequence[int]], int]] = {
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "Conv": _convolution,
    "ConvTranspose": _transposed,
}
"""Multiply-accumulates of nodes, by the shapes of what they read and of the first of what they make."""


class DoesNotRun(ModelError, RuntimeError):
    """A node does not take what it is given, as where it takes one sample and gets two: so torch's operators say it."""


class _Opaque:
    """One node, and the sessions that run it, by the kinds of its inputs."""

    def __init__(self, step: Step, versions: Mapping[str, int], known: Mapping[str, Array]) -> None:
        self.step, self.versions, self.known = step, versions, known
        self.sessions: dict[Any, Any] = {}
        self.shapes: dict[Any, list[tuple[Any, Any]]] = {}

    def compute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """In single precision where it is called in double: onnxruntime has few operators in double."""
        arrays = [tensor.detach().cpu().contiguous().numpy() for tensor in inputs]
        wide = any(array.dtype == np.float64 for array in arrays)
        found = self._run([array.astype(TYPES.get(array.dtype, array.dtype)) for array in arrays])
        tensors = [torch.from_numpy(np.array(array)) for array in found]
        return [tensor.double() if wide and tensor.is_floating_point() else tensor for tensor in tensors]

    def shapes_read(self, shapes: Shapes) -> Shapes:
        """Of all that the node reads, by slot, when it is given tensors of these shapes."""
        left = iter(shapes)
        names = [name for name in dict.fromkeys(self.step.node.input) if name]
        found = {name: self.known[name].shape if name in self.known else next(left) for name in names}
        return [found.get(name, ()) for name in self.step.node.input]

    def _run(self, arrays: Sequence[Array]) -> list[Array]:
        names = [name for name in dict.fromkeys(self.step.node.input) if name and name not in self.known]
        key = tuple((array.dtype.str, array.ndim) for array in arrays)
        if key not in self.sessions:
            self.sessions[key] = session(self._model(names, arrays).SerializeToString())
        try:
            found: list[Array] = self.sessions[key].run(None, dict(zip(names, arrays, strict=True)))
        except Exception as error:  # onnxruntime has a class for every fault, and no common one
            raise DoesNotRun(f"{self.step.op} does not run: {told(error)}", where=self.step.name) from error
        return found

    def _model(self, names: Sequence[str], arrays: Sequence[Array]) -> Any:
        make = onnx.helper
        given = [
            make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim)
            for name, array in zip(names, arrays, strict=True)
        ]
        made = [make.make_empty_tensor_value_info(name) for name in self.step.node.output if name]
        known = [onnx.numpy_helper.from_array(array, name) for name, array in self.known.items()]
        graph = make.make_graph([self.step.node], "one", given, made, known)
        imports = [make.make_opsetid(domain, version) for domain, version in self.versions.items()]
        return make.make_model(graph, opset_imports=imports, ir_version=8)


class _Kept:
    """A node behind which the file is left as it is: what it reads is a result, and so is not its own."""

    def __init__(self) -> None:
        self.shapes: dict[Any, list[tuple[Any, Any]]] = {}

    def compute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [inputs[0].clone()]


def kept_as_it_is(op: str, value: Tensor, weights: Sequence[Tensor] = ()) -> Tensor:
    """A value that is read by a node of this kind, of which nothing is known: the same value. Weights are its own."""
    if None not in _NUMBERED:
        _NUMBERED[None] = len(_KNOWN)
        _KNOWN.append(_Kept())
    found: Tensor = _operator(op)([value, *weights], _NUMBERED[None], [])[0]
    return found


def run_opaque(step: Step, versions: Mapping[str, int], inputs: Sequence[Value]) -> list[Value]:
    """The results of a step, by onnxruntime."""
    if step.node is None:
        raise ModelError(f"{step.op} cannot be run on its own", where=step.name)
    by_name = {name: value for name, value in zip(step.reads, inputs, strict=True) if name and value is not None}
    known = {name: np.array(value) for name, value in by_name.items() if not isinstance(value, Tensor)}
    number = _number(step, versions, known)
    tensors = [value for value in by_name.values() if isinstance(value, Tensor)]
    found = _operator(step.op)(tensors, number, list(_sizes(known.values())))
    results = iter(found)
    return [next(results) if name else None for name in step.makes]


def _sizes(known: Iterable[Array]) -> Iterator[int]:
    """What may be sizes of the example among numbers that a node holds: the graph says that it has them."""
    for array in known:
        yield from array.shape
        yield from (array.ravel().tolist() if array.dtype.kind == "i" and array.size <= MOST_DIMENSIONS else [])


def _number(step: Step, versions: Mapping[str, int], known: Mapping[str, Array]) -> int:
    """The number under which a node with these known inputs is found again."""
    key = (id(step), *((name, array.dtype.str, array.shape, array.tobytes()) for name, array in known.items()))
    if key not in _NUMBERED:
        _NUMBERED[key] = len(_KNOWN)
        _KNOWN.append(_Opaque(step, versions, known))
    return _NUMBERED[key]


@cache
def _operator(op: str) -> Any:
    """torch's operator for a kind of node."""
    _LIBRARY.define(f"{op}(Tensor[] inputs, int number, int[] sizes) -> Tensor[]")  # type: ignore[no-untyped-call]
    name = f"{NAMESPACE}::{op}"
    torch.library.impl(name, "CPU", lib=_LIBRARY)(_compute)
    torch.library.register_fake(name, _shapes, lib=_LIBRARY)
    packet = getattr(getattr(torch.ops, NAMESPACE), op)
    if op in MACS:
        register_flop_formula(packet)(_flops)
    return packet.default


def _flops(inputs: Shapes, number: int, sizes: Sequence[int] = (), *, out_shape: Shapes) -> int:
    """What torch's counter is told of a node: two for every multiply-accumulate."""
    known = _KNOWN[number]
    return 2 * MACS[known.step.op](known.shapes_read(inputs), out_shape[0]) if isinstance(known, _Opaque) else 0


def _compute(inputs: list[Tensor], number: int, sizes: Sequence[int] = ()) -> list[Tensor]:
    known = _KNOWN[number]
    tensors = known.compute(inputs)
    known.shapes.setdefault(_key(inputs), [(tuple(t.shape), t.dtype) for t in tensors])
    return tensors


def _key(inputs: Sequence[Tensor]) -> Any:
    return tuple((tuple(t.shape), t.dtype) for t in inputs)


def _shapes(inputs: list[Tensor], number: int, sizes: Sequence[int] = ()) -> list[Tensor]:
    """Sizes are those of the first real run; where there was none, they are found by running the node on zeros."""
    known = _KNOWN[number]
    if _key(inputs) not in known.shapes:
        with torch._C._DisableTorchDispatch():
            _compute([torch.zeros(tuple(t.shape), dtype=t.dtype) for t in inputs], number)
    return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in known.shapes[_key(inputs)]]
