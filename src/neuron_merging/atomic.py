"""Write files and folders atomically: after a crash the old or the new content is there, never a mixture.

A folder is written as `new` in a work folder `.NAME.neuron-merging-RANDOM` beside its destination. Then the old one is
renamed to `old` in the work folder, the new one is renamed into place, and the work folder is deleted. A file that says
so marks a work folder as ours: the next writer deletes what a killed one left, and nothing else. Writers are serialised
by a lock on `.NAME.neuron-merging-lock`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
WORK_MARKER = "neuron-merging-work"
"""The file that marks a work folder as written here."""

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
    if not above.is_dir():
        raise MergingError("this is a file, not a folder", where=str(above), fix="Give a place in a folder.")
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
    with lock_path(place), _add_file_to_error(place), _open_work_folder(place) as work:
        folder = work / "new"
        folder.mkdir()
        part = folder / place.name
        yield part
        for other in sorted(folder.iterdir(), key=lambda path: path == part):
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
    return place.with_name(f".{place.name}.neuron-merging-{role}")


def replace_folder(place: Path, fill: Callable[[Path], None]) -> None:
    """Replace the folder at `place`, if any, with one that `fill` writes. The caller holds the lock."""
    with _open_work_folder(place) as work:
        new = work / "new"
        new.mkdir()
        fill(new)
        _sync_folder(new)
        # A folder that is not empty cannot be replaced in one step: rename twice. `recover_folder` undoes a half.
        if place.exists():
            os.rename(place, work / "old")
        os.rename(new, place)
        _sync_folder(place.parent)


@contextmanager
def _open_work_folder(place: Path) -> Iterator[Path]:
    """Yield an empty work folder beside a place, after deleting those of killed writers. The caller holds the lock."""
    recover_folder(place)
    try:
        work = Path(tempfile.mkdtemp(dir=place.parent, prefix=make_sibling_path(place, "").name))
        (work / WORK_MARKER).write_text("Temporary files of neuron-merging. They are deleted at the next save.\n")
        yield work
    finally:
        recover_folder(place)


def recover_folder(place: Path) -> None:
    """Undo an interrupted write. The caller holds the lock, so no other writer is active."""
    for work in _list_work_folders(place):
        # Interrupted between the two renames: the new folder is not in place yet, so the old one comes back.
        if (work / "old").exists() and not place.exists():
            os.rename(work / "old", place)
        for part in ("new", "old"):
            shutil.rmtree(work / part, ignore_errors=True)
        # The marker goes last: a kill in the middle leaves a folder that is still known as ours.
        with suppress(OSError):
            (work / WORK_MARKER).unlink(missing_ok=True)
            work.rmdir()


def holds_moved_folder(place: Path) -> bool:
    """Return whether a writer has moved the folder away from its place and has put no other one there yet."""
    return any((work / "old").exists() for work in _list_work_folders(place))


def _list_work_folders(place: Path) -> list[Path]:
    """List the work folders of a place. A user's own folder of such a name has no marker and is not empty."""
    name = re.compile(re.escape(make_sibling_path(place, "").name) + r"[a-z0-9_]{8}")
    try:
        found = [path for path in place.parent.iterdir() if name.fullmatch(path.name) and not path.is_symlink()]
        return [path for path in found if path.is_dir() and ((path / WORK_MARKER).is_file() or not os.listdir(path))]
    except OSError:  # the parent, or another writer's work folder, has gone meanwhile
        return []


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
