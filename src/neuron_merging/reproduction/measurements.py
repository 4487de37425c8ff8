"""Measure one trial (criterion, ratio, method) on one trained checkpoint.

The metrics are accuracy, WARE, size, class activation maps and filter similarity. The paper shows the last block's
output as class activation maps, but not how it combines the channels. Here each position shows its contribution to the
score of the image's class. For a network that ends in pooling and a linear layer, that is the sum of the channels
weighted by the classifier, the definition of class activation mapping.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging import evaluation, models
from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.config import CompressConfig
from neuron_merging.data import FolderImages, Images
from neuron_merging.graph.digests import compute_file_sha256
from neuron_merging.models.state_dicts import load_weights
from neuron_merging.pipeline import compress_analysis
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.reproduction import datasets, layer_metrics
from neuron_merging.reproduction.experiments import NETWORK_FAMILIES, MergeMethod, PaperNetwork, PaperPanel, PaperTarget
from neuron_merging.reproduction.paper_values import ORIGINAL_METHOD
from neuron_merging.selection.criteria import matches_pattern
from neuron_merging.sweeps import run_cells
from neuron_merging.sweeps.run_cells import CellResult


class PaperCell(run_cells.Cell, frozen=True, kw_only=True):
    """The cache key of a measurement: its kind, the network, the images, the cut and the merger."""

    kind: str
    device: str
    network: str
    weights: str
    images: str
    criterion: str = ""
    ratio: dict[str, float] = {}
    merger: str = ""
    material: str = ""
    """The digest of the calibration images, or of the code of a user's merger."""


TEST_BATCH_SIZE = 250
CPU = torch.device("cpu")
LabelledBatchIterator = Iterator[tuple[Tensor, Tensor]]
AdvanceProgress = Callable[[int], None]
"""Called with the number of images that were processed since the last call."""


@dataclass(frozen=True, eq=False)
class PaperCheckpoint:
    """The weights of a network and the images to measure it on."""

    network: PaperNetwork
    file: Path
    images: Images | FolderImages
    root: str | None = None
    """The given data folder, for methods that need training images."""
    device: torch.device = CPU
    advance: AdvanceProgress = field(repr=False, default=lambda count: None)

    @cached_property
    def model(self) -> nn.Module:
        spec = models.find_network(self.network.architecture)
        model = spec.build(classes=self.classes)
        load_weights(model, str(self.file))
        return model.eval().to(self.device)

    @property
    def classes(self) -> int:
        """The number of classes; 1000 for ImageNet even if only some class folders are on the disk."""
        usual = models.find_network(self.network.architecture)
        return usual.classes if self.network.data == usual.data else self.images.classes

    @cached_property
    def example(self) -> Tensor:
        return next(iter(self.images.batches(1, self.device)))[0]

    @cached_property
    def analysis(self) -> Analysis:
        """The analysis of the network, shared by all trials."""
        return analyse(self.model, self.example)

    @cached_property
    def predictions(self) -> tuple[Tensor, Tensor]:
        """The outputs of the original network, and the labels."""
        return evaluation.predict(self.model, self.batches())

    def batches(self) -> LabelledBatchIterator:
        """Yield batches of images and report the progress."""
        for x, y in self.images.batches(TEST_BATCH_SIZE, self.device):
            yield x, y
            self.advance(len(y))

    @cached_property
    def weights_digest(self) -> str:
        return compute_file_sha256(self.file)

    @cached_property
    def images_digest(self) -> str:
        return self.images.digest

    @cached_property
    def calibration_digest(self) -> str:
        return datasets.load_dataset(self.network.data, "train", self.root).digest

    def ratio(self, panel: PaperPanel, share: float) -> dict[str, float]:
        """Return the share of channels to remove for every pattern of layers that the panel prunes."""
        family = NETWORK_FAMILIES[self.network.family]
        # The authors' program rounds the kept channels of the narrow network and then multiplies by the width.
        if family.grain and not panel.cut:
            return {pattern: 1 - math.floor(base * (1 - share) + 1e-9) / base for pattern, base in family.grain}
        return dict.fromkeys(_select_layers(self.model, panel.cut or family.cut), share)


def _select_layers(model: nn.Module, cut: tuple[str | int, ...]) -> list[str]:
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    return list(dict.fromkeys(part if isinstance(part, str) else convolutions[part] for part in cut))


