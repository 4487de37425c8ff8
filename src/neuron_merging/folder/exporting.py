"""export: a network as ONNX or as torch's exported program, with free batch sizes, checked against the module."""

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
from neuron_merging.cutting.verify import TOLERANCE
from neuron_merging.errors import MergingError, ModelError, VerificationError, told
from neuron_merging.files.comparing import ROUNDED, rounding
from neuron_merging.files.needed import need
from neuron_merging.files.network import FileNetwork
from neuron_merging.files.reading import session
from neuron_merging.files.writing import OPTIMISED, write
from neuron_merging.graph.network import GraphNetwork
from neuron_merging.graph.quiet import quiet
from neuron_merging.graph.rebatching import batched_like
from neuron_merging.graph.trees import called, flatten_outputs, split
from neuron_merging.graph.usercode import place_of

Run = Callable[[Sequence[Any]], list[Tensor]]
BATCH = "batch"
"""The name of the free size that comes first."""
BATCHES = (1, 3, 16)
"""Batch sizes at which a file whose batch is free is compared."""
SUFFIXES = (".onnx", ".pt2")


def is_export(path: object) -> bool:
    """Whether a result goes into a file for other programs, not into a folder."""
    return isinstance(path, (str, Path)) and Path(path).suffix.lower() in SUFFIXES


@dataclass(frozen=True)
class Export:
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
def export(model: nn.Module, inputs: tuple[Any, ...], target: str | Path, dynamic: Sequence[str] = ()) -> Export:
    """Write `target` (.onnx or .pt2), run it, and compare it with the module at several batch sizes.

    The batch size is free wherever the network's code allows it; `dynamic` names further dimensions that shall be, as
    "2", or "1:2" for dimension 2 of the input 1 alone. The file appears only once it has passed.
    """
    path = Path(target)
    if not is_export(path):
        raise MergingError(f"cannot write {path.suffix or 'such'} files", where=str(path), fix="Name it .onnx or .pt2")
    atomic.check_file(path)
    if isinstance(model, FileNetwork) and path.suffix.lower() == ".onnx":
        written = write(model, path)
        return Export(str(target), written.difference, written.batches, written.note)
    with quiet(), atomic.beside(path) as part:
        asked = [_dimension(text) for text in dynamic]
        _check_dimensions(inputs, asked)
        program, free, note = _program(model, inputs, asked)
        names = model.inputs if isinstance(model, GraphNetwork) else None
        _written(program, part, names, free)
        difference, batches, optimised = _checked(model, part, inputs, free=not note, path=path)
    return Export(str(target), difference, batches, "; ".join(filter(None, (note, optimised))))


def in_onnxruntime(model: nn.Module, inputs: tuple[Any, ...], threads: int = 0) -> Callable[..., Any]:
    """A network as onnxruntime runs it, by way of a file that is gone again."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        export(model, inputs, file)
        return file_in_onnxruntime(str(file), threads)


def file_in_onnxruntime(path: str, threads: int = 0) -> Callable[..., Any]:
    """A file as onnxruntime runs it."""
    opened = session(path, threads)
    names = [value.name for value in opened.get_inputs()]

    def run(*values: Any) -> Any:
        arrays = (value.numpy() for value in flatten_outputs(values))
        return opened.run(None, dict(zip(names, arrays, strict=True)))

    return run


# Free sizes


def _dimension(text: str) -> tuple[int | None, int]:
    """An input, or all of them, and a dimension.

    >>> _dimension("2"), _dimension("1:2")
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


