"""Opening: a file in, a network with example inputs out, checked against onnxruntime.

A step that torch computes otherwise than onnxruntime does is found out and left to onnxruntime.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from neuron_merging.errors import ModelError, told
from neuron_merging.files.examples import example_inputs, feed
from neuron_merging.files.needed import onnx
from neuron_merging.files.network import FileNetwork, Origin
from neuron_merging.files.program import opaque_steps, program_of
from neuron_merging.files.reading import File, read, session
from neuron_merging.files.tidying import tidied

ENOUGH = {torch.float16: 5e-2, torch.float32: 2e-3}
"""Of the largest entry: sums are taken in another order."""
LEAST = {torch.float16: 1e-3, torch.float32: 1e-6}
"""onnxruntime's sigmoid and its like are exact to that."""


def is_file(model: object) -> TypeGuard[str | Path]:
    """Whether a model is the name of an ONNX file."""
    return isinstance(model, (str, Path)) and Path(model).suffix == ".onnx"


def open_file(path: str | Path, inputs: Sequence[Tensor] | None = None) -> tuple[FileNetwork, tuple[Tensor, ...]]:
    """The network of an ONNX file, and example inputs for it.

    Parameters
    ----------
    path
        The file.
    inputs
        An example of every input, in the file's order; left out, random ones of sizes that the file takes.

    Returns
    -------
    tuple
        A module that computes what the file does, and the inputs.

    Raises
    ------
    ModelError
        The file cannot be read or run.

    Examples
    --------
    >>> network, inputs = open_file("model.onnx")                     # doctest: +SKIP
    """
    file = read(path)
    given = example_inputs(file) if inputs is None else tuple(inputs)
    _check_inputs(file, given)
    program = program_of(tidied(file.model))
    opaque: set[str] = set()
    while True:
        network = FileNetwork(opaque_steps(program, frozenset(opaque)), Origin(file, given)).eval()
        wrong = _first_wrong(network, file, given)
        if wrong is None:
            return network, given
        if wrong in opaque:
            raise ModelError("torch does not compute what onnxruntime does", where=f"{file.path}, {wrong}")
        opaque.add(wrong)


def _check_inputs(file: File, inputs: Sequence[Any]) -> None:
    names = [value.name for value in file.inputs]
    if len(inputs) != len(names) or not all(isinstance(value, Tensor) for value in inputs):
        what = f"the file takes {len(names)} tensors: {', '.join(names)}"
        raise ModelError(what, where="example_inputs", fix="Give one for each, in this order.")
    try:
        file.session.run(None, feed(file, inputs))
    except Exception as error:  # onnxruntime has a class for every fault, and no common one
        fix = "Give inputs of the file's shapes and types."
        raise ModelError(
            f"onnxruntime does not run the file on them: {told(error)}", where="inputs", fix=fix
        ) from error


@torch.no_grad()
def _first_wrong(network: FileNetwork, file: File, inputs: Sequence[Tensor]) -> str | None:
    """The first step whose results are not those of onnxruntime; None if the network's are."""
    outputs = file.session.run(list(network.program.outputs), feed(file, inputs)) if network.program.outputs else []
    found = network(*inputs)[: len(outputs)]
    if all(agrees(mine, theirs) for mine, theirs in zip(found, outputs, strict=True)) and outputs:
        return None
    values = network.values(*inputs, every=True)
    named = [name for step in network.program.steps for name in step.makes if isinstance(values.get(name), Tensor)]
    known = dict(zip(named, _every(network, named).run(named, feed(file, inputs)), strict=True))
    for step in network.program.steps:
        if not all(agrees(values[name], known[name]) for name in step.makes if name in known):
            return step.name
    return None if not outputs else network.program.steps[-1].name


def _every(network: FileNetwork, names: Sequence[str]) -> Any:
    """The tidy model with these values as its outputs, not optimised: so each is there."""
    model = onnx.ModelProto()
    model.CopyFrom(network.program.model)
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    return session(model.SerializeToString())


def agrees(mine: Tensor, theirs: Any) -> bool:
    """Whether two results are the same, but for the order of sums."""
    if tuple(mine.shape) != np.shape(theirs):
        return False
    if not mine.is_floating_point():
        return True  # where a whole number turns on the last digit of a sum, both are right
    a, b = mine.double(), torch.from_numpy(np.array(theirs)).double()
    finite = a.isfinite() & b.isfinite()
    if not bool((finite | (a == b) | (a.isnan() & b.isnan())).all()):
        return False
    if not bool(finite.any()):
        return True
    limit = ENOUGH.get(mine.dtype, 1e-4) * float(b[finite].abs().max()) + LEAST.get(mine.dtype, 1e-9)
    return float((a - b)[finite].abs().max()) <= limit
