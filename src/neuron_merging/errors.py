"""The exceptions of the library, and what they say of others'."""

from __future__ import annotations

import re


class MergingError(Exception):
    """Something the caller can act on: what happened, where, and what to do about it.

    >>> raise MergingError("ratio 1.5 is outside [0, 1)", where="ratio=", fix="give a share")
    Traceback (most recent call last):
    ...
    neuron_merging.errors.MergingError: ratio 1.5 is outside [0, 1) (at ratio=). give a share
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what + (f" (at {where})" if where else "") + (f". {fix}" if fix else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(kind: type[MergingError], what: str, where: str, fix: str) -> MergingError:
    return kind(what, where=where, fix=fix)


def told(error: BaseException) -> str:
    """Another library's error on one line: its kind, and the first line of its message if it has one.

    >>> told(KeyError("weight")), told(AssertionError())
    ("KeyError: 'weight'", 'AssertionError')
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class NothingToPrune(MergingError):
    """No group takes part: each has a reason."""


class VerificationError(MergingError):
    """The smaller network does not compute what it should."""


class ModelError(MergingError):
    """The network could not be built, its weights not loaded, or it could not be captured."""


class FolderError(MergingError):
    """A folder that cannot be written or read back: missing, damaged, changed or too new."""


class RecipeError(MergingError):
    """A recipe that cannot be meant: an unknown key or a value of the wrong kind."""
