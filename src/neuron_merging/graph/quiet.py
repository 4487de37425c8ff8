"""What is global in a process, and is borrowed for a while.

The exporter, the switches of torch, the filters of warnings and the random numbers belong to the whole process. One
lock covers them, which a thread may take again while it holds it; all is put back, whatever happens in between.
"""

from __future__ import annotations

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

_EXCLUSIVE = threading.RLock()


@contextmanager
def alone() -> Iterator[None]:
    """No other thread is between these lines; outside of inference mode, with random numbers that are put back."""
    with _EXCLUSIVE, torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """The exporter logs as errors and warnings what is reported here."""
    with _EXCLUSIVE:
        before = logging.root.manager.disable
        try:
            logging.disable(logging.CRITICAL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.disable(before)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention as its module's code says: torch's fused one leaves other values at masked places."""
    with _EXCLUSIVE:
        fast = torch.backends.mha.get_fastpath_enabled()
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def every_line() -> Iterator[None]:
    """The exporter notes the lines of all functions that forward() leads to, not of those named so alone."""

    def below_forward(tracer: TracerBase, stack: StackSummary) -> StackSummary:
        names = [frame.name for frame in stack]
        return StackSummary.from_list(stack[names.index("forward") :] if "forward" in names else [])

    with _EXCLUSIVE:
        before = TracerBase._filter_traceback_frames
        try:
            TracerBase._filter_traceback_frames = below_forward  # type: ignore[assignment]
            yield
        finally:
            TracerBase._filter_traceback_frames = before  # type: ignore[method-assign]


@contextmanager
def as_exported() -> Iterator[None]:
    """Code that asks whether it is being exported is told so, and goes the way that a captured graph shows."""
    with _EXCLUSIVE:
        before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
        try:
            torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
            yield
        finally:
            torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


class _Hushed:
    """A stream that is silent for one thread and as it was for all others."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._owner = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._owner else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def hushed() -> Iterator[None]:
    """What this thread prints is dropped."""
    with _EXCLUSIVE:
        before = sys.stdout, sys.stderr
        try:
            sys.stdout, sys.stderr = (_Hushed(stream) for stream in before)  # type: ignore[assignment]
            yield
        finally:
            sys.stdout, sys.stderr = before
