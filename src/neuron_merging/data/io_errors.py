"""Errors of unreadable files, raised as one MergingError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from neuron_merging.errors import MergingError


@contextmanager
def report_read_errors(where: str) -> Iterator[None]:
    """Whatever goes wrong inside is told as a fault of the file `where`.

    Every exception, because a damaged file can raise any: zlib, tar, zip and pickle each have
    their own and pass on more.
    """
    try:
        yield
    except MergingError:
        raise
    except PermissionError as error:
        fix = "Allow it to be read, or give another folder"
        raise MergingError(f"cannot read this file: {error.strerror}", where=where, fix=fix) from error
    except Exception as error:
        what = f"cannot read this file: {str(error) or type(error).__name__}"
        fix = "It is damaged, cut short or something else: remove it and get it again"
        raise MergingError(what, where=where, fix=fix) from error
