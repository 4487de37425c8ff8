"""The packages of the extra `onnx`, imported when something of theirs is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from neuron_merging.errors import MergingError


class _Needed:
    """A module that is imported at its first use: the library works without it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(need(self._name), attribute)


def need(name: str) -> Any:
    """A module of the extra, or an error that says how to get it."""
    try:
        return import_module(name)
    except ImportError as error:
        what = f"ONNX needs {name.partition('.')[0]}"
        raise MergingError(what, where="import", fix="pip install 'neuron-merging[onnx]'") from error


onnx: Any = _Needed("onnx")
inliner: Any = _Needed("onnx.inliner")
reference: Any = _Needed("onnx.reference")
runtime: Any = _Needed("onnxruntime")
message: Any = _Needed("google.protobuf.message")
