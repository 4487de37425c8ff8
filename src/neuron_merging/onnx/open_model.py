"""Open an ONNX file as a network with example inputs, and check it against onnxruntime.

Dynamic sizes are found by trying common ones. If the outputs differ, every step is compared on the inputs that
onnxruntime computed for it, so that errors do not propagate. Steps that differ are then run by onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from neuron_merging.errors import ModelError, describe_error
from neuron_merging.graph.compare import ROUNDING_FACTOR, OutputDifference, compare_outputs
from neuron_merging.graph.copying import Float64Mode, copy_to_float64, to_float64
from neuron_merging.graph.example_inputs import call_model, draw_example, flatten_outputs
from neuron_merging.graph.graph import Shape
from neuron_merging.onnx import onnx, protobuf_message
from neuron_merging.onnx.channel_selections import rewrite_channel_selections
from neuron_merging.onnx.model_file import OnnxFile, open_ort_session, read_onnx_file
from neuron_merging.onnx.network import OnnxNetwork, OnnxOrigin
from neuron_merging.onnx.normalize import normalize_model
from neuron_merging.onnx.operators.shape_ops import TORCH_DTYPES
from neuron_merging.onnx.program import build_program
from neuron_merging.progress import announce

IMAGE_SIZES_TO_TRY = ((224, 224), (64, 64), (48, 160), (32, 128), (320, 320), (640, 640), (28, 28), (32, 32), (8, 8))
"""Heights and widths in pixels, in the order in which they are tried."""
SEQUENCE_LENGTHS_TO_TRY = (16, 128, 8, 1, 32, 64, 512, 576, 1024, 4096, 16000)
"""Lengths of sequences in tokens or samples, in the order in which they are tried; the last ones fit audio."""
BATCH_SIZES_TO_TRY = (2, 4, 8, 16)
"""Batch sizes that are tried where one sample does not run."""


MAX_INPUT_BYTES = 2**32
"""Bytes of one example input; more is a mistake in the file, and may exhaust the memory."""


def find_onnx_example_inputs(file: OnnxFile) -> tuple[Tensor, ...]:
    """Return random inputs of the first candidate sizes that onnxruntime runs, if possible with finite outputs.

    Raises
    ------
    ModelError
        None of the candidate sizes runs.
    """
    _check_no_zero_sizes(file)
    session, problem, found = file.session, "no shapes were tried", None
    for shapes in _iter_candidate_shapes(file):
        inputs = make_onnx_inputs(file, shapes)
        try:
            outputs = session.run(None, make_ort_feed(file, inputs))
        except Exception as error:  # noqa: BLE001 (onnxruntime's exceptions have no common base class)
            problem = describe_error(error)
            continue
        # A recording that is too short for its windows may run and give no numbers.
        if not any(_holds_nan(value) for value in outputs):
            return inputs
        found = found or inputs
    if found is not None:
        return found
    raise ModelError(
        f"the file has dynamic sizes, and none of the tried values runs: {problem}",
        where=str(file.path),
        fix="Give the shape of each input, as in --input 1,3,224,224: "
        f"{'; '.join(map(_describe_onnx_input, file.inputs))}.",
    )


def _holds_nan(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and bool(np.isnan(value).any())


def make_onnx_inputs(file: OnnxFile, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """Return random inputs of these shapes, with the dtypes that the file declares."""
    if len(shapes) != len(file.inputs):
        names = ", ".join(value.name for value in file.inputs)
        what = f"the file takes {len(file.inputs)} inputs ({names}), and {len(shapes)} shapes were given"
        raise ModelError(what, where="--input", fix="Give one for each, in this order.")
    for value, shape in zip(file.inputs, shapes, strict=True):
        _check_input_fits_memory(file, value, shape)
    generator = torch.Generator("cpu").manual_seed(0)
    return tuple(
        draw_example(shape, get_input_dtype(value), generator, positive=True)
        for value, shape in zip(file.inputs, shapes, strict=True)
    )


def _check_input_fits_memory(file: OnnxFile, value: Any, shape: Shape) -> None:
    size = math.prod(shape) * get_input_dtype(value).itemsize
    if size > MAX_INPUT_BYTES:
        what = f"the input {value.name!r} of shape {' x '.join(map(str, shape))} would take {size / 2**30:.0f} GiB"
        raise ModelError(what, where=str(file.path), fix="Declare the sizes that the network is used with.")


def make_ort_feed(file: OnnxFile, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Return the inputs by name as numpy arrays, as onnxruntime takes them."""
    values = [tensor.detach().cpu().numpy() for tensor in inputs]
    return dict(zip([value.name for value in file.inputs], values, strict=True))


def get_input_dtype(value: Any) -> torch.dtype:
    """Return the torch dtype of an input."""
    dtype = TORCH_DTYPES.get(value.type.tensor_type.elem_type)
    if dtype is None:
        fix = "Export the network without its text preprocessing, so that its inputs are numeric tensors."
        raise ModelError("the input is not a numeric tensor", where=value.name, fix=fix)
    return dtype


