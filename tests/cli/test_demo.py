"""The demo: a table, a page, and the lines for one's own model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import neuron_merging as nm
from neuron_merging.checkpoint import load_folder
from neuron_merging.cli import app
from neuron_merging.reproduction import demo


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "DEMO_EPOCHS", 4)
    assert app.main(["demo", "--out", "here"]) == 0
    return capsys.readouterr().out


def test_the_demo(said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"│ (\S.*?) +│ +([\d.]+) % │ +([\d.]+) │ +([\d,]+) │ +([\d,]+) │ +([\d.]+) │", said)
    assert [row[0] for row in rows] == ["original", "pruned", "merged (paper)", "merged (default)"]
    accuracy = {row[0]: float(row[1]) for row in rows}
    assert accuracy["original"] > 90
    assert accuracy["pruned"] + 20 < accuracy["merged (default)"] > accuracy["merged (paper)"]
    fidelity = {row[0]: float(row[2]) for row in rows}
    assert fidelity["pruned"] < fidelity["merged (default)"] > fidelity["merged (paper)"]
    macs = [int(row[4].replace(",", "")) for row in rows]
    assert macs[0] == 1_495_552 and all(0.24 * macs[0] < small <= 0.25 * macs[0] for small in macs[1:])
    assert "The verdict, without data: " in said and "The truth, on 445 images: " in said
    page = tmp_path / "here/small/report.html"
    assert str(page) in said and page.is_file()
    shown = page.read_text()
    for name in ("original", "merged (default)"):
        assert f"{accuracy[name]:.1f} %" in shown
    assert 'import neuron_merging as nm\n  small = nm.compress(model, example_inputs, budget={"macs": 0.5})' in said
    reloaded(tmp_path / "here/small")
    refused_elsewhere(tmp_path, capsys)


def reloaded(folder: Path) -> None:
    """What the demo leaves is a folder like any other."""
    assert nm.load(folder).conv1.out_channels < 32
    assert app.main(["verify", str(folder)]) == 0
    assert app.main(["report", str(folder)]) == 0
    manifest = load_folder.read_folder(folder, ())[0]
    assert manifest.accuracy is not None
    assert f"{manifest.accuracy[1]:.1f} %" in (folder / "report.html").read_text()
    assert "trained further" not in (folder / "report.html").read_text()


def refused_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter").touch()
    assert app.main(["demo", "--out", "thesis"]) == 2
    assert "something else is there" in capsys.readouterr().err
