"""A failed allocation raises one clear error, and is never taken for a property of the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.cli import app
from neuron_merging.errors import MemoryExhausted
from neuron_merging.graph import process_state
from neuron_merging.graph.graph import Node

FULL = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: you tried to allocate 10 bytes."


def trained() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 3)]
    net, x = nn.Sequential(*layers), torch.randn(4, 3, 6, 6)
    net(x)
    return net.eval(), x[:1]


def fail_after(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, calls: int) -> None:
    """Let the memory be full at one call of a method."""
    original: Callable[..., Any] = getattr(kind, name)
    left = [calls]

    def run(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError(FULL)
        return original(*args, **kwargs)

    monkeypatch.setattr(kind, name, run)


@pytest.mark.parametrize(("kind", "name"), [(Node, "compute"), (nn.Linear, "forward")])
@pytest.mark.parametrize("calls", [1, 2, 5, 8, 13, 21, 34, 55])
def test_a_full_memory_is_an_error_or_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, calls: int
) -> None:
    monkeypatch.setenv("NEURON_MERGING_CACHE", "")
    net, x = trained()
    expected = nm.compress(net, x, ratio=0.5, effort="fast")
    fail_after(monkeypatch, kind, name, calls)
    try:
        found = nm.compress(net, x, ratio=0.5, effort="fast")
    except MemoryExhausted as error:
        assert "memory is not enough" in str(error) and "smaller example" in str(error)
    else:
        assert repr(found) == repr(expected)
        assert all(
            torch.equal(a, b) for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True)
        )


def test_the_command_line_says_it_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fail_after(monkeypatch, nn.Linear, "forward", 3)
    assert app.main(["compress", "lenet-300-100", "out", "--ratio", "0.5", "--effort", "fast", "--no-report"]) == 2
    assert "memory is not enough" in capsys.readouterr().err and not Path("out").exists()


def test_freed_memory_is_kept_only_inside_of_the_outermost_use(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(process_state, "_set_malloc_thresholds", seen.append)
    with pytest.raises(ValueError), process_state.reuse_freed_memory(), process_state.reuse_freed_memory():
        assert seen == [process_state.KEPT_BYTES]
        raise ValueError
    assert seen == [process_state.KEPT_BYTES, process_state.USUAL_BYTES]
