"""Sweeps: every combination is measured once, also after interruptions and failures."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.config import CompressConfig
from neuron_merging.sweeps import run_cells, scores
from neuron_merging.sweeps.grid import build_trials, create_executor, expand_targets
from neuron_merging.sweeps.run_cells import TaskExecutor


@cache
def network() -> nm.Analysis:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))
    return nm.analyse(net.eval(), torch.zeros(1, 4))


def size(model: nn.Module) -> float:
    return float(sum(p.numel() for p in model.parameters()))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The settings of what was really computed."""
    made, plain = [], scores.measure_cell_task

    def counting(subject: scores.SweepContext, task: scores.CellTask) -> dict[str, object]:
        made.append(task)
        return plain(subject, task)

    monkeypatch.setattr(scores, "measure_cell_task", counting)
    return made


GRID = {"budget": {"params": [0.8, "60%"]}, "ratio": 0.25, "merger": ["none", "moments"], "criterion": ["l1", "l2"]}


def test_a_row_is_what_compress_makes_of_these_settings() -> None:
    found = nm.sweep(network(), jobs=1, **GRID)
    assert len(found.rows) == 12 and found.original.fidelity == 1 and found.metric == "fidelity"
    for row in found.rows[::5]:
        name, value = row.target.split()
        asked = {"ratio": 0.25} if name == "ratio" else {"budget": {name: value}}
        small = nm.compress(network(), criterion=row.criterion, merger=row.merger, **asked)
        assert (row.parameters, row.macs) == (small.summary.parameters[1], small.summary.macs[1])
    for target, best in found.best.items():
        own = [row for row in found.rows if row.target == target]
        assert best.fidelity == max(row.fidelity for row in own) and best.merger == "moments"


def test_nothing_is_computed_twice_and_nothing_stale_is_believed(tmp_path: Path, tried: list[object]) -> None:
    grid = {"budget": {"params": [0.8]}, "ratio": 0.25, "merger": ["none", "cosine"]}
    first = nm.sweep(network(), out=tmp_path / "out", jobs=1, **grid)
    assert len(tried) == 5
    assert nm.sweep(network(), out=tmp_path / "out", jobs=1, **grid) == first and len(tried) == 5
    nm.sweep(network(), out=tmp_path / "out", jobs=1, **{**grid, "ratio": [0.25, 0.5]})
    assert len(tried) == 7
    nm.sweep(network(), out=tmp_path / "out", jobs=1, **grid, seed=1)
    assert len(tried) == 11  # the original is as it was
    nm.sweep(network(), out=tmp_path / "out", jobs=1, **grid, evaluate=size)
    assert len(tried) == 16
    other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    nm.sweep(other, torch.zeros(1, 4), out=tmp_path / "out", jobs=1, ratio=0.5)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    nm.sweep(other, torch.zeros(1, 4), out=tmp_path / "out", jobs=1, ratio=0.5)
    assert len(tried) == 20


def test_the_files_say_what_was_found(tmp_path: Path) -> None:
    found = nm.sweep(network(), out=tmp_path / "out", jobs=1, ratio=[0.25, 0.5], evaluate=size, save_best=True)
    with open(tmp_path / "out/sweep.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["target"] for line in lines] == ["original", "ratio 0.25", "ratio 0.5"]
    assert [float(line["score"]) for line in lines[1:]] == [row.parameters for row in found.rows]
    assert json.loads((tmp_path / "out/sweep.json").read_text())["rows"][0]["target"] == "ratio 0.25"
    small = nm.load(tmp_path / "out/best/ratio-0.5", build=lambda: nn.Sequential(*network().model))
    assert size(small) == found.rows[1].parameters
    nm.sweep(network(), out=tmp_path / "out", jobs=1, ratio=[0.25, 0.5], evaluate=size, save_best=True)


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[None]:
    """One entry for every call of a function from now on."""
    calls: list[None] = []
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *values: calls.append(None) or function(*values))
    return calls


@pytest.mark.long
def test_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their number, the network is hashed once, and pickled once if there are several."""
    calls = (
        count_calls(monkeypatch, run_cells, "_pickle_shared"),
        count_calls(monkeypatch, scores, "compute_graph_digest"),
    )
    grid = {"ratio": [0.25, 0.5], "merger": ["none", "moments"]}
    one, counts = nm.sweep(network(), jobs=1, **grid), [len(found) for found in calls]
    two = nm.sweep(network(), jobs=2, **grid)
    assert counts == [0, 1] and [len(found) for found in calls] == [1, 2]
    assert [(r.parameters, pytest.approx(r.fidelity)) for r in one.rows] == [
        (r.parameters, r.fidelity) for r in two.rows
    ]


KILLED = """
import os, sys, time, torch, neuron_merging as nm
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 24), torch.nn.ReLU(), torch.nn.Linear(24, 2)).eval()