def has_free_batch_size(file: OnnxFile) -> bool:
    """Return whether the first size of every input is dynamic and has the same name everywhere."""
    firsts = [next(iter(_get_declared_sizes(value)), None) for value in file.inputs]
    return bool(firsts) and all(size is None or isinstance(size, str) for size in firsts) and len(set(firsts)) == 1


def _get_declared_sizes(value: Any) -> list[int | str | None]:
    """Return the sizes of an input: a number, the name of a dynamic size, or None for an unnamed one."""
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in dims]


def _describe_onnx_input(value: Any) -> str:
    """Return the name of an input with its declared sizes, for messages."""
    return f"{value.name} ({', '.join(str(size or '?') for size in _get_declared_sizes(value))})"


def _check_no_zero_sizes(file: OnnxFile) -> None:
    """Raise if the file fixes an input size at zero: no value would pass through the network."""
    for value in file.inputs:
        if any(dim.HasField("dim_value") and dim.dim_value == 0 for dim in value.type.tensor_type.shape.dim):
            fix = "Replace it by a name, which makes it dynamic, or by the size that the network is used with."
            raise ModelError(
                f"the file fixes a size of its input {value.name!r} as zero", where=str(file.path), fix=fix
            )


def _iter_candidate_shapes(file: OnnxFile) -> Iterator[list[Shape]]:
    """Yield candidate shapes of all inputs.

    Inputs after the first may be recurrent states or caches; their dynamic sizes are also tried as 1. If no sizes run
    with a batch of 1, larger ones are tried: a network may take its samples in pairs or fours.
    """
    yield from _iter_batch_shapes(file, 1)
    if any(not isinstance(size, int) for value in file.inputs for size in _get_declared_sizes(value)[:1]):
        for batch in BATCH_SIZES_TO_TRY:
            yield from islice(_iter_batch_shapes(file, batch), 2)


def _iter_batch_shapes(file: OnnxFile, batch: int) -> Iterator[list[Shape]]:
    """Yield candidate shapes of all inputs for one batch size."""
    sizes = [_fill_batch_size(_get_declared_sizes(value), file, batch) for value in file.inputs]
    planes = (
        IMAGE_SIZES_TO_TRY
        if any(_has_open_sizes(shape) for shape in sizes if len(shape) == 4)
        else IMAGE_SIZES_TO_TRY[:1]
    )
    lengths = (
        SEQUENCE_LENGTHS_TO_TRY
        if any(_has_open_sizes(shape) for shape in sizes if len(shape) != 4)
        else SEQUENCE_LENGTHS_TO_TRY[:1]
    )
    states = (False, True) if any(_has_open_sizes(shape) for shape in sizes[1:]) else (False,)
    for plane, length, state in product(planes, lengths, states):
        first = [_fill_open_sizes(shape, plane, length, batch) for shape in sizes[:1]]
        yield first + [_fill_open_sizes(shape, plane, 1 if state else length, batch) for shape in sizes[1:]]


def _fill_batch_size(sizes: list[int | str | None], file: OnnxFile, batch: int) -> list[int | str | None]:
    """Replace every size that has the name of a batch dimension, first in any input, by the batch size."""
    batches = {next(iter(_get_declared_sizes(value)), None) for value in file.inputs}
    return [batch if isinstance(size, str) and size in batches else size for size in sizes]


def _has_open_sizes(sizes: list[int | str | None]) -> bool:
    return any(not isinstance(size, int) for size in sizes[1:])


def _fill_open_sizes(sizes: list[int | str | None], plane: tuple[int, int], length: int, batch: int) -> Shape:
    """Fill dynamic sizes: the batch size, height and width for images (4-D), `length` for anything else."""
    if len(sizes) == 4:
        last = sizes[3] if isinstance(sizes[3], int) else 0
        # A last size of 1, 3 or 4 is a channel count: the layout is NHWC, otherwise NCHW.
        height, width = (2, 3) if last not in (1, 3, 4) else (1, 2)
        guesses = {height: plane[0], width: plane[1]}
    else:
        guesses = {}
    fill = {dim: guesses.get(dim, 3 if len(sizes) == 4 else length) for dim in range(len(sizes))} | {0: batch}
    return tuple(size if isinstance(size, int) else fill[dim] for dim, size in enumerate(sizes))


ORT_SLACK = {torch.float16: 1e-3}
"""Absolute tolerance by dtype."""
OTHER_ORT_SLACK = 1e-6
"""Absolute tolerance of the other dtypes: onnxruntime's sigmoid and similar functions have about this error."""


def compare_with_ort(mine: Tensor, theirs: Any) -> OutputDifference:
    """Measure the difference between an output of torch and one of onnxruntime."""
    (difference,) = compare_outputs([mine], [torch.from_numpy(np.array(theirs))])
    return difference


def is_close_to_ort(mine: Tensor, theirs: Any, rounding: float = 0.0) -> bool:
    """Return whether two outputs agree up to rounding; `rounding` is the measured rounding error of the network."""
    difference = compare_with_ort(mine, theirs)
    if difference.is_integer:
        return not difference.fault  # an argmax may flip with the last digit of a sum: compare shape and type only
    return difference.is_close(max(ORT_SLACK.get(difference.dtype, OTHER_ORT_SLACK), ROUNDING_FACTOR * rounding))


