"""The page of a folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging import models
from neuron_merging.checkpoint import model_folder
from neuron_merging.cli import app
from neuron_merging.evaluation.summary import Summary


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save(models.create_network("lenet-300-100").state_dict(), "weights.pt")
    assert app.main(["compress", "lenet-300-100", "out", "--weights", "weights.pt"]) == 0
    return tmp_path / "out"


def test_the_folder_can_lose_its_page_and_get_it_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    assert app.main(["verify", "out"]) == 0 and nm.load(folder)
    assert app.main(["report", "out"]) == 0
    again = (folder / "report.html").read_text()
    assert still(again) == still(first)
    assert app.main(["verify", "out"]) == 0
    assert sorted(p.name for p in folder.parent.iterdir()) == ["out", "weights.pt"]
    assert "report.html" in capsys.readouterr().out


def still(text: str) -> str:
    """The page without what is measured in seconds."""
    return re.sub(r"[\d.]+ (µs|ms|s)\b|[\d.]+ ×|[−±+]\d+ %|width:[\d.]+%", "", text)


def test_without_the_original_the_page_says_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "weights.pt").unlink()
    assert app.main(["report", "out", "--to", "page.html"]) == 0
    assert "give --weights" in capsys.readouterr().err
    text = Path("page.html").read_text()
    assert "weights were not found" in text and "300 → 150" in text and "Scaling matrix" not in text


def test_weights_that_were_trained_further_are_noticed(folder: Path) -> None:
    small = nm.load(folder)
    nn.init.normal_(small.ip3.weight)
    manifest = model_folder.read_folder(folder, ())[0]
    summary = Summary(manifest.parameters, manifest.macs, (), (), None)
    found = nm.Compressed(small, manifest.plan, summary)
    model_folder.save(found, folder, recipe=model_folder.read_recipe(folder), overwrite=True)
    assert app.main(["report", "out"]) == 0
    assert "trained further" in (folder / "report.html").read_text()


def test_no_page_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["compress", "lenet-300-100", "out", "--no-report"]) == 0
    assert not Path("out/report.html").exists()
    assert app.main(["report", "none"]) == 3
