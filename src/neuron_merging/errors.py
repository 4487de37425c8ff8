"""The one exception class of the library."""

from __future__ import annotations


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
