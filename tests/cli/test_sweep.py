"""The command for sweeps: files, pages, and one clear error for what cannot be meant."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

import neuron_merging as nm
from neuron_merging import models
from neuron_merging.cli import app
from neuron_merging.cli.sweep import parse_budget_lists, parse_merger_list


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    torch.save(models.create_network("lenet-300-100").state_dict(), "lenet.pt")
    return "lenet.pt"


@pytest.mark.long
def test_a_sweep_leaves_a_table_a_curve_a_page_and_the_best(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["sweep", "lenet-300-100", "out", "--weights", weights, "--jobs", "1", "--json", "--save-best"]
    line += ["--budget", "params=80%,50%", "--merger", "none,cosine:threshold=0.2,bn=released", "--criterion", "l2"]
    assert app.main(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["target"] for row in found["rows"]] == ["params 80%"] * 2 + ["params 50%"] * 2
    assert [row["merger"] for row in found["rows"][:2]] == ["none", "cosine:threshold=0.2,bn=released"]
    out = Path("out")
    with open(out / "sweep.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 5
    assert (out / "curve.png").read_bytes()[:4] == b"\x89PNG" and b"<svg" in (out / "curve.svg").read_bytes()
    assert "swept" in (out / "index.html").read_text() and "Compared with other settings" in best_page(out)
    assert sum(p.numel() for p in nm.load(out / "best/params-50").parameters()) <= 266_610 / 2
    assert app.main(["verify", "out/best/params-50"]) == 0
    before = {file: file.stat().st_mtime_ns for file in (out / "cells").iterdir()}
    assert app.main(line[:-9]) == 2  # no budget
    capsys.readouterr()
    assert app.main([*line, "--budget", "params=60%"]) == 0
    after = {file: file.stat().st_mtime_ns for file in (out / "cells").iterdir()}
    assert len(after) == len(before) + 2 and before.items() <= after.items()


def best_page(out: Path) -> str:
    return (out / "best/params-50/report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "no combination to run"),
        (["--budget", "macs"], "is not KEY=VALUE"),
        (["--budget", "gold=50%"], "no budget of 'gold'"),
        (["--ratio", "half"], "not a list of numbers"),
        (["--ratio", "0.5", "--merger", "nonsense"], "unknown merger 'nonsense'"),
        (["--ratio", "0.5", "--criterion", "nonsense"], "nonsense"),
        (["--ratio", "0.5", "--jobs", "0"], "0 processes"),
        (["--ratio", "0.5", "--cluster", "nowhere"], "no scheduler answers at nowhere"),
    ],
)
def test_bad_requests(weights: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["sweep", "lenet-300-100", "out", "--weights", weights, *flags]) == 2
    assert said in capsys.readouterr().err and not list(Path().glob("out/*/*"))


def test_lists_on_the_command_line() -> None:
    assert parse_budget_lists(["macs=90%,50%", "macs=10%"]) == {"macs": ["90%", "50%", "10%"]}
    assert parse_merger_list("none,my.module:Merger:a=1,b=2,moments") == ["none", "my.module:Merger:a=1,b=2", "moments"]
    assert parse_merger_list(None) == [None]
