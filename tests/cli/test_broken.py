"""Disks that are full, folders that are read-only, processes that are killed: one clear line, nothing half-written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import neuron_merging as nm
from neuron_merging import atomic, models, pipeline
from neuron_merging.cli import app
from neuron_merging.onnx import export
from tests.full_disk import no_large_files

NETS = """
import torch
from torch import nn

def sick():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.constant_(model[2].weight, float("nan"))
    return model

class Talking(nn.Module):
    def __init__(self):
        super().__init__()
        print("building")
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        print("running")
        return self.b(self.a(x).relu())

def leaving():
    raise SystemExit(0)
"""


@pytest.fixture(autouse=True)
def here(folder_with: Callable[[str], Path]) -> Path:
    return folder_with(NETS)


SLOW_DISK = """
import os, sys, time
fsync = os.fsync
os.fsync = lambda stream: (time.sleep(0.3), fsync(stream))
from neuron_merging.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def started(*arguments: str, slow: bool = False) -> subprocess.Popen[str]:
    """The command line as a user runs it; on a slow disk, there is time to see it write."""
    return subprocess.Popen(
        [sys.executable, *(("-c", SLOW_DISK) if slow else ("-m", "neuron_merging")), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def left() -> set[str]:
    return set(os.listdir()) - {"nets.py", "__pycache__"}


def fails_on_a_full_disk(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line that the command writes."""
    capsys.readouterr()
    with no_large_files():
        assert app.main(arguments) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err and said.out == "", said
    return said.err.splitlines()[-1]


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk(existing: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if existing:
        assert app.main(["compress", "lenet-300-100", "out", "--no-report"]) == 0
    arguments = ("compress", "lenet-300-100", "out", "--overwrite", "--no-report", "--ratio", "0.25")
    said = fails_on_a_full_disk(capsys, *arguments)
    assert said.startswith("error: ") and "new/model.safetensors" in said
    assert left() == ({"out"} if existing else set())
    if existing:
        assert nm.load("out").ip1.out_features == 150
        assert app.main(["verify", "out"]) == 0


@pytest.mark.parametrize("target", ["small", "small.onnx", "small.pt2"])
def test_a_full_disk_is_noticed_before_the_work(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*arguments: object, **options: object) -> None:
        raise AssertionError("the work has begun")

    assert app.main(["compress", "lenet-300-100", "out", "--no-report"]) == 0
    monkeypatch.setattr(pipeline, "compress_analysis", work)
    monkeypatch.setattr(pipeline, "compress_with_plan", work)
    monkeypatch.setattr(export, "_run_torch_export", work)
    commands = [["compress", "lenet-300-100", target], ["apply", "out", "lenet-300-100", target]]
    commands += [["export", "out", target]] if "." in target else []
    for command in commands:
        monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=2_100_000))
        assert app.main(command) == 2
        assert "the disk has 2.1 MB left" in capsys.readouterr().err and left() == {"out"}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**9))
    with pytest.raises(AssertionError, match="the work has begun"):
        app.main(commands[0])


@pytest.mark.parametrize("target", ["model.onnx", "model.pt2"])
def test_a_full_disk_while_exporting(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", "lenet-300-100", "out", "--no-report"]) == 0
    Path(target).write_text("the old one")
    said = fails_on_a_full_disk(capsys, "export", "out", target, "--overwrite")
    assert said.startswith("error: ") and target in said
    assert left() == {"out", target} and Path(target).read_text() == "the old one"


def test_a_read_only_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    assert app.main(["compress", "lenet-300-100", "out", "--no-report"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(atomic.tempfile, "TemporaryFile", refuses)
    for arguments in (
        ["compress", "lenet-300-100", "a/b"],
        ["export", "out", "x.onnx"],
        ["report", "out", "--to", "p"],
    ):
        assert app.main(arguments) == 1
        assert "nothing can be written there: Permission denied (at " in capsys.readouterr().err
    assert left() == {"out"}


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", "lenet-300-100", "out", "--no-report"]) == 0
    capsys.readouterr()
    for arguments in (["export", "out", "no/x.onnx"], ["report", "out", "--to", "no/p.html"]):
        assert app.main(arguments) == 2
        assert "there is no such folder" in capsys.readouterr().err
    for command in (["verify"], ["report"], ["bench"]):
        assert app.main([*command, "nowhere"]) == 3
    assert left() == {"out"}


def test_weights_with_nan(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect", "nets:sick"], ["compress", "nets:sick", "out"]):
        assert app.main([*command, "--input", "1,4"]) == 3
        said = capsys.readouterr()
        assert said.out == "" and "NaN or infinity (at 2.weight)" in said.err
    assert left() == set()


def test_what_a_network_prints_is_no_part_of_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["inspect", "nets:Talking", "--input", "1,4"],
        ["compress", "nets:Talking", "out", "--input", "1,4"],
        ["verify", "out", "--trust"],
        ["report", "out", "--trust"],
        ["export", "out", "out.onnx", "--trust"],
        ["bench", "out", "--runs", "2", "--trust"],
    ):
        assert app.main(arguments) == 0
        said = capsys.readouterr()
        assert "│" in said.out and "running" not in said.out and "building" not in said.out


def test_a_network_that_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", "nets:leaving", "out", "--input", "1,4"]) == 3
    assert "SystemExit: 0 (at nets.py:" in capsys.readouterr().err


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)


@pytest.mark.long
def test_kill_in_the_middle_of_writing() -> None:
    torch.save(models.create_network("lenet-300-100").state_dict(), "weights.pt")
    arguments = ("compress", "lenet-300-100", "out", "--weights", "weights.pt", "--no-report", "--overwrite")
    assert app.main([*arguments, "--ratio", "0.5"]) == 0
    process = started(*arguments, "--ratio", "0.2", slow=True)
    wait_for(lambda: any(Path().glob(".out.neuron-merging-*/new")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert nm.load("out").ip1.out_features in (150, 240)
    assert app.main(["verify", "out"]) == 0
    assert app.main([*arguments, "--ratio", "0.9"]) == 0
    assert nm.load("out").ip1.out_features == 30
    assert left() == {"out", "weights.pt"}


@pytest.mark.long
def test_ctrl_c_while_the_page_is_made() -> None:
    process = started("compress", "lenet-300-100", "out", "--merger", "none", slow=True)
    assert process.stderr is not None
    while "writing the page" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, said = process.communicate()
    assert (process.returncode, out, said) == (130, "", "error: interrupted\n")
    assert left() == set()


@pytest.mark.long
def test_two_commands_write_one_folder() -> None:
    both = [
        started("compress", "lenet-300-100", "out", "--no-report", "--overwrite", "--ratio", r) for r in ("0.5", "0.2")
    ]
    for process in both:
        _, said = process.communicate()
        assert process.returncode == 0, said
    assert nm.load("out").ip1.out_features in (150, 240)
    assert app.main(["verify", "out"]) == 0
    assert left() == {"out"}


@pytest.mark.long
def test_the_second_of_two_commands_finds_the_folder() -> None:
    both = [started("compress", "lenet-300-100", "out", "--no-report", "--ratio", ratio) for ratio in ("0.5", "0.2")]
    codes = []
    for process in both:
        process.communicate()
        codes.append(process.returncode)
    assert sorted(codes) == [0, 2]
    assert app.main(["verify", "out"]) == 0
