"""The verdict on the command line: first where it is bad, an exit code where it is required, in all that is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import neuron_merging as nm
from neuron_merging.cli import app
from neuron_merging.models import sources

NETS = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))

class Whole(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.b(self.a(x).relu())

def batches():
    pick = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield torch.randn(32, 1, 8, 8, generator=pick), torch.randint(10, (32,), generator=pick)

def steps(model, batches):
    return sum(len(x) for x, _ in batches) / 96 - 0.01 * (12 - model[0].out_channels)

def nothing(model):
    return float("nan")
"""
SMALL = ("nets:small", "--input", "1,1,8,8")


@pytest.fixture(autouse=True)
def here(folder_with: Callable[[str], Path]) -> Path:
    return folder_with(NETS)


def test_a_bad_result_is_told_first_and_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", *SMALL, "out", "--ratio", "0.9", "--merger", "none"]) == 0
    said = capsys.readouterr()
    warning = "WARNING: its outputs are far from the original's"
    assert warning in said.err and said.err.index(warning) < said.err.index("written to out")
    assert Path("out/README.md").read_text().splitlines()[2].startswith(f"> **{warning}")
    page = Path("out/report.html").read_text()
    assert 'class="tile verdict warning"' in page and 'role="alert"' in page and "64 synthetic images, no data" in page
    assert app.main(["compress", *SMALL, "again", "--ratio", "0.9", "--merger", "none", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert verdict["level"] == "warning" and 0 <= verdict["fidelity"] < 0.6 and verdict["culprits"]
    assert verdict["inputs"] == "64 synthetic images" and verdict["data"] is False


def test_what_is_required_is_an_exit_code_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", *SMALL, "out", "--ratio", "0.9", "--require", "95%"]) == 6
    said = capsys.readouterr()
    assert not Path("out").exists() and said.out == "" and "0.95 is required" in said.err
    assert app.main(["compress", *SMALL, "out", "--ratio", "0.1", "--require", "0.01", "--no-report"]) == 0
    kept = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert kept["require"] == "0.01"


def test_a_metric_and_data_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("x.npz", x=np.random.default_rng(0).normal(size=(40, 1, 8, 8)).astype(np.float32))
    flags = ["--eval", "nets:batches", "--metric", "nets:steps", "--max-loss", "4%", "--calibrate", "x.npz"]
    assert app.main(["compress", *SMALL, "out", *flags, "--json", "--no-report"]) == 0
    found = json.loads(capsys.readouterr().out)
    before, after = found["verdict"]["score"]
    assert before == 1 and 0.96 <= after < 1 and found["verdict"]["data"] and found["verdict"]["accuracy"]
    kept = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert (
        kept["eval"] == "nets:batches"
        and kept["max_loss"] == "4%"
        and kept["calibrate"] == str(Path("x.npz").resolve())
    )
    assert app.main(["compress", *SMALL, "again", "--recipe", "out/recipe.yaml", "--no-report"]) == 2
    assert "would import nets" in capsys.readouterr().err
    assert app.main(["compress", *SMALL, "again", "--recipe", "out/recipe.yaml", "--no-report", "--trust"]) == 0
    assert app.main(["report", "out", "--trust", "--to", "page.html"]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--metric", "nets:nothing"), "returned nan"),
        (("--metric", "nets:batchez"), "Did you mean batches"),
        (("--metric", "steps"), "not package.module:function"),
        (("--max-loss", "lots"), "Write 0.01 or 1%"),
        (("--max-loss", "0.1", "--budget", "macs=50%"), "a largest loss cannot both be given"),
        (("--eval", "no-such-folder"), "no folder, no file of arrays and no data set"),
        (("--eval", "nets:steps"), "raised TypeError"),
        (("--eval", "x.npz"), "does not take a batch of (5, 3)"),
        (("--eval", "x.npz", "--mean", "a,b", "--std", "1"), "not a list of numbers"),
    ],
)
def test_what_cannot_be_judged_writes_nothing(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    np.savez("x.npz", x=np.zeros((5, 3), np.float32))
    assert app.main(["compress", *SMALL, "out", *flags]) in (2, 3)
    said = capsys.readouterr()
    assert words in said.err and said.out == "" and not Path("out").exists()


def test_a_folder_saved_from_python_opens_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = sources.build_from_source("nets:Whole", {})
    small = nm.compress(model, torch.zeros(1, 4), ratio={"a": 0.25}, merger=nm.Cosine(threshold=0.2))
    small.save("out")
    kept = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert kept["model"] == "nets:Whole" and kept["input"] == ["1,4"] and kept["layer"] == {"a": 0.25}
    assert kept["merger"] == "cosine:threshold=0.2" and kept["ratio"] == 0.0
    assert app.main(["verify", "out", "--trust"]) == 0
    assert nm.load("out", trust=True).a.out_features == 9
    capsys.readouterr()
    assert app.main(["compress", "nets:Whole", "again", "--recipe", "out/recipe.yaml", "--no-report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["after"] == 9
