"""Several processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import neuron_merging as nm
from neuron_merging.cli.app import main
from neuron_merging.errors import MergingError
from neuron_merging.reproduction.training import processes
from neuron_merging.reproduction.training.train import train
from tests.reproduction.training.stripes import SHORT, Net, same, stripes

SCRIPT = """
import sys
import torch
from safetensors.torch import save_file
sys.path.insert(0, sys.argv[1])
from tests.reproduction.training.stripes import SHORT, Net, stripes
from neuron_merging.reproduction.training import processes
from neuron_merging.reproduction.training import train

team = processes.detect_processes()
torch.manual_seed(team.rank)  # every process starts from other weights: the first one's must count
done = train(Net(), stripes(250), SHORT, test=stripes(101, seed=1), out=sys.argv[2] + "/run", processes=team)
save_file(done.model.state_dict(), f"{sys.argv[2]}/rank{team.rank}of{team.count}.safetensors")
open(f"{sys.argv[2]}/score{team.rank}", "w").write(str(done.log[-1].test_accuracy))
"""


def _launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("accelerate")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    port = ["--main_process_port", "0"]
    return subprocess.run([*launcher, *port, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.long
def test_two_processes_learn_and_end_with_the_same_network(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = _launch(str(script), str(Path(__file__).parents[3]), str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    first, second = (load_file(tmp_path / f"rank{rank}of2.safetensors") for rank in (0, 1))
    assert same(first, second)
    assert same(first, load_file(tmp_path / "run" / "model.safetensors"))
    scores = [float((tmp_path / f"score{rank}").read_text()) for rank in (0, 1)]
    assert scores[0] == scores[1] > 90
    assert ran.stderr.count("epoch 4/4") == 1


@pytest.mark.long
def test_two_processes_take_the_steps_of_one(tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the other process has no tiny networks in place of the paper's
    command = ["train", "lenet-300-100", "--data", str(small_data), "--epochs", "2", "--lr", "0.05", "--batch", "50"]
    assert main([*command, "--out", str(tmp_path / "one")]) == 0
    ran = _launch("-m", "neuron_merging", *command, "--out", str(tmp_path / "two"))
    assert ran.returncode == 0, ran.stderr
    assert "in 2 processes" in ran.stderr
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert not same(one, two)  # sums in another order: else there was one process
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-5)


def test_one_process_needs_no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert train(Net(), stripes(32), replace(SHORT, epochs=1), quiet=True).log
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MergingError, match=r"pip install 'neuron-merging\[train\]'"):
        train(Net(), stripes(32), SHORT, quiet=True)


CALIBRATING = """
import sys
import torch
from safetensors.torch import save_file
sys.path.insert(0, sys.argv[1])
from tests.reproduction.training.test_processes import batches, pruned
from neuron_merging.reproduction.training import processes

team = processes.detect_processes()
small = pruned(batches()[team.rank :: team.count], team)
save_file(small.model.state_dict(), f"{sys.argv[2]}/rank{team.rank}of{team.count}.safetensors")
"""


def batches() -> list[torch.Tensor]:
    pick = torch.Generator().manual_seed(3)
    return [torch.randn(40, 6, generator=pick) + i for i in range(6)]


def pruned(calibration: list[torch.Tensor], team: processes.TrainingProcesses | None = None) -> nm.Compressed:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    merger = nm.Calibrated(calibration, processes=team)
    return nm.compress(net, torch.zeros(1, 6), ratio=0.5, criterion="expected-error", merger=merger)


@pytest.mark.long
def test_two_processes_fit_to_the_batches_of_both(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CALIBRATING)
    ran = _launch(str(script), str(Path(__file__).parents[3]), str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    whole, half = pruned(batches()).model.state_dict(), pruned(batches()[::2]).model.state_dict()
    for rank in (0, 1):
        found = load_file(tmp_path / f"rank{rank}of2.safetensors")
        for name, tensor in whole.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    assert any(not torch.allclose(half[name], whole[name], rtol=1e-2) for name in whole)
