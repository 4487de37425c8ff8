"""gallery: pictures that stand in the page itself."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from torch import Tensor

MOST = 24


def gallery(images: Tensor, most: int = MOST) -> tuple[str, ...]:
    """Images (n, c, h, w) as addresses of PNG files for the page; each is spread over all brightnesses.

    >>> import torch
    >>> [address[:22] for address in gallery(torch.rand(2, 3, 4, 4))]
    ['data:image/png;base64,', 'data:image/png;base64,']
    """
    return tuple(as_address(png(_pixels(image.detach().double().cpu().numpy()))) for image in images[:most])


def _pixels(image: np.ndarray) -> np.ndarray:
    """Bytes (h, w, 1 or 3); of another number of channels their mean is shown."""
    shown = image if len(image) in (1, 3) else image.mean(0, keepdims=True)
    shown = np.nan_to_num(shown, posinf=0.0, neginf=0.0)
    low, high = shown.min(), shown.max()
    scaled = (shown - low) / (high - low) if high > low else np.full_like(shown, 0.5)
    return np.moveaxis(np.round(255 * scaled).astype(np.uint8), 0, 2)


def png(pixels: np.ndarray, palette: dict[bytes, bytes] | None = None) -> bytes:
    """Bytes (h, w, 1 or 3) as a file; with a palette, of levels that stand for its colours."""
    rows, columns, channels = pixels.shape
    kind = 3 if palette else 2 if channels == 3 else 0
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)], 1).tobytes()
    header = struct.pack(">IIBBBBB", columns, rows, 8, kind, 0, 0, 0)
    parts = {b"IHDR": header, **(palette or {}), b"IDAT": zlib.compress(lines, 9), b"IEND": b""}
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def as_address(file: bytes) -> str:
    """A file as the address of itself."""
    return "data:image/png;base64," + base64.b64encode(file).decode()
