"""File formats that contain a complete network. A row of `FILE_FORMATS` reads, writes and runs one format.

A path without such a suffix is a folder of `checkpoint.save_folder`, or the name of a network.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging import atomic
from neuron_merging.errors import ModelError, describe_error
from neuron_merging.graph.example_inputs import call_model, flatten_outputs
from neuron_merging.graph.graph import Shape
from neuron_merging.graph.process_state import silence_logging
from neuron_merging.graph.user_code import find_user_line
from neuron_merging.onnx import import_onnx_package
from neuron_merging.onnx.model_file import open_ort_session, read_onnx_file
from neuron_merging.onnx.network import OnnxNetwork
from neuron_merging.onnx.open_model import find_onnx_example_inputs, make_onnx_inputs, open_onnx_file
from neuron_merging.onnx.write_model import WrittenFile, write_onnx_file

NetworkAndInputs = tuple[nn.Module, tuple[Any, ...] | None]
FileRunner = Callable[[Sequence[Any]], list[Tensor]]
"""Runs a file on inputs and returns its outputs."""


@dataclass(frozen=True)
class FileFormat:
    """One file format that contains a complete network."""

    suffix: str
    read: Callable[[str | Path, Any], NetworkAndInputs]
    """Returns the network and example inputs: the given ones, else those that the file stores, else None."""
    save: Callable[[torch.export.ExportedProgram, Path, Sequence[str] | None, Any], None]
    """Writes a program to a file; takes the names of the inputs and the dynamic sizes, if there are any."""
    open_runner: Callable[[Path, bool], FileRunner]
    """Opens a file for running; True as second argument turns the runtime's optimisations off, for comparisons."""
    advice: str
    """Tells users how to run such a file without this package."""
    make_inputs: Callable[[str, Sequence[Shape]], tuple[Tensor, ...]] | None = None
    """Makes inputs of given shapes with the dtypes that the file declares; None if the format declares none."""
    find_inputs: Callable[[str], tuple[Any, ...] | None] | None = None
    """Returns example inputs that the file stores or declares; the network itself need not be known to this package."""
    list_input_names: Callable[[str], Sequence[str]] | None = None
    """Returns the names of the inputs, in the file's order; None if the format takes them by position."""
    network: type[nn.Module] | None = None
    """The class of networks that keep a reference to their file; `save_edited` takes these."""
    save_edited: Callable[[Any, Path], WrittenFile] | None = None
    """Writes such a network as an edited copy of its file."""
    risk: str = ""
    """Why opening an untrusted file is dangerous; empty if it is not."""
    takes_weights: bool = False
    """Whether other weights can be loaded into the network of a file."""
    trainable: bool = True
    """Whether the network of a file can be fine-tuned."""


def read_exported_program(path: str | Path, inputs: Any = None) -> NetworkAndInputs:
    """Read a `.pt2` file; return its module and example inputs, the stored ones if `inputs` is None."""
    program = _load_exported_program(str(path))
    known = program.example_inputs
    if inputs is None and known is not None and not known[1]:
        inputs = tuple(known[0])
    return program.module(), inputs


def _load_exported_program(path: str) -> torch.export.ExportedProgram:
    if not os.path.isfile(path):
        raise ModelError("there is no such file", where=path, fix="Write it with torch.export.save.")
    try:
        with warnings.catch_warnings(), silence_logging():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as error:
        what = f"not an exported program: {describe_error(error)}"
        raise ModelError(what, where=path, fix="Write it with torch.export.save.") from error


def _save_exported_program(
    program: torch.export.ExportedProgram, part: Path, names: Sequence[str] | None, free: Any
) -> None:
    # torch's writer aborts the process when the disk is full, so serialise in memory first.
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    atomic.write_file(part, lambda file: file.write_bytes(buffer.getbuffer()))


def _open_program_runner(part: Path, plain: bool) -> FileRunner:
    module = torch.export.load(part).module()
    return lambda values: flatten_outputs(call_model(module, values))


def _save_onnx(program: torch.export.ExportedProgram, part: Path, names: Sequence[str] | None, free: Any) -> None:
    import_onnx_package("onnxscript")
    try:
        with redirect_stdout(io.StringIO()):
            found = torch.onnx.export(program, dynamo=True, verbose=False, input_names=names, dynamic_shapes=free)
            assert found is not None
            found.save(str(part))
    except OSError as error:
        raise OSError(error.errno, error.strerror or describe_error(error), str(part)) from error
    except Exception as error:
        what = f"the network could not be exported: {describe_error(_find_root_cause(error))}"
        raise ModelError(what, where=find_user_line(error), fix="Try the other format: .pt2.") from error


def _find_root_cause(error: BaseException) -> BaseException:
    """Return the first error of the chain; the exporter wraps it in advice on how to report bugs."""
    return error if error.__cause__ is None else _find_root_cause(error.__cause__)


def _open_onnx_runner(part: Path, plain: bool) -> FileRunner:
    opened = open_ort_session(str(part), plain=plain)
    given = [value.name for value in opened.get_inputs()]

    def run(values: Sequence[Any]) -> list[Tensor]:
        arrays = (value.detach().cpu().numpy() for value in flatten_outputs(values))
        return [torch.from_numpy(out) for out in opened.run(None, dict(zip(given, arrays, strict=True)))]

    return run


FILE_FORMATS = {
    row.suffix: row
    for row in (
        FileFormat(
            ".onnx",
            read=open_onnx_file,
            save=_save_onnx,
            open_runner=_open_onnx_runner,
            advice="Such a file does not need neuron-merging: onnxruntime.InferenceSession(file). It can be "
            "compressed, and compared with the original (neuron-merging compare).",
            make_inputs=lambda path, shapes: make_onnx_inputs(read_onnx_file(path, only_to_run=True), shapes),
            find_inputs=lambda path: find_onnx_example_inputs(read_onnx_file(path, only_to_run=True)),
            list_input_names=lambda path: [value.name for value in read_onnx_file(path, only_to_run=True).inputs],
            network=OnnxNetwork,
            save_edited=write_onnx_file,
        ),
        FileFormat(
            ".pt2",
            read=read_exported_program,
            save=_save_exported_program,
            open_runner=_open_program_runner,
            find_inputs=lambda path: read_exported_program(path)[1],
            advice="Such a file does not need neuron-merging: torch.export.load(file).module(). It can be compared "
            "with the original (neuron-merging compare).",
            risk="which can hold pickled objects",
            takes_weights=True,
            trainable=False,
        ),
    )
}
"""All formats, by suffix."""


def find_format(path: object) -> FileFormat | None:
    """Return the format of a path by its suffix; None for a folder or an object that is not a path.

    >>> find_format("small.ONNX").suffix, find_format("small/"), find_format(nn.Identity())
    ('.onnx', None, None)
    """
    return FILE_FORMATS.get(Path(path).suffix.lower()) if isinstance(path, (str, Path)) else None


def list_suffixes(stem: str = "") -> str:
    """List the suffixes of all formats, for messages.

    >>> list_suffixes("small")
    'small.onnx or small.pt2'
    """
    return " or ".join(stem + suffix for suffix in FILE_FORMATS)
