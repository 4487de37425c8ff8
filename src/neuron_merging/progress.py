"""Report the progress of long computations: stages call a listener, which may show a progress bar."""

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
"""Called with the stage's name, the number of items done, and the total number of items."""
log = logging.getLogger("neuron_merging")
REFRESH_SECONDS = 0.2
"""Least number of seconds between two updates of a plain-text bar: a notebook sends each one to the browser."""
LINE_SECONDS = 10.0
"""Seconds between two lines of progress in a log or a file."""
# Context variables, not globals: threads and asynchronous tasks that compress at once have separate bars.
_listener: ContextVar[ProgressListener | None] = ContextVar("listener", default=None)
_stage: ContextVar[str] = ContextVar("stage", default="")
_announcer: ContextVar[Callable[[str], object] | None] = ContextVar("announcer", default=None)


@contextmanager
def listen_to_progress(listener: ProgressListener) -> Iterator[None]:
    """Call the listener for all progress inside the `with` block.

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
    """Yield the items, and report each as done when the next one is requested."""
    for done, item in enumerate(items):
        report_progress(stage, done, len(items))
        yield item
    report_progress(stage, len(items), len(items))


def report_progress(stage: str, done: int, total: int) -> None:
    """Report how far a stage is. The first report of a stage is also logged."""
    if stage != _stage.get():
        _stage.set(stage)
        log.debug("%s", stage)
    listener = _listener.get()
    if listener is not None:
        listener(stage, done, total)


@contextmanager
def hear_announcements(announcer: Callable[[str], object]) -> Iterator[None]:
    """Call the announcer with every announcement inside the `with` block."""
    token = _announcer.set(announcer)
    try:
        yield
    finally:
        _announcer.reset(token)


def announce(text: str) -> None:
    """Tell the user something before long work begins: in the log, and through the announcer if there is one."""
    log.info("%s", text)
    announcer = _announcer.get()
    if announcer is not None:
        announcer(text)


# Progress bars


@contextmanager
def show_progress_bar(message: str, wanted: bool | None = None) -> Iterator[None]:
    """Show a bar on stderr for the work inside the `with` block.

    With `wanted=None` a bar is shown in a notebook and at Python's prompt, unless a listener is set already. A program
    that shows none gets a line in the log every ten seconds.
    """
    interactive = _in_notebook() or hasattr(sys, "ps1")  # Python sets sys.ps1 only at its prompt
    show = wanted if wanted is not None else interactive and _listener.get() is None
    bar = (
        _log_progress(message)
        if not show
        else show_terminal_bar(message)
        if sys.stderr.isatty()
        else _show_text_bar(message, sys.stderr)
    )
    with bar:
        yield


@contextmanager
def show_terminal_bar(message: str, **console: Any) -> Iterator[None]:
    """Show a rich progress bar with the elapsed and the remaining time."""
    # Imported here: rich is slow to import, and library users rarely show a bar.
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
    stderr_console = Console(stderr=True, soft_wrap=True, **console)
    with Progress(*columns, console=stderr_console, transient=True) as bar:
        task = bar.add_task(escape(message), total=None)
        before = ""

        def show(stage: str, done: int, total: int) -> None:
            nonlocal task, before
            if stage != before:  # a new task, so that the remaining time is estimated per stage
                bar.remove_task(task)
                task, before = bar.add_task("", total=None), stage
            bar.update(task, description=escape(f"{message}: {stage}"), completed=done, total=total or None)

        with listen_to_progress(show):
            yield


class ProgressLines:
    """A listener that writes a line every ten seconds: stage, share done, time left of the stage.

    >>> clock = iter((0.0, 12.0))
    >>> lines = ProgressLines("compressing", print, lambda: next(clock))
    >>> lines("fitting", 0, 4), lines("fitting", 1, 4)
    compressing: fitting, 25 % done, about 36 s left
    (None, None)
    """

    def __init__(
        self, message: str, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.message, self._write, self._clock = message, write, clock
        self._stage, self._started = "", 0.0
        self._last: float | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        self._last = now if self._last is None else self._last
        if stage != self._stage:
            self._stage, self._started = stage, now
        if now - self._last >= LINE_SECONDS:
            self._last = now
            self._write(f"{self.message}: {stage}{self._describe(now - self._started, done, total)}")

    def _describe(self, elapsed: float, done: int, total: int) -> str:
        if not total:
            return ""
        left = f", about {elapsed * (total - done) / done:.0f} s left" if done else ""
        return f", {100 * done // total} % done{left}"


@contextmanager
def _log_progress(message: str) -> Iterator[None]:
    """Log a line every ten seconds, unless somebody else listens."""
    with nullcontext() if _listener.get() else listen_to_progress(ProgressLines(message, log.info)):
        yield


@contextmanager
def _show_text_bar(message: str, stream: TextIO) -> Iterator[None]:
    """Show one line that is overwritten with a carriage return. It works in notebooks without widgets."""
    last, width = 0.0, 0

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last, width
        now = time.monotonic()
        if now - last >= REFRESH_SECONDS:
            text = f"{message}: {stage}" + (f" {done}/{total}" if total else "")
            stream.write("\r" + text.ljust(width))  # padded, to erase a longer line before
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
