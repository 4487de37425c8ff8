"""Parts of the report: inline images, charts, heatmaps, settings."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import neuron_merging as nm
from neuron_merging import report
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.evaluation.figures import encode_images, format_ranges
from neuron_merging.report.charts import build_sweep_chart
from neuron_merging.report.report_data import describe_settings
from neuron_merging.sweeps import CutLoss, GroupSensitivity, Sensitivity, Sweep, SweepRow
from tests.report.small_result import collected, shown


def opened(address: str) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


def test_a_gallery_is_what_an_image_viewer_sees() -> None:
    images = torch.rand(3, 3, 5, 7)
    found = encode_images(images, most=2)
    assert len(found) == 2 and opened(found[1]).shape == (5, 7, 3)
    one = images[1].numpy()
    expected = np.round(255 * (one - one.min()) / (one.max() - one.min())).transpose(1, 2, 0)
    assert np.abs(opened(found[1]) - expected).max() <= 1


@pytest.mark.parametrize("images", [torch.zeros(1, 1, 4, 4), torch.full((1, 5, 4, 4), float("nan"))])
def test_grey_flat_and_broken_images_are_drawn_too(images: torch.Tensor) -> None:
    assert opened(encode_images(images)[0]).shape == (4, 4)


ROWS = (
    SweepRow("macs 70%", "l2", "none", 70, 700, 0.9, 80.0),
    SweepRow("macs 50%", "l2", "none", 50, 500, 0.8, 60.0),
    SweepRow("macs 70%", "l2", "moments", 70, 700, 0.95, 88.0),
    SweepRow("macs 50%", "l2", "moments", 50, 500, 0.85, 84.0),
    SweepRow("macs 1%", "l2", "none", refused="<b>cannot be met</b>"),
)
SWEEP = Sweep(SweepRow("original", "", "", 100, 1000, 1.0, 90.0), ROWS, "accuracy %")


def test_a_curve_has_every_network_in_its_place() -> None:
    curve = build_sweep_chart(SWEEP)
    assert curve is not None and curve.original is not None
    none, moments = curve.lines
    assert (none.name, moments.name) == ("none", "moments")
    assert none.dots[0].x < none.dots[1].x < curve.original.x
    assert curve.original.y < moments.dots[1].y < moments.dots[0].y < none.dots[1].y < none.dots[0].y
    assert [text for _, text in curve.across][-1] == "100 %" and len(curve.across) > 2
    assert build_sweep_chart(replace(SWEEP, rows=ROWS[4:])) is None


def test_the_page_of_a_sweep_names_the_best_and_what_was_refused() -> None:
    text = report.render_sweep_report(SWEEP, "<net>", (("model", "net"),))
    assert "<net>" not in text and "<b>cannot" not in text and "cannot be met" in text
    plain = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    assert "88.00 best for macs 70%: l2, moments" in plain and "84.00 best for macs 50%" in plain
    assert len(re.findall("<circle", text)) == 4 and "model" in plain
    assert not re.search(r"https?://|url\(", text)


def test_what_is_known_is_on_the_page_and_what_is_not_is_left_out() -> None:
    _, _, found = collected()
    losses = (CutLoss(0.5, 6, 0.25), CutLoss(0.75, 3, 1.5, measured=False))
    worth = Sensitivity((GroupSensitivity("0", 12, losses, 0.5, 0.5),), (0.5, 0.75), "divergence", "probes", True, 1.0)
    text = shown(replace(found, sensitivity=worth, sweep=SWEEP))
    assert "Sensitivity of each group" in text and "0.25 ≈1.5" in text and "Compared with other settings" in text
    bare = shown(replace(found, sensitivity=None, sweep=None, inputs=(), settings=()))
    assert not any(
        part in bare
        for part in ("Sensitivity of each group", "Compared with other settings", "Synthesised inputs", "Settings")
    )


def test_settings_of_a_network_from_python_are_in_plain_sight() -> None:
    text = shown(collected()[2])
    assert "Settings" in text and "criterion" in text and re.search(r"ratio 0\.5", text)


def test_a_budget_leaves_its_sensitivities_on_the_page() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 24), torch.nn.ReLU(), torch.nn.Linear(24, 3))
    analysis = nm.analyse(net, torch.zeros(1, 4))
    small = nm.compress(analysis, budget={"params": 0.6})
    found = report.collect_report_data(analysis, small, None, title="net", method="", load="")
    assert found.sensitivity is not None and [group.name for group in found.sensitivity.groups] == ["0"]
    assert re.search(r"budget params (60%|0\.6)", shown(found))


def test_what_a_recipe_leaves_open_is_not_listed() -> None:
    listed = dict(describe_settings(Recipe(model="net", ratio=0.5, ignore=["fc"], layer={"a": 0.25}, round_to=8)))
    assert listed == {
        "model": "net", "ratio": "0.5", "layer": "a 0.25", "ignore": "fc", "scope": "internal",
        "criterion": Recipe().criterion, "round to": "8",
    }  # fmt: skip


def test_numbers_of_channels() -> None:
    assert (format_ranges([]), format_ranges([3]), format_ranges([0, 1, 4, 5, 6, 9])) == ("", "3", "0–1, 4–6, 9")
    _, small, found = collected()
    layer = found.layers[0]
    assert layer.units == tuple(small.plan.groups[0].kept) and sorted((*layer.units, *layer.removed_units)) == list(
        range(12)
    )
    assert layer.units_text in shown_titles(found)


def shown_titles(found: report.ReportData) -> list[str]:
    return re.findall(r'title="([^"]*)"', report.render_report_data(found))
