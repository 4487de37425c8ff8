"""Class activation maps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from neuron_merging.reproduction import datasets, experiments, measurements, run
from neuron_merging.reproduction.measurements import PaperCheckpoint
from neuron_merging.reproduction.networks import ResNet
from tests.reproduction.tiny import reproduce

# Claims and maps


def test_a_class_map_is_the_classifiers_sum_of_channels() -> None:
    model = ResNet(8).eval()
    x, labels = torch.randn(3, 3, 32, 32), torch.tensor([1, 4, 4])
    seen: list[Tensor] = []
    handle = model.layer3.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        model(x)
    handle.remove()
    want = torch.einsum("nc,nchw->nhw", model.fc.weight[labels], seen[0].relu()) / 64
    found = measurements.compute_class_maps(model, "layer3", x, labels)
    assert torch.allclose(found, want, atol=1e-5) and not model.layer3._forward_hooks


def test_pictures_are_the_first_of_each_class_in_the_order_of_classes(everything: Path) -> None:
    images = datasets.load_dataset("cifar-10", "test", everything)
    shuffled = replace(images, y=torch.tensor([3, 1, 3, 0, 1, 2, 9, 9, 0, 2, 1, 1]))
    checkpoint = PaperCheckpoint(experiments.find_paper_network("resnet-56"), Path(), shuffled)
    assert measurements.pick_images(checkpoint) == [3, 1, 5, 0, 6]
    x, labels = measurements.load_class_images(checkpoint)
    assert labels.tolist() == [0, 1, 2, 3, 9]
    seen = torch.from_numpy(np.stack(measurements.denormalise_images(x, shuffled))).permute(0, 3, 1, 2)
    assert torch.allclose(seen, images.x[[3, 1, 5, 0, 6]] / 255, atol=1e-6)


# Broken and unusual requests


def test_a_picture_for_every_ratio(everything: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    draw = lambda x, shown, names: drawn.append([*shown]) or Figure()  # noqa: E731
    monkeypatch.setattr(run.plots, "plot_class_maps", draw)
    assert reproduce("figure4", "--data", everything, "--ratios", "0.25,0.5", "--limit", 4) == 0
    assert drawn == [
        ["original", "pruned\nl1 25%", "merged\nl1 25%", "pruned\nl1 50%", "merged\nl1 50%"],
    ]
