"""export: a network as ONNX or as torch's exported program, checked against the module."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging import atomic
from neuron_merging.cutting.verify import TOLERANCE
from neuron_merging.errors import MergingError, ModelError, VerificationError, told
from neuron_merging.graph.quiet import quiet
from neuron_merging.graph.trees import flatten_outputs
from neuron_merging.graph.usercode import place_of

Run = Callable[[Sequence[Any]], list[Tensor]]
Writer = Callable[[nn.Module, tuple[Any, ...]], tuple[bytes, Run]]


@torch.no_grad()
def export(model: nn.Module, inputs: tuple[Any, ...], target: str | Path) -> float:
    """Write `target` (.onnx or .pt2), run it, and return the largest difference to the module.

    The file appears only once it has passed; the input shapes are fixed to those of `inputs`.
    """
    path = Path(target)
    writers: dict[str, Writer] = {".onnx": _as_onnx, ".pt2": _as_program}
    if path.suffix not in writers:
        raise MergingError(f"cannot write {path.suffix or 'such'} files", where=str(path), fix="Name it .onnx or .pt2")
    atomic.check_file(path)
    want = flatten_outputs(model(*inputs))
    with quiet():
        data, run = _exported(writers[path.suffix], model, inputs)
        difference = _largest_difference(run(inputs), want, path)
    atomic.replace_file(path, data)
    return difference


def _exported(write: Writer, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[bytes, Run]:
    try:
        with redirect_stdout(io.StringIO()):
            return write(model, inputs)
    except MergingError:
        raise
    except Exception as error:
        what = f"the network could not be exported: {told(error)}"
        raise ModelError(what, where=place_of(error), fix="Try the other format: .onnx or .pt2.") from error


def _as_onnx(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[bytes, Run]:
    runtime = _need("onnxruntime")
    _need("onnxscript")
    program = torch.onnx.export(model, inputs, dynamo=True, verbose=False)
    assert program is not None
    data = program.model_proto.SerializeToString()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(values: Sequence[Any]) -> list[Tensor]:
        arrays = (value.detach().cpu().numpy() for value in flatten_outputs(values))
        return [torch.from_numpy(out) for out in session.run(None, dict(zip(names, arrays, strict=True)))]

    return data, run


def _as_program(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[bytes, Run]:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, inputs, strict=False), buffer)
    data = buffer.getvalue()
    module = torch.export.load(io.BytesIO(data)).module()
    return data, lambda values: flatten_outputs(module(*values))


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