def evaluate(model):
    size = sum(p.numel() for p in model.parameters())
    with open("notes", "a") as notes:
        notes.write(f"{size}\\n")
    time.sleep(float(sys.argv[1]))
    return float(size)

ratios = [i / 24 for i in range(1, 7)]
print(len(nm.sweep(net, torch.zeros(1, 4), out="out", ratio=ratios, evaluate=evaluate, jobs=1).rows))
"""


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="there is no such signal")
def test_a_sweep_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(KILLED)
    options = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen([sys.executable, "sweep.py", "0.3"], **options)
    notes = tmp_path / "notes"
    while run.poll() is None and (not notes.exists() or len(notes.read_text().splitlines()) < 3):
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    kept = len(list((tmp_path / "out/cells").glob("*.json")))
    assert 2 <= kept < 7 and not (tmp_path / "out/sweep.csv").exists()
    done = subprocess.run([sys.executable, "sweep.py", "0"], stdout=subprocess.PIPE, check=True, **options)
    assert done.stdout == "6\n"
    asked = notes.read_text().splitlines()
    assert len(set(asked)) == 7 and len(asked) <= 8 and asked.count(asked[0]) == asked.count(asked[1]) == 1


def test_what_one_cell_cannot_do_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    found = nm.sweep(network(), jobs=1, budget=[{"params": 0.7}, {"params": "0.003k"}])
    good, bad = found.rows
    assert good.fidelity and not good.refused
    assert "cannot be met" in bad.refused and bad.parameters is None and list(found.best) == ["params 70%"]
    assert "refused" in str(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "no combination to run"),
        ({"ratio": 1.5}, "ratio 1.5"),
        ({"budget": {"gold": 1}}, "no budget of 'gold'"),
        ({"ratio": 0.5, "merger": ["none", "nonsense"]}, "nonsense"),
        ({"ratio": 0.5, "criterion": ["nonsense"]}, "nonsense"),
        ({"ratio": 0.5, "jobs": 0}, "0 processes"),
        ({"ratio": 0.5, "save_best": True}, "no folder"),
        ({"ratio": 0.5, "evaluate": lambda model: float("nan"), "jobs": 1}, "returned nan"),
        pytest.param(
            {"ratio": 0.5, "evaluate": lambda model: 1 / 0, "jobs": 2}, "ZeroDivisionError", marks=pytest.mark.long
        ),
        ({"ratio": 0.5, "evaluate": lambda model: 1 / 0, "jobs": 1}, "ZeroDivisionError"),
        ({"ratio": 0.5, "evaluate": lambda model: "good", "jobs": 1}, "not a number"),
    ],
)
def test_bad_requests_are_one_clear_error(options: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(nm.MergingError, match=said):
        nm.sweep(network(), **options)  # type: ignore[arg-type]


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(nm.MergingError, match="something else"):
        nm.sweep(network(), out=tmp_path, ratio=0.5, jobs=1)
    with pytest.raises(nm.MergingError, match="that is a file"):
        nm.sweep(network(), out=tmp_path / "notes.txt", ratio=0.5, jobs=1)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_goals() -> None:
    both = expand_targets({"macs": [0.5, 0.9], "params": "1k"})
    assert [name for name, _ in both] == ["macs 50%, params 1k", "macs 90%, params 1k"]
    assert [name for name, _ in expand_targets([0.5, {"params": 0.25}])] == ["macs 50%", "params 25%"]


def measure_speed(model: nn.Module) -> float:
    return float(size(model))


measure_speed.timed = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "budget", [{"latency": "50%"}, {"latency@onnxruntime": "5ms"}, {"latency@torch": "50%"}], ids=str
)
@pytest.mark.parametrize("jobs", [None, 4])
def test_what_is_timed_runs_alone(budget: dict[str, str], jobs: int | None) -> None:
    trials = build_trials(expand_targets([budget, {"macs": "50%"}]), ["l2"], ["none"], CompressConfig())
    assert create_executor(trials, jobs, None) == TaskExecutor(1)
    with pytest.raises(nm.MergingError, match="distorts the measured times"):
        create_executor(trials, jobs, "tcp://localhost:8786")


def test_a_score_that_times_runs_alone() -> None:
    trials = build_trials(expand_targets([0.5, 0.7]), ["l2"], ["none"], CompressConfig())
    assert create_executor(trials, 4, None, measure_speed) == TaskExecutor(1)
    assert create_executor(trials, 4, None, size) == TaskExecutor(4)


def test_an_analysis_goes_to_another_process_whole() -> None:
    again = cloudpickle.loads(cloudpickle.dumps(network()))
    one, two = (nm.compress(analysis, ratio=0.5).model.state_dict() for analysis in (network(), again))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert run_cells.fingerprint_engine() == run_cells.fingerprint_engine.__wrapped__()
