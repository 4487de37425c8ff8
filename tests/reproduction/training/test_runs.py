"""The folder of a run, and going on to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from neuron_merging.errors import MergingError
from neuron_merging.reproduction.training import run_state
from neuron_merging.reproduction.training.train import train
from tests.reproduction.training.stripes import SHORT, Net, _stop_after, same, stripes, weights


def test_the_folder_explains_itself(tmp_path: Path) -> None:
    done = train(Net(), stripes(64), SHORT, test=stripes(16), out=tmp_path / "run", about={"network": "x"}, quiet=True)
    files = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert files == ["checkpoint.safetensors", "log.csv", "model.safetensors", "training.yaml"]
    assert same(load_file(tmp_path / "run" / "model.safetensors"), weights(done.model))
    settings = yaml.safe_load((tmp_path / "run" / "training.yaml").read_text())
    assert settings["network"] == "x" and settings["images"] == 64 and settings["milestones"] == [2, 3]
    lines = (tmp_path / "run" / "log.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[0].startswith("epoch,lr,loss,accuracy,test_accuracy")


def _stop_in_step(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    count, step = [0], torch.optim.SGD.step

    def stepping(self: torch.optim.SGD, closure: None = None) -> None:
        count[0] += 1
        if count[0] > steps:
            raise KeyboardInterrupt
        step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", stepping)


@pytest.mark.parametrize(
    "stop",
    [
        lambda patch: _stop_after(patch, 1),
        lambda patch: _stop_after(patch, 3),
        lambda patch: _stop_in_step(patch, 2),  # in the first epoch: there is no checkpoint yet
        lambda patch: _stop_in_step(patch, 10),  # in the middle of the third
    ],
    ids=["after 1", "after 3", "in 1", "in 3"],
)
def test_a_resumed_run_ends_with_the_same_bits(
    stop: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images, test = Net(), stripes(64), stripes(32, seed=1)
    whole = train(model, images, SHORT, test=test, out=tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop(patch)
        with pytest.raises(KeyboardInterrupt):
            train(model, images, SHORT, test=test, out=tmp_path / "cut", quiet=True)
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    assert not [file for file in (tmp_path / "cut").iterdir() if file.name.startswith(".")]
    resumed = train(model, images, SHORT, test=test, out=tmp_path / "cut", resume=True, quiet=True)
    for name in ("model.safetensors", "checkpoint.safetensors"):
        assert same(load_file(tmp_path / "whole" / name), load_file(tmp_path / "cut" / name))
    assert [replace(line, seconds=0) for line in whole.log] == [replace(line, seconds=0) for line in resumed.log]


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    model, images = Net(), stripes(64)
    first = train(model, images, SHORT, out=tmp_path, quiet=True)
    again = train(model, images, SHORT, out=tmp_path, resume=True, quiet=True)
    assert same(weights(first.model), weights(again.model)) and first.log == again.log


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    model, images, out = Net(), stripes(64), tmp_path / "run"
    train(model, images, SHORT, out=out, about={"network": "a"}, quiet=True)

    def refused(words: str, **changed: object) -> None:
        given = {"images": images, "recipe": SHORT, "about": {"network": "a"}, "resume": True, "out": out} | changed
        with pytest.raises(MergingError, match=words):
            train(model, quiet=True, **given)  # type: ignore[arg-type]

    refused(r"lr was 0.05 and is now 0.1.*same settings", recipe=replace(SHORT, lr=0.1))
    refused("network was 'a' and is now 'b'", about={"network": "b"})
    refused("images was 64 and is now 32", images=images.head(32))
    refused("images_sha256 was", images=stripes(64, seed=5))
    refused("already contains a run.*--resume", resume=False)
    refused("no run to resume", out=None)
    file = out / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused("checkpoint is damaged")
    file.unlink()
    refused("contains a finished run")
    (tmp_path / "letter.txt").write_text("not ours")
    refused("something else is there", out=tmp_path)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(Net(), stripes(64), SHORT, out=out, quiet=True)
    with run_state.lock_run_folder(out), pytest.raises(MergingError, match="another run is using this folder"):
        train(Net(), stripes(64), SHORT, out=out, resume=True, quiet=True)
    (out / "checkpoint.safetensors").rename(tmp_path / "kept")
    (out / "model.safetensors").unlink()
    before = (out / "training.yaml").read_text()  # now as if the run in it were in its first epoch
    with run_state.lock_run_folder(out), pytest.raises(MergingError, match="another run is using this folder"):
        train(Net(), stripes(32), replace(SHORT, lr=0.01), out=out, quiet=True)
    assert (out / "training.yaml").read_text() == before
    (tmp_path / "kept").rename(out / "checkpoint.safetensors")
    train(Net(), stripes(64), SHORT, out=out, resume=True, quiet=True)
