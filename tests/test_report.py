"""The HTML page: what it says is what was measured, and it stands on its own in a browser."""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import CASES
from PIL import Image
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import data, networks, report
from neuron_merging.folder import store
from neuron_merging.graph.capture import capture
from neuron_merging.measuring import fidelity
from neuron_merging.measuring.summary import Summary
from neuron_merging.report import page, scaling
from neuron_merging.report.findings import Findings, Latency, Layer
from neuron_merging.tool import cli

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

OUTSIDE = """[...document.querySelectorAll("section, .tile, table, li, figure")]
    .filter(e => e.scrollWidth > e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth)
    .map(e => e.outerHTML.slice(0, 90))"""
"""Elements that stick out of their place."""


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


@cache
def collected(merger: str | None = None) -> tuple[nn.Module, nm.Compressed, Findings]:
    model, x = net(), torch.zeros(1, 1, 8, 8)
    small = nm.compress(model, x, merger=merger)
    batches, inputs = report.on_synthetic_inputs(model, x, small.summary.macs[0])
    found = report.compare(report.versions(model, small.model, small.plan), batches, inputs)
    return model, small, report.collect(model, small, capture(model, x), x, found, title="net", method="", load="")


def levels(heat: scaling.Heat) -> np.ndarray:
    """The picture's levels: -127 … 127."""
    image = Image.open(io.BytesIO(base64.b64decode(heat.image.partition(",")[2])))
    assert image.mode == "P"
    return np.array(image).astype(int) - 127


# What the networks answer


def concordance(x: np.ndarray, y: np.ndarray) -> float:
    """By its definition, over all outputs."""
    covariance = ((x - x.mean(0)) * (y - y.mean(0))).sum()
    return float(2 * covariance / (x.var(0) + y.var(0) + (x.mean(0) - y.mean(0)) ** 2).sum() / len(x))


def test_scores_by_hand() -> None:
    torch.manual_seed(1)
    x, a, b = torch.randn(40, 6), nn.Linear(6, 4), nn.Linear(6, 4)
    labels = torch.randint(4, (40,))
    parts: Any = [((x[i : i + 7],), labels[i : i + 7]) for i in range(0, 40, 7)]
    got = report.compare({"original": a, "other": b}, parts, "random rows")
    left, right = a(x).detach(), b(x).detach()
    assert (got.scores[0].same, got.scores[0].agreement) == (100, pytest.approx(1))
    assert got.scores[1].agreement == pytest.approx(concordance(left.numpy(), right.numpy()), abs=1e-6)
    assert got.scores[1].same == pytest.approx(100 * float((left.argmax(1) == right.argmax(1)).double().mean()))
    for output, score in zip((left, right), got.scores, strict=True):
        assert score.accuracy == pytest.approx(100 * float((output.argmax(1) == labels).double().mean()))
    assert got.favourite == pytest.approx(100 * left.argmax(1).bincount().max().item() / 40)
    assert not got.synthetic


def test_a_shift_costs_agreement() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 5

    a, b = nn.Linear(6, 3), Shifted(6, 3)
    b.load_state_dict(a.state_dict())
    got = report.compare({"original": a, "other": b}, [((torch.randn(64, 6),), None)], "rows")
    assert got.scores[1].agreement < 0.2 and got.scores[1].same == 100 and got.synthetic


def test_networks_are_left_as_they_are() -> None:
    model = net().train()
    report.compare({"original": model}, [((torch.randn(4, 1, 8, 8),), None)], "noise")
    assert model.training and all(m.training for m in model.modules())