def open_test_images(
    network: PaperNetwork, root: str | None, limit: int | None, download: bool
) -> Images | FolderImages:
    """Open the test images of a network's data set, or the first `limit` of them."""
    images = datasets.load_dataset(network.data, "test", root, download=download)
    return images.head(limit) if limit is not None else images


def list_weight_folders(root: str | None) -> list[Path]:
    """Return the folders to search for weights: `root`, $NEURON_MERGING_DATA and the cache of torch.hub."""
    given = [root, os.environ.get("NEURON_MERGING_DATA"), os.path.join(torch.hub.get_dir(), "checkpoints")]
    return [Path(folder).expanduser() for folder in given if folder]


@dataclass(frozen=True)
class PaperTrial:
    """One combination of criterion, ratio and method; without a method, the original network."""

    criterion: str = ""
    ratio: float = 0.0
    method: MergeMethod | None = None
    threshold: float | None = None

    @property
    def label(self) -> str:
        return self.method.label if self.method else ORIGINAL_METHOD

    @property
    def merger(self) -> MergeMethod | None:
        """The method with the t of this trial."""
        return self.method.with_threshold(self.threshold) if self.method and self.threshold is not None else self.method

    def __str__(self) -> str:
        at = f" t={self.threshold:g}" if self.threshold is not None else ""
        return f"{self.criterion} {self.ratio:.0%} {self.label}{at}" if self.method else ORIGINAL_METHOD


def list_paper_trials(target: PaperTarget, panel: PaperPanel, methods: Sequence[MergeMethod]) -> list[PaperTrial]:
    """Return the trial of the original network, then every cut with every method."""
    return [PaperTrial(), *_list_cuts(target, panel, methods)]


def _list_cuts(target: PaperTarget, panel: PaperPanel, methods: Sequence[MergeMethod]) -> Iterator[PaperTrial]:
    for ratio in panel.ratios:
        for criterion in target.criteria:
            for method in methods:
                # A threshold that the user gave is not swept.
                free = method.name == "cosine" and "threshold" not in dict(method.options)
                swept = target.thresholds if free else ()
                for threshold in swept or (None,):
                    yield PaperTrial(criterion, ratio, method, threshold)


def _digest_material(checkpoint: PaperCheckpoint, method: MergeMethod) -> str:
    return checkpoint.calibration_digest if method.needs_images else method.code


def make_paper_cell(kind: str, checkpoint: PaperCheckpoint, panel: PaperPanel, trial: PaperTrial) -> PaperCell:
    """Build the cache key of a trial on a checkpoint."""
    merger = trial.merger
    return PaperCell(
        kind=kind,
        device=checkpoint.device.type,
        network=checkpoint.network.architecture,
        weights=checkpoint.weights_digest,
        images=checkpoint.images_digest,
        criterion=trial.criterion,
        ratio=checkpoint.ratio(panel, trial.ratio) if merger else {},
        merger=merger.text(checkpoint.network) if merger else "",
        material=_digest_material(checkpoint, merger) if merger else "",
    )


def compress_checkpoint(checkpoint: PaperCheckpoint, panel: PaperPanel, trial: PaperTrial) -> Compressed:
    """Compress a checkpoint with the settings of a trial."""
    assert trial.merger is not None
    settings = CompressConfig(
        ratio=checkpoint.ratio(panel, trial.ratio),
        criterion=trial.criterion,
        merger=trial.merger.merger(checkpoint.network),
        calibration=trial.merger.batches(checkpoint.network, checkpoint.root),
    )
    small = compress_analysis(checkpoint.analysis, settings, judge=False)
    return replace(small, model=checkpoint.analysis.move_to_user(small.model))


def measure_trial_scores(checkpoint: PaperCheckpoint, panel: PaperPanel, trial: PaperTrial) -> CellResult:
    """Measure top-1 and top-5 accuracy, WARE and parameters in one pass over the images."""
    before, labels = checkpoint.predictions
    if trial.method is None:
        size = evaluation.count_parameters(checkpoint.model)
        return {**_compute_accuracies(before, labels), "ware": 0.0, "parameters": size}
    clock = time.perf_counter()
    small = compress_checkpoint(checkpoint, panel, trial)
    seconds = time.perf_counter() - clock
    after = evaluation.predict(small.model, checkpoint.batches())[0]
    return {
        **_compute_accuracies(after, labels),
        "ware": layer_metrics.ware(before, after),
        "parameters": small.summary.parameters[1],
        "seconds": seconds,
    }