def _program(
    model: nn.Module, inputs: tuple[Any, ...], dynamic: Sequence[tuple[int | None, int]]
) -> tuple[torch.export.ExportedProgram, Any, str]:
    """The program with free sizes, and which; with those of the example where the code fixes its batch, and why."""
    longer = resized(inputs, 2)
    try:
        called(model, longer)
        free = _as_called(model, _free(longer, 2, dynamic))
        return _exported(model, longer, _dimensions(free)), free, ""
    except Exception as error:  # whatever the user's code or the exporter raises
        if dynamic:
            what = f"sizes that were to be free cannot be: {told(error)}"
            raise ModelError(what, where=place_of(error) or "--dynamic", fix="Leave --dynamic out.") from error
        note = f"the batch size is fixed: {told(error)}"
    try:
        return _exported(model, inputs, None), None, note
    except Exception as error:
        what = f"the network could not be exported: {told(error)}"
        raise ModelError(what, where=place_of(error), fix="Try the other format: .onnx or .pt2.") from error


def _exported(model: nn.Module, inputs: tuple[Any, ...], shapes: Any) -> torch.export.ExportedProgram:
    positional, named = split(inputs)
    with redirect_stdout(io.StringIO()):
        return torch.export.export(model, positional, dict(named) or None, dynamic_shapes=shapes, strict=False)


def resized(inputs: tuple[Any, ...], batch: int) -> tuple[Any, ...]:
    """Fresh inputs like these, so many in a batch."""
    old = _batch(inputs)
    found: tuple[Any, ...] = tree_map(lambda value: batched_like([value], old, batch)[0], inputs)
    return found


def _batch(inputs: tuple[Any, ...]) -> int:
    return next((len(value) for value in flatten_outputs(inputs) if value.ndim), 1)


def _free(inputs: tuple[Any, ...], batch: int, dynamic: Sequence[tuple[int | None, int]]) -> tuple[Any, ...]:
    """By input and dimension, the names of the sizes that are free."""

    def of(value: Any, which: int) -> Any:
        if not isinstance(value, Tensor):
            return None
        dims = {0: BATCH} if value.ndim and len(value) == batch else {}
        for asked, dim in dynamic:
            if asked in (None, which) and dim < value.ndim and dim not in dims:
                dims[dim] = f"size_{dim}"
        return dims

    return tuple(tree_map(lambda value, i=i: of(value, i), value) for i, value in enumerate(inputs))


def _dimensions(free: Any) -> Any:
    """Any batch; of the other sizes those that the network's code copes with, the least of which torch finds."""
    known = {BATCH: torch.export.Dim(BATCH, min=1)}
    return tree_map(lambda name: name if name is None else known.get(name, torch.export.Dim.DYNAMIC), free)


def _as_called(model: nn.Module, shapes: tuple[Any, ...]) -> Any:
    """What `*inputs` takes is one argument to the exporter; where some are given by name, all are."""
    positional, named = split(shapes)
    if named:
        return {**dict(zip(signature(model.forward).parameters, positional, strict=False)), **named}
    kinds = [parameter.kind for parameter in signature(model.forward).parameters.values()]
    if Parameter.VAR_POSITIONAL not in kinds:
        return shapes
    at = kinds.index(Parameter.VAR_POSITIONAL)
    return (*shapes[:at], tuple(shapes[at:]))


# Writing


def _written(program: torch.export.ExportedProgram, part: Path, names: Sequence[str] | None, free: Any) -> None:
    """Write the program, piece by piece."""
    if part.suffix.lower() == ".pt2":
        held = io.BytesIO()  # torch's own writer ends the process where a disk is full
        torch.export.save(program, held)
        atomic.write_file(part, lambda file: file.write_bytes(held.getbuffer()))
        return
    need("onnxscript")
    try:
        with redirect_stdout(io.StringIO()):
            found = torch.onnx.export(program, dynamo=True, verbose=False, input_names=names, dynamic_shapes=free)
            assert found is not None
            found.save(str(part))
    except OSError as error:
        raise OSError(error.errno, error.strerror or told(error), str(part)) from error
    except Exception as error:
        what = f"the network could not be exported: {told(_first(error))}"
        raise ModelError(what, where=place_of(error), fix="Try the other format: .pt2.") from error


def _first(error: BaseException) -> BaseException:
    """The error that led to this one: the exporter wraps it in advice on how to report it."""
    return error if error.__cause__ is None else _first(error.__cause__)


