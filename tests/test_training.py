"""Training: the paper's recipes, resuming to the bit, several processes, the two commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import networks
from neuron_merging.data import Images
from neuron_merging.errors import MergingError
from neuron_merging.folder import store
from neuron_merging.folder.recipe import Recipe
from neuron_merging.tool.cli import app, main
from neuron_merging.training import runs, settings
from neuron_merging.training.augment import crop_and_flip, shuffle
from neuron_merging.training.settings import TrainingRecipe
from neuron_merging.training.train import train

PAGE = (Path(__file__).parent.parent / "docs" / "training.md").read_text()
SHORT = TrainingRecipe(epochs=4, milestones=(2, 3), lr=0.05, batch=16, crop=1)


def stripes(count: int, seed: int = 0, name: str = "stripes") -> Images:
    """Noise with a bright bar at one of four heights, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 4
    x = torch.randint(0, 120, (count, 1, 8, 8), generator=generator)
    for i, label in enumerate(y.tolist()):
        x[i, 0, 2 * label : 2 * label + 2] += 120
    return Images(x.to(torch.uint8), y, (0.4,), (0.3,), name, 4)


class Net(nn.Sequential):
    """All that could break a resumed run: batch norm's buffers, dropout's chance."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 4),
        )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Recipes


def test_recipe_of_lenet_is_the_papers() -> None:
    recipe = settings.paper("lenet-300-100")
    rates = [recipe.lr_at(epoch) for epoch in range(recipe.epochs)]
    assert len(rates) == 60
    assert rates == pytest.approx([0.1] * 15 + [0.01] * 15 + [0.001] * 15 + [0.0001] * 15)
    assert (recipe.momentum, recipe.weight_decay, recipe.batch) == (0.9, 1e-4, 128)
    assert not recipe.crop and not recipe.flip


@pytest.mark.parametrize("network", ["vgg-16", "resnet-56", "wideresnet-40-4"])
def test_recipe_of_convolutional_networks_is_the_papers(network: str) -> None:
    recipe = settings.paper(network)
    rates = [recipe.lr_at(epoch) for epoch in range(recipe.epochs)]
    assert rates == pytest.approx([0.1] * 100 + [0.01] * 50 + [0.001] * 50)
    assert (recipe.momentum, recipe.weight_decay, recipe.batch) == (0.9, 5e-4, 128)
    assert recipe.crop == 4 and recipe.flip


def test_another_number_of_epochs_moves_the_milestones() -> None:
    assert settings.paper("vgg-16").lasting(8).milestones == (4, 6)
    assert settings.paper("lenet-300-100").lasting(20).milestones == (5, 10, 15)
    assert settings.paper("vgg-16").lasting(1).milestones == ()


@pytest.mark.parametrize(
    "numbers",
    [{"epochs": 0}, {"lr": float("nan")}, {"lr": -1.0}, {"batch": 0}, {"milestones": (5, 3)}, {"decay": 0.5}],
)
def test_recipes_that_cannot_be_meant(numbers: dict[str, float]) -> None:
    with pytest.raises(MergingError, match=next(iter(numbers))):
        TrainingRecipe(**numbers)  # type: ignore[arg-type]


# Augmentation


def test_crop_and_flip_agree_with_one_image_at_a_time() -> None:
    x = torch.randint(0, 256, (20, 3, 6, 5), dtype=torch.uint8)
    drawn = shuffle(20, torch.Generator().manual_seed(1), crop=2, flip=True)
    found = crop_and_flip(x, drawn.shift, drawn.mirror, 2)
    for i in range(20):
        top, left = drawn.shift[i].tolist()
        one = F.pad(x[i], (2, 2, 2, 2))[:, top : top + 6, left : left + 5]
        assert torch.equal(found[i], one.flip(2) if drawn.mirror[i] else one)


def test_chance_is_fair_and_repeatable() -> None:
    first, again = (shuffle(9000, torch.Generator().manual_seed(3), crop=4, flip=True) for _ in range(2))
    assert torch.equal(first.order, again.order) and torch.equal(first.shift, again.shift)
    assert first.order.sort().values.tolist() == list(range(9000))
    assert (first.shift.flatten().bincount(minlength=9).double() / 2000 - 1).abs().max() < 0.1
    assert first.mirror.double().mean().item() == pytest.approx(0.5, abs=0.03)
    plain = shuffle(10, torch.Generator().manual_seed(3))
    assert not plain.shift.any() and not plain.mirror.any()


# Training


def test_steps_are_those_of_sgd_with_momentum_and_weight_decay() -> None:
    images = stripes(24)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    recipe = TrainingRecipe(epochs=3, milestones=(2,), decay=4, lr=0.2, weight_decay=0.01, batch=24, crop=0, flip=False)
    found = weights(train(model, images, recipe, quiet=True).model)
    x, y = next(iter(images.batches(24)))
    w, b = (p.detach().clone().requires_grad_() for p in (model[1].weight, model[1].bias))
    speeds = [torch.zeros_like(w), torch.zeros_like(b)]
    for lr in (0.2, 0.2, 0.05):
        loss = F.cross_entropy(x.flatten(1) @ w.T + b, y)
        for p, g, v in zip((w, b), torch.autograd.grad(loss, (w, b)), speeds, strict=True):
            v.mul_(0.9).add_(g + 0.01 * p.detach())
            p.data -= lr * v
    torch.testing.assert_close(found["1.weight"], w.detach())
    torch.testing.assert_close(found["1.bias"], b.detach())


def test_it_learns_and_leaves_the_callers_things_alone() -> None:
    model, before, chance = Net(), {}, torch.get_rng_state()
    before = weights(model)
    done = train(model, stripes(256), SHORT, test=stripes(128, seed=1), quiet=True)
    assert done.log[-1].test_accuracy is not None and done.log[-1].test_accuracy > 90
    assert done.log[-1].loss < done.log[0].loss and [line.epoch for line in done.log] == [1, 2, 3, 4]
    assert [line.lr for line in done.log] == pytest.approx([0.05, 0.05, 0.005, 0.0005])
    assert same(before, weights(model)) and model.training and not done.model.training
    assert torch.equal(chance, torch.get_rng_state())
    assert all(p.is_contiguous() for p in done.model.parameters())


def test_the_seed_decides() -> None:
    model, images = Net(), stripes(64)
    first, again = (weights(train(model, images, SHORT, quiet=True).model) for _ in range(2))
    torch.manual_seed(99)
    other = weights(train(model, images, replace(SHORT, seed=1), quiet=True).model)
    assert same(first, again) and not same(first, other)


def test_a_last_batch_of_one_image_is_left_out() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    done = train(model, stripes(33), replace(SHORT, epochs=1), quiet=True)
    assert int(done.model[2].num_batches_tracked) == 2  # type: ignore[index]


def test_networks_that_view_their_feature_maps() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8 * 64, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            logits: Tensor = self.fc(x.view(x.shape[0], -1))
            return logits

    assert train(Viewing(), stripes(64), SHORT, quiet=True).log[-1].loss < 1


def test_frozen_parameters_stay() -> None:
    model = Net()
    model[0].weight.requires_grad_(False)
    done = train(model, stripes(64), SHORT, quiet=True)
    assert torch.equal(done.model[0].weight, model[0].weight)  # type: ignore[index]
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(MergingError, match="frozen"):
        train(model, stripes(64), SHORT, quiet=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(99, 4)), "does not take a batch"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), "have 4 classes"),
        (nn.Conv2d(1, 4, 8), r"returns \(2, 4, 1, 1\)"),
    ],
)
def test_networks_that_do_not_fit_the_images(model: nn.Module, words: str) -> None:
    with pytest.raises(MergingError, match=words):
        train(model, stripes(8), SHORT, quiet=True)


def test_a_loss_that_is_not_finite_is_one_error_and_spoils_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(MergingError, match=r"no longer finite.*smaller --lr"):
        train(Net(), stripes(64), replace(SHORT, lr=1e30), out=tmp_path, quiet=True)
    assert not (tmp_path / "model.safetensors").exists() and not (tmp_path / "checkpoint.safetensors").exists()


# The folder, and going on


def test_the_folder_explains_itself(tmp_path: Path) -> None:
    done = train(Net(), stripes(64), SHORT, test=stripes(16), out=tmp_path / "run", about={"network": "x"}, quiet=True)
    files = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert files == ["checkpoint.safetensors", "log.csv", "model.safetensors", "training.yaml"]
    assert same(load_file(tmp_path / "run" / "model.safetensors"), weights(done.model))
    settings = yaml.safe_load((tmp_path / "run" / "training.yaml").read_text())
    assert settings["network"] == "x" and settings["images"] == 64 and settings["milestones"] == [2, 3]
    lines = (tmp_path / "run" / "log.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[0].startswith("epoch,lr,loss,accuracy,test_accuracy")


def _stop_after(monkeypatch: pytest.MonkeyPatch, epochs: int) -> None:
    save = runs.save

    def saving(folder: Path, state: runs.RunState) -> None:
        save(folder, state)
        if len(state.log) == epochs:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs, "save", saving)


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
    refused("has a run already.*--resume", resume=False)
    refused("nothing to go on with", out=None)
    file = out / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused("checkpoint is damaged")
    file.unlink()
    refused("weights of a finished run")
    (tmp_path / "letter.txt").write_text("not ours")
    refused("something else is there", out=tmp_path)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(Net(), stripes(64), SHORT, out=out, quiet=True)
    with runs.claimed(out), pytest.raises(MergingError, match="another run is at work"):
        train(Net(), stripes(64), SHORT, out=out, resume=True, quiet=True)
    (out / "checkpoint.safetensors").rename(tmp_path / "kept")
    (out / "model.safetensors").unlink()
    before = (out / "training.yaml").read_text()  # now as if the run in it were in its first epoch
    with runs.claimed(out), pytest.raises(MergingError, match="another run is at work"):
        train(Net(), stripes(32), replace(SHORT, lr=0.01), out=out, quiet=True)
    assert (out / "training.yaml").read_text() == before
    (tmp_path / "kept").rename(out / "checkpoint.safetensors")
    train(Net(), stripes(64), SHORT, out=out, resume=True, quiet=True)


class Refusing(Net):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such thing")


class Flat(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def test_a_network_that_cannot_be_trained_is_told(tmp_path: Path) -> None:
    with pytest.raises(MergingError, match=r"does not take a batch of.*KeyError"):
        train(Refusing(), stripes(64), SHORT, quiet=True)
    with pytest.raises(MergingError, match=r"does not train on a batch of \(1, 1, 8, 8\).*--batch"):
        train(Flat(), stripes(64), replace(SHORT, batch=1), quiet=True)


def test_gradients_are_there_wherever_it_is_called_from() -> None:
    with torch.no_grad():
        inside = train(Net(), stripes(64), SHORT, quiet=True)
        assert not torch.is_grad_enabled()
    torch.manual_seed(0)
    assert inside.log[-1].loss < inside.log[0].loss


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_have_bounds(seed: int) -> None:
    with pytest.raises(MergingError, match="seed is"):
        TrainingRecipe(seed=seed)


def test_a_run_that_diverges_in_the_last_step_of_an_epoch_leaves_no_checkpoint(tmp_path: Path) -> None:
    once = replace(SHORT, lr=1e38, batch=64)
    with pytest.raises(MergingError, match="no longer finite"):
        train(Net(), stripes(64), once, test=stripes(32), out=tmp_path, quiet=True)
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_every_image_is_seen_in_batches_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    real = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda x, y, **more: seen.append(len(y)) or real(x, y, **more))
    train(plain, stripes(5), TrainingRecipe(epochs=1, milestones=(), batch=1, crop=0), quiet=True)
    assert seen == [1] * 5
    seen.clear()
    train(plain, stripes(5), TrainingRecipe(epochs=1, milestones=(), batch=2, crop=0), quiet=True)
    assert seen == [2, 2]


# Several processes

SCRIPT = """
import sys
import torch
from safetensors.torch import save_file
sys.path.insert(0, sys.argv[1])
from test_training import Net, SHORT, stripes
from neuron_merging import processes
from neuron_merging.training import train

