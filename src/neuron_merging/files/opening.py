"""Opening: a file in, a network with example inputs out, checked against onnxruntime.

A step that torch computes otherwise than onnxruntime does is found out and left to onnxruntime.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from neuron_merging.errors import ModelError, told
from neuron_merging.files.comparing import first_wrong
from neuron_merging.files.examples import example_inputs, feed
from neuron_merging.files.network import FileNetwork, Origin
from neuron_merging.files.program import program_of
from neuron_merging.files.reading import File, read
from neuron_merging.files.tidying import tidied


def is_file(model: object) -> TypeGuard[str | Path]:
    """Whether a model is the name of an ONNX file."""
    return isinstance(model, (str, Path)) and Path(model).suffix.lower() == ".onnx"


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
    tidy, opaque = tidied(file.model), frozenset[str]()
    while True:
        network = FileNetwork(program_of(tidy, opaque), Origin(file, given)).eval()
        wrong = first_wrong(network, given)
        if wrong is None:
            return network, given
        if wrong in opaque:
            raise ModelError("torch does not compute what onnxruntime does", where=f"{file.path}, {wrong}")
        opaque |= {wrong}


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
