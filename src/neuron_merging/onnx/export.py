"""Export a network as ONNX or as a torch ExportedProgram, with a dynamic batch size, verified against the module."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from neuron_merging import atomic
from neuron_merging.errors import MergingError, ModelError, VerificationError, describe_error
from neuron_merging.graph.batch_size import choose_check_batch_sizes
from neuron_merging.graph.compare import ROUNDING_FACTOR, compare_outputs
from neuron_merging.graph.example_inputs import (
    call_model,
    flatten_outputs,
    infer_batch_size,
    resample_inputs,
    split_keyword_inputs,
)
from neuron_merging.graph.graph_module import GraphNetwork
from neuron_merging.graph.process_state import silence_logging
from neuron_merging.graph.user_code import find_user_line
from neuron_merging.onnx.formats import FileRunner, find_format, list_suffixes
from neuron_merging.onnx.model_file import open_ort_session
from neuron_merging.onnx.open_model import measure_rounding_error
from neuron_merging.onnx.operators.shape_ops import spell_out_selections
from neuron_merging.onnx.quantize import (
    DEFAULT_INT8_LOSS,
    InputBatch,
    Int8Network,
    check_quantizable,
    quantize_onnx_file,
)
from neuron_merging.onnx.write_model import NOTE_COMPARED_UNOPTIMIZED

BATCH_DIM_NAME = "batch"
"""The name of the dynamic batch dimension in the file."""


@dataclass(frozen=True)
class ExportResult:
    """A written file and its largest difference from the module."""

    file: str
    difference: float
    batches: tuple[int, ...]
    """The batch sizes at which the file was compared."""
    note: str = ""
    """Why the batch size is fixed, or another remark on the file; empty if there is none."""

    def facts(self) -> dict[str, Any]:
        """Return the fields with readable names, for printing."""
        facts = {"file": self.file, "largest difference": self.difference}
        sizes = ", ".join(str(batch) for batch in self.batches)
        return {**facts, "compared at batch sizes": sizes, **({"note": self.note} if self.note else {})}


@torch.no_grad()
def export_model(
    model: nn.Module, inputs: tuple[Any, ...], target: str | Path, dynamic: Sequence[str] = ()
) -> ExportResult:
    """Write `target` (.onnx or .pt2), run it, and compare it with the module at several batch sizes.

    The batch size is dynamic wherever the network's code allows it. `dynamic` names further dimensions to make dynamic:
    "2" for dimension 2 of every input, "1:2" for dimension 2 of input 1. The file appears only after it has passed the
    comparison.
    """
    path, form = Path(target), find_format(target)
    if form is None:
        what = f"cannot write {path.suffix or 'such'} files"
        raise MergingError(what, where=str(path), fix=f"Name it {list_suffixes()}")
    atomic.check_output_file(path)
    atomic.check_free_space(path, model)
    if form.save_edited is not None and form.network is not None and isinstance(model, form.network):
        written = form.save_edited(model, path)
        return ExportResult(str(target), written.difference, written.batches, written.note)
    with silence_logging(), atomic.stage_file(path) as part:
        dimensions = [_parse_dimension(text) for text in dynamic]
        _check_dimensions(inputs, dimensions)
        program, free, note = _export_with_free_batch(model, inputs, dimensions)
        names = model.input_names if isinstance(model, GraphNetwork) else None
        form.save(program, part, names, free)
        open_runner = partial(form.open_runner, part)
        difference, batches, optimised = _verify_exported_file(model, open_runner, inputs, free=not note, path=path)
    return ExportResult(str(target), difference, batches, "; ".join(filter(None, (note, optimised))))


def quantize_model(
    model: nn.Module,
    inputs: tuple[Any, ...],
    fit: Sequence[InputBatch] = (),
    heldout: Sequence[InputBatch] = (),
    *,
    max_loss: float = DEFAULT_INT8_LOSS,
) -> Int8Network:
    """Export a network to ONNX and quantise the file, calibrated on `fit`, or on the example without such inputs."""
    check_quantizable(model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        export_model(model, inputs, file)
        return quantize_onnx_file(file, fit or (inputs,), heldout, max_loss=max_loss)


def check_int8_target(path: str | Path) -> None:
    """Raise an error for a path that is no .onnx file."""
    if Path(path).suffix.lower() != ".onnx":
        raise MergingError("int8 networks are .onnx files", where=str(path), fix="Name it small.onnx.")


def make_ort_callable(model: nn.Module, inputs: tuple[Any, ...], threads: int = 0) -> Callable[..., Any]:
    """Return a function that runs a network with onnxruntime, exported to a temporary file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        export_model(model, inputs, file)
        return open_ort_callable(str(file), threads)


