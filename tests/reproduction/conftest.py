"""The paper's names stand for tiny networks, and all data is in miniature."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from neuron_merging import models
from neuron_merging.graph.user_code import load_plugins
from neuron_merging.reproduction import datasets, experiments, run
from neuron_merging.reproduction.measurements import PaperCheckpoint
from tests.reproduction.tiny import IMAGES, TINY, save_network


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with all data sets and all of the paper's files, in miniature."""
    folder = tmp_path_factory.mktemp("data")
    pick = np.random.default_rng(0)
    labels = (np.arange(IMAGES) % 10).astype(np.uint8)
    pixels = pick.integers(0, 256, (IMAGES, 28, 28), dtype=np.uint8)
    sizes = b"".join(size.to_bytes(4, "big") for size in pixels.shape)
    (folder / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + pixels.tobytes())
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + labels.tobytes())
    for name in ("cifar10_test", "cifar10_train_2k", "cifar100_test"):
        x = pick.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", x=x, y=labels)
    for i in range(4):
        place = folder / "val" / f"n0{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pick.integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(place / f"{i}.png")
    for seed, name in enumerate(experiments.WEIGHT_FILES):
        save_network(name, folder / experiments.WEIGHT_FILES[name][0], seed)
    return folder


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The paper's names stand for tiny networks, and nothing is found outside the data folder given."""
    load_plugins()  # before: it registers the networks themselves
    for name, spec in TINY.items():
        monkeypatch.setitem(models.NETWORKS, name, spec)
    monkeypatch.delenv("NEURON_MERGING_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(datasets, "_FASHION_MNIST", replace(datasets._FASHION_MNIST, system_folders=()))
    monkeypatch.setitem(datasets.DATASET_SPECS, "fashion-mnist", datasets._FASHION_MNIST)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The trials that were really measured."""
    seen: list[str] = []
    real = run.MEASURE_FUNCTIONS["score"]

    def counting(checkpoint: PaperCheckpoint, panel: Any, trial: Any) -> Any:
        result = real(checkpoint, panel, trial)
        seen.append(str(trial))
        return result

    monkeypatch.setitem(run.MEASURE_FUNCTIONS, "score", counting)
    return seen
