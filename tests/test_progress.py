"""Progress of long work, as it is reported to listeners."""

import io
import logging
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging import progress
from neuron_merging.pipeline import compress
from neuron_merging.progress import listen_to_progress, track_progress

X = torch.randn(4, 6)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def heard(**options: object) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    with listen_to_progress(lambda stage, done, total: found.setdefault(stage, []).append((done, total))):
        nm.compress(network(), X, **options)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("options", "stage", "total"),
    [
        ({}, "fitting layers", 2),
        ({"merger": "none"}, "running the network", 5),
        ({"calibration": [X]}, "fitting layer after layer", 5),
    ],
)
def test_every_stage_is_told_from_nothing_to_all(options: dict[str, object], stage: str, total: int) -> None:
    told = heard(**options)[stage]
    assert told[0] == (0, total) and told[-1] == (total, total)
    assert all(after[0] in (before[0] + 1, 0) for before, after in pairwise(told))


def test_nobody_needs_to_listen_and_the_last_listener_is_forgotten() -> None:
    said: list[str] = []
    with pytest.raises(KeyError), listen_to_progress(lambda stage, done, total: said.append(stage)):
        raise KeyError
    assert list(track_progress("abc", "reading")) == ["a", "b", "c"]
    assert said == []


class Stream(io.StringIO):
    """Stands for the stderr of a notebook."""


def test_notebooks_get_a_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    nm.compress(network(), X)
    assert stream.getvalue() == ""
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    nm.compress(network(), X)
    lines = stream.getvalue().split("\r")
    assert any(line.startswith("compressing: fitting layers 1/2") for line in lines) and lines[-1] == ""
    seen = len(stream.getvalue())
    nm.compress(network(), X, progress=False)
    assert len(stream.getvalue()) == seen


def test_a_terminal_gets_a_bar_if_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    nm.compress(network(), X, progress=True)
    assert "compressing" in stream.getvalue()


def test_stages_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "neuron_merging"):
        nm.compress(network(), X)
    said = [record.getMessage() for record in caplog.records if record.name == "neuron_merging"]
    assert "fitting layers" in said and any("fidelity" in line for line in said)


def test_programs_without_a_terminal_get_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "neuron_merging"):
        nm.compress(network(), X)
    lines = [record.getMessage() for record in caplog.records]
    assert any("fitting layers, 50 % done, about" in line for line in lines)


def test_long_work_is_announced_with_what_fast_would_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Conv2d(8, 4, 3))
    net.train()(torch.randn(8, 3, 12, 12))
    said: list[str] = []
    for seconds in (compress.ANNOUNCED_SECONDS, 0):
        monkeypatch.setattr(compress, "ANNOUNCED_SECONDS", seconds)
        with progress.hear_announcements(said.append):
            nm.compress(net.eval(), torch.randn(1, 3, 12, 12), ratio=0.5)
    assert len(said) == 1 and 'effort="fast" takes about' in said[0]