team = processes.current()
torch.manual_seed(team.rank)  # every process starts from other weights: the first one's must count
done = train(Net(), stripes(250), SHORT, test=stripes(101, seed=1), out=sys.argv[2] + "/run", processes=team)
save_file(done.model.state_dict(), f"{sys.argv[2]}/rank{team.rank}of{team.count}.safetensors")
open(f"{sys.argv[2]}/score{team.rank}", "w").write(str(done.log[-1].test_accuracy))
"""


def _launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("accelerate")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    port = ["--main_process_port", "0"]
    return subprocess.run([*launcher, *port, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_two_processes_learn_and_end_with_the_same_network(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = _launch(str(script), str(Path(__file__).parent), str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    first, second = (load_file(tmp_path / f"rank{rank}of2.safetensors") for rank in (0, 1))
    assert same(first, second)
    assert same(first, load_file(tmp_path / "run" / "model.safetensors"))
    scores = [float((tmp_path / f"score{rank}").read_text()) for rank in (0, 1)]
    assert scores[0] == scores[1] > 90
    assert ran.stderr.count("epoch 4/4") == 1


def test_two_processes_take_the_steps_of_one(tmp_path: Path, small_data: Path) -> None:
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


# The commands


@pytest.fixture
def small_data(tmp_path: Path) -> Path:
    """FashionMNIST's files with 240 images in place of 60,000: a bar at one of ten heights."""
    generator, folder = np.random.default_rng(0), tmp_path / "data"
    folder.mkdir()
    for stem, count in (("train", 240), ("t10k", 60)):
        y = np.arange(count, dtype=np.uint8) % 10
        x = generator.integers(0, 90, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(x, y, strict=True):
            image[2 * label : 2 * label + 3] += 150
        sizes = b"".join(n.to_bytes(4, "big") for n in (count, 28, 28))
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + x.tobytes())
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + y.tobytes())
    return folder


