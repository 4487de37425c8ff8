"""A sweep on a real scheduler with two workers, one of which is killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.sweeps import run_cells

pytest.importorskip("distributed")
SECONDS = 600
"""How long to wait for what must happen on a machine that is busy with other things."""


class Noting:
    """A score that leaves files which tell when it was asked and when it answered.

    A worker's third cell is not answered before a worker was killed.
    """

    def __init__(self, place: Path) -> None:
        self.place = place

    def __call__(self, model: nn.Module) -> float:
        size = sum(p.numel() for p in model.parameters())
        (self.place / f"begun-{size}-{os.getpid()}-{uuid.uuid4().hex}").touch()
        if len(self.begun_by(os.getpid())) >= 3:
            waited((self.place / "killed").exists)
        (self.place / f"done-{size}-{os.getpid()}-{uuid.uuid4().hex}").touch()
        return float(size)

    def begun_by(self, process: int) -> list[Path]:
        return list(self.place.glob(f"begun-*-{process}-*"))


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def waited(condition: object) -> None:
    end = time.monotonic() + SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    file = folder / "scheduler.json"
    with ExitStack() as stack:
        scheduler = ("distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
        stack.enter_context(started(*scheduler))
        waited(file.exists)
        worker = ("distributed.cli.dask_worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-nanny")
        made = [
            stack.enter_context(started(*worker, "--no-dashboard", "--local-directory", str(folder / str(i))))
            for i in range(workers)
        ]
        address = json.loads(file.read_text())["address"]
        yield address, made


def network() -> nm.Analysis:
    net = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))
    return nm.analyse(net.eval(), torch.zeros(1, 4))


@pytest.mark.long
def test_a_worker_that_is_killed_loses_nothing_and_no_cell_is_computed_twice(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    known = network()
    ratios = [i / 24 for i in range(1, 10)]
    with cluster(tmp_path, 2) as (address, workers):
        from distributed import Client

        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=SECONDS)

        score, killed = Noting(notes), []

        def busy() -> list[subprocess.Popen[bytes]]:
            return [worker for worker in workers if len(score.begun_by(worker.pid)) >= 3]

        def kill() -> None:  # of ten cells each worker begins a third, or one of them does all that is left
            waited(lambda: busy() and len(list(notes.glob("done-*"))) == len(list((tmp_path / "out/cells").iterdir())))
            killed.append(busy()[0])
            killed[0].kill()
            killed[0].wait(SECONDS)
            (notes / "killed").touch()

        killer = threading.Thread(target=kill)
        killer.start()
        found = nm.sweep(known, out=tmp_path / "out", ratio=ratios, merger="none", evaluate=score, cluster=address)
        killer.join()
        assert len(killed) == 1 and sum(worker.poll() is None for worker in workers) == 1
    assert [row.parameters for row in found.rows] == [row.score for row in found.rows]
    assert len(set(found.rows)) == len(ratios) and not any(row.refused for row in found.rows)
    assert len(list((tmp_path / "out/cells").iterdir())) == len(ratios) + 1
    finished = [file.name.split("-")[1] for file in notes.glob("done-*")]
    assert len(finished) == len(set(finished)) == len(ratios) + 1
    assert len(list(notes.glob("begun-*"))) == len(finished) + 1  # the one that was on the way
    again = nm.sweep(known, out=tmp_path / "out", ratio=ratios, merger="none", evaluate=score, jobs=1)
    assert again == found and len(list(notes.glob("done-*"))) == len(finished)


def test_a_cluster_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cells, "CLUSTER_TIMEOUT", 1)
    with pytest.raises(nm.MergingError, match=r"no scheduler answers at tcp://127\.0\.0\.1:9"):
        nm.sweep(network(), ratio=[0.5], cluster="tcp://127.0.0.1:9")
    with pytest.raises(nm.MergingError, match="no scheduler answers at nowhere"):
        nm.sweep(network(), ratio=[0.5], cluster="nowhere")


@pytest.mark.long
def test_a_cluster_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cells, "CLUSTER_TIMEOUT", 5)
    with cluster(tmp_path, 0) as (address, _), pytest.raises(nm.MergingError, match="no workers after 5 seconds"):
        nm.sweep(network(), ratio=[0.5], cluster=address)
