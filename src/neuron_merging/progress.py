"""progress: long work tells how far it is; who wants to show that listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done, and how much there is."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """All work inside tells the listener.

    >>> with listening(lambda stage, done, total: print(f"{stage}: {done} of {total}")):
    ...     letters = list(each("ab", "reading"))
    reading: 0 of 2
    reading: 1 of 2
    reading: 2 of 2
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def each(items: Sequence[T], stage: str) -> Iterator[T]:
    """The items, each told as done when the next is asked for."""
    for done, item in enumerate(items):
        tell(stage, done, len(items))
        yield item
    tell(stage, len(items), len(items))


def tell(stage: str, done: int, total: int) -> None:
    """How far a stage is."""
    listener = _listener.get()
    if listener is not None:
        listener(stage, done, total)