def _compute_accuracies(outputs: Tensor, labels: Tensor) -> CellResult:
    return {"accuracy": evaluation.accuracy(outputs, labels), "top5": evaluation.accuracy(outputs, labels, top=5)}


MAX_CLASSES = 10
"""Classes that the figure shows."""


def measure_class_maps(checkpoint: PaperCheckpoint, panel: PaperPanel, trial: PaperTrial) -> CellResult:
    """Compute the maps of a trial, their correlation with the original's, and the error of the layer's output."""
    layer = NETWORK_FAMILIES[checkpoint.network.family].maps
    x, labels = load_class_images(checkpoint)
    before = compute_class_maps(checkpoint.model, layer, x, labels)
    if trial.method is None:
        return {"maps": before.tolist(), "correlation": 1.0, "error": 0.0}
    small = compress_checkpoint(checkpoint, panel, trial)
    after = compute_class_maps(small.model, layer, x, labels)
    errors = layer_metrics.reconstruction_errors(checkpoint.model, small.model, [x], small.plan, [layer])
    return {"maps": after.tolist(), "correlation": correlate_maps(before, after), "error": errors[layer]}


def pick_images(checkpoint: PaperCheckpoint) -> list[int]:
    """Return the index of the first image of each of the first ten classes."""
    first: dict[int, int] = {}
    for place, label in enumerate(checkpoint.images.y.tolist()):
        first.setdefault(label, place)
    return [place for _, place in sorted(first.items())[:MAX_CLASSES]]


def load_class_images(checkpoint: PaperCheckpoint) -> tuple[Tensor, Tensor]:
    """Load one normalised image per class, and the labels."""
    wanted = pick_images(checkpoint)
    # One by one and no further than needed: ImageNet's images are decoded from disk.
    few = islice(checkpoint.images.batches(1, checkpoint.device), max(wanted) + 1)
    pairs = {place: pair for place, pair in enumerate(few) if place in wanted}
    x, y = zip(*(pairs[place] for place in wanted), strict=True)
    return torch.cat(x), torch.cat(y)


def compute_class_maps(model: nn.Module, layer: str, x: Tensor, labels: Tensor) -> Tensor:
    """Return the contribution of each position of a layer's output to the score of the image's class."""
    seen: list[Any] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        with torch.enable_grad():
            # The input needs a gradient, so that autograd records a network whose weights are frozen.
            outputs = model(x.clone().requires_grad_())
            scores = outputs.gather(1, labels[:, None]).sum()
            (gradient,) = torch.autograd.grad(scores, seen[0])
    finally:
        handle.remove()
    # Gradient times activation: exact if pooling and a linear layer follow (class activation mapping).
    maps: Tensor = (gradient * seen[0].detach()).sum(1)
    return maps


def correlate_maps(before: Tensor, after: Tensor) -> float:
    """Return the correlation of two maps of an image, averaged over the images; a constant map has correlation 0.

    >>> ramp = torch.arange(4.0).reshape(1, 2, 2)
    >>> round(correlate_maps(ramp, 3 * ramp + 1), 6), round(correlate_maps(ramp, -ramp), 6)
    (1.0, -1.0)
    """
    a, b = (maps.flatten(1) - maps.flatten(1).mean(1, keepdim=True) for maps in (before, after))
    return float(torch.nn.functional.cosine_similarity(a, b).mean())


def denormalise_images(x: Tensor, images: Images | FolderImages) -> list[Any]:
    """Convert normalised images to pixels in 0..1 of shape (height, width, channels)."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (images.mean, images.std))
    return [picture.permute(1, 2, 0).numpy() for picture in (x.cpu() * std + mean).clamp(0, 1)]


def compute_similarities(checkpoint: PaperCheckpoint) -> dict[str, Tensor]:
    """Return the largest cosine of every filter to another one, for the layers that the paper prunes."""
    similarities = layer_metrics.max_similarities(checkpoint.model, checkpoint.example)
    patterns = NETWORK_FAMILIES[checkpoint.network.family].cut
    return {name: values for name, values in similarities.items() if any(matches_pattern(p, name) for p in patterns)}


def format_layer_position(layer: str) -> str:
    """Return stage and block as the paper counts them, or the layer's name.

    >>> [format_layer_position(name) for name in ("layer2.0.conv1", "block3.layer.5.conv1", "ip1")]
    ['2-1', '3-6', 'ip1']
    """
    match = re.match(r"(?:layer|block)(\d+)\.(?:layer\.)?(\d+)\.", layer)
    return f"{match[1]}-{int(match[2]) + 1}" if match else layer
