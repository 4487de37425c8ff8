"""atomic: files and folders that a crash leaves as they were or as they should be, never in between.

A folder is written as `.NAME.new` beside its place. Then the old one is renamed to `.NAME.old`, the new one takes its
place, and the old one is deleted. Writers take turns by a lock on `.NAME.lock`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from neuron_merging.errors import MergingError

# Before any work


def check_file(file: str | Path) -> None:
    """Refuse a file that cannot be written, before any work is done."""
    place = Path(os.path.realpath(file))
    if not place.parent.is_dir():
        raise MergingError("there is no such folder", where=str(place.parent), fix="Make it first.")
    if place.is_dir():
        raise MergingError("that is a folder", where=str(file), fix="Give the name of a file.")
    check_writable(place)


def check_writable(place: Path) -> None:
    """Refuse a place above which nothing can be written."""
    above = next(folder for folder in place.parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise OSError(error.errno, f"nothing can be written there: {error.strerror}", str(place)) from error


# Files


def replace_file(file: str | Path, data: bytes) -> Path:
    """Write a file whole or not at all; its path."""
    place = Path(os.path.realpath(file))
    part = sibling(place, "part")
    with locked(place):
        try:
            _write(part, data)
            os.replace(part, place)
            _sync(place.parent)
        finally:
            part.unlink(missing_ok=True)
    return place


# Folders


def identity(place: Path) -> tuple[int, int] | None:
    """Which folder it is: another one may have taken its place since."""
    try:
        return place.stat().st_ino, place.stat().st_ctime_ns
    except OSError:
        return None


def sibling(place: Path, role: str) -> Path:
    """The hidden name beside a place that something on its way has."""
    return place.with_name(f".{place.name}.{role}")


def publish(place: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder in place of the one that may be there; called with the lock held."""
    new = sibling(place, "new")
    try:
        new.mkdir()
        for name, data in files.items():
            _write(new / name, data)
        _sync(new)
        if place.exists():
            os.rename(place, sibling(place, "old"))
        os.rename(new, place)
        _sync(place.parent)
    finally:
        recover(place)


def recover(place: Path) -> None:
    """Undo a write that was cut off: called with the lock held, so no other writer is at work."""
    old = sibling(place, "old")
    if old.exists() and not place.exists():
        os.rename(old, place)
    shutil.rmtree(sibling(place, "new"), ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _write(file: Path, data: bytes) -> None:
    try:
        with open(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:  # a full disk does not say which file
        raise OSError(error.errno, error.strerror, str(file)) from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Writers of one place take turns; the lock file goes when the last one is done."""
    file = sibling(place, "lock")
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_still(file, descriptor):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        os.unlink(file)
        os.close(descriptor)


def _is_still(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False
