"""Fixtures and helpers that all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Container, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.inputs import input_sets, synthetic
from tests.merging.fitting import Stream
from tools import torchvision_operators

os.environ["XDG_CONFIG_HOME"] = os.devnull  # no signing key: folders that tests write are as untrusted as a stranger's
os.environ["NEURON_MERGING_CACHE"] = ""  # no disk cache: a test must not depend on inputs that another one synthesised
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def mark_long(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Parameters of a test: `make test` takes those in `quick`, `make test-long` the others."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.long) for value in values]


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests out of every later garbage collection."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def use_one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed_torch() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def synthesise_few_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthesise few inputs in few steps: most tests do not depend on how good the inputs are."""
    for efforts in (input_sets.FIT_EFFORTS, input_sets.HELDOUT_EFFORTS):
        monkeypatch.setitem(efforts, "normal", input_sets.SynthesisEffort(32, 32, 8, 2**30, 2**50))


@pytest.fixture
def folder_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that writes source code to nets.py in a temporary folder and changes into that folder."""

    def put(networks: str) -> Path:
        (tmp_path / "nets.py").write_text(networks)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, "nets", raising=False)
        return tmp_path

    return put


def import_or_fail(zoo: str) -> Any:
    """Import a package of published networks. Fail without it: `make install` installs it."""
    try:
        return import_module(zoo)
    except (ImportError, RuntimeError) as error:
        pytest.fail(f"{zoo} cannot be imported: {error}. `make install` installs torchvision and timm.", pytrace=False)


@pytest.fixture(scope="session")
def declare_vision_operators() -> None:
    """torchvision's models need no compiled operators, but importing it asks for their schemas."""
    torchvision_operators.watch_torchvision_import()


@pytest.fixture(scope="session")
def residual() -> tuple[nn.Module, Tensor]:
    """A network with a residual stream, and the inputs that its batch-norm statistics come from."""
    torch.manual_seed(0)
    model = Stream()
    x = synthetic.draw_dead_leaves(64, (3, 12, 12), torch.Generator().manual_seed(3))
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = None
    model(x)
    return model.eval(), x


@pytest.fixture(scope="session")
def residual_analysis(residual: tuple[nn.Module, Tensor]) -> nm.Analysis:
    """The same network, exported once for all tests of a process."""
    model, x = residual
    return nm.analyse(model, x[:1])


@pytest.fixture
def small_data(tmp_path: Path) -> Path:
    """Files in FashionMNIST's format with 240 training images: each shows a bar, whose height is the class."""
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
