"""The HTML page: what it says is what was measured, and it stands on its own."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import neuron_merging as nm
from neuron_merging import report
from neuron_merging.checkpoint.manifest import decode_figures, encode_figures
from neuron_merging.checkpoint.save_folder import build_stored_figures
from neuron_merging.evaluation import fidelity
from neuron_merging.report import html_page
from neuron_merging.selection.budget import LossCurve
from tests.report.small_result import collected, shown
from tests.zoo.unusual import VECTORS, Plain


def test_a_loss_for_an_output_has_a_page(tmp_path: Path) -> None:
    class Loss(Plain):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).square().mean()

    model = Loss()
    report.write_report(tmp_path / "page.html", nm.compress(model, VECTORS), model, VECTORS)
    assert (tmp_path / "page.html").is_file()


def test_the_page_says_what_was_measured() -> None:
    _, small, found = collected()
    assert found.fidelity is not None
    text = shown(found)
    before, after = small.summary.parameters
    assert f"parameters {before:,} {after:,}" in text
    assert "This is not accuracy: no data was given" in text and "64 synthetic images" in text
    for score in found.fidelity.scores:
        assert f"{score.network} {score.fidelity:.3f}" in text
    assert "what the network returns" in text
    for layer in found.layers:
        assert layer.error is not None
        saved = " ".join(f"−{100 * share:.1f} %" for share in layer.saved)
        assert f"{layer.name} {layer.before} → {layer.kept} {saved} {100 * layer.error:.1f} %" in text


def test_accuracies_are_called_so() -> None:
    _, _, found = collected()
    scores = (
        fidelity.NetworkScore("original", 98, 100, 1),
        fidelity.NetworkScore("pruned", 11, 10, 0),
        fidelity.NetworkScore("merged", 95, 96, 0.9),
    )
    text = shown(replace(found, fidelity=fidelity.Fidelity("445 images of digits", False, scores, 10)))
    assert "Accuracy on 445 images of digits" in text and "not accuracy" not in text
    assert "accuracy 98.0 % 95.0 % −3.0 points" in text and "pruned 11.0 %" in text


def test_names_cannot_break_the_page() -> None:
    _, _, found = collected()
    bad = '<script>alert("x")</script>'
    text = html_page.render_report_data(
        replace(found, title=bad, layers=(replace(found.layers[0], name=bad, how=(bad,)),))
    )
    assert bad not in text and text.count("<script>") == 1


def test_the_page_loads_nothing() -> None:
    _, _, found = collected()
    text = html_page.render_report_data(found)
    assert not re.search(r"https?://|@import|url\(|src=\"(?!data:)|href=\"(?!data:|#)", text)
    assert "default-src 'none'" in text


def test_the_template_is_in_the_package() -> None:
    home = files("neuron_merging.report")
    assert all(home.joinpath(name).is_file() for name in ("page.html", "sweep.html", "parts.html", "style.css"))


@pytest.mark.parametrize(
    ("filter", "value", "text"),
    [
        (html_page.format_bytes, 999, "999 B"),
        (html_page.format_bytes, 1_070_000, "1.07 MB"),
        (html_page.format_bytes, 273_000_000, "273 MB"),
        (html_page.format_change, (100, 100), "±0 %"),
        (html_page.format_change, (100, 130), "+30 %"),
        (html_page.format_change, (0, 0), "±0 %"),
        (html_page.format_duration, 2.5, "2.5 s"),
        (html_page.format_duration, 0.000057, "57 µs"),
    ],
)
def test_numbers_for_people(filter: Any, value: Any, text: str) -> None:
    assert filter(value) == text


def test_histogram() -> None:
    bars = html_page.build_histogram((0.01, 0.02, 0.99, 1.0000001))
    assert [n for _, _, n, _ in bars] == [2] + [0] * 18 + [2] and bars[0][3] == 1
    assert html_page.build_histogram((-0.55, 0.5))[0][0] == pytest.approx(-0.6)


def test_without_the_original_the_page_shows_what_compress_measured() -> None:
    model, small, _ = collected()
    text = report.render_report(small)
    assert "Scaling matrix" in text and "Latency" not in text
    whole = report.render_report(small, model, torch.zeros(1, 1, 8, 8))
    assert "Latency" in whole and "pruned" in whole
    with pytest.raises(nm.MergingError, match="original network is needed"):
        report.render_report(small, images=[torch.zeros(1, 1, 8, 8)])
    with pytest.raises(nm.MergingError, match="no measured figures"):
        report.render_report(replace(small, figures=None))


def test_figures_survive_their_file() -> None:
    _, small, _ = collected()
    stored = build_stored_figures(small, None)
    assert stored is not None
    endless = msgspec.structs.replace(stored, curves={"0": LossCurve((8, 4), (0.0, float("inf")))})
    assert decode_figures(encode_figures(endless), "figures.json") == endless
