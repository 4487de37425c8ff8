"""SHA-256 digests of values, files and networks: equal digests mean equal content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuron_merging.graph.graph import Graph


def compute_digest(*values: Any) -> str:
    """The digest of nested lists, tuples and mappings of tensors, bytes and whatever has a telling `repr`.

    >>> compute_digest([torch.zeros(2)]) == compute_digest([torch.zeros(2)])
    True
    >>> compute_digest(["ab", "c"]) == compute_digest(["a", "bc"])
    False
    """
    found = hashlib.sha256()
    for part in _iter_content(values):
        # The length comes first: otherwise ("ab", "c") and ("a", "bc") would be the same bytes.
        found.update(str(len(part)).encode() + b":")
        found.update(part)
    return found.hexdigest()


def _iter_content(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield repr((value.dtype, tuple(value.shape))).encode()
        yield _view_as_bytes(value)
    elif isinstance(value, bytes | memoryview):
        yield value
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}".encode()
        for key, own in sorted(value.items(), key=lambda item: repr(item[0])):
            yield repr(key).encode()
            yield from _iter_content(own)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for own in value:
            yield from _iter_content(own)
    else:
        yield repr(value).encode()


def _view_as_bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor, without a copy where it lies in one piece on the CPU."""
    plain = tensor.detach().cpu().contiguous()
    return plain.flatten().view(torch.uint8).numpy().data if plain.numel() else b""


def compute_graph_digest(graph: Graph) -> str:
    """The digest of a network: its operators with their shapes, its parameters, buffers and constants."""
    nodes = [(node.name, node.op, node.args, node.shapes) for node in graph.nodes]
    return compute_digest(nodes, graph.tensors, graph.constants)


def compute_sha256(data: bytes) -> str:
    """The plain SHA-256 of bytes, as `sha256sum` prints it."""
    return hashlib.sha256(data).hexdigest()


def compute_file_sha256(file: Path) -> str:
    """The plain SHA-256 of a file, which may be larger than the memory."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