class Fixed(nn.Module):
    """Takes two rows at a time and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(2, 3)


def test_synthetic_inputs_come_in_sizes_that_the_network_takes() -> None:
    for model, example, samples in ((Fixed(), torch.zeros(2, 6), 256), (nn.Linear(6, 3), torch.zeros(5, 6), 255)):
        batches, said = report.on_synthetic_inputs(model, example, 100)
        got = [len(model(*batch)) for batch, _ in batches]
        assert sum(got) == samples and f"{samples} synthetic" in said
    batches, said = report.on_synthetic_inputs(nn.Embedding(5, 3), torch.zeros(2, 4, dtype=torch.int64), 100)
    assert said == "the example inputs" and len(list(batches)) == 1


def test_accuracy_needs_class_scores() -> None:
    with pytest.raises(nm.MergingError, match="class scores"):
        report.compare({"original": nn.Conv2d(1, 2, 3)}, *report.on_images(data.digits("test").head(4)))


# The layers


def test_layers_are_counted() -> None:
    _, small, found = collected("cosine")
    merged = {m.group: m.folded for m in small.merged.merges}
    for layer in found.layers:
        assert layer.kept + (layer.merged or 0) + layer.dropped == layer.before
        assert layer.merged == merged[layer.name]
    assert [layer.dropped for layer in collected("none")[2].layers] == [6, 4]
    assert [layer.dropped for layer in collected("moments")[2].layers] == [0, 0]


def test_similarity_by_hand() -> None:
    model, small, found = collected("none")
    rows = model[0].weight.detach().flatten(1).double()
    cosine = nn.functional.cosine_similarity(rows[:, None], rows[None], dim=2).numpy()
    kept = list(small.plan.groups[0].kept)
    removed = [i for i in range(12) if i not in kept]
    assert found.layers[0].similarity == pytest.approx(cosine[np.ix_(removed, kept)].max(1), abs=1e-6)


def test_the_picture_of_cosine_merging_is_its_matrix() -> None:
    model, small, found = collected("cosine")
    heat = found.layers[0].heat
    assert heat is not None and heat.exact and heat.whole and heat.shape == (6, 12)
    kept = torch.tensor(small.plan.groups[0].kept)
    removed = torch.tensor([i for i in range(12) if i not in kept])
    merge = next(m for m in small.merged.merges if m.group == "0")
    assert merge.scaling is not None and merge.columns is not None
    scales = merge.scaling.to_dense()
    weight = model[3].weight.detach()
    assert torch.allclose(
        weight[:, kept] + torch.einsum("orab,kr->okab", weight[:, removed], scales), merge.columns, atol=1e-6
    )
    shown = levels(heat)
    assert np.array_equal(shown[:, :6], 127 * np.eye(6))
    assert np.array_equal(shown[:, 6:], np.clip(np.round(scales.numpy() / heat.top * 127), -127, 127))


def test_the_nearest_matrix_is_found_where_there_is_one() -> None:
    _, small, _ = collected("cosine")
    model = net()
    kept, removed = np.arange(0, 12, 2), np.arange(1, 12, 2)
    weight = model[3].weight.detach()
    want = torch.randn(6, 6)
    columns = weight[:, kept] + torch.einsum("orab,kr->okab", weight[:, removed], want)
    merge = replace(
        next(m for m in small.merged.merges if m.group == "0"),
        scaling=None,
        columns=columns,
        positions=torch.from_numpy(kept),
    )
    heat = scaling.heat(merge, kept, removed, {"3.weight": weight})
    assert heat is not None and not heat.exact
    assert np.abs(levels(heat)[:, 6:] * heat.top / 127 - want.clamp(-heat.top, heat.top).numpy()).max() < 0.05


def test_large_matrices_are_shown_by_their_strongest_entries() -> None:
    matrix = np.zeros((300, 900))
    matrix[299, 899], matrix[0, 450] = -3, 2
    heat = scaling.picture(matrix, 300, "next", True)
    shown = levels(heat)
    assert shown.shape == (100, 225) and not heat.whole and heat.shape == (300, 900)
    assert shown[-1, -1] == -127 and shown[0, 112] > 0 and np.count_nonzero(shown) == 2


@pytest.mark.parametrize(
    "name", ["residual", "depthwise", "grouped", "tied layers", "transformer", "u-net", "dense block"]
)
def test_any_network_has_a_page(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.build()
    small = nm.compress(model, case.inputs(), scope="all", merger="cosine")
    file = report.write(tmp_path / "page.html", small, model, case.inputs())
    assert all(f">{choice.name}<" in file.read_text() for choice in small.plan.groups)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


# The page


def shown(findings: Findings) -> str:
    """Its text without tags."""
    body = page.render(findings).partition("<body>")[2].partition("<script>")[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_the_page_says_what_was_measured() -> None:
    _, small, found = collected()
    assert found.fidelity is not None
    text = shown(found)
    before, after = small.summary.parameters
    assert f"parameters {before:,} {after:,}" in text
    assert "This is not accuracy: no data was given" in text and "256 synthetic inputs" in text
    for score in found.fidelity.scores:
        assert f"{score.network} {score.agreement:.2f}" in text
    assert "what the network returns" in text
    for layer in found.layers:
        assert layer.error is not None
        assert f"{layer.name} {layer.before} → {layer.kept} {100 * layer.error:.1f} %" in text


def test_accuracies_are_called_so() -> None:
    _, _, found = collected()
    scores = (
        fidelity.Score("original", 98, 100, 1),
        fidelity.Score("pruned", 11, 10, 0),
        fidelity.Score("merged", 95, 96, 0.9),
    )
    text = shown(replace(found, fidelity=fidelity.Fidelity("445 images of digits", False, scores, 10)))
    assert "Accuracy on 445 images of digits" in text and "not accuracy" not in text
    assert "accuracy 98.0 % 95.0 % −3.0 points" in text and "pruned 11.0 %" in text


def test_names_cannot_break_the_page() -> None:
    _, _, found = collected()
    bad = '<script>alert("x")</script>'
    text = page.render(replace(found, title=bad, layers=(replace(found.layers[0], name=bad, how=(bad,)),)))
    assert bad not in text and text.count("<script>") == 1


def test_the_page_loads_nothing() -> None:
    _, _, found = collected()
    text = page.render(found)
    assert not re.search(r"https?://|@import|url\(|src=\"(?!data:)|href=\"(?!data:|#)", text)
    assert "default-src 'none'" in text


def test_the_template_is_in_the_package() -> None:
    assert files("neuron_merging.report").joinpath("page.html").is_file()


@pytest.mark.parametrize(
    ("filter", "value", "text"),
    [
        (page.size, 999, "999 B"),
        (page.size, 1_070_000, "1.07 MB"),
        (page.size, 273_000_000, "273 MB"),
        (page.change, (100, 100), "±0 %"),
        (page.change, (100, 130), "+30 %"),
        (page.change, (0, 0), "±0 %"),
        (page.duration, 2.5, "2.5 s"),
        (page.duration, 0.000057, "57 µs"),
    ],
)
def test_numbers_for_people(filter: Any, value: Any, text: str) -> None:
    assert filter(value) == text


def test_histogram() -> None:
    bars = page.histogram((0.01, 0.02, 0.99, 1.0000001))
    assert [n for _, _, n, _ in bars] == [2] + [0] * 18 + [2] and bars[0][3] == 1
    assert page.histogram((-0.55, 0.5))[0][0] == pytest.approx(-0.6)


# From a folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save(networks.build("lenet-300-100").state_dict(), "weights.pt")
    assert cli.main(["compress", "lenet-300-100", "out", "--weights", "weights.pt"]) == 0
    return tmp_path / "out"


def test_the_folder_can_lose_its_page_and_get_it_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    assert cli.main(["verify", "out"]) == 0 and nm.load(folder)
    assert cli.main(["report", "out"]) == 0
    again = (folder / "report.html").read_text()
    assert still(again) == still(first)
    assert cli.main(["verify", "out"]) == 0
    assert sorted(p.name for p in folder.parent.iterdir()) == ["out", "weights.pt"]
    assert "report.html" in capsys.readouterr().out


def still(text: str) -> str:
    """The page without what is measured in seconds."""
    return re.sub(r"[\d.]+ (µs|ms|s)\b|[\d.]+ ×|[−±+]\d+ %|width:[\d.]+%", "", text)


def test_without_the_original_the_page_says_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "weights.pt").unlink()
    assert cli.main(["report", "out", "--to", "page.html"]) == 0
    assert "give --weights" in capsys.readouterr().err
    text = Path("page.html").read_text()
    assert "weights were not at hand" in text and "300 → 150" in text and "Scaling matrix" not in text


def test_weights_that_were_trained_further_are_noticed(folder: Path) -> None:
    small = nm.load(folder)
    nn.init.normal_(small.ip3.weight)
    manifest = store.read(folder, ())[0]
    summary = Summary(manifest.parameters, manifest.macs, (), (), None)
    found = nm.Compressed(small, manifest.plan, summary)
    store.save(found, folder, recipe=store.recipe_of(folder), overwrite=True)
    assert cli.main(["report", "out"]) == 0
    assert "trained further" in (folder / "report.html").read_text()


def test_no_page_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compress", "lenet-300-100", "out", "--no-report"]) == 0
    assert not Path("out/report.html").exists()
    assert cli.main(["report", "none"]) == 3


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if BROWSER is None:
        pytest.skip("needs Chromium on the PATH (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


def wide() -> Findings:
    """A page with long names, large numbers and many layers."""
    _, _, found = collected()
    name = "backbone.stages.3.blocks.23.feed_forward_network.intermediate_projection.dense"
    layers = [replace(found.layers[i % 2], name=f"{name}_{i}", how=(f"{name}: fitted, " * 3,)) for i in range(30)]
    summary = replace(found.summary, macs=(41_891_842_560, 20_891_842_560), parameters=(986_123_456, 493_123_456))
    latency = Latency({1: (12.3456, 8.7654), 16: (123.456, 87.654)}, 16)
    recipe = "model: " + "a" * 200
    layers.append(Layer(name, 64, 32, None, None, ()))
    return replace(
        found, title=name, summary=summary, latency=latency, recipe=recipe, layers=tuple(layers), load="x" * 200
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 375, 320])
def test_in_a_browser(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    file = tmp_path / "page.html"
    file.write_text(page.render(wide()))
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
    images = tab.evaluate("[...document.images].map(i => [i.naturalWidth, i.naturalHeight, i.alt.length > 0])")
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
