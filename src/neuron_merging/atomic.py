"""Write files and folders atomically: after a crash the old or the new content is there, never a mixture.

A folder is written as `.NAME.new` beside its destination. Then the old one is renamed to `.NAME.old`, the new one
is renamed into place, and the old one is deleted. Writers are serialised by a lock on `.NAME.lock`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from neuron_merging.errors import MergingError

FileContent = bytes | Callable[[Path], object]
"""What a file holds: its bytes, or a function that writes the file of that name itself, piece by piece."""
IS_WINDOWS = os.name == "nt"

# Before any work


def resolve_path(path: str | Path) -> Path:
    """Where a path leads, or an error for what cannot be the place of a file or folder.

    >>> resolve_path("/tmp/../small").name
    'small'
    """
    try:
        text = os.fspath(path)
        place = Path(os.path.realpath(text))
    except (TypeError, ValueError) as error:
        raise MergingError(f"{path!r} is not a path", where="path", fix="Give a text or a Path.") from error
    if not text:
        raise MergingError("the path is empty", where="path", fix="Give a name, as small/.")
    if place == place.parent:
        raise MergingError("this is the root of a disk", where=str(place), fix="Give a folder in it.")
    if any(part.is_symlink() for part in (place, *place.parents)):  # realpath follows every other link
        raise MergingError("the symbolic links form a loop", where=str(path), fix="Give another place.")
    return place


def check_output_file(file: str | Path) -> None:
    """Refuse a file that cannot be written, before any work is done."""
    place = resolve_path(file)
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


def replace_file(file: str | Path, content: FileContent) -> Path:
    """Write a file whole or not at all; its path."""
    place = resolve_path(file)
    part = make_sibling_path(place, "part")
    with lock_path(place):
        try:
            write_file(part, content)
            os.replace(part, place)
            _sync_folder(place.parent)
        finally:
            part.unlink(missing_ok=True)
    return place


@contextmanager
def stage_file(file: str | Path) -> Iterator[Path]:
    """A file to write and check, in a folder of its own; if all goes well it takes its place, what lies by it first."""
    place = resolve_path(file)
    with (
        lock_path(place),
        _add_file_to_error(place),
        tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as folder,
    ):
        part = Path(folder) / place.name
        yield part
        for other in sorted(Path(folder).iterdir(), key=lambda path: path == part):
            with open(other, "r+b") as stream:
                os.fsync(stream.fileno())
            os.replace(other, place.with_name(other.name))
        _sync_folder(place.parent)


@contextmanager
def _add_file_to_error(place: Path) -> Iterator[None]:
    """A full disk does not say which file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error


def write_file(file: Path, content: FileContent) -> None:
    """Write a file and see it to the disk: half of it may be there if this fails."""
    with _add_file_to_error(file):
        if callable(content):
            content(file)
        else:
            file.write_bytes(content)
        with open(file, "r+b") as stream:  # Windows flushes only what is open for writing
            os.fsync(stream.fileno())


# Folders


def get_folder_identity(place: Path) -> tuple[int, int] | None:
    """Which folder it is: another one may have taken its place since."""
    try:
        return place.stat().st_ino, place.stat().st_ctime_ns
    except OSError:
        return None


def make_sibling_path(place: Path, role: str) -> Path:
    """The hidden name beside a place that something on its way has."""
    return place.with_name(f".{place.name}.{role}")


def replace_folder(place: Path, fill: Callable[[Path], None]) -> None:
    """Put the folder that `fill` writes in place of the one that may be there; called with the lock held."""
    new = make_sibling_path(place, "new")
    try:
        new.mkdir()
        fill(new)
        _sync_folder(new)
        if place.exists():
            os.rename(place, make_sibling_path(place, "old"))
        os.rename(new, place)
        _sync_folder(place.parent)
    finally:
        recover_folder(place)


def recover_folder(place: Path) -> None:
    """Undo a write that was cut off: called with the lock held, so no other writer is at work."""
    old = make_sibling_path(place, "old")
    if old.exists() and not place.exists():
        os.rename(old, place)
    shutil.rmtree(make_sibling_path(place, "new"), ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """See the names in a folder to the disk; Windows does that by itself and opens no folders."""
    if IS_WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Taking turns


@contextmanager
def lock_path(place: Path, role: str = "lock", *, patient: bool = True) -> Iterator[None]:
    """Writers of one place take turns; the lock file goes when the last one is done, the lock itself with its process.

    One that is not `patient` gets a MergingError where another is at work.
    """
    file = make_sibling_path(place, role)
    try:
        lock = FileLock(file, timeout=-1 if patient else 0)
        lock.acquire()
    except Timeout as error:
        what, fix = "another run is using this folder", "Wait for it, or give another folder."
        raise MergingError(what, where=str(place), fix=fix) from error
    try:
        yield
    finally:
        # Removed while it is held: who waits for it sees that it is gone and makes a new one. Windows removes no file
        # that is open; there filelock does it on release.
        if not IS_WINDOWS:
            file.unlink(missing_ok=True)
        lock.release()
