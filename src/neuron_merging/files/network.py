"""An ONNX file as a module: every step of its program is run by torch.

Sizes are numbers: what a file computes from the shapes of values is evaluated beside the network, not in it. So the
module can be captured like any other, and its code copes with fewer channels wherever the file does. Parameters have
the names of the file's constants, steps those of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.files.evaluating import evaluate
from neuron_merging.files.opaque import kept_as_it_is, run_opaque
from neuron_merging.files.operators.calls import Call, Unsupported, Value
from neuron_merging.files.operators.table import HANDLERS
from neuron_merging.files.program import Program, Step, are_weights
from neuron_merging.files.reading import File
from neuron_merging.files.tidying import Array
from neuron_merging.graph.resizing import Resizable, Sizes, register

KNOWN_SLOTS = {"Resize": (1, 2, 3), "Upsample": (1,), "Clip": (1, 2), "Pad": (1, 2, 3), "Dropout": (1, 2)}
"""Inputs, by operator, that are numbers to compute with and no weights."""
MOVING = {"BatchNormalization": (3, 4)}
"""Inputs that are statistics, not parameters."""
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Linear", "BatchNormalization", "InstanceNormalization", "PRelu")
"""Layers whose constants are weights, however few entries they have."""


class Running(nn.Module):
    """A step, as a module: so its name is that of the operators that it runs."""

    def __init__(self, step: Step, versions: Mapping[str, int]) -> None:
        super().__init__()
        self.step = _Shared(step)
        self.versions = versions
        self.path = ""

    def forward(self, inputs: Sequence[Value], sizes: Mapping[str, Sizes]) -> Sequence[Value]:
        step = self.step.value
        if step.node is not None and not any(isinstance(value, Tensor) for value in inputs):
            return self.step.evaluated(inputs, self.versions)
        call = Call(self.path, list(inputs), step.attributes, self.versions.get("", 1), len(step.makes), sizes)
        handler = HANDLERS.get(step.op)
        own = step.node is None or step.node.domain in ("", "ai.onnx")
        if handler is not None and own and not step.opaque:
            try:
                found = handler(call)
                return list(found) if isinstance(found, (list, tuple)) else [found]
            except Unsupported:
                pass  # a way of using the operator that torch does not have
        return run_opaque(step, self.versions, inputs)


class Stopping(nn.Module):
    """A node that is not run, as a module: so its name is in the refusal of the channels that it would read."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def forward(self, value: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return kept_as_it_is(self.op, value, weights)


class _Shared:
    """A step that all copies of a module share."""

    def __init__(self, value: Step) -> None:
        self.value = value
        self.known: dict[Any, list[Array]] = {}

    def evaluated(self, inputs: Sequence[Any], versions: Mapping[str, int]) -> list[Array]:
        """What a step makes of known numbers, computed once for each of them."""
        key = tuple(None if value is None else (value.dtype.str, value.shape, value.tobytes()) for value in inputs)
        if key not in self.known:
            self.known[key] = evaluate(self.value.node, inputs, versions)
        return self.known[key]

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a network came from: its file, and inputs that the file takes."""

    file: File
    inputs: tuple[Tensor, ...] = field(repr=False)

    def __deepcopy__(self, memo: Any) -> Origin:
        return self


class FileNetwork(Resizable):
    """A network that runs a program: tensors in, in the file's order; the file's outputs and the program's ends out."""

    def __init__(self, program: Program, origin: Origin) -> None:
        super().__init__()
        self.program, self.origin = program, origin
        self.names: dict[str, str] = {}
        """By the constant's name in the file, that of the parameter."""
        self.running: list[Running] = []
        for step in program.steps:
            module = Running(step, program.opsets)
            module.path = register(self, step.name, module)
            self.running.append(module)
        self.stops = {name: Stopping(step.op) for name, step in _stops(program).items()}
        for name, step in _stops(program).items():
            register(self, step.name, self.stops[name])
        for name, kind in _kinds(program).items():
            tensor = torch.from_numpy(np.array(program.constants[name]))
            held = nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor
            self.names[name] = register(self, name, held)
        self.untouched = [
            register(self, name, nn.Parameter(torch.from_numpy(np.array(value)), requires_grad=False))
            for name, value in (program.left.weights if program.left is not None and self.stops else ())
        ]
        """The parameters that belong to what is left as it is: so they are counted, and refused."""
        self._last = {name: i for i, step in enumerate(program.steps) for name in step.reads}
        self._results = {*program.outputs, *program.ends}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = {name: _as_tensor(value) for name, value in self.values(*inputs).items()}
        left = [self._tensor(path) for path in self.untouched]
        for name, stop in self.stops.items():
            values[name], left = stop(values[name], left), []
        return tuple(values.values())

    def values(self, *inputs: Tensor, every: bool = False) -> dict[str, Any]:
        """What the network returns, by name, or every value on the way."""
        values: dict[str, Any] = {**self.program.constants, **dict(self.own())}
        values |= dict(zip(self.program.inputs, inputs, strict=True))
        for i, module in enumerate(self.running):
            step = module.step.value
            made = module([values.get(name) for name in step.reads], self.sizes)
            values |= {name: value for name, value in zip(step.makes, made, strict=False) if name}
            for name in step.reads:
                if self._last[name] == i and name not in self._results and not every:
                    values.pop(name, None)
        return values if every else {name: values[name] for name in (*self.program.outputs, *self.program.ends)}

    def own(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by the names of the file's constants."""
        yield from ((name, self._tensor(path)) for name, path in self.names.items())

    def _tensor(self, path: str) -> Tensor:
        home, _, attribute = path.rpartition(".")
        found: Tensor = getattr(self.get_submodule(home), attribute)
        return found


def _stops(program: Program) -> Mapping[str, Step]:
    """The values that nodes read which are not run. Where those read none of the program's, one that it returns."""
    if program.ends or program.left is None:
        return program.ends
    return {name: program.left.first for name in program.outputs[:1]}


def _kinds(program: Program) -> dict[str, str]:
    """The constants that are weights: parameters, or buffers where they are statistics.

    What is added to hide something, and so has infinities, is none.
    """
    uses: dict[str, list[tuple[str, int]]] = {}
    for step in program.steps:
        for slot, name in enumerate(step.reads):
            if name in program.constants and name not in program.held and slot not in KNOWN_SLOTS.get(step.op, ()):
                uses.setdefault(name, []).append((step.op, slot))
    found = {}
    for name, places in uses.items():
        value = program.constants[name]
        layer = any(op in LAYERS for op, _ in places)
        if are_weights(value) and (layer or (value.size > 1 and np.isfinite(value).all())):
            found[name] = "buffer" if any(slot in MOVING.get(op, ()) for op, slot in places) else "parameter"
    return found


def _as_tensor(value: Value) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(np.array(value))


def array_of(tensor: Tensor) -> Array:
    """A parameter as the file stores it."""
    return tensor.detach().cpu().contiguous().numpy()
