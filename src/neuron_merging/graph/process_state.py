"""Change process-wide state temporarily: logging, warnings, stdout, the exporter's flags, attention kernels, random
numbers, free memory. One re-entrant lock covers all of it, and everything is restored on exit.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import StackSummary
from typing import Any, TextIO

import torch
from torch.fx.proxy import TracerBase

from neuron_merging.errors import explain_out_of_memory

_PROCESS_LOCK = threading.RLock()


@contextmanager
def exclusive_access() -> Iterator[None]:
    """Hold the process-wide lock, leave inference mode, and restore the random state on exit.

    A failed allocation inside becomes a MemoryExhausted.
    """
    with _PROCESS_LOCK, torch.inference_mode(False), restore_rng(), explain_out_of_memory():
        yield


@contextmanager
def restore_rng() -> Iterator[None]:
    """Restore the random generators of the CPU and of all accelerators in use on exit."""
    # Only initialised ones: reading the state would initialise CUDA, which takes seconds and breaks later forks.
    accelerators = [module for module in (torch.cuda, torch.xpu) if module.is_initialized()]
    before = [module.get_rng_state_all() for module in accelerators]
    metal = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for module, states in zip(accelerators, before, strict=True):
                module.set_rng_state_all(states)
            if metal is not None:
                torch.mps.set_rng_state(metal)


def seed_rng(seed: int) -> None:
    """Seed the generators that `restore_rng` restores.

    `torch.manual_seed` would also queue a seed for accelerators that are not in use yet. It would take effect later,
    outside of `restore_rng`.
    """
    torch.default_generator.manual_seed(seed)
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            module.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


class _ThreadFilter:
    """A stand-in for the regex in an entry of `warnings.filters`. It matches all warnings of one thread."""

    def __init__(self) -> None:
        self._owner, self.active = threading.get_ident(), True

    def match(self, text: str) -> bool:
        return self.active and threading.get_ident() == self._owner


@contextmanager
def silence_logging() -> Iterator[None]:
    """Drop log records and warnings of this thread. The exporter logs failures that this package reports itself.

    Loggers and warning filters are process-wide in Python. So `Logger.callHandlers` is replaced by a method that checks
    the thread, and a filter that checks the thread is inserted. `catch_warnings` is not used: on exit it would undo
    changes that other threads made to the filters meanwhile.
    """
    owner, thread_filter = threading.get_ident(), _ThreadFilter()
    entry = ("ignore", thread_filter, Warning, None, 0)
    with _PROCESS_LOCK:
        call_handlers = logging.Logger.callHandlers

        def call_handlers_of_others(self: logging.Logger, record: logging.LogRecord) -> None:
            if threading.get_ident() != owner:
                call_handlers(self, record)

        try:
            logging.Logger.callHandlers = call_handlers_of_others  # type: ignore[method-assign]
            warnings.filters.insert(0, entry)  # type: ignore[attr-defined]
            yield
        finally:
            logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign]
            thread_filter.active = False  # another thread may have copied the list, and restore its copy later
            with suppress(ValueError):
                warnings.filters.remove(entry)  # type: ignore[attr-defined]


@contextmanager
def disable_fused_attention() -> Iterator[None]:
    """Run attention without torch's fused kernel in this thread: the kernel returns other values at masked positions.

    `set_fastpath_enabled` is process-wide, so `get_fastpath_enabled` is replaced by a function that checks the thread.
    """
    owner = threading.get_ident()
    with _PROCESS_LOCK:
        is_enabled = torch.backends.mha.get_fastpath_enabled

        def is_enabled_for_others() -> bool:
            return threading.get_ident() != owner and is_enabled()

        try:
            torch.backends.mha.get_fastpath_enabled = is_enabled_for_others
            yield
        finally:
            torch.backends.mha.get_fastpath_enabled = is_enabled


@contextmanager
def record_all_source_lines() -> Iterator[None]:
    """Let the exporter record source lines of all functions below forward(), not only of functions of that name."""

    def below_forward(tracer: TracerBase, stack: StackSummary) -> StackSummary:
        names = [frame.name for frame in stack]
        return StackSummary.from_list(stack[names.index("forward") :] if "forward" in names else [])

    with _PROCESS_LOCK:
        before = TracerBase._filter_traceback_frames
        try:
            TracerBase._filter_traceback_frames = below_forward  # type: ignore[assignment]
            yield
        finally:
            TracerBase._filter_traceback_frames = before  # type: ignore[method-assign]


@contextmanager
def simulate_export() -> Iterator[None]:
    """Make `torch.compiler.is_exporting()` true, so that the model's code takes the same branches as in a capture."""
    with _PROCESS_LOCK:
        before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
        try:
            torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
            yield
        finally:
            torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


class _SilencedStream:
    """A stream that drops what one thread writes and passes on the rest."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._owner = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._owner else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def silence_stdout() -> Iterator[None]:
    """Drop what this thread prints to stdout and stderr."""
    with _PROCESS_LOCK:
        before = sys.stdout, sys.stderr
        try:
            sys.stdout, sys.stderr = (_SilencedStream(stream) for stream in before)  # type: ignore[assignment]
            yield
        finally:
            sys.stdout, sys.stderr = before


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of mallopt's parameters in malloc.h."""
KEPT_BYTES = (2**31 - 1, 2**30)
"""Free bytes at the end of the heap that glibc keeps, and the size from which a block is mapped by itself, while memory
is reused. The first is the largest value that mallopt takes."""
USUAL_BYTES = (2**26, 2**25)
"""The same afterwards: what glibc arrives at by itself once a program has freed blocks of 32 MiB."""
_reuse_depth = 0


@contextmanager
def reuse_freed_memory() -> Iterator[None]:
    """Let glibc keep freed memory for the next allocation, while a network runs again and again.

    By default it returns every large block to the system, which clears each page when it is touched again. That takes
    up to 40 % of the time of gradient steps on the CPU.
    """
    global _reuse_depth
    with _PROCESS_LOCK:
        _reuse_depth += 1
        try:
            if _reuse_depth == 1:
                _set_malloc_thresholds(KEPT_BYTES)
            yield
        finally:
            _reuse_depth -= 1
            if _reuse_depth == 0:
                _set_malloc_thresholds(USUAL_BYTES)
                release_free_memory()


def _set_malloc_thresholds(values: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for name, value in zip((M_TRIM_THRESHOLD, M_MMAP_THRESHOLD), values, strict=True):
            mallopt(name, value)


def release_free_memory() -> None:
    """Return freed memory from glibc to the system. After a fit, glibc holds on to much of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
