"""export: a network as ONNX or as torch's exported program, checked against the module."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.capture import place_of
from neuron_merging.errors import MergingError
from neuron_merging.models import ModelError
from neuron_merging.verify import TOLERANCE, VerificationError, flatten_outputs

Run = Callable[[Sequence[Any]], list[Tensor]]
Writer = Callable[[nn.Module, tuple[Any, ...], Path], Run]


@torch.no_grad()
def export(model: nn.Module, inputs: tuple[Any, ...], target: str | Path) -> float:
    """Write `target` (.onnx or .pt2), run it, and return the largest difference to the module.

    The file appears only once it has passed; the input shapes are fixed to those of `inputs`.
    """
    path = Path(target)
    writers = {".onnx": _write_onnx, ".pt2": _write_program}
    if path.suffix not in writers:
        raise MergingError(f"cannot write {path.suffix or 'such'} files", where=str(path), fix="Name it .onnx or .pt2")
    want = flatten_outputs(model(*inputs))
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = _written(writers[path.suffix], model, inputs, part)(inputs)
        difference = _largest_difference(got, want, path)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return difference


def _written(write: Writer, model: nn.Module, inputs: tuple[Any, ...], path: Path) -> Run:
    try:
        with redirect_stdout(io.StringIO()):
            return write(model, inputs, path)
    except (MergingError, OSError):
        raise
    except Exception as error:
        what = f"the network could not be exported: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ModelError(what, where=place_of(error), fix="Try the other format: .onnx or .pt2.") from error


def _write_onnx(model: nn.Module, inputs: tuple[Any, ...], path: Path) -> Run:
    runtime = _need("onnxruntime")
    _need("onnxscript")
    torch.onnx.export(model, inputs, path, dynamo=True, external_data=False, verbose=False)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(values: Sequence[Any]) -> list[Tensor]:
        arrays = (value.detach().cpu().numpy() for value in flatten_outputs(values))
        return [torch.from_numpy(out) for out in session.run(None, dict(zip(names, arrays, strict=True)))]

    return run


def _write_program(model: nn.Module, inputs: tuple[Any, ...], path: Path) -> Run:
    torch.export.save(torch.export.export(model, inputs, strict=False), path)
    module = torch.export.load(path).module()
    return lambda values: flatten_outputs(module(*values))


def _need(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MergingError(
            f"writing ONNX needs {name}", where="export", fix="pip install 'neuron-merging[onnx]'"
        ) from error


def _largest_difference(got: Sequence[Tensor], want: Sequence[Tensor], path: Path) -> float:
    if [tuple(t.shape) for t in got] != [tuple(t.shape) for t in want]:
        raise VerificationError("the exported network's outputs have other shapes than the module's", where=str(path))
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        difference = float((a.double() - b.double()).abs().amax()) if a.numel() else 0.0
        if not difference <= TOLERANCE.get(b.dtype, 0.0) * max(float(b.double().abs().amax()), 1e-6):
            raise VerificationError(
                f"the exported network differs from the module by {difference:.2g}", where=str(path)
            )
        worst = max(worst, difference)
    return worst