@torch.no_grad()
def measure_rounding_error(network: nn.Module, inputs: Sequence[Any]) -> list[float]:
    """Return the largest absolute difference of each output from the same computation in float64."""
    plain, copy = flatten_outputs(call_model(network, inputs)), copy_to_float64(network, weights=False)
    with Float64Mode():  # type: ignore[no-untyped-call]
        exact = flatten_outputs(call_model(copy, tree_map(to_float64, tuple(inputs))))
    return [found.absolute for found in compare_outputs(plain, exact)]


@torch.no_grad()
def find_first_wrong_step(network: OnnxNetwork, inputs: Sequence[Tensor]) -> str | None:
    """Return the name of the first step whose outputs differ from onnxruntime's; None if the network's agree."""
    file, outputs = network.origin.file, list(network.program.outputs)
    if outputs:
        wanted = file.session.run(outputs, make_ort_feed(file, inputs))
        if all(is_close_to_ort(mine, theirs) for mine, theirs in zip(network(*inputs), wanted, strict=False)):
            return None
    values = network.compute_values(*inputs, every=True)
    named = [name for step in network.program.steps for name in step.outputs if isinstance(values.get(name), Tensor)]
    known = dict(
        zip(named, _open_session_with_all_outputs(network, named).run(named, make_ort_feed(file, inputs)), strict=True)
    )
    return find_first_differing_step(network, values, known)


def find_first_differing_step(network: OnnxNetwork, values: Mapping[str, Any], known: Mapping[str, Any]) -> str | None:
    """Return the first step whose outputs differ from onnxruntime's when it gets onnxruntime's inputs."""
    given = {**values, **{name: torch.from_numpy(np.array(value)) for name, value in known.items()}}
    for module in network.step_modules:
        step = module.step.value
        outputs = module([given.get(name) for name in step.inputs], network.sizes)
        pairs = [(value, known[name]) for name, value in zip(step.outputs, outputs, strict=False) if name in known]
        if not all(isinstance(mine, Tensor) and is_close_to_ort(mine, theirs) for mine, theirs in pairs):
            return step.name
    return None


def _open_session_with_all_outputs(network: OnnxNetwork, names: Sequence[str]) -> Any:
    """Open the normalised model with all these values as outputs; fused nodes would not compute them otherwise."""
    model = onnx.ModelProto()
    model.CopyFrom(network.program.model)
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    try:
        return open_ort_session(model.SerializeToString())
    except protobuf_message.EncodeError as error:  # protobuf cannot serialise more than two gigabytes
        where = str(network.origin.file.path)
        raise ModelError(
            "torch's outputs differ from onnxruntime's, and the file is too large to find out why", where=where
        ) from error


def open_onnx_file(path: str | Path, inputs: Sequence[Tensor] | None = None) -> tuple[OnnxNetwork, tuple[Tensor, ...]]:
    """Open an ONNX file as a network, with example inputs for it.

    Parameters
    ----------
    path
        The file.
    inputs
        One example per input, in the file's order. Default: random inputs of sizes that the file accepts.

    Returns
    -------
    tuple
        A module that computes the outputs of the file, and the inputs.

    Raises
    ------
    ModelError
        The file cannot be read or run.

    Examples
    --------
    >>> network, inputs = open_onnx_file("model.onnx")                     # doctest: +SKIP
    """
    file = read_onnx_file(path)
    if file.dequantized:
        announce(f"{len(file.dequantized)} weights that the file stores quantised are float from here on")
    given = find_onnx_example_inputs(file) if inputs is None else tuple(inputs)
    _check_onnx_inputs(file, given)
    normalized, opaque = normalize_model(file.model), frozenset[str]()
    rewrite_channel_selections(normalized)
    while True:  # each round leaves one more differing step to onnxruntime
        network = OnnxNetwork(build_program(normalized, opaque), OnnxOrigin(file, given)).eval()
        wrong = find_first_wrong_step(network, given)
        if wrong is None:
            return network, given
        if wrong in opaque:
            raise ModelError("torch's outputs differ from onnxruntime's", where=f"{file.path}, {wrong}")
        opaque |= {wrong}


def _check_onnx_inputs(file: OnnxFile, inputs: Sequence[Any]) -> None:
    names = [value.name for value in file.inputs]
    if len(inputs) != len(names) or not all(isinstance(value, Tensor) for value in inputs):
        what = f"the file takes {len(names)} tensors: {', '.join(names)}"
        raise ModelError(what, where="example_inputs", fix="Give one for each, in this order.")
    try:
        file.session.run(None, make_ort_feed(file, inputs))
    except Exception as error:  # onnxruntime's exceptions have no common base class
        fix = "Give inputs of the file's shapes and types."
        raise ModelError(
            f"onnxruntime does not run the file on them: {describe_error(error)}", where="inputs", fix=fix
        ) from error
