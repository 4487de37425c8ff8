"""Networks that read pictures are distilled on changed copies of the user's, where that helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.channels.analysis import Analysis
from neuron_merging.config import CompressConfig
from neuron_merging.inputs.augmentation import augment_pictures
from neuron_merging.inputs.input_sets import OriginalOutputs
from neuron_merging.merging.distillation import distill
from neuron_merging.pipeline.build_network import PrunedNetwork, merge_and_prune
from neuron_merging.pipeline.distill import distill_network
from neuron_merging.pipeline.prepared_inputs import PreparedInputs, prepare_inputs

pytestmark = pytest.mark.filterwarnings("ignore")
NOTE = "distilled from the original on 18 of the pictures"


def make_net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 12, 3, stride=2), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.ReLU(), nn.Conv2d(12, 5, 1)]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=0.5)
    return nn.Sequential(*layers).eval()


def draw_pictures(count: int = 24, last: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 10, 10, generator=generator)
    pictures = nn.functional.interpolate(coarse, size=20, mode="bilinear")
    return pictures.movedim(1, 3).contiguous() if last else pictures


SETTINGS = CompressConfig(ratio=0.5, calibration=[draw_pictures()], effort="best")


def cut_half(model: nn.Module, settings: CompressConfig = SETTINGS) -> tuple[Analysis, PreparedInputs, PrunedNetwork]:
    analysis = nm.analyse(model, torch.zeros(2, 3, 20, 20))
    settings = settings.adapt_data_to(analysis.inputs)
    inputs = prepare_inputs(analysis, settings)
    kept = {group.name: range(0, 12, 2) for group in analysis.channels.groups}
    return analysis, inputs, merge_and_prune(analysis, kept, settings, inputs)


def list_values(network: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in network.parameters()]


def are_equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.pipeline.distill.MAX_PICTURE_STEPS", 120)


def test_the_error_on_pictures_held_back_falls_and_the_original_stays(few_steps: None) -> None:
    model = make_net()
    original = list_values(model)
    analysis, inputs, cut = cut_half(model)
    before = list_values(cut.small)
    (note,) = distill_network(analysis, cut, SETTINGS, inputs)
    assert NOTE in note and "on 6 others, mirrored" in note
    assert not are_equal(before, list_values(cut.small)) and are_equal(original, list_values(model))
    again = cut_half(model)
    assert distill_network(again[0], again[2], SETTINGS, again[1]) == [note]
    assert are_equal(list_values(again[2].small), list_values(cut.small))


@pytest.mark.parametrize(
    "more",
    [
        {"effort": "normal"},
        {"merger": "none", "effort": None},
        {"calibration": None},
        {"calibration": [draw_pictures(8)]},
    ],
)
def test_without_time_or_pictures_nothing_is_trained(more: dict[str, Any], few_steps: None) -> None:
    settings = replace(SETTINGS, **more)
    analysis, inputs, cut = cut_half(make_net(), settings)
    before = list_values(cut.small)
    assert not distill_network(analysis, cut, settings, inputs)
    assert are_equal(before, list_values(cut.small))


def test_weights_that_are_worse_on_pictures_held_back_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.merging.distillation.WEIGHT_RATE", 1.0)
    model, small, pictures = make_net(), make_net(), draw_pictures()
    before = list_values(small)
    batches = iter([(pictures[:4],)] * 3)
    found = distill(small, OriginalOutputs(model), batches, [(pictures,)], frozenset(), 3, all_weights=True)
    assert not found.is_better and are_equal(before, list_values(small))


def test_a_file_is_written_with_the_trained_weights(tmp_path: Path, few_steps: None) -> None:
    torch.onnx.export(make_net(), (torch.zeros(1, 3, 20, 20),), tmp_path / "net.onnx", dynamo=False)
    small = nm.compress(tmp_path / "net.onnx", ratio=0.5, calibration=[draw_pictures()], effort="best")
    assert any(NOTE in note for note in small.summary.notes)
    small.save(tmp_path / "small.onnx")
    again = nm.analyse(tmp_path / "small.onnx").model
    picture = draw_pictures(1)
    torch.testing.assert_close(again(picture)[0], small.model(picture)[0])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_changed_pictures_stay_in_the_range_of_the_given_ones(last: bool, dtype: torch.dtype) -> None:
    pictures = draw_pictures(last=last)
    pictures = pictures if dtype.is_floating_point else (255 * pictures).to(dtype)
    first, again = (augment_pictures(pictures, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.shape == pictures.shape and first.dtype == dtype and torch.equal(first, again)
    assert float(first.min()) >= float(pictures.min()) and float(first.max()) <= float(pictures.max())
    changed = (first != pictures).flatten(1).float().mean(1).numpy()
    assert np.all(changed > 0.3)