def test_train_command(tmp_path: Path, small_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = ["train", "lenet-300-100", "--data", f"fashion-mnist:{small_data}", "--out", str(out), "--json"]
    assert main([*command, "--epochs", "6", "--lr", "0.05", "--batch", "32", "--step", "4", "--seed", "5"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["accuracy"] > 80
    assert "epoch 6/6  lr 0.005" in told.err
    settings = yaml.safe_load((out / "training.yaml").read_text())
    assert settings["milestones"] == [4] and settings["seed"] == 5 and settings["weight_decay"] == 1e-4
    model = networks.build("lenet-300-100")
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
    assert "--resume goes on" in capsys.readouterr().err
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
        (["no-such-network"], "nothing says what to train on"),
        (["lenet-300-100", "--data", "mars"], "no data set 'mars'"),
        (["lenet-300-100", "--data", "fashion-mnist:/mars"], "no such folder"),
        (["resnet-34-imagenet"], "only the validation images are read"),
        (["lenet-300-100", "--device", "meta"], "nothing is computed on"),
        (["lenet-300-100", "--milestones", "3,x"], "3,x"),
        (["lenet-300-100", "--milestones", "3", "--step", "2"], "both say"),
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
    small = nm.compress(networks.build("lenet-300-100"), torch.randn(1, 1, 28, 28), ratio=0.8)
    store.save(small, tmp_path / "small", recipe=Recipe(model="lenet-300-100", ratio=0.8))
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
    assert store.read_plan(out) == store.read_plan(small_network)
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
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "training.md", "exec"), {})
    assert 0 <= float(capsys.readouterr().out) <= 100
    assert (tmp_path / "six-epochs" / "model.safetensors").is_file()
