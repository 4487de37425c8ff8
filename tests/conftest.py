"""What all tests share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def folder_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a module of networks, nets.py, into the test's folder and goes there."""

    def put(networks: str) -> Path:
        (tmp_path / "nets.py").write_text(networks)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.delitem(sys.modules, "nets", raising=False)
        return tmp_path

    return put


@pytest.fixture(scope="session")
def declare_vision_operators() -> Iterator[None]:
    """torchvision's models need no compiled operators, but importing it asks for their schemas."""
    try:
        import torchvision  # noqa: F401

        yield
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        yield
        del library