def _opened(part: Path, *, plain: bool = False) -> Run:
    """What was written, as it is run; `plain` without onnxruntime's optimisation."""
    if part.suffix.lower() == ".pt2":
        module = torch.export.load(part).module()
        return lambda values: flatten_outputs(called(module, values))
    opened = session(str(part), plain=plain)
    given = [value.name for value in opened.get_inputs()]

    def run(values: Sequence[Any]) -> list[Tensor]:
        arrays = (value.detach().cpu().numpy() for value in flatten_outputs(values))
        return [torch.from_numpy(out) for out in opened.run(None, dict(zip(given, arrays, strict=True)))]

    return run


# Checking


def _checked(
    model: nn.Module, part: Path, inputs: tuple[Any, ...], *, free: bool, path: Path
) -> tuple[float, tuple[int, ...], str]:
    """The comparison, without onnxruntime's optimisation where only that makes a difference."""
    try:
        return *_compared(model, _opened(part), inputs, free=free, path=path), ""
    except VerificationError as error:
        try:
            return *_compared(model, _opened(part, plain=True), inputs, free=free, path=path), OPTIMISED
        except VerificationError:
            raise error from None


def _compared(
    model: nn.Module, run: Run, inputs: tuple[Any, ...], *, free: bool, path: Path
) -> tuple[float, tuple[int, ...]]:
    """The largest difference between file and module, and the batch sizes at which it was looked for."""
    worst, done = 0.0, []
    for batch, values in _batches(inputs, free):
        try:
            found = run(values)
        except Exception as error:  # onnxruntime has a class for every fault, and no common one
            what = f"the exported network does not run on a batch of {batch}: {told(error)}"
            raise VerificationError(what, where=str(path), fix="Try the other format: .onnx or .pt2.") from error
        want = flatten_outputs(called(model, values))
        worst = max(worst, _largest_difference(found, want, path, partial(_rounded, model, values)))
        done.append(batch)
    return worst, tuple(done)


def _batches(inputs: tuple[Any, ...], free: bool) -> Iterator[tuple[int, tuple[Any, ...]]]:
    own = _batch(inputs)
    yield own, inputs
    for batch in BATCHES if free else ():
        if batch != own:
            yield batch, resized(inputs, batch)


def _largest_difference(
    got: Sequence[Tensor], want: Sequence[Tensor], path: Path, rounded: Callable[[], Sequence[float]]
) -> float:
    """The largest of any output, none of which may be more than the order of sums, or `rounded`, makes."""
    if [tuple(t.shape) for t in got] != [tuple(t.shape) for t in want]:
        raise VerificationError("the exported network's outputs have other shapes than the module's", where=str(path))
    apart = [
        float((a.double() - b.double()).abs().amax()) if a.numel() else 0.0 for a, b in zip(got, want, strict=True)
    ]
    if not all(far <= _enough(value) for far, value in zip(apart, want, strict=True)):
        _check_rounding(apart, [max(_enough(v), ROUNDED * r) for v, r in zip(want, rounded(), strict=False)], path)
    return max(apart, default=0.0)


def _enough(value: Tensor) -> float:
    largest = float(value.double().abs().amax()) if value.numel() else 0.0
    return TOLERANCE.get(value.dtype, 0.0) * max(largest, 1e-6)


def _check_rounding(apart: Sequence[float], limits: Sequence[float], path: Path) -> None:
    """Few networks make much of their rounding: what it is, is found out where it matters."""
    for i, far in enumerate(apart):
        if not far <= (limits[i] if i < len(limits) else 0.0):
            raise VerificationError(f"the exported network differs from the module by {far:.2g}", where=str(path))


def _rounded(model: nn.Module, values: tuple[Any, ...]) -> list[float]:
    """How far rounding takes the module's own outputs; nothing, where its code runs in no other precision."""
    try:
        return rounding(model, values)
    except Exception:  # noqa: BLE001 (whatever the user's code raises)
        return []
