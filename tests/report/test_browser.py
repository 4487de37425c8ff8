"""The page in a browser."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from neuron_merging.evaluation.figures import LatencyComparison, LayerReport
from neuron_merging.report import html_page
from neuron_merging.report.report_data import ReportData
from tests.report.small_result import collected
from tests.report.test_parts import SWEEP

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

OUTSIDE = """[...document.querySelectorAll("section, .tile, table, li, figure")]
    .filter(e => e.scrollWidth > e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth)
    .map(e => e.outerHTML.slice(0, 90))"""
"""Elements that stick out of their place."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if BROWSER is None:
        pytest.skip("needs Chromium on the PATH (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


def wide() -> ReportData:
    """A page with long names, large numbers and many layers."""
    _, _, found = collected()
    name = "backbone.stages.3.blocks.23.feed_forward_network.intermediate_projection.dense"
    layers = [replace(found.layers[i % 2], name=f"{name}_{i}", how=(f"{name}: fitted, " * 3,)) for i in range(30)]
    summary = replace(found.summary, macs=(41_891_842_560, 20_891_842_560), parameters=(986_123_456, 493_123_456))
    latency = LatencyComparison({1: (12.3456, 8.7654), 16: (123.456, 87.654)}, 16)
    recipe = "model: " + "a" * 200
    layers.append(LayerReport(name, 64, 32, None, None, ()))
    return replace(
        found, title=name, summary=summary, latency=latency, recipe=recipe, layers=tuple(layers), load="x" * 200
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 375, 320])
def test_in_a_browser(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    file = tmp_path / "page.html"
    file.write_text(html_page.render_report_data(wide()))
    faults: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab.on("console", lambda message: faults.append(message.text))
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("request", lambda request: faults.append(request.url) if request.url.startswith("http") else None)
    tab.goto(file.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(OUTSIDE) == []
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
    assert dark == (scheme == "dark")
    _pictures_are_drawn(tab)
    _a_layer_can_be_chosen(tab)
    shot = np.array(Image.open(io.BytesIO(tab.screenshot(full_page=True))).convert("RGB"))
    assert shot.shape[1] == width and len(np.unique(shot[::9, ::9].reshape(-1, 3), axis=0)) > 20
    assert faults == []
    tab.close()


def _pictures_are_drawn(tab: Any) -> None:
    images = tab.evaluate(
        "[...document.querySelectorAll('.heat img')].map(i => [i.naturalWidth, i.naturalHeight, i.alt.length > 0])"
    )
    assert images and all(w == 12 or w == 8 for w, _, _ in images) and all(told for _, _, told in images)
    unnamed = "[...document.querySelectorAll('[role=img]')].filter(e => !e.getAttribute('aria-label')).length"
    assert tab.evaluate(unnamed) == 0


def _a_layer_can_be_chosen(tab: Any) -> None:
    seen = "[...document.querySelectorAll('.panel')].filter(p => p.offsetHeight > 0).map(p => p.id)"
    assert tab.evaluate(seen) == ["panel-0"]
    tab.select_option("#chooser", "2")
    assert tab.evaluate(seen) == ["panel-2"]
    tab.click("[data-layer='1']")
    assert tab.evaluate(seen) == ["panel-1"] and tab.evaluate("chooser.value") == "1"
    tab.hover("#panel-1 .heat img", position={"x": 2, "y": 2})
    assert re.match(r"channel \d+ of the original, in terms of kept channel \d+", tab.inner_text("#panel-1 .readout"))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 375)])
def test_the_page_of_a_sweep_in_a_browser(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    file = tmp_path / "page.html"
    file.write_text(html_page.render_sweep_report(SWEEP, "net" * 30, (("weights", "/" + "a" * 200),)))
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab.goto(file.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("document.querySelector('.curve').getBoundingClientRect().height") > 100
    tab.close()
