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
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any, TextIO

import torch
from torch.fx.proxy import TracerBase

_PROCESS_LOCK = threading.RLock()


@contextmanager
def exclusive_access() -> Iterator[None]:
    """No other thread is between these lines; outside of inference mode, with random numbers that are put back."""
    with _PROCESS_LOCK, torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def silence_logging() -> Iterator[None]:
    """The exporter logs as errors and warnings what is reported here."""
    with _PROCESS_LOCK:
        before = logging.root.manager.disable
        try:
            logging.disable(logging.CRITICAL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.disable(before)


@contextmanager
def disable_fused_attention() -> Iterator[None]:
    """Attention as its module's code says: torch's fused one leaves other values at masked places."""
    with _PROCESS_LOCK:
        fast = torch.backends.mha.get_fastpath_enabled()
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


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
