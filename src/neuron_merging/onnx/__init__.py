"""Read ONNX files, run them with torch, and write them again.

The packages of the extra `onnx` are imported at their first use.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from neuron_merging.errors import MergingError
from neuron_merging.graph.user_code import import_module_or_raise

Array = NDArray[Any]
"""A constant of a file, or a value that onnxruntime computes, as a numpy array."""


class _LazyModule:
    """Imports a module at the first access to one of its attributes, so that the library works without it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_onnx_package(self._name), attribute)


def import_onnx_package(name: str) -> Any:
    """Import a package of the extra `onnx`; the error names the pip command that installs it."""
    return import_module_or_raise(name, "pip install 'neuron-merging[onnx]'", "import", MergingError)


onnx: Any = _LazyModule("onnx")
onnx_inliner: Any = _LazyModule("onnx.inliner")
onnx_version_converter: Any = _LazyModule("onnx.version_converter")
onnx_reference: Any = _LazyModule("onnx.reference")
onnxruntime: Any = _LazyModule("onnxruntime")
protobuf_message: Any = _LazyModule("google.protobuf.message")
ort_quantization: Any = _LazyModule("onnxruntime.quantization")
