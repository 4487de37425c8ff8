"""Weights go to the disk and come back without a second copy of them in memory."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.models import state_dicts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="getrusage is not on Windows")
def test_saving_and_loading_hold_one_copy_of_the_weights() -> None:
    """Measured from a small process: a child's peak is at least what its parent held when it was started."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/memory.py"), "120"], capture_output=True, text=True, check=False
    )
    found = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert set(found) == {"save", "load", "checkpoint"}, done.stderr
    assert all(0.9 < ratio <= 1.3 for ratio in found.values()), found


def test_what_can_be_stored_as_it_is_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_copy(*arguments: object, **options: object) -> Tensor:
        raise AssertionError("copied")

    model = nn.Linear(4, 4)
    monkeypatch.setattr(Tensor, "clone", no_copy)
    state_dicts.write_safetensors(tmp_path / "w", model.state_dict(keep_vars=True))


class Awkward(nn.Module):
    """Every way in which tensors share memory or lie scattered in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.b.weight = nn.Parameter(self.b.weight.detach().t())
        self.register_buffer("whole", torch.arange(6.0))
        self.register_buffer("part", self.whole[:3])
        self.register_buffer("again", self.whole)
        self.register_buffer("wide", torch.ones(1).expand(3))
        self.register_buffer("passing", torch.arange(3.0), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.zeros(0))
        self.plain = torch.full((3,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.b(self.a(x).relu()).relu())
        return y * self.plain + self.part + self.wide + self.passing + self.whole[:3] + self.again[3:]


def test_shared_scattered_and_transient_tensors_come_back(tmp_path: Path) -> None:
    x = torch.randn(2, 6)
    small = nm.compress(Awkward(), x, merger="none")
    small.save(tmp_path / "small")
    again = nm.load(tmp_path / "small", build=Awkward)
    assert torch.equal(again(x), small.model(x))
    assert again.again is again.whole
    assert "passing" not in again.state_dict()
    assert not any(tensor.is_meta for tensor in (*again.parameters(), *again.buffers(), again.plain))
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_a_buffer_that_the_folder_does_not_have_keeps_its_value(tmp_path: Path) -> None:
    def build(more: bool = True) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        if more:
            model[0].register_buffer("later", torch.ones(2), persistent=False)
        return model

    nm.compress(build(more=False), torch.randn(2, 6), merger="none").save(tmp_path / "small")
    assert torch.equal(nm.load(tmp_path / "small", build=build)[0].later, torch.ones(2))


def test_channels_last_weights_come_back(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)

    x = torch.randn(1, 3, 8, 8)
    small = nm.compress(build(), x, merger="none")
    small.save(tmp_path / "small")
    assert torch.allclose(nm.load(tmp_path / "small", build=build)(x), small.model.eval()(x), atol=1e-6)


def test_built_in_networks_are_loaded_without_random_weights_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from neuron_merging import models
    from neuron_merging.checkpoint import save_folder
    from neuron_merging.checkpoint.recipe import Recipe
    from neuron_merging.models import sources

    small = nm.compress(models.create_network("lenet-300-100"), torch.zeros(1, 1, 28, 28), merger="none")
    save_folder.save(small, tmp_path / "small", recipe=Recipe(model="lenet-300-100"))
    made: list[nn.Module] = []
    right = sources.build_from_source
    monkeypatch.setattr(sources, "build_from_source", lambda *a, **k: made.append(right(*a, **k)) or made[-1])
    nm.load(tmp_path / "small")
    assert all(parameter.is_meta for parameter in made[0].parameters())


def two_layers(width: int) -> nm.Compressed:
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    return nm.compress(model, torch.randn(2, 6), merger="none")


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files there")
def test_a_full_disk_in_the_middle_of_the_weights_leaves_the_old_folder(tmp_path: Path) -> None:
    from tests.full_disk import no_large_files

    place, large = tmp_path / "small", two_layers(12_000)
    two_layers(8).save(place)
    before = (place / "model.safetensors").read_bytes()
    with no_large_files(), pytest.raises(OSError) as failed:
        large.save(place, overwrite=True)
    assert failed.value.errno == errno.EFBIG and Path(failed.value.filename).name == "model.safetensors"
    assert (place / "model.safetensors").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["small"]


def test_the_sums_are_those_of_the_files(tmp_path: Path) -> None:
    import hashlib

    from neuron_merging.checkpoint import load_folder

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    nm.compress(model, torch.randn(2, 6), merger="none").save(tmp_path / "small")
    manifest = load_folder.verify_folder(tmp_path / "small")
    sums = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in (tmp_path / "small").iterdir()}
    assert manifest.files == {
        name: sums[name] for name in ("model.safetensors", "figures.json", "recipe.yaml", "README.md")
    }
    assert len(safetensors.torch.load_file(tmp_path / "small/model.safetensors")) == 4