def open_ort_callable(path: str, threads: int = 0) -> Callable[..., Any]:
    """Return a function that runs an ONNX file with onnxruntime."""
    opened = open_ort_session(path, threads)
    names = [value.name for value in opened.get_inputs()]

    def run(*values: Any) -> Any:
        arrays = (value.detach().cpu().numpy() for value in flatten_outputs(values))
        return opened.run(None, dict(zip(names, arrays, strict=True)))

    return run


# Free sizes


def _parse_dimension(text: str) -> tuple[int | None, int]:
    """Parse "input:dimension" or "dimension"; None as the input means every input.

    >>> _parse_dimension("2"), _parse_dimension("1:2")
    ((None, 2), (1, 2))
    """
    which, _, dim = text.rpartition(":")
    try:
        return int(which) if which else None, int(dim)
    except ValueError as error:
        raise MergingError(f"{text!r} is not a dimension", where="--dynamic", fix="Write 2, or 1:2.") from error


def _check_dimensions(inputs: tuple[Any, ...], dynamic: Sequence[tuple[int | None, int]]) -> None:
    """Raise for a dimension that no input has; the exporter would ignore it silently."""
    for which, dim in dynamic:
        chosen = inputs if which is None else inputs[which : which + 1] if which >= 0 else ()
        if not any(0 <= dim < value.ndim for value in flatten_outputs(chosen)):
            what = f"no input has a dimension {dim}" if which is None else f"input {which} has no dimension {dim}"
            raise MergingError(what, where="--dynamic", fix="Count from 0, which is the batch.")


def _export_with_free_batch(
    model: nn.Module, inputs: tuple[Any, ...], dynamic: Sequence[tuple[int | None, int]]
) -> tuple[torch.export.ExportedProgram, Any, str]:
    """Export with a dynamic batch size, or with the example's sizes if the network's code fixes the batch.

    Returns the program, its dynamic sizes (None if there are none) and the reason for a fixed batch (or "").
    """
    longer = resample_inputs(inputs, 2)  # torch.export specialises a batch of 1, so trace with 2
    try:
        call_model(model, longer)
        free = _match_forward_signature(model, _name_free_sizes(longer, 2, dynamic))
        return _run_torch_export(model, longer, _make_dynamic_shapes(free)), free, ""
    except Exception as error:  # whatever the user's code or the exporter raises
        if dynamic:
            what = f"these sizes cannot be dynamic: {describe_error(error)}"
            raise ModelError(what, where=find_user_line(error) or "--dynamic", fix="Leave --dynamic out.") from error
        note = f"the batch size is fixed: {describe_error(error)}"
    try:
        return _run_torch_export(model, inputs, None), None, note
    except Exception as error:
        what = f"the network could not be exported: {describe_error(error)}"
        raise ModelError(what, where=find_user_line(error), fix=f"Try another format: {list_suffixes()}.") from error


def _run_torch_export(model: nn.Module, inputs: tuple[Any, ...], shapes: Any) -> torch.export.ExportedProgram:
    positional, named = split_keyword_inputs(inputs)
    with redirect_stdout(io.StringIO()):
        program = torch.export.export(model, positional, dict(named) or None, dynamic_shapes=shapes, strict=False)
    return spell_out_selections(program)


def _name_free_sizes(inputs: tuple[Any, ...], batch: int, dynamic: Sequence[tuple[int | None, int]]) -> tuple[Any, ...]:
    """Return the names of the dynamic sizes, by input and dimension."""

    def name_sizes(value: Any, which: int) -> Any:
        if not isinstance(value, Tensor):
            return None
        dims = {0: BATCH_DIM_NAME} if value.ndim and len(value) == batch else {}
        for input_index, dim in dynamic:
            if input_index in (None, which) and dim < value.ndim and dim not in dims:
                dims[dim] = f"size_{dim}"
        return dims

    return tuple(tree_map(lambda value, i=i: name_sizes(value, i), value) for i, value in enumerate(inputs))


