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
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from neuron_merging.errors import MergingError

if TYPE_CHECKING:
    from torch import nn

FileContent = bytes | Callable[[Path], object]
"""The content of a file: its bytes, or a function that writes to the given path, for files larger than memory."""
IS_WINDOWS = os.name == "nt"
SPACE_MARGIN = 2_000_000
"""Bytes for what is written beside the weights: plan, figures, page, the folder itself."""

# Checks before any work is done


def resolve_path(path: str | Path) -> Path:
    """Return the absolute path with symbolic links resolved. Raise a MergingError for an unusable path.

    >>> resolve_path("/tmp/../small").name
    'small'
    """
    try:
        text = os.fspath(path)
        place = Path(os.path.realpath(text))
    except (TypeError, ValueError) as error:
        raise MergingError(f"{path!r} is not a path", where="path", fix="Give a string or a Path.") from error
    if not text:
        raise MergingError("the path is empty", where="path", fix="Give a name, such as small/.")
    if place == place.parent:
        raise MergingError("this is the root of a disk", where=str(place), fix="Give a folder in it.")
    if any(part.is_symlink() for part in (place, *place.parents)):  # realpath follows every other link
        raise MergingError("the symbolic links form a loop", where=str(path), fix="Give another place.")
    return place


def check_output_file(file: str | Path) -> None:
    """Raise an error if a file cannot be written, before any work is done."""
    place = resolve_path(file)
    if not place.parent.is_dir():
        raise MergingError("there is no such folder", where=str(place.parent), fix="Create it first.")
    if place.is_dir():
        raise MergingError("that is a folder", where=str(file), fix="Give the name of a file.")
    check_writable(place)


def check_writable(place: Path) -> None:
    """Raise an OSError if nothing can be written into the nearest existing folder above a path."""
    above = next(folder for folder in place.parents if folder.exists())
    # os.access() is wrong under Windows ACLs and on some network drives, so create a real file.
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise OSError(error.errno, f"nothing can be written there: {error.strerror}", str(place)) from error


def check_free_space(path: str | Path, model: nn.Module) -> None:
    """Refuse a disk on which the weights of a network do not fit, before any work is done."""
    from torch.nn.parameter import is_lazy  # late: the command line starts without torch

    place = resolve_path(path)
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor)]
    needed = SPACE_MARGIN + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    above = next(folder for folder in (place, *place.parents) if folder.is_dir())
    try:
        free = shutil.disk_usage(above).free
    except OSError:  # some file systems do not say: what does not fit is noticed when it is written
        return
    if free < needed:
        what = f"the disk has {free / 1e6:,.1f} MB left, and the result may need {needed / 1e6:,.1f} MB"
        raise MergingError(what, where=str(place), fix="Free some space, or give a place on another disk.")


# Files


def replace_file(file: str | Path, content: FileContent) -> Path:
    """Write a file completely or not at all. Return its resolved path."""
    place = resolve_path(file)
    part = make_sibling_path(place, "part")
    with lock_path(place):
        try:
            write_file(part, content)
            os.replace(part, place)  # atomic on POSIX and Windows, within one file system
            _sync_folder(place.parent)
        finally:
            part.unlink(missing_ok=True)
    return place


@contextmanager
def stage_file(file: str | Path) -> Iterator[Path]:
    """Yield a path in a temporary folder to write and check a file at. Move it into place if no error is raised.

    Files that are written beside it, such as external data of an ONNX file, are moved first.
    """
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
    """Add the path to an OSError that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error


def write_file(file: Path, content: FileContent) -> None:
    """Write a file and flush it to the disk. If this fails, a part of it may remain."""
    with _add_file_to_error(file):
        if callable(content):
            content(file)
        else:
            file.write_bytes(content)
        with open(file, "r+b") as stream:  # Windows flushes only what is open for writing
            os.fsync(stream.fileno())


# Folders


def get_folder_identity(place: Path) -> tuple[int, int] | None:
    """Return inode and change time of a folder, to detect that another one has replaced it; None if there is none."""
    try:
        return place.stat().st_ino, place.stat().st_ctime_ns
    except OSError:
        return None


def make_sibling_path(place: Path, role: str) -> Path:
    """Return the hidden path beside `place` for a temporary file or folder with this role."""
    return place.with_name(f".{place.name}.{role}")


def replace_folder(place: Path, fill: Callable[[Path], None]) -> None:
    """Replace the folder at `place`, if any, with one that `fill` writes. The caller holds the lock."""
    new = make_sibling_path(place, "new")
    try:
        new.mkdir()
        fill(new)
        _sync_folder(new)
        # A folder that is not empty cannot be replaced in one step: rename twice. `recover_folder` undoes a half.
        if place.exists():
            os.rename(place, make_sibling_path(place, "old"))
        os.rename(new, place)
        _sync_folder(place.parent)
    finally:
        recover_folder(place)


def recover_folder(place: Path) -> None:
    """Undo an interrupted write. The caller holds the lock, so no other writer is active."""
    old = make_sibling_path(place, "old")
    # Interrupted between the two renames: the new folder is not in place yet, so the old one comes back.
    if old.exists() and not place.exists():
        os.rename(old, place)
    shutil.rmtree(make_sibling_path(place, "new"), ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk. Windows does so by itself, and cannot open folders."""
    if IS_WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Locks


@contextmanager
def lock_path(place: Path, role: str = "lock", *, patient: bool = True) -> Iterator[None]:
    """Hold the lock of a path, so that its writers take turns. A crash releases the lock with its process.

    With `patient=False`, raise a MergingError at once if another process holds the lock.
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
        # The file is removed while the lock is held: a waiting process notices that and creates a new one. Windows
        # cannot remove an open file; there filelock removes it on release.
        if not IS_WINDOWS:
            file.unlink(missing_ok=True)
        lock.release()
