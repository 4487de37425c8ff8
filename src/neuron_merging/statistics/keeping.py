"""keeping: what was worked out for a network, on disk, so that the next run need not do it again.

A shelf belongs to one network, by the content of its graph and tensors, and to one way of working. It holds one file
for each piece, so that a run which was cut off goes on where it was. What cannot be read counts as not there, and
what cannot be written is not kept: a cache must never be the reason for a failure.
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
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Graph
from neuron_merging.statistics.synthetic import batch_size, is_numeric

VERSION = 1
"""Of the way in which inputs are made: what an older one made is not taken for it."""
MOST = 2**30
"""Bytes that the cache may hold; beyond that the oldest shelves go."""


def root() -> Path | None:
    """The folder of the cache: $NEURON_MERGING_CACHE, else the user's own; none where that is empty."""
    given = os.environ.get("NEURON_MERGING_CACHE")
    if given == "":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "neuron-merging"
    return (Path(given) if given else home) / "remembered"


def content(graph: Graph, example: Sequence[Any], way: object) -> str:
    """A digest of all that the inputs depend on: of numbers in the example, which are made up anew, the shape."""
    length = batch_size(example)
    digest = hashlib.sha256(repr((VERSION, torch.__version__, way)).encode())
    for node in graph.nodes:
        digest.update(repr((node.name, node.op, sorted(node.args.items()))).encode())
    for value in flat(example):
        made_up = is_numeric(value) and value.ndim > 0 and len(value) == length
        digest.update(repr((value.dtype, value.shape) if made_up else value).encode())
        digest.update(_bytes(value) if isinstance(value, Tensor) and not made_up else b"")
    for name, tensor in sorted([*graph.tensors.items(), *graph.constants.items()]):
        digest.update(name.encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """What a tensor holds, as something that has bytes."""
    plain = tensor.detach().cpu().contiguous()
    return plain.flatten().view(torch.uint8).numpy() if plain.numel() else b""


@dataclass(frozen=True)
class Shelf:
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
            _tidy(self.folder)
        except (OSError, safetensors.SafetensorError):
            return


def shelf(graph: Graph, example: Sequence[object], way: object) -> Shelf:
    """The shelf for a network and a way of working."""
    place = root()
    return Shelf(None if place is None else place / content(graph, example, way))


def _tidy(newest: Path) -> None:
    """Let the oldest shelves go until the rest fits."""
    shelves = sorted((f for f in newest.parent.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime, reverse=True)
    held = 0
    for folder in shelves:
        held += sum(file.stat().st_size for file in folder.iterdir())
        if held > MOST and folder != newest:
            shutil.rmtree(folder, ignore_errors=True)
