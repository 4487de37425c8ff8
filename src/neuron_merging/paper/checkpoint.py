"""checkpoint: a trained network on its test images, loaded when it is first needed."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from neuron_merging import data, measuring, networks
from neuron_merging.channels.analysis import Analysis
from neuron_merging.cutting.trial import analyse
from neuron_merging.data import FolderImages, Images
from neuron_merging.networks.checkpoints import load_weights
from neuron_merging.paper.settings import FAMILIES, Network, Panel

BATCH = 250
CPU = torch.device("cpu")
Pairs = Iterator[tuple[Tensor, Tensor]]
Advance = Callable[[int], None]
"""Told how many more images have been through a network."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Weights of a network and the images to measure it on; everything else follows from them."""

    network: Network
    file: Path
    images: Images | FolderImages
    root: str | None = None
    """The data folder that was given, for methods that look at training images."""
    device: torch.device = CPU
    advance: Advance = field(repr=False, default=lambda count: None)

    @cached_property
    def model(self) -> nn.Module:
        spec = networks.find(self.network.architecture)
        model = spec.build(classes=self.classes)
        load_weights(model, str(self.file))
        return model.eval().to(self.device)

    @property
    def classes(self) -> int:
        """Those of the data set; ImageNet's are a thousand even if only some lie on the disk."""
        usual = networks.find(self.network.architecture)
        return usual.classes if self.network.data == usual.data else self.images.classes

    @cached_property
    def example(self) -> Tensor:
        return next(iter(self.images.batches(1, self.device)))[0]

    @cached_property
    def analysis(self) -> Analysis:
        """Made once, for all trials."""
        return analyse(self.model, self.example)

    @cached_property
    def predictions(self) -> tuple[Tensor, Tensor]:
        """What the original network returns, and the labels."""
        return measuring.predict(self.model, self.batches())

    def batches(self) -> Pairs:
        """The images, with the progress told."""
        for x, y in self.images.batches(BATCH, self.device):
            yield x, y
            self.advance(len(y))

    @cached_property
    def weights_digest(self) -> str:
        with self.file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    @cached_property
    def images_digest(self) -> str:
        return self.images.digest

    @cached_property
    def calibration_digest(self) -> str:
        return data.load(self.network.data, "train", self.root).digest

    def ratio(self, panel: Panel, share: float) -> dict[str, float]:
        """The share to remove for every pattern of layers that the panel cuts."""
        family = FAMILIES[self.network.family]
        if family.grain and not panel.cut:
            return {pattern: 1 - math.floor(base * (1 - share) + 1e-9) / base for pattern, base in family.grain}
        return dict.fromkeys(_layers(self.model, panel.cut or family.cut), share)


def _layers(model: nn.Module, cut: tuple[str | int, ...]) -> list[str]:
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    return list(dict.fromkeys(part if isinstance(part, str) else convolutions[part] for part in cut))


def open_images(network: Network, root: str | None, limit: int | None, download: bool) -> Images | FolderImages:
    """The test images of a network's data set, or the first `limit` of them."""
    images = data.load(network.data, "test", root, download=download)
    return images.head(limit) if limit is not None else images


def folders(root: str | None) -> list[Path]:
    """Where weights are looked for: the data folder, $NEURON_MERGING_DATA, and where torch keeps downloads."""
    given = [root, os.environ.get("NEURON_MERGING_DATA"), os.path.join(torch.hub.get_dir(), "checkpoints")]
    return [Path(folder).expanduser() for folder in given if folder]
