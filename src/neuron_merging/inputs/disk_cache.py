"""Disk caches: folders of files by name, in which the next run finds what an earlier one computed.

A cache is never a reason to fail. A file that cannot be read, or that its reader does not accept, counts as missing
and is discarded; one that cannot be written is skipped. Files are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from neuron_merging import atomic
from neuron_merging.errors import describe_error
from neuron_merging.graph.digests import compute_digest, compute_graph_digest
from neuron_merging.graph.example_inputs import has_batch_axis, infer_batch_size
from neuron_merging.graph.graph import Graph
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.progress import log

T = TypeVar("T")
DECODING_ERRORS = (
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    msgspec.MsgspecError,
    safetensors.SafetensorError,
)
"""What readers of files raise on damaged or foreign content."""


@dataclass(frozen=True)
class DiskCache:
    """Files by name in one folder.

    Attributes
    ----------
    folder
        Where they are; None for a cache that keeps nothing.
    max_bytes
        What they may take together: beyond that the oldest are removed. None for no limit.
    """

    folder: Path | None
    max_bytes: int | None = None

    def read(self, name: str, decode: Callable[[Path], T | None]) -> T | None:
        """What `decode` makes of a file. One that it fails on, or returns None for, is discarded."""
        file = None if self.folder is None else self.folder / name
        if file is None or not file.is_file():
            return None
        try:
            found = decode(file)
        except OSError:  # the disk's fault, or another process removed it: nothing is known about the content
            return None
        except DECODING_ERRORS as error:
            log.info("the cache file %s is discarded: %s", file, error)
            found = None
        if found is None:
            with contextlib.suppress(OSError):
                file.unlink()
        return found

    def write(self, name: str, content: atomic.FileContent) -> str:
        """Keep a file, if the disk allows it; otherwise the reason why not."""
        if self.folder is None:
            return ""
        file = self.folder / name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic.replace_file(file, content)
            if self.max_bytes is not None:
                _evict_oldest(self.folder, file, self.max_bytes)
        except (OSError, safetensors.SafetensorError) as error:
            return describe_error(error)
        return ""


def _evict_oldest(folder: Path, newest: Path, max_bytes: int) -> None:
    """Remove the oldest files until the rest fits; the newest stays, whatever its size."""
    files = []
    for file in folder.rglob(f"*{newest.suffix}"):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            status = file.stat()
            files.append((file == newest, status.st_mtime_ns, status.st_size, file))
    held = 0
    for is_newest, _, size, file in sorted(files, reverse=True):
        held += size
        if held > max_bytes and not is_newest:
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # fails while other files are in the folder
                file.parent.rmdir()


# Synthesised inputs

INPUTS_VERSION = "2"
"""Of the way in which inputs are synthesised: entries of other versions are not used."""
MAX_CACHE_BYTES = 2**30
"""Bytes that all synthesised inputs together may take."""


def open_input_cache() -> DiskCache:
    """The cache of synthesised inputs: in $NEURON_MERGING_CACHE, else the user's own; nothing is kept where that is
    empty.
    """
    given = os.environ.get("NEURON_MERGING_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "neuron-merging"
    folder = None if given == "" else (Path(given) if given else home) / "remembered"
    return DiskCache(folder, MAX_CACHE_BYTES)


@dataclass(frozen=True)
class InputCacheEntry:
    """The batches that were synthesised for one network with one set of options: a file for each.

    An interrupted run continues after the last whole batch.
    """

    cache: DiskCache
    key: str

    def get(
        self, number: int, like: Mapping[str, Tensor], figures: Sequence[str]
    ) -> tuple[dict[str, Tensor], dict[str, float]] | None:
        """A batch and its figures; all are finite, and the tensors have the names, shapes and dtypes of `like`."""

        def decode(file: Path) -> tuple[dict[str, Tensor], dict[str, float]] | None:
            with safetensors.safe_open(file, "pt") as opened:
                notes = dict(opened.metadata() or {})
            tensors, found = load(file.read_bytes()), {name: float(notes[name]) for name in figures}
            valid = notes["version"] == INPUTS_VERSION and all(map(math.isfinite, found.values()))
            return (tensors, found) if valid and _match_tensors(tensors, like) else None

        return self.cache.read(self._name(number), decode)

    def put(self, number: int, tensors: Mapping[str, Tensor], figures: Mapping[str, float]) -> None:
        """Keep a batch and its figures."""
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        notes = {name: str(figure) for name, figure in figures.items()} | {"version": INPUTS_VERSION}
        self.cache.write(self._name(number), lambda part: save_file(plain, part, notes))

    def _name(self, number: int) -> str:
        return f"{self.key}/{number}.safetensors"


def _match_tensors(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> bool:
    return set(tensors) == set(like) and all(
        tensor.shape == like[name].shape and tensor.dtype == like[name].dtype and bool(tensor.isfinite().all())
        for name, tensor in tensors.items()
    )


def open_cache_entry(graph: Graph, example: Sequence[Any], options: object) -> InputCacheEntry:
    """The entry of a network and of the options that its inputs are synthesised with.

    Of the example's float tensors along the batch dimension, whose values are synthesised anew, only the shape counts.
    """
    cache, length = open_input_cache(), infer_batch_size(example)
    if cache.folder is None:
        return InputCacheEntry(cache, "")  # nothing is kept: the network need not be hashed
    values = [
        (value.dtype, value.shape) if has_batch_axis(value, length) and value.is_floating_point() else value
        for value in flatten_inputs(example)
    ]
    key = compute_digest(INPUTS_VERSION, torch.__version__, options, values, compute_graph_digest(graph))
    return InputCacheEntry(cache, key)
