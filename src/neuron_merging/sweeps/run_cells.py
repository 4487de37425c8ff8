"""Run many measurements (cells) in this process, in worker processes or on a Dask cluster, and cache each result
in a JSON file.

The file's name is a hash of everything that the result depends on, so a cached result is used only while it is
valid, and an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import joblib
import msgspec
import numpy as np
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError

from neuron_merging import progress
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.digests import compute_digest, compute_sha256
from neuron_merging.inputs.disk_cache import DiskCache

CELL_SCHEMA = 1
"""To be raised when a measurement of this package changes its meaning."""
SOURCE_ROOT = Path(__file__).parent.parent
ENGINE_FILES = (
    "api.py",
    "evaluation/__init__.py",
    "data/__init__.py",
    "sweeps/scores.py",
    "reproduction/networks.py",
    "reproduction/datasets.py",
    "reproduction/comparison_methods.py",
)
"""Where the code between a network's weights and its figures begins; what these files import belongs to it."""
CellResult = dict[str, Any]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured; its fields are all that the result depends on, beside the engine and torch."""

    @property
    def key(self) -> str:
        """The name of its file."""
        everything = [CELL_SCHEMA, str(torch.__version__), fingerprint_engine(), self]
        return compute_sha256(msgspec.json.encode(everything))[:32]


class _CachedResult(msgspec.Struct, frozen=True):
    cell: Any
    result: CellResult


@dataclass(frozen=True)
class ResultCache:
    """Results by cell, as small JSON files in one folder."""

    folder: Path

    def get(self, cell: Cell) -> CellResult | None:
        """The result of an earlier run; a file that is no such thing counts as none."""

        def decode(file: Path) -> CellResult | None:
            entry = msgspec.json.decode(file.read_bytes(), type=_CachedResult)
            whole = entry.cell == msgspec.to_builtins(cell) and entry.result and None not in entry.result.values()
            return entry.result if whole else None

        return DiskCache(self.folder).read(f"{cell.key}.json", decode)

    def put(self, cell: Cell, result: CellResult) -> CellResult:
        """Keep a result; what comes back is what a later run will read."""
        encoded = msgspec.json.encode(_CachedResult(cell, result))
        problem = DiskCache(self.folder).write(f"{cell.key}.json", msgspec.json.format(encoded, indent=1))
        if problem:
            progress.log.warning("a result is not kept for later runs: %s", problem)
        return msgspec.json.decode(encoded, type=_CachedResult).result


@cache
def fingerprint_engine() -> str:
    """The sum of the code between a network's weights and the figures measured on it."""
    files = sorted(_collect_imported_files([SOURCE_ROOT / file for file in ENGINE_FILES]))
    return compute_digest([(path.name, path.read_bytes()) for path in files])


def _collect_imported_files(waiting: list[Path]) -> set[Path]:
    """Files, with all files of this package that they import when they are loaded."""
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _iterate_imports(ast.parse(path.read_bytes()))
    return found


def _iterate_imports(module: ast.Module) -> Iterator[Path]:
    for statement in module.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(SOURCE_ROOT.name):
            home = SOURCE_ROOT.parent.joinpath(*(statement.module or "").split("."))
            places = [home, *(home / alias.name for alias in statement.names)]
            files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
            yield from (file for file in files if file.is_file() and file.parent != SOURCE_ROOT.parent)


S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
CLUSTER_TIMEOUT = 10
"""Seconds to wait for a scheduler, and for a first worker."""
RESUME_HINT = "Results so far are stored: the same command continues."


