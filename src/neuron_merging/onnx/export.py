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
from neuron_merging.graph.compare import ROUNDING_FACTOR, compare_outputs
from neuron_merging.graph.example_inputs import infer_batch_size, resample_inputs
from neuron_merging.graph.graph_module import GraphNetwork
from neuron_merging.graph.process_state import silence_logging
from neuron_merging.graph.pytree import call_model, flatten_outputs, split_keyword_inputs
from neuron_merging.graph.user_code import find_user_line
from neuron_merging.onnx.formats import FileRunner, find_format, list_suffixes
from neuron_merging.onnx.model_file import open_ort_session
from neuron_merging.onnx.open_model import measure_rounding_error
from neuron_merging.onnx.write_model import NOTE_COMPARED_UNOPTIMIZED

BATCH_DIM_NAME = "batch"
"""The name of the free size that comes first."""
EXPORT_CHECK_BATCH_SIZES = (1, 3, 16)
"""Batch sizes at which a file whose batch is free is compared."""


@dataclass(frozen=True)
class ExportResult:
    """A file that was written, and how it compares with the module."""

    file: str
    difference: float
    batches: tuple[int, ...]
    """The batch sizes at which it was compared."""
    note: str = ""
    """Why its batch is not free, if it is not, or what else is to be known."""

    def facts(self) -> dict[str, Any]:
        """The same for people."""
        said = {"file": self.file, "largest difference": self.difference}
        sizes = ", ".join(str(batch) for batch in self.batches)
        return {**said, "compared at batch sizes": sizes, **({"note": self.note} if self.note else {})}


@torch.no_grad()
def export_model(
    model: nn.Module, inputs: tuple[Any, ...], target: str | Path, dynamic: Sequence[str] = ()
) -> ExportResult:
    """Write `target` (.onnx or .pt2), run it, and compare it with the module at several batch sizes.

    The batch size is free wherever the network's code allows it; `dynamic` names further dimensions that shall be, as
    "2", or "1:2" for dimension 2 of the input 1 alone. The file appears only once it has passed.
    """
    path, form = Path(target), find_format(target)
    if form is None:
        what = f"cannot write {path.suffix or 'such'} files"
        raise MergingError(what, where=str(path), fix=f"Name it {list_suffixes()}")
    atomic.check_output_file(path)
    if form.save_edited is not None and form.network is not None and isinstance(model, form.network):
        written = form.save_edited(model, path)
        return ExportResult(str(target), written.difference, written.batches, written.note)
    with silence_logging(), atomic.stage_file(path) as part:
        asked = [_parse_dimension(text) for text in dynamic]
        _check_dimensions(inputs, asked)
        program, free, note = _export_with_free_batch(model, inputs, asked)
        names = model.input_names if isinstance(model, GraphNetwork) else None
        form.save(program, part, names, free)
        open_runner = partial(form.open_runner, part)
        difference, batches, optimised = _verify_exported_file(model, open_runner, inputs, free=not note, path=path)
    return ExportResult(str(target), difference, batches, "; ".join(filter(None, (note, optimised))))


