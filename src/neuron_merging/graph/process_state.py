"""Change process-wide state for a while: logging, warnings, stdout, the exporter's flags, attention kernels,
random numbers, free memory. One re-entrant lock covers all of it, and everything is restored on exit.
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

_PROCESS_LOCK = threading.RLock()


@contextmanager
def exclusive_access() -> Iterator[None]:
    """No other thread is between these lines; outside of inference mode, with random numbers that are put back."""
    with _PROCESS_LOCK, torch.inference_mode(False), restore_rng():
        yield


@contextmanager
def restore_rng() -> Iterator[None]:
    """The random generators of the CPU and of all accelerators in use are as before on exit."""
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
    """Seed the generators that `restore_rng` puts back.

    `torch.manual_seed` also seeds accelerators that are first used later, after everything was put back.
    """
    torch.default_generator.manual_seed(seed)
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            module.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


class _ThreadFilter:
    """Takes the place of a pattern in `warnings.filters`, and matches whatever one thread warns of."""

    def __init__(self) -> None:
        self._owner, self.active = threading.get_ident(), True

    def match(self, text: str) -> bool:
        return self.active and threading.get_ident() == self._owner


@contextmanager
def silence_logging() -> Iterator[None]:
    """Drop what this thread logs and warns of: the exporter logs as errors what is reported here.

    Both are process-wide in Python. The handlers of loggers are reached through a method that asks for the thread, and
    a filter of warnings does so too. The filter is not put in by `catch_warnings`, which would undo what other threads
    do to the filters meanwhile.
    """
    owner, own = threading.get_ident(), _ThreadFilter()
    entry = ("ignore", own, Warning, None, 0)
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
            own.active = False  # another thread may have copied the list, and puts its copy back later
            with suppress(ValueError):
                warnings.filters.remove(entry)  # type: ignore[attr-defined]


@contextmanager
def disable_fused_attention() -> Iterator[None]:
    """Run attention as its module's code says: torch's fused kernel leaves other values at masked places.

    torch's switch is process-wide, so the question for it is answered here, for this thread alone.
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
    """The exporter notes the lines of all functions that forward() leads to, not of those named so alone."""

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
    """Code that asks whether it is being exported is told so, and goes the way that a captured graph shows."""
    with _PROCESS_LOCK:
        before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
        try:
            torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
            yield
        finally:
            torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


class _SilencedStream:
    """A stream that is silent for one thread and as it was for all others."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._owner = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._owner else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def silence_stdout() -> Iterator[None]:
    """What this thread prints is dropped."""
    with _PROCESS_LOCK:
        before = sys.stdout, sys.stderr
        try:
            sys.stdout, sys.stderr = (_SilencedStream(stream) for stream in before)  # type: ignore[assignment]
            yield
        finally:
            sys.stdout, sys.stderr = before


def release_free_memory() -> None:
    """Give the system what the C library keeps for later, where it keeps any: after a fit that is a lot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
