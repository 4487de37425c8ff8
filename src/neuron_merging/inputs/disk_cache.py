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
from neuron_merging.graph.example_inputs import flatten_inputs, has_batch_axis, infer_batch_size
from neuron_merging.graph.graph import Graph
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
"""Errors that decoders raise for damaged or foreign files."""


@dataclass(frozen=True)
class DiskCache:
    """Files by name in one folder.

    Attributes
    ----------
    folder
        The folder; None for a cache that stores nothing.
    max_bytes
        The largest total size; the oldest files beyond it are removed. None for no limit.
    """

    folder: Path | None
    max_bytes: int | None = None

    def read(self, name: str, decode: Callable[[Path], T | None]) -> T | None:
        """Return the decoded content of a file; discard the file if `decode` fails or returns None."""
        file = None if self.folder is None else self.folder / name
        if file is None or not file.is_file():
            return None
        try:
            found = decode(file)
        except OSError:  # the disk failed or another process removed the file; its content may be valid
            return None
        except DECODING_ERRORS as error:
            log.info("the cache file %s is discarded: %s", file, error)
            found = None
        if found is None:
            with contextlib.suppress(OSError):
                file.unlink()
        return found

    def write(self, name: str, content: atomic.FileContent) -> str:
        """Write a file; return the reason if that fails, else an empty text."""
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
    """Remove the oldest files until the rest fits; keep the newest, whatever its size."""
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

INPUTS_VERSION = "4"
"""Version of the synthesis; increase it when results change. Entries of other versions are ignored."""
MAX_CACHE_BYTES = 2**30
"""Largest total size of all synthesised inputs, in bytes."""


def open_input_cache() -> DiskCache:
    """Open the cache of synthesised inputs: $NEURON_MERGING_CACHE, else the user's cache folder.

    An empty variable disables the cache.
    """
    given = os.environ.get("NEURON_MERGING_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "neuron-merging"
    folder = None if given == "" else (Path(given) if given else home) / "remembered"
    return DiskCache(folder, MAX_CACHE_BYTES)


@dataclass(frozen=True)
class InputCacheEntry:
    """The batches that were synthesised for one network with one set of options, one file each.

    An interrupted run continues after the last complete batch.
    """

    cache: DiskCache
    key: str

    def get(
        self, number: int, like: Mapping[str, Tensor], figures: Sequence[str]
    ) -> tuple[dict[str, Tensor], dict[str, float]] | None:
        """Return a batch and its figures; None unless all are finite and the tensors match `like` in name, shape and
        dtype.
        """

        def decode(file: Path) -> tuple[dict[str, Tensor], dict[str, float]] | None:
            with safetensors.safe_open(file, "pt") as opened:
                notes = dict(opened.metadata() or {})
            tensors, found = load(file.read_bytes()), {name: float(notes[name]) for name in figures}
            valid = notes["version"] == INPUTS_VERSION and all(map(math.isfinite, found.values()))
            return (tensors, found) if valid and _match_tensors(tensors, like) else None

        return self.cache.read(self._name(number), decode)

    def put(self, number: int, tensors: Mapping[str, Tensor], figures: Mapping[str, float]) -> None:
        """Write a batch and its figures."""
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
    """Open the cache entry of a network and of the options of the synthesis.

    Values of the example's float tensors with a batch dimension are synthesised, so only their shapes enter the key.
    """
    cache, length = open_input_cache(), infer_batch_size(example)
    if cache.folder is None:
        return InputCacheEntry(cache, "")  # the cache is disabled: skip hashing the network
    values = [
        (value.dtype, value.shape) if has_batch_axis(value, length) and value.is_floating_point() else value
        for value in flatten_inputs(example)
    ]
    key = compute_digest(INPUTS_VERSION, torch.__version__, options, values, compute_graph_digest(graph))
    return InputCacheEntry(cache, key)
