"""The result cache: nothing is measured twice, and stale results are not used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from neuron_merging.reproduction import run
from neuron_merging.sweeps import run_cells
from tests.reproduction.tiny import FEW, SMALL, reproduce, save_network

# Caching


def test_nothing_is_measured_twice(everything: Path, measured: list[str]) -> None:
    assert reproduce(*SMALL, "--data", everything) == 0
    assert len(measured) == 5
    before = Path("reproduce/table1/table1.csv").read_bytes()
    assert reproduce(*SMALL, "--data", everything) == 0
    assert len(measured) == 5 and Path("reproduce/table1/table1.csv").read_bytes() == before
    assert reproduce(*SMALL, "--data", everything, "--methods", "none,cosine,cosine:threshold=0.2") == 0
    assert measured[5:] == ["l1 50% cosine:threshold=0.2", "l1 60% cosine:threshold=0.2"]


def test_an_interrupted_run_goes_on_where_it_stopped(
    everything: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = run.MEASURE_FUNCTIONS["score"]

    def stopping(*arguments: Any) -> Any:
        if len(measured) == 3:
            raise KeyboardInterrupt
        return counting(*arguments)

    monkeypatch.setitem(run.MEASURE_FUNCTIONS, "score", stopping)
    assert reproduce(*SMALL, "--data", everything) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert [file.suffix for file in Path("reproduce/table1/cache").iterdir()] == [".json"] * 3
    assert not Path("reproduce/table1/index.html").exists()
    monkeypatch.setitem(run.MEASURE_FUNCTIONS, "score", counting)
    assert reproduce(*SMALL, "--data", everything) == 0
    assert len(measured) == 5 and len(set(measured)) == 5


def test_other_weights_images_or_code_are_measured_anew(
    everything: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    once = ("table1", *FEW, "--data", everything)
    assert reproduce(*once) == 0
    assert reproduce(*once, "--weights", save_network("lenet-300-100", tmp_path / "other.safetensors", 77)) == 0
    assert len(measured) == 6
    assert reproduce(*once, "--limit", 5) == 0
    assert len(measured) == 9
    monkeypatch.setattr(run_cells, "fingerprint_engine", lambda: "changed")
    assert reproduce(*once) == 0
    assert len(measured) == 12


def test_a_damaged_cache_file_is_measured_anew(everything: Path, measured: list[str]) -> None:
    once = ("table1", *FEW, "--data", everything)
    assert reproduce(*once) == 0
    for file in Path("reproduce/table1/cache").iterdir():
        file.write_text(file.read_text()[:20])
    assert reproduce(*once) == 0
    assert len(measured) == 6


def test_the_engine_is_the_code_between_weights_and_figures() -> None:
    files = run_cells._collect_imported_files([run_cells.SOURCE_ROOT / file for file in run_cells.ENGINE_FILES])
    names = {str(file.relative_to(run_cells.SOURCE_ROOT)) for file in files}
    assert {
        "merging/cosine.py",
        "selection/criteria.py",
        "pruning/surgery.py",
        "evaluation/predictions.py",
        "reproduction/networks.py",
        "reproduction/dataset_files.py",
    } <= names
    assert not any(name.startswith(("paper/", "tool/", "report/")) for name in names)


# Broken and unusual requests


def test_a_merger_of_ones_own_is_measured_anew_when_it_changes(
    everything: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from neuron_merging.merging.protocol import Prune\nclass Mine(Prune):\n    pass\n"
    once = ("table1", *FEW, "--data", everything, "--methods", "my_merger:Mine")
    monkeypatch.setattr(sys, "path", list(sys.path))
    counts = []
    for text in (source, source, source + "# changed\n"):
        Path("my_merger.py").write_text(text)
        sys.modules.pop("my_merger", None)
        measured.clear()
        assert reproduce(*once) == 0
        counts.append(len(measured))
    assert counts == [2, 0, 1]