@dataclass(frozen=True)
class TaskExecutor:
    """How many tasks run at a time: processes of this machine, or whatever a Dask scheduler has."""

    jobs: int = 1
    cluster: str | None = None

    def each(self, work: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """The number of each task and what `work(shared, task)` returns, as soon as it is there."""
        if self.cluster is None and (self.jobs == 1 or len(tasks) < 2):
            yield from ((i, work(shared, task)) for i, task in enumerate(tasks))
        elif tasks:
            yield from self._run_in_workers(work, shared, tasks)

    def _run_in_workers(self, work: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        parcel = _pickle_shared(shared)
        name = compute_digest(parcel.data)
        jobs = -1 if self.cluster else min(self.jobs, len(tasks))
        threads = 0 if self.cluster else max(1, min(torch.get_num_threads(), joblib.cpu_count() // jobs))
        calls = (joblib.delayed(_run_task)(parcel, name, work, i, task, threads) for i, task in enumerate(tasks))
        with self._backend(parcel):
            run = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")
            try:
                yield from run(calls)
            except TerminatedWorkerError as error:
                what = "a process was killed, as happens where memory runs out"
                raise MergingError(what, where="--jobs", fix=f"Give fewer. {RESUME_HINT}") from error

    def _backend(self, parcel: np.ndarray) -> AbstractContextManager[Any]:
        if self.cluster is not None:
            return _connect_to_cluster(self.cluster, parcel)
        found: AbstractContextManager[Any] = joblib.parallel_config("loky")
        return found


def _pickle_shared(shared: object) -> np.ndarray:
    """What all tasks need, as one array: joblib shares those between processes."""
    try:
        return np.frombuffer(cloudpickle.dumps(shared), np.uint8)
    except Exception as error:
        what = f"the network cannot be sent to other processes: {describe_error(error)}"
        raise MergingError(what, where="--jobs", fix="Work in one process: --jobs 1.") from error


_unpickled_shared: dict[str, Any] = {}
"""What this process has unpacked last."""


def _unpickle_shared(parcel: np.ndarray, name: str) -> Any:
    """What a parcel holds, unpacked once in each process; its digest is its name."""
    if name not in _unpickled_shared:
        _unpickled_shared.clear()
        _unpickled_shared[name] = cloudpickle.loads(parcel.data)
    return _unpickled_shared[name]


def _run_task(
    parcel: np.ndarray, name: str, work: Callable[[Any, T], R], number: int, task: T, threads: int
) -> tuple[int, R]:
    """One task, in a process of its own; what the network's code prints is no part of the result."""
    if threads:
        torch.set_num_threads(threads)
    with redirect_stdout(sys.stderr):
        return number, work(_unpickle_shared(parcel, name), task)


# On a cluster


@contextmanager
def _connect_to_cluster(address: str, parcel: np.ndarray) -> Iterator[None]:
    try:
        from distributed import Client, KilledWorker
        from distributed.client import FutureCancelledError
        from distributed.comm.core import CommClosedError
    except ImportError as error:
        what = f"a cluster needs {error.name}"
        raise MergingError(what, where="--cluster", fix="pip install 'neuron-merging[cluster]'") from error
    try:
        client: Any = Client(address, timeout=CLUSTER_TIMEOUT, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, ImportError) as error:  # a TimeoutError is an OSError
        what = f"no scheduler answers at {address}: {describe_error(error)}"
        raise MergingError(what, where="--cluster", fix="Start one: dask scheduler; or leave --cluster out.") from error
    with client:
        _check_workers(client)
        try:
            with joblib.parallel_config("dask", client=client, scatter=[parcel]):
                yield
        except (CommClosedError, FutureCancelledError, KilledWorker) as error:
            what = f"the cluster was lost: {describe_error(error)}"
            raise MergingError(what, where="--cluster", fix=f"Check the cluster. {RESUME_HINT}") from error


def _check_workers(client: Any) -> None:
    """Refuse a cluster without workers, and workers with another engine: their results would not be ours."""
    try:
        client.wait_for_workers(1, timeout=CLUSTER_TIMEOUT)
    except TimeoutError as error:
        what = f"the scheduler has no workers after {CLUSTER_TIMEOUT} seconds"
        raise MergingError(what, where="--cluster", fix="Start some: dask worker tcp://…") from error
    try:
        engines = client.run(fingerprint_engine)
    except ImportError as error:
        fix = "Install neuron-merging in their environments."
        raise MergingError(
            f"the workers cannot run this: {describe_error(error)}", where="--cluster", fix=fix
        ) from error
    other = [worker for worker, found in engines.items() if found != fingerprint_engine()]
    if other:
        what = f"the worker {other[0]} has another version of neuron-merging"
        raise MergingError(what, where="--cluster", fix="Install the same one everywhere.")


def count_processes(jobs: int | None, tasks: int) -> int:
    """How many: as many as were asked for, else as there are processors, and tasks for them."""
    if jobs is not None and jobs < 1:
        raise MergingError(f"{jobs} processes", where="--jobs", fix="Give at least 1.")
    return jobs or max(1, min(joblib.cpu_count(), tasks))


CellJob = tuple[Cell, Any]
"""A cell, and the task that measures it."""


def measure_cells(
    jobs: Sequence[CellJob],
    cache: ResultCache | None,
    pool: TaskExecutor,
    work: Callable[[Any, Any], CellResult],
    shared: Any,
) -> dict[str, CellResult]:
    """Results by the key of their cell; each is kept as soon as it is there."""
    known = {cell.key: cache.get(cell) for cell, _ in jobs} if cache else {}
    results = {key: found for key, found in known.items() if found is not None}
    missing = list({cell.key: (cell, task) for cell, task in jobs if cell.key not in results}.values())
    for done, (number, found) in enumerate(pool.each(_CachedWork(work, cache), shared, missing)):
        cell = missing[number][0]
        results[cell.key] = found if cache is None else cache.get(cell) or cache.put(cell, found)
        progress.report_progress("cells", len(jobs) - len(missing) + done + 1, len(jobs))
    return results


@dataclass(frozen=True)
class _CachedWork:
    """The work on a cell. Who does it keeps the result too, where the folder can be reached.

    So nothing is lost with a process that goes between its work and the answer, and what is done again by a cluster
    is read.
    """

    work: Callable[[Any, Any], CellResult]
    cache: ResultCache | None

    def __call__(self, shared: Any, job: CellJob) -> CellResult:
        cell, task = job
        if self.cache is None or not self.cache.folder.is_dir():
            return self.work(shared, task)
        return self.cache.get(cell) or self.cache.put(cell, self.work(shared, task))
