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
"""Increase it when a measurement changes its meaning: all cached results are then invalid."""
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
"""Entry points of the code that computes figures from weights. Their hash, with that of all imported files, is part of
the cache key."""
CellResult = dict[str, Any]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The cache key of a measurement: its fields are all that the result depends on, besides this package and torch."""

    @property
    def key(self) -> str:
        """The name of the cache file: a hash of the fields, the code and the version of torch."""
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
        """Return the result of an earlier run; None if there is none or the file is damaged."""

        def decode(file: Path) -> CellResult | None:
            entry = msgspec.json.decode(file.read_bytes(), type=_CachedResult)
            # Compare the stored cell too, in case of a hash collision or a copied file.
            # A missing figure counts as not measured.
            valid = entry.cell == msgspec.to_builtins(cell) and entry.result and None not in entry.result.values()
            return entry.result if valid else None

        return DiskCache(self.folder).read(f"{cell.key}.json", decode)

    def put(self, cell: Cell, result: CellResult) -> CellResult:
        """Store a result and return it as a later run will read it, so that both runs report the same."""
        encoded = msgspec.json.encode(_CachedResult(cell, result))
        problem = DiskCache(self.folder).write(f"{cell.key}.json", msgspec.json.format(encoded, indent=1))
        if problem:
            progress.log.warning("a result could not be cached: %s", problem)
        return msgspec.json.decode(encoded, type=_CachedResult).result


@cache
def fingerprint_engine() -> str:
    """Return the hash of all code that computes figures from a network's weights."""
    files = sorted(_collect_imported_files([SOURCE_ROOT / file for file in ENGINE_FILES]))
    return compute_digest([(path.name, path.read_bytes()) for path in files])


def _collect_imported_files(waiting: list[Path]) -> set[Path]:
    """Return files together with all files of this package that they import at module level."""
    files: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in files:
            files.add(path)
            waiting += _iterate_imports(ast.parse(path.read_bytes()))
    return files


def _iterate_imports(module: ast.Module) -> Iterator[Path]:
    for statement in module.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(SOURCE_ROOT.name):
            target = SOURCE_ROOT.parent.joinpath(*(statement.module or "").split("."))
            # `from package import name` imports a module of the package or a name in it: try both.
            candidates = [target, *(target / alias.name for alias in statement.names)]
            files = [file for place in candidates for file in (place.with_suffix(".py"), place / "__init__.py")]
            yield from (file for file in files if file.is_file() and file.parent != SOURCE_ROOT.parent)


S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
CLUSTER_TIMEOUT = 10
"""Seconds to wait for a scheduler, and then for its first worker."""
RESUME_HINT = "Results so far are stored: the same command continues."


