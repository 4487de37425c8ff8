"""Progress of long work: stages report to a listener, which may show a bar."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
ProgressListener = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done, and how much there is."""
log = logging.getLogger("neuron_merging")
REFRESH_SECONDS = 0.2
"""Seconds between two lines of a bar that is text."""
_listener: ContextVar[ProgressListener | None] = ContextVar("listener", default=None)
_stage: ContextVar[str] = ContextVar("stage", default="")


@contextmanager
def listen_to_progress(listener: ProgressListener) -> Iterator[None]:
    """All work inside tells the listener.

    >>> with listen_to_progress(lambda stage, done, total: print(f"{stage}: {done} of {total}")):
    ...     letters = list(track_progress("ab", "reading"))
    reading: 0 of 2
    reading: 1 of 2
    reading: 2 of 2
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def track_progress(items: Sequence[T], stage: str) -> Iterator[T]:
    """The items, each told as done when the next is asked for."""
    for done, item in enumerate(items):
        report_progress(stage, done, len(items))
        yield item
    report_progress(stage, len(items), len(items))


def report_progress(stage: str, done: int, total: int) -> None:
    """How far a stage is; where one begins, the log says so."""
    if stage != _stage.get():
        _stage.set(stage)
        log.debug("%s", stage)
    listener = _listener.get()
    if listener is not None:
        listener(stage, done, total)


# Showing it


@contextmanager
def show_progress_bar(message: str, wanted: bool | None = None) -> Iterator[None]:
    """A bar for the work inside, on stderr.

    `wanted` None shows one where somebody looks on and nobody listens yet: in a notebook and at Python's prompt.
    """
    watched = _in_notebook() or hasattr(sys, "ps1")
    show = wanted if wanted is not None else watched and _listener.get() is None
    bar = (
        nullcontext()
        if not show
        else show_terminal_bar(message)
        if sys.stderr.isatty()
        else _show_text_bar(message, sys.stderr)
    )
    with bar:
        yield


@contextmanager
def show_terminal_bar(message: str, **console: Any) -> Iterator[None]:
    """A bar with the time that is left."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    place = Console(stderr=True, soft_wrap=True, **console)
    with Progress(*columns, console=place, transient=True) as bar:
        task = bar.add_task(escape(message), total=None)
        before = ""

        def show(stage: str, done: int, total: int) -> None:
            nonlocal task, before
            if stage != before:  # the time that is left is that of the stage
                bar.remove_task(task)
                task, before = bar.add_task("", total=None), stage
            bar.update(task, description=escape(f"{message}: {stage}"), completed=done, total=total or None)

        with listen_to_progress(show):
            yield


@contextmanager
def _show_text_bar(message: str, stream: TextIO) -> Iterator[None]:
    """One line that is written over: notebooks need no more, and no widgets for it."""
    last, width = 0.0, 0

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last, width
        now = time.monotonic()
        if now - last >= REFRESH_SECONDS:
            text = f"{message}: {stage}" + (f" {done}/{total}" if total else "")
            stream.write("\r" + text.ljust(width))
            stream.flush()
            last, width = now, len(text)

    try:
        with listen_to_progress(show):
            yield
    finally:
        if width:
            stream.write("\r" + " " * width + "\r")
            stream.flush()


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules
