"""The exceptions of the library, and one-line descriptions of other libraries' errors."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TypeVar

Renamed = TypeVar("Renamed")

MAX_LISTED_NAMES = 24
"""Number of known names that an error lists when none resembles the unknown one: about three lines of text."""


class MergingError(Exception):
    """An error that the caller can act on: what happened, where, and what to do about it.

    Every error that the library raises on purpose derives from this class.

    Parameters
    ----------
    what
        What happened.
    where
        A layer, a line of the model's code, a file or a key.
    fix
        What to do about it.

    Examples
    --------
    >>> raise MergingError("ratio 1.5 is outside [0, 1)", where="ratio=", fix="give a share")
    Traceback (most recent call last):
    ...
    neuron_merging.errors.MergingError: ratio 1.5 is outside [0, 1) (at ratio=). give a share
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        what = what.removesuffix(".")  # of a library's message
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what + (f" (at {where})" if where else "") + (f". {fix}" if fix else ""))

    # Exceptions pickle their positional arguments, and these are keywords: worker processes raise such errors.
    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (type(self), self.what, self.where, self.fix)


def _rebuild_error(kind: type[MergingError], what: str, where: str, fix: str) -> MergingError:
    return kind(what, where=where, fix=fix)


_MESSAGE_NOISE = re.compile(
    r"\x1b\[[0-9;]*m|\[ONNXRuntimeError\] : \d+ : \w+ : |/onnxruntime_src/\S+:\d+ .*?\)(?: const)? (?=\w)"
)
"""Noise in other libraries' messages: ANSI colours, and onnxruntime's error codes, C++ file names and signatures."""


def describe_error(error: BaseException) -> str:
    """Return another library's error on one line: its class, and the first line of its message if it has one.

    >>> describe_error(KeyError("weight")), describe_error(AssertionError())
    ("KeyError: 'weight'", 'AssertionError')
    """
    lines = _MESSAGE_NOISE.sub("", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class MemoryExhausted(MergingError):
    """The memory of the machine or of the accelerator is not enough.

    Examples
    --------
    >>> with explain_out_of_memory():
    ...     raise MemoryError
    Traceback (most recent call last):
    ...
    neuron_merging.errors.MemoryExhausted: the memory is not enough: MemoryError. ...
    """


_OUT_OF_MEMORY = re.compile(r"not enough memory|can't allocate memory|out of memory|bad_alloc|Failed to allocate", re.I)
"""What torch, CUDA, numpy and onnxruntime say when an allocation fails."""
MEMORY_FIX = (
    "Give a smaller example (batch size, image size, text length), fewer samples (calibration=, evaluate=) or "
    'effort="fast", or use a machine with more memory. Nothing was written.'
)


def raise_if_out_of_memory(error: BaseException | None) -> None:
    """Raise MemoryExhausted if an error, or one that caused it, is a failed allocation.

    Handlers of the errors of a network's code call this: a full memory says nothing about the network.
    """
    while error is not None and not isinstance(error, MemoryExhausted):
        may_be_allocation = isinstance(error, RuntimeError) or type(error).__name__ == "ArrayMemoryError"
        if isinstance(error, MemoryError) or (may_be_allocation and _OUT_OF_MEMORY.search(str(error))):
            raise MemoryExhausted(f"the memory is not enough: {describe_error(error)}", fix=MEMORY_FIX) from error
        # A library may have wrapped the failed allocation in an error of its own.
        error = error.__cause__ or error.__context__


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turn failed allocations into a MemoryExhausted, also those that caused another error."""
    try:
        yield
    except Exception as error:
        raise_if_out_of_memory(error)
        raise


class NothingToPrune(MergingError):
    """No group can be pruned. The message gives the reason of each layer.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> try:
    ...     nm.compress(torch.nn.Linear(4, 2), torch.zeros(1, 4))
    ... except NothingToPrune as error:
    ...     print(error.what)
    nothing can be removed: weight: output is what the network returns
    """


class VerificationError(MergingError):
    """The smaller network does not compute what the original does with the removed channels zeroed.

    It is raised in place of a wrong result. Either the rule of an operator is wrong, or the model's code depends on
    the number of channels in a way that the analysis missed.

    Examples
    --------
    >>> raise VerificationError("output 0 differs by 0.3", fix="Leave layers out with ignore=.")
    Traceback (most recent call last):
    ...
    neuron_merging.errors.VerificationError: output 0 differs by 0.3. Leave layers out with ignore=.
    """


class FidelityError(MergingError):
    """The fidelity of the smaller network is below what `require=` asks for.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> try:
    ...     nm.compress(net, torch.zeros(1, 4), ratio=0.75, require=1.0)
    ... except FidelityError as error:
    ...     print(error.where)
    require=
    """


class ModelError(MergingError):
    """The network could not be built or captured, or its weights could not be loaded.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> try:
    ...     nm.analyse({"weight": torch.zeros(2, 4)}, torch.zeros(1, 4))
    ... except ModelError as error:
    ...     print(error)
    expected a torch.nn.Module, got dict. Give the module itself, not its state dict or a class.
    """


class FolderError(MergingError):
    """A folder cannot be written or read back: it is missing, damaged, changed or from a newer version.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> try:
    ...     nm.load("no-such-folder")
    ... except FolderError as error:
    ...     print(error.fix)
    Give a complete folder that neuron-merging wrote.
    """


class RecipeError(MergingError):
    """A recipe is invalid: it has an unknown key, or a value of the wrong type."""


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return the advice for an unknown name: similar known names, or a list of known names.

    >>> suggest_names("raito", ["ratio", "scope"])
    'Did you mean ratio?'
    """
    names = list(known)
    # Below difflib's default cutoff of 0.6, so that short names with a typo still match.
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    more = " …" if len(names) > MAX_LISTED_NAMES else ""
    return f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(names[:MAX_LISTED_NAMES])}{more}."


def make_deprecated_getattr(module: str, renamed: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module-level `__getattr__` that resolves old names for one more version, with a warning.

    `renamed` maps each old name to the path of the new one: "package.module:name", or a module.
    """

    def find_renamed(name: str) -> object:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = renamed[name].partition(":")
        # stacklevel=3: the frame above this function is the module's `__getattr__`, the one above that the user's line.
        warnings.warn(f"{module}.{name} is now {home}{'.' * bool(new)}{new}", DeprecationWarning, stacklevel=3)
        imported = import_module(home)
        return getattr(imported, new) if new else imported

    return find_renamed


def deprecated_members(**renamed: str) -> Callable[[type[Renamed]], type[Renamed]]:
    """Return a class decorator that keeps old member names readable for one more version, with a warning.

    >>> @deprecated_members(place="location")
    ... class Node:
    ...     location = "line 12"
    >>> Node.place.__doc__
    'Deprecated: use `location`.'
    """

    def add_old_names(cls: type[Renamed]) -> type[Renamed]:
        for old, new in renamed.items():
            setattr(cls, old, property(_make_old_getter(cls.__name__, old, new)))
        return cls

    return add_old_names


def _make_old_getter(owner: str, old: str, new: str) -> Callable[[object], object]:
    def read_renamed(self: object) -> object:
        warnings.warn(f"{owner}.{old} is now {owner}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    read_renamed.__doc__ = f"Deprecated: use `{new}`."
    return read_renamed
