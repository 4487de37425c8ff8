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
    """Return the digest of nested lists, tuples and mappings of tensors, bytes and objects with a unique `repr`.

    >>> compute_digest([torch.zeros(2)]) == compute_digest([torch.zeros(2)])
    True
    >>> compute_digest(["ab", "c"]) == compute_digest(["a", "bc"])
    False
    """
    digest = hashlib.sha256()
    for part in _iter_content(values):
        # The length comes first: otherwise ("ab", "c") and ("a", "bc") would be the same bytes.
        digest.update(str(len(part)).encode() + b":")
        digest.update(part)
    return digest.hexdigest()


def _iter_content(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield repr((value.dtype, tuple(value.shape))).encode()
        yield _view_as_bytes(value)
    elif isinstance(value, bytes | memoryview):
        yield value
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}".encode()
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):  # independent of insertion order
            yield repr(key).encode()
            yield from _iter_content(item)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for item in value:
            yield from _iter_content(item)
    else:
        yield repr(value).encode()


def _view_as_bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    plain = tensor.detach().cpu().contiguous()
    # Through uint8, since numpy has no bfloat16.
    return plain.flatten().view(torch.uint8).numpy().data if plain.numel() else b""


def compute_graph_digest(graph: Graph) -> str:
    """Return the digest of a network: operators with shapes, parameters, buffers and constants."""
    nodes = [(node.name, node.op, node.args, node.shapes) for node in graph.nodes]
    return compute_digest(nodes, graph.tensors, graph.constants)


def compute_sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes, as `sha256sum` prints it."""
    return hashlib.sha256(data).hexdigest()


def compute_file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, read in pieces: it may be larger than memory."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