def _make_dynamic_shapes(free: Any) -> Any:
    """Convert names to `torch.export` dimensions: any batch size; torch infers the range of the other sizes."""
    known = {BATCH_DIM_NAME: torch.export.Dim(BATCH_DIM_NAME, min=1)}
    return tree_map(lambda name: name if name is None else known.get(name, torch.export.Dim.DYNAMIC), free)


def _match_forward_signature(model: nn.Module, shapes: tuple[Any, ...]) -> Any:
    """Arrange shapes as `torch.export` expects them for the signature of `forward`.

    The exporter counts `*inputs` as one argument, and takes all shapes by name if some inputs are given by name.
    """
    positional, named = split_keyword_inputs(shapes)
    if named:
        return {**dict(zip(signature(model.forward).parameters, positional, strict=False)), **named}
    kinds = [parameter.kind for parameter in signature(model.forward).parameters.values()]
    if Parameter.VAR_POSITIONAL not in kinds:
        return shapes
    at = kinds.index(Parameter.VAR_POSITIONAL)
    return (*shapes[:at], tuple(shapes[at:]))


# Checking


def _verify_exported_file(
    model: nn.Module, open_runner: Callable[[bool], FileRunner], inputs: tuple[Any, ...], *, free: bool, path: Path
) -> tuple[float, tuple[int, ...], str]:
    """Compare file and module; if they differ, compare again without onnxruntime's graph optimisation."""
    try:
        return *_compare_exported_file(model, open_runner(False), inputs, free=free, path=path), ""
    except VerificationError as error:
        try:
            return *_compare_exported_file(
                model, open_runner(True), inputs, free=free, path=path
            ), NOTE_COMPARED_UNOPTIMIZED
        except VerificationError:
            raise error from None


def _compare_exported_file(
    model: nn.Module, run: FileRunner, inputs: tuple[Any, ...], *, free: bool, path: Path
) -> tuple[float, tuple[int, ...]]:
    """Return the largest difference between file and module, and the batch sizes that were compared."""
    worst, done = 0.0, []
    for batch, values in _iter_check_batches(model, inputs, free):
        try:
            outputs = run(values)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            what = f"the exported network does not run on a batch of {batch}: {describe_error(error)}"
            raise VerificationError(what, where=str(path), fix=f"Try another format: {list_suffixes()}.") from error
        want = flatten_outputs(call_model(model, values))
        worst = max(worst, _check_export_difference(outputs, want, path, partial(_try_measure_rounding, model, values)))
        done.append(batch)
    return worst, tuple(done)


def _iter_check_batches(model: nn.Module, inputs: tuple[Any, ...], free: bool) -> Iterator[tuple[int, tuple[Any, ...]]]:
    example_size = infer_batch_size(inputs)
    yield example_size, inputs
    for batch in choose_check_batch_sizes(model, inputs) if free else ():
        if batch != example_size:
            yield batch, resample_inputs(inputs, batch)


def _check_export_difference(
    got: Sequence[Tensor], want: Sequence[Tensor], path: Path, measure_rounding: Callable[[], Sequence[float]]
) -> float:
    """Return the largest difference of any entry; raise if one exceeds what rounding explains."""
    differences = compare_outputs(got, want)
    wrong = [difference for difference in differences if not difference.is_close()]
    if wrong and not any(difference.fault for difference in wrong):
        # Some networks amplify rounding: measure how much against float64, which is slow, only if it matters.
        slack = [ROUNDING_FACTOR * error for error in measure_rounding()] or [0.0] * len(want)
        wrong = [difference for difference in wrong if not difference.is_close(slack[difference.output])]
    for difference in wrong:
        what = f"differs from the module by {difference.absolute:.2g}"
        if difference.fault:
            what = f"does not return the module's outputs: output {difference.output}: {difference.fault}"
        raise VerificationError(f"the exported network {what}", where=str(path))
    return max((difference.absolute for difference in differences), default=0.0)


def _try_measure_rounding(model: nn.Module, values: tuple[Any, ...]) -> list[float]:
    """Return the rounding error of each output; [] if the network's code does not run in float64."""
    try:
        return measure_rounding_error(model, values)
    except Exception:  # noqa: BLE001 (whatever the user's code raises)
        return []
