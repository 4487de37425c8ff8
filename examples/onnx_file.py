"""Compress an ONNX file without its training code, and run the result with onnxruntime.

    pip install 'neuron-merging[onnx]'
    pip install --no-deps rapidocr-onnxruntime

The second package brings trained files. This one tells whether a line of text stands on its head.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime

import neuron_merging as nm

SHAPE = (1, 3, 48, 192)


def find_file() -> Path:
    spec = find_spec("rapidocr_onnxruntime")  # finds the package without importing it
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "models" / "ch_ppocr_mobile_v2.0_cls_infer.onnx"


def run(file: str | Path, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(file))
    (found,) = session.run(None, {session.get_inputs()[0].name: images})
    return np.asarray(found)


def main() -> tuple[int, int]:
    import torch

    images = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    analysis = nm.analyse(find_file(), images)
    small = nm.compress(analysis, budget={"params": 0.8}, effort="fast")
    print(small.summary)
    small.save("small.onnx", overwrite=True)

    print("outputs of the file:", run("small.onnx", images.numpy()).round(3))
    print("of the original:", run(find_file(), images.numpy()).round(3))
    return small.summary.parameters


if __name__ == "__main__":
    main()
