"""Import the user's code by name, and find its lines in tracebacks for error messages."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neuron_merging.errors import MergingError, ModelError, suggest_names

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
PACKAGE_ROOT = Path(__file__).parent.parent


def find_user_line(error: BaseException) -> str:
    """Return the innermost line of the user's code in a traceback, as `file.py:12: code`; empty if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library_file(f.filename)]
    if not frames:
        return ""
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"


def find_failing_object(error: BaseException) -> Any:
    """Return the `self` of the innermost method of the user's code that was running; None if there was none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "self" in frame.f_locals]
    user_frames = [frame for frame in frames if not _is_library_file(frame.f_code.co_filename)]
    return user_frames[-1].f_locals["self"] if user_frames else None


def list_active_user_lines() -> tuple[str, ...]:
    """Return the lines of the user's code on the call stack, innermost first, as `file.py:12`."""
    lines, frame = [], sys._getframe(1)
    while frame is not None:
        if not _is_library_file(frame.f_code.co_filename):
            lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


def iter_active_modules() -> Iterator[Any]:
    """Yield the modules whose forward() is on the call stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and "self" in frame.f_code.co_varnames:
            yield frame.f_locals.get("self")
        frame = frame.f_back  # type: ignore[assignment]


@cache
def _is_library_file(filename: str) -> bool:
    """Return whether a file belongs to torch, onnxruntime, the standard library or this package, by its path."""
    path = Path(filename)
    # The networks of the reproduction count as the user's code: error messages should name their lines.
    in_package = path.is_relative_to(PACKAGE_ROOT) and not path.is_relative_to(
        PACKAGE_ROOT / "reproduction" / "networks.py"
    )
    # site-packages usually lie inside the standard library's folder.
    standard = path.is_relative_to(STANDARD_LIBRARY) and "-packages" not in str(path.parent)
    return (
        filename.startswith("<")  # such as "<string>": generated code
        or in_package
        or standard
        or any(path.is_relative_to(folder) for folder in _find_engine_folders())
    )


@cache
def _find_engine_folders() -> tuple[Path, ...]:
    """Return the installation folders of the packages that run networks: torch and onnxruntime."""
    specs = (find_spec(name) for name in ("torch", "onnxruntime"))
    return tuple(Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None)


def parse_source_line(trace: str) -> str:
    """Return `file.py:12: code` of the innermost frame of the user's code in a stack trace; empty if there is none."""
    location = ""
    lines = trace.splitlines()
    for here, after in zip(lines, [*lines[1:], ""], strict=False):
        if here.lstrip().startswith('File "'):
            file, line = here.split('"')[1], here.split("line ")[-1].split(",")[0]
            if not _is_library_file(file):
                code = after.strip() if not after.lstrip().startswith('File "') else ""
                location = f"{Path(file).name}:{line}" + (f": {code}" if code else "")
    return location


def split_reference(text: str) -> tuple[str, str]:
    r"""Split `prefix:name`. Without a colon the name is empty. A Windows drive is not a prefix.

    >>> split_reference("timm:resnet18"), split_reference("resnet-56"), split_reference(r"C:\me\small")
    (('timm', 'resnet18'), ('resnet-56', ''), ('C:\\me\\small', ''))
    """
    prefix, _, name = text.partition(":")
    is_drive = len(prefix) == 1 and prefix.isalpha() and name.startswith(("\\", "/"))
    return (text, "") if is_drive else (prefix, name)


def is_code_reference(text: str, known: Collection[str] = ()) -> bool:
    """Return whether a text is `package.module:function`, and neither a path nor a prefix in `known`.

    >>> is_code_reference("my_data:batches"), is_code_reference("cifar-10:~/data"), is_code_reference("photos/")
    (True, False, False)
    """
    module, name = split_reference(text)
    dotted = all(part.isidentifier() for part in (*module.split("."), *name.split(".")))
    return dotted and module not in known and not os.path.exists(text)


_keeps_sys_path: ContextVar[bool] = ContextVar("keeps_sys_path", default=False)


@contextmanager
def keep_user_code_importable() -> Iterator[None]:
    """Keep the current folder on `sys.path` until the end of the block, once user code was imported from it.

    The user's functions may import more of it when they are called, and worker processes import it again.
    """
    token = _keeps_sys_path.set(True)
    with _restore_sys_path():
        try:
            yield
        finally:
            _keeps_sys_path.reset(token)


@contextmanager
def _restore_sys_path() -> Iterator[None]:
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before


def import_object(module: str, name: str, where: str = "MODEL") -> Any:
    """Import the class or function `module:name` from the current folder or an installed package."""
    with nullcontext() if _keeps_sys_path.get() else _restore_sys_path():
        if os.getcwd() not in sys.path and not _is_in_compressed_folder(Path.cwd()):
            sys.path.insert(0, os.getcwd())
        target = _import_user_module(module, name, where)
    try:
        for part in name.split("."):
            target = getattr(target, part)
    except AttributeError as error:
        fix = suggest_names(name, [n for n in dir(target) if not n.startswith("_")])
        raise ModelError(f"{module} has no {name}", where=where, fix=fix) from error
    if not callable(target):
        raise ModelError(f"{module}:{name} cannot be called", where=where, fix="Name a class or function.")
    return target


def _import_user_module(module: str, name: str, where: str) -> Any:
    if module.endswith(".py"):
        dotted_name = module.removesuffix(".py").replace(os.sep, ".").strip(".")
        raise ModelError(f"{module} is a file, not a module", where=where, fix=f"Write {dotted_name}:{name}")
    _check_module_origin(module, where)
    return import_module_or_raise(module, f"Is it installed, or in the current folder ({os.getcwd()})?", where)


def import_module_or_raise(
    module: str, fix: str, where: str = "MODEL", error_type: type[MergingError] = ModelError
) -> Any:
    """Import a module. Whatever it raises becomes one `error_type` with the advice `fix`."""
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:  # a script may call sys.exit() when it is imported
        what = f"{module} cannot be imported: {type(error).__name__}: {error}"
        place = where if isinstance(error, ModuleNotFoundError) else find_user_line(error)
        raise error_type(what, where=place, fix=fix) from error


def _check_module_origin(module: str, where: str) -> None:
    """Raise a ModelError if the module lies in the folder of a compressed network, wherever on `sys.path` that is.

    Such folders are exchanged, so loading one must never run code from it.
    """
    package = module.partition(".")[0]
    try:
        spec = find_spec(package) if package not in sys.modules else None
    except (ImportError, ValueError):
        return  # importing it will say why
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    for place in places:
        if place and _is_in_compressed_folder(Path(place)):
            what = f"{package} lies in the folder of a compressed network, from which nothing is imported"
            raise ModelError(what, where=place, fix=f"Check it, copy it elsewhere, and start there ({where}).")


def _is_in_compressed_folder(place: Path) -> bool:
    """Return whether a path is inside the folder of a compressed network, which may come from an untrusted source."""
    return any((folder / "plan.json").is_file() for folder in (place, *place.parents))


PLUGIN_GROUP = "neuron_merging.plugins"
"""The group of entry points of plugins: functions without arguments that register networks, data sets or mergers."""


@cache
def load_plugins() -> None:
    """Call every plugin once. Registries call this when they do not know a name."""
    for plugin in entry_points(group=PLUGIN_GROUP):
        plugin.load()()
