"""pool: where many tasks on one network are done: here, in processes of this machine, or on a cluster."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle
import joblib
import numpy as np
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError

from neuron_merging.errors import MergingError, told
from neuron_merging.sweeping.cells import engine

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
PATIENCE = 10
"""Seconds to wait for a scheduler, and for a first worker."""
GOES_ON = "What was measured is kept: the same command goes on from there."


@dataclass(frozen=True)
class Pool:
    """How many tasks run at a time: processes of this machine, or whatever a Dask scheduler has."""

    jobs: int = 1
    cluster: str | None = None

    def each(self, work: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """The number of each task and what `work(shared, task)` returns, as soon as it is there."""
        if self.cluster is None and (self.jobs == 1 or len(tasks) < 2):
            yield from ((i, work(shared, task)) for i, task in enumerate(tasks))
        elif tasks:
            yield from self._elsewhere(work, shared, tasks)

    def _elsewhere(self, work: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        parcel = _packed(shared)
        jobs = -1 if self.cluster else min(self.jobs, len(tasks))
        threads = 0 if self.cluster else max(1, min(torch.get_num_threads(), joblib.cpu_count() // jobs))
        calls = (joblib.delayed(_done)(parcel, work, i, task, threads) for i, task in enumerate(tasks))
        with self._backend(parcel):
            run = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")
            try:
                yield from run(calls)
            except TerminatedWorkerError as error:
                what = "a process was killed, as happens where memory runs out"
                raise MergingError(what, where="--jobs", fix=f"Give fewer. {GOES_ON}") from error

    def _backend(self, parcel: np.ndarray) -> AbstractContextManager[Any]:
        if self.cluster is not None:
            return _on_cluster(self.cluster, parcel)
        found: AbstractContextManager[Any] = joblib.parallel_config("loky")
        return found


def _packed(shared: object) -> np.ndarray:
    """What all tasks need, as one array: joblib shares those between processes."""
    try:
        return np.frombuffer(cloudpickle.dumps(shared), np.uint8)
    except Exception as error:
        what = f"the network cannot be sent to other processes: {told(error)}"
        raise MergingError(what, where="--jobs", fix="Work in one process: --jobs 1.") from error


_opened: dict[str, Any] = {}
"""What this process has unpacked last."""


def _unpacked(parcel: np.ndarray) -> Any:
    content = parcel.tobytes()
    name = hashlib.sha256(content).hexdigest()
    if name not in _opened:
        _opened.clear()
        _opened[name] = cloudpickle.loads(content)
    return _opened[name]


def _done(parcel: np.ndarray, work: Callable[[Any, T], R], number: int, task: T, threads: int) -> tuple[int, R]:
    """One task, in a process of its own; what the network's code prints is no part of the result."""
    if threads:
        torch.set_num_threads(threads)
    with redirect_stdout(sys.stderr):
        return number, work(_unpacked(parcel), task)


# On a cluster


@contextmanager
def _on_cluster(address: str, parcel: np.ndarray) -> Iterator[None]:
    try:
        from distributed import Client, KilledWorker
        from distributed.client import FutureCancelledError
        from distributed.comm.core import CommClosedError
    except ImportError as error:
        what = f"a cluster needs {error.name}"
        raise MergingError(what, where="--cluster", fix="pip install 'neuron-merging[cluster]'") from error
    try:
        client: Any = Client(address, timeout=PATIENCE, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, ImportError) as error:  # a TimeoutError is an OSError
        what = f"no scheduler answers at {address}: {told(error)}"
        raise MergingError(what, where="--cluster", fix="Start one: dask scheduler; or leave --cluster out.") from error
    with client:
        _check_workers(client)
        try:
            with joblib.parallel_config("dask", client=client, scatter=[parcel]):
                yield
        except (CommClosedError, FutureCancelledError, KilledWorker) as error:
            what = f"the cluster was lost: {told(error)}"
            raise MergingError(what, where="--cluster", fix=f"See to it. {GOES_ON}") from error


def _check_workers(client: Any) -> None:
    """Refuse a cluster without workers, and workers with another engine: their results would not be ours."""
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except TimeoutError as error:
        what = f"the scheduler has no workers after {PATIENCE} seconds"
        raise MergingError(what, where="--cluster", fix="Start some: dask worker tcp://…") from error
    try:
        engines = client.run(engine)
    except ImportError as error:
        fix = "Install neuron-merging in their environments."
        raise MergingError(f"the workers cannot run this: {told(error)}", where="--cluster", fix=fix) from error
    other = [worker for worker, found in engines.items() if found != engine()]
    if other:
        what = f"the worker {other[0]} has another version of neuron-merging"
        raise MergingError(what, where="--cluster", fix="Install the same one everywhere.")


def processes(jobs: int | None, tasks: int) -> int:
    """How many: as many as were asked for, else as there are processors, and tasks for them."""
    if jobs is not None and jobs < 1:
        raise MergingError(f"{jobs} processes", where="--jobs", fix="Give at least 1.")
    return jobs or max(1, min(joblib.cpu_count(), tasks))
