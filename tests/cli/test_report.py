"""The page of a folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging import models, report
from neuron_merging.checkpoint import load_folder, save_folder
from neuron_merging.checkpoint.manifest import FIGURES_FILE, compute_file_sha256, encode_manifest
from neuron_merging.cli import app
from neuron_merging.evaluation.summary import Summary
from neuron_merging.models import sources


def write_folder(place: Path) -> Path:
    """Compress a network's weights, which the folder's recipe then names."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        torch.save(models.create_network("lenet-300-100").state_dict(), "weights.pt")
        assert app.main(["compress", "lenet-300-100", "out", "--weights", "weights.pt"]) == 0
    return place / "out"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_folder(tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("written"))


@pytest.fixture
def copied(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a folder, for tests that need neither its weights nor its original."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(written, tmp_path / "out"))


def test_the_folder_can_lose_its_page_and_get_it_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    assert app.main(["verify", "out"]) == 0 and nm.load(folder)
    assert app.main(["report", "out"]) == 0
    assert (folder / "report.html").read_text() == first
    assert app.main(["verify", "out"]) == 0
    assert sorted(p.name for p in folder.parent.iterdir()) == ["out", "weights.pt"]
    assert "report.html" in capsys.readouterr().out


def forget_figures(folder: Path) -> None:
    """The folder as an older version wrote it."""
    manifest = load_folder.read_folder(folder, ())[0]
    files = {name: checksum for name, checksum in manifest.files.items() if name != FIGURES_FILE}
    (folder / "plan.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=files)))
    (folder / FIGURES_FILE).unlink()


def test_the_page_needs_neither_the_original_nor_its_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "weights.pt").unlink()
    for place in ("api.analyse", "evaluation.figures.measure_latency", "selection.judge.judge_network"):
        monkeypatch.setattr(f"neuron_merging.{place}", None)
    monkeypatch.setattr(sources, "build_from_source", None)
    first = (folder / "report.html").read_text()
    assert "pruned" in first and "Scaling matrix" in first and "Latency" in first
    assert app.main(["report", "out", "--to", "page.html"]) == 0
    assert Path("page.html").read_text() == first


def test_a_folder_without_figures_is_measured_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = (folder / "report.html").read_text()
    forget_figures(folder)
    assert app.main(["verify", "out"]) == 0 and nm.load(folder)
    assert app.main(["report", "out"]) == 0
    assert "stores no figures" in capsys.readouterr().err
    assert still((folder / "report.html").read_text()) == still(first)


def still(text: str) -> str:
    """The page without what is measured in seconds."""
    return re.sub(r"[\d.]+ (µs|ms|s)\b|[\d.]+ ×|[−±+]\d+ %|width:[\d.]+%", "", text)


def test_data_judge_anew_and_the_folder_stays(folder: Path) -> None:
    np.savez("x.npz", x=np.random.default_rng(0).normal(size=(40, 1, 28, 28)).astype(np.float32))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert app.main(["report", "out", "--eval", "x.npz", "--to", "page.html"]) == 0
    text = Path("page.html").read_text()
    assert "Fidelity of the outputs on 40 images of x" in text and "no data" not in text and "Scaling matrix" in text
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_without_the_original_the_page_says_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "weights.pt").unlink()
    forget_figures(folder)
    assert app.main(["report", "out", "--to", "page.html"]) == 0
    assert "give --weights" in capsys.readouterr().err
    text = Path("page.html").read_text()
    assert "weights were not found" in text and "300 → 150" in text and "Scaling matrix" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found | {"version": 99}, "reads up to"),
        (lambda found: found | {"title": 3.5}, "damaged"),
        (lambda found: [found], "damaged"),
        (lambda found: found["figures"].update(inputs=["https://example.org/x.png"]) or found, "stored in the file"),
        (lambda found: found["figures"]["layers"][0].update(before=0) or found, "damaged"),
        (lambda found: found["figures"]["fidelity"].update(scores=[]) or found, "damaged"),
        (lambda found: found | {"sweep": {"rows": 1}}, "damaged"),
    ],
)
def test_figures_of_a_stranger_are_data(
    copied: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], Any], words: str
) -> None:
    file = copied / FIGURES_FILE
    file.write_bytes(json.dumps(change(json.loads(file.read_bytes()))).encode())
    assert app.main(["report", "out"]) == 3 and "was changed" in capsys.readouterr().err
    manifest = load_folder.read_folder(copied, ())[0]
    files = manifest.files | {FIGURES_FILE: compute_file_sha256(file)}
    (copied / "plan.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=files)))
    assert app.main(["report", "out"]) == 3
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"name": "other"}, {"size": 5, "kept": (0, 1)}])
def test_groups_that_the_network_does_not_have_are_one_clear_error(
    folder: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    manifest = load_folder.read_folder(folder, ())[0]
    groups = tuple(msgspec.structs.replace(group, **change) for group in manifest.plan.groups)
    plan = msgspec.structs.replace(manifest.plan, groups=groups)
    (folder / "plan.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, plan=plan)))
    np.savez("x.npz", x=np.random.default_rng(0).normal(size=(40, 1, 28, 28)).astype(np.float32))
    for flags in (["--weights", "weights.pt"], ["--eval", "x.npz"]):
        assert app.main(["report", "out", *flags, "--to", "page.html"]) == 2
        assert "the plan does not fit this network" in capsys.readouterr().err


def test_pages_and_cards_are_named_after_the_network(folder: Path) -> None:
    assert app.main(["compress", "out", "smaller", "--ratio", "0.2"]) == 0
    assert "<h1>out, compressed</h1>" in Path("smaller/report.html").read_text()
    assert Path("smaller/README.md").read_text().startswith("# out, compressed\n")
    assert "<h1>lenet-300-100, compressed</h1>" in (folder / "report.html").read_text()


def test_results_of_apply_and_sweep_have_figures_too(folder: Path) -> None:
    source = ["lenet-300-100", "--weights", "weights.pt"]
    assert app.main(["apply", "out", *source[:1], "applied", *source[1:]]) == 0
    grid = ["--ratio", "0.5", "--criterion", "l2", "--merger", "none,cosine", "--jobs", "1", "--save-best"]
    assert app.main(["sweep", *source[:1], "swept", *source[1:], *grid]) == 0
    best = next(Path("swept/best").iterdir())
    (folder.parent / "weights.pt").unlink()
    for place, words in ((Path("applied"), "Make a plan for these weights"), (best, "Compared with other settings")):
        first = (place / "report.html").read_text()
        assert words in first and "Latency" in first
        assert app.main(["report", str(place)]) == 0
        assert (place / "report.html").read_text() == first


def test_a_folder_from_python_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 3))
    small = nm.compress(net, torch.zeros(1, 4), budget={"params": 0.6})
    small.save("out")
    assert app.main(["report", "out"]) == 0
    text = Path("out/report.html").read_text()
    assert text == report.render_report(small) and "<h1>Sequential, compressed</h1>" in text
    assert "Sensitivity of each group" in text and "Scaling matrix" in text and "Latency" not in text


def test_weights_that_were_trained_further_are_noticed(folder: Path) -> None:
    small = nm.load(folder)
    nn.init.normal_(small.ip3.weight)
    manifest = load_folder.read_folder(folder, ())[0]
    summary = Summary(manifest.parameters, manifest.macs, (), (), None)
    found = nm.Compressed(small, manifest.plan, summary)
    save_folder.save(found, folder, recipe=load_folder.read_recipe(folder), overwrite=True)
    assert app.main(["report", "out"]) == 0
    assert "they were fine-tuned" in (folder / "report.html").read_text()


def test_no_page_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["compress", "lenet-300-100", "out", "--no-report"]) == 0
    assert not Path("out/report.html").exists()
    assert app.main(["report", "none"]) == 3