def make_ort_callable(model: nn.Module, inputs: tuple[Any, ...], threads: int = 0) -> Callable[..., Any]:
    """A network as onnxruntime runs it, by way of a file that is gone again."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        export_model(model, inputs, file)
        return open_ort_callable(str(file), threads)


def open_ort_callable(path: str, threads: int = 0) -> Callable[..., Any]:
    """A file as onnxruntime runs it."""
    opened = open_ort_session(path, threads)
    names = [value.name for value in opened.get_inputs()]

    def run(*values: Any) -> Any:
        arrays = (value.detach().cpu().numpy() for value in flatten_outputs(values))
        return opened.run(None, dict(zip(names, arrays, strict=True)))

    return run


# Free sizes


def _parse_dimension(text: str) -> tuple[int | None, int]:
    """An input, or all of them, and a dimension.

    >>> _parse_dimension("2"), _parse_dimension("1:2")
    ((None, 2), (1, 2))
    """
    which, _, dim = text.rpartition(":")
    try:
        return int(which) if which else None, int(dim)
    except ValueError as error:
        raise MergingError(f"{text!r} is no dimension", where="--dynamic", fix="Write 2, or 1:2.") from error


def _check_dimensions(inputs: tuple[Any, ...], dynamic: Sequence[tuple[int | None, int]]) -> None:
    """A dimension that no input has would go without a word."""
    for which, dim in dynamic:
        asked = inputs if which is None else inputs[which : which + 1] if which >= 0 else ()
        if not any(0 <= dim < value.ndim for value in flatten_outputs(asked)):
            what = f"no input has a dimension {dim}" if which is None else f"input {which} has no dimension {dim}"
            raise MergingError(what, where="--dynamic", fix="Count from 0, which is the batch.")


def _export_with_free_batch(
    model: nn.Module, inputs: tuple[Any, ...], dynamic: Sequence[tuple[int | None, int]]
) -> tuple[torch.export.ExportedProgram, Any, str]:
    """The program with free sizes, and which; with those of the example where the code fixes its batch, and why."""
    longer = resample_inputs(inputs, 2)
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
        return torch.export.export(model, positional, dict(named) or None, dynamic_shapes=shapes, strict=False)


def _name_free_sizes(inputs: tuple[Any, ...], batch: int, dynamic: Sequence[tuple[int | None, int]]) -> tuple[Any, ...]:
    """By input and dimension, the names of the sizes that are free."""

    def of(value: Any, which: int) -> Any:
        if not isinstance(value, Tensor):
            return None
        dims = {0: BATCH_DIM_NAME} if value.ndim and len(value) == batch else {}
        for asked, dim in dynamic:
            if asked in (None, which) and dim < value.ndim and dim not in dims:
                dims[dim] = f"size_{dim}"
        return dims

    return tuple(tree_map(lambda value, i=i: of(value, i), value) for i, value in enumerate(inputs))


def _make_dynamic_shapes(free: Any) -> Any:
    """Any batch; of the other sizes those that the network's code copes with, the least of which torch finds."""
    known = {BATCH_DIM_NAME: torch.export.Dim(BATCH_DIM_NAME, min=1)}
    return tree_map(lambda name: name if name is None else known.get(name, torch.export.Dim.DYNAMIC), free)


def _match_forward_signature(model: nn.Module, shapes: tuple[Any, ...]) -> Any:
    """What `*inputs` takes is one argument to the exporter; where some are given by name, all are."""
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
    """The comparison, without onnxruntime's optimisation where only that makes a difference."""
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
    """The largest difference between file and module, and the batch sizes at which it was looked for."""
    worst, done = 0.0, []
    for batch, values in _iter_check_batches(inputs, free):
        try:
            found = run(values)
        except Exception as error:  # onnxruntime has a class for every fault, and no common one
            what = f"the exported network does not run on a batch of {batch}: {describe_error(error)}"
            raise VerificationError(what, where=str(path), fix=f"Try another format: {list_suffixes()}.") from error
        want = flatten_outputs(call_model(model, values))
        worst = max(worst, _check_export_difference(found, want, path, partial(_try_measure_rounding, model, values)))
        done.append(batch)
    return worst, tuple(done)


def _iter_check_batches(inputs: tuple[Any, ...], free: bool) -> Iterator[tuple[int, tuple[Any, ...]]]:
    own = infer_batch_size(inputs)
    yield own, inputs
    for batch in EXPORT_CHECK_BATCH_SIZES if free else ():
        if batch != own:
            yield batch, resample_inputs(inputs, batch)


def _check_export_difference(
    got: Sequence[Tensor], want: Sequence[Tensor], path: Path, measure_rounding: Callable[[], Sequence[float]]
) -> float:
    """The largest difference of any entry, none of which may be more than rounding makes."""
    found = compare_outputs(got, want)
    wrong = [own for own in found if not own.is_close()]
    if wrong and not any(own.fault for own in wrong):  # few networks make much of their rounding
        slack = [ROUNDING_FACTOR * error for error in measure_rounding()] or [0.0] * len(want)
        wrong = [own for own in wrong if not own.is_close(slack[own.output])]
    for own in wrong:
        what = f"differs from the module by {own.absolute:.2g}"
        if own.fault:
            what = f"does not answer like the module: output {own.output}: {own.fault}"
        raise VerificationError(f"the exported network {what}", where=str(path))
    return max((own.absolute for own in found), default=0.0)


def _try_measure_rounding(model: nn.Module, values: tuple[Any, ...]) -> list[float]:
    """How far rounding takes the module's own outputs; nothing, where its code runs in no other precision."""
    try:
        return measure_rounding_error(model, values)
    except Exception:  # noqa: BLE001 (whatever the user's code raises)
        return []
