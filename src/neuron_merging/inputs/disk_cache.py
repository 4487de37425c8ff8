"""Disk cache of synthesised inputs, so that the next run does not compute them again.

An entry belongs to one network, by the content of its graph and tensors, and to one set of options. It holds one
file for each batch, so that an interrupted run continues where it stopped. A file that cannot be read counts as
missing, and one that cannot be written is skipped: a cache must never cause a failure.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuron_merging import atomic
from neuron_merging.graph.graph import Graph
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs.synthetic import infer_batch_size, is_float_tensor

CACHE_VERSION = 1
"""Of the way in which inputs are made: what an older one made is not taken for it."""
MAX_CACHE_BYTES = 2**30
"""Bytes that the cache may hold; beyond that the oldest shelves go."""


def find_cache_root() -> Path | None:
    """The folder of the cache: $NEURON_MERGING_CACHE, else the user's own; none where that is empty."""
    given = os.environ.get("NEURON_MERGING_CACHE")
    if given == "":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "neuron-merging"
    return (Path(given) if given else home) / "remembered"


def compute_cache_key(graph: Graph, example: Sequence[Any], way: object) -> str:
    """A digest of all that the inputs depend on: of numbers in the example, which are made up anew, the shape."""
    length = infer_batch_size(example)
    digest = hashlib.sha256(repr((CACHE_VERSION, torch.__version__, way)).encode())
    for node in graph.nodes:
        digest.update(repr((node.name, node.op, sorted(node.args.items()))).encode())
    for value in flatten_inputs(example):
        made_up = is_float_tensor(value) and value.ndim > 0 and len(value) == length
        digest.update(repr((value.dtype, value.shape) if made_up else value).encode())
        digest.update(_view_as_bytes(value) if isinstance(value, Tensor) and not made_up else b"")
    for name, tensor in sorted([*graph.tensors.items(), *graph.constants.items()]):
        digest.update(name.encode())
        digest.update(_view_as_bytes(tensor))
    return digest.hexdigest()


def _view_as_bytes(tensor: Tensor) -> Any:
    """What a tensor holds, as something that has bytes."""
    plain = tensor.detach().cpu().contiguous()
    return plain.flatten().view(torch.uint8).numpy() if plain.numel() else b""


@dataclass(frozen=True)
class CacheEntry:
    """The pieces of one network."""

    folder: Path | None

    def get(self, piece: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """A piece's tensors and notes, if it is there."""
        if self.folder is None:
            return None
        file = self.folder / f"{piece}.safetensors"
        try:
            with safetensors.safe_open(file, "pt") as opened:
                notes = dict(opened.metadata() or {})
            return load_file(file), notes
        except (OSError, safetensors.SafetensorError):
            return None

    def put(self, piece: str, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
        """Keep a piece, if the disk lets us."""
        if self.folder is None:
            return
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"{piece}.safetensors"
            atomic.replace_file(file, lambda part: save_file(plain, part, dict(notes)))
            _evict_oldest(self.folder)
        except (OSError, safetensors.SafetensorError):
            return


def open_cache_entry(graph: Graph, example: Sequence[object], way: object) -> CacheEntry:
    """The shelf for a network and a way of working."""
    place = find_cache_root()
    return CacheEntry(None if place is None else place / compute_cache_key(graph, example, way))


def _evict_oldest(newest: Path) -> None:
    """Let the oldest shelves go until the rest fits."""
    shelves = sorted((f for f in newest.parent.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime, reverse=True)
    held = 0
    for folder in shelves:
        held += sum(file.stat().st_size for file in folder.iterdir())
        if held > MAX_CACHE_BYTES and folder != newest:
            shutil.rmtree(folder, ignore_errors=True)
