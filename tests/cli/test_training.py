"""The commands train and finetune."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import neuron_merging as nm
from neuron_merging import models
from neuron_merging.checkpoint import load_folder, save_folder
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.cli.app import app, main
from tests.reproduction.training.stripes import _stop_after, same, weights

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


# The commands


def test_train_command(tmp_path: Path, small_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = ["train", "lenet-300-100", "--data", f"fashion-mnist:{small_data}", "--out", str(out), "--json"]
    assert main([*command, "--epochs", "6", "--lr", "0.05", "--batch", "32", "--step", "4", "--seed", "5"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["accuracy"] > 80
    assert "epoch 6/6  lr 0.005" in told.err
    settings = yaml.safe_load((out / "training.yaml").read_text())
    assert settings["milestones"] == [4] and settings["seed"] == 5 and settings["weight_decay"] == 1e-4
    model = models.create_network("lenet-300-100")
    model.load_state_dict(load_file(out / "model.safetensors"))
    assert main(command) == 2
    assert "--resume" in capsys.readouterr().err


def test_train_command_goes_on(
    tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "lenet-300-100", "--data", str(small_data), "--epochs", "3", "--limit", "100"]
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        _stop_after(patch, 1)
        assert main([*command, "--out", str(tmp_path / "cut")]) == 130
    assert "--resume continues" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "cut"), "--resume", "--momentum", "0.5"]) == 2
    assert "momentum was 0.9 and is now 0.5" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "cut"), "--resume"]) == 0
    assert same(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")))


def test_the_networks_classes_follow_the_data(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 4)):
        x, y = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), np.arange(count)
        np.savez(tmp_path / f"cifar100_{split}.npz", x=x, y=y)
    command = ["train", "wideresnet-10-1", "--data", f"cifar-100:{tmp_path}", "--out", str(tmp_path / "run")]
    assert main([*command, "--epochs", "1", "--batch", "4"]) == 0
    assert load_file(tmp_path / "run" / "model.safetensors")["fc.weight"].shape[0] == 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-network"], "no data set to train on"),
        (["lenet-300-100", "--data", "mars"], "no data set 'mars'"),
        (["lenet-300-100", "--data", "fashion-mnist:/mars"], "no such folder"),
        (["resnet-34-imagenet"], "ImageNet's training images are not supported"),
        (["lenet-300-100", "--device", "meta"], "does not compute values"),
        (["lenet-300-100", "--milestones", "3,x"], "3,x"),
        (["lenet-300-100", "--milestones", "3", "--step", "2"], "two learning-rate schedules"),
        (["lenet-300-100", "--limit", "1"], "too few"),
        (["lenet-300-100", "--device", "abacus"], "no device 'abacus'"),
        (["resnet-20", "--data", "fashion-mnist"], "does not take a batch"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    small_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NEURON_MERGING_DATA", str(small_data))
    assert main(["train", *arguments, "--out", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def small_network(tmp_path: Path) -> Path:
    small = nm.compress(models.create_network("lenet-300-100"), torch.randn(1, 1, 28, 28), ratio=0.8)
    save_folder.save(small, tmp_path / "small", recipe=Recipe(model="lenet-300-100", ratio=0.8))
    return tmp_path / "small"


def test_finetune_command(
    tmp_path: Path, small_data: Path, small_network: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, before = tmp_path / "tuned", nm.load(small_network)
    numbers = ["--epochs", "8", "--batch", "16", "--lr", "0.05"]
    command = ["finetune", str(small_network), "--data", str(small_data), *numbers]
    assert main([*command, "--out", str(out), "--json"]) == 0
    first, last = json.loads(capsys.readouterr().out)["accuracy"]
    assert first < 40 and last > 70
    tuned = nm.load(out)
    assert not same(weights(before), weights(tuned))
    assert {k: v.shape for k, v in weights(before).items()} == {k: v.shape for k, v in weights(tuned).items()}
    assert load_folder.read_plan(out) == load_folder.read_plan(small_network)
    assert sorted(file.name for file in out.iterdir()) == sorted(
        ["README.md", "log.csv", "model.safetensors", "plan.json", "recipe.yaml", "training.yaml"]
    )
    assert f"{last:.2f} % after" in (out / "README.md").read_text()
    assert main(["verify", str(out)]) == 0
    assert main([*command, "--out", str(small_network)]) == 2
    assert same(weights(before), weights(nm.load(small_network)))


def test_finetune_goes_on(
    tmp_path: Path, small_data: Path, small_network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["finetune", str(small_network), "--data", str(small_data), "--epochs", "3"]
    assert main(command) == 0
    with monkeypatch.context() as patch:
        _stop_after(patch, 2)
        assert main([*command, "--out", str(tmp_path / "cut")]) == 130
    (tmp_path / "cut" / "notes.txt").write_text("mine")
    assert main([*command, "--out", str(tmp_path / "cut"), "--resume"]) == 0
    assert same(weights(nm.load(f"{small_network}-tuned")), weights(nm.load(tmp_path / "cut")))
    assert (tmp_path / "cut" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "cut" / "checkpoint.safetensors").exists()
    assert main(["verify", str(tmp_path / "cut")]) == 0


# The page


def test_the_pages_commands_run(tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_MERGING_DATA", str(small_data))
    lines = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    commands = [re.split("neuron-merging |neuron_merging ", line)[1] for line in lines if not line.startswith("pip")]
    ran = 0
    for command in map(shlex.split, commands):
        app.parse_args(command, print_error=False, exit_on_error=False)
        if "~" not in "".join(command):
            assert main(command) == 0
            ran += 1
    assert ran == 5 and len(commands) == 10


def test_the_pages_python_runs(
    tmp_path: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_MERGING_DATA", str(small_data))
    block = next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "six-epochs" in text)
    exec(compile(block, "training.md", "exec"), {})
    assert 0 <= float(capsys.readouterr().out) <= 100
    assert (tmp_path / "six-epochs" / "model.safetensors").is_file()