@dataclass(frozen=True)
class TaskExecutor:
    """Runs tasks in this process, in local worker processes, or on a Dask cluster."""

    jobs: int = 1
    cluster: str | None = None

    def run_tasks(self, work: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """Yield the number of each task and the result of `work(shared, task)`, in order of completion."""
        # Without other processes nothing has to be pickled, which not every network can be.
        if self.cluster is None and (self.jobs == 1 or len(tasks) < 2):
            yield from ((i, work(shared, task)) for i, task in enumerate(tasks))
        elif tasks:
            yield from self._run_in_workers(work, shared, tasks)

    def _run_in_workers(self, work: Callable[[S, T], R], shared: S, tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        pickled = _pickle_shared(shared)
        name = compute_digest(pickled.data)
        jobs = -1 if self.cluster else min(self.jobs, len(tasks))
        # Divide the threads among the processes: oversubscribed cores slow all of them down.
        threads = 0 if self.cluster else max(1, min(torch.get_num_threads(), joblib.cpu_count() // jobs))
        calls = (joblib.delayed(_run_task)(pickled, name, work, i, task, threads) for i, task in enumerate(tasks))
        with self._backend(pickled):
            # One task at a time: tasks take seconds to minutes, and processes should finish together.
            run = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")
            try:
                yield from run(calls)
            except TerminatedWorkerError as error:
                what = "a worker process was killed, probably because memory ran out"
                raise MergingError(what, where="--jobs", fix=f"Give fewer jobs. {RESUME_HINT}") from error

    def _backend(self, pickled: np.ndarray) -> AbstractContextManager[Any]:
        if self.cluster is not None:
            return _connect_to_cluster(self.cluster, pickled)
        backend: AbstractContextManager[Any] = joblib.parallel_config("loky")
        return backend


def _pickle_shared(shared: object) -> np.ndarray:
    """Pickle what all tasks need into one array, which joblib memory-maps for all processes."""
    try:
        return np.frombuffer(cloudpickle.dumps(shared), np.uint8)
    except Exception as error:
        what = f"the network cannot be sent to other processes: {describe_error(error)}"
        raise MergingError(what, where="--jobs", fix="Use one process: --jobs 1.") from error


_unpickled_shared: dict[str, Any] = {}
"""The last unpickled object of this process, by its digest."""


def _unpickle_shared(pickled: np.ndarray, name: str) -> Any:
    """Unpickle the shared object once per process; `name` is its digest."""
    if name not in _unpickled_shared:
        # Only the last one is kept: networks are large, and a process works on one sweep at a time.
        _unpickled_shared.clear()
        _unpickled_shared[name] = cloudpickle.loads(pickled.data)
    return _unpickled_shared[name]


def _run_task(
    pickled: np.ndarray, name: str, work: Callable[[Any, T], R], number: int, task: T, threads: int
) -> tuple[int, R]:
    """Run one task in a worker process; prints of the network's code go to stderr."""
    if threads:
        torch.set_num_threads(threads)
    with redirect_stdout(sys.stderr):
        return number, work(_unpickle_shared(pickled, name), task)


# On a cluster


@contextmanager
def _connect_to_cluster(address: str, pickled: np.ndarray) -> Iterator[None]:
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
            with joblib.parallel_config("dask", client=client, scatter=[pickled]):
                yield
        except (CommClosedError, FutureCancelledError, KilledWorker) as error:
            what = f"the cluster was lost: {describe_error(error)}"
            raise MergingError(what, where="--cluster", fix=f"Check the cluster. {RESUME_HINT}") from error


def _check_workers(client: Any) -> None:
    """Raise if a cluster has no workers, or workers with another version, whose results would differ."""
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
        raise MergingError(what, where="--cluster", fix="Install the same version everywhere.")


def count_processes(jobs: int | None, tasks: int) -> int:
    """Return the number of processes: `jobs` if given, else one per processor and at most one per task."""
    if jobs is not None and jobs < 1:
        raise MergingError(f"{jobs} processes are too few", where="--jobs", fix="Give at least 1.")
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
    """Measure the cells that are not cached and return all results by key; each is stored as soon as it is measured."""
    known = {cell.key: cache.get(cell) for cell, _ in jobs} if cache else {}
    results = {key: result for key, result in known.items() if result is not None}
    # By key: equal cells are measured once.
    missing = list({cell.key: (cell, task) for cell, task in jobs if cell.key not in results}.values())
    for done, (number, result) in enumerate(pool.run_tasks(_CachedWork(work, cache), shared, missing)):
        cell = missing[number][0]
        # A worker that reaches the folder has stored the result already.
        results[cell.key] = result if cache is None else cache.get(cell) or cache.put(cell, result)
        progress.report_progress("cells", len(jobs) - len(missing) + done + 1, len(jobs))
    return results


@dataclass(frozen=True)
class _CachedWork:
    """Measures a cell in a worker and caches the result there, if the worker can reach the folder.

    A worker that dies after its measurement then loses nothing, and a task that the cluster repeats is read from the
    cache.
    """

    work: Callable[[Any, Any], CellResult]
    cache: ResultCache | None

    def __call__(self, shared: Any, job: CellJob) -> CellResult:
        cell, task = job
        if self.cache is None or not self.cache.folder.is_dir():
            return self.work(shared, task)
        return self.cache.get(cell) or self.cache.put(cell, self.work(shared, task))
