"""Memory that is free, and still counted as ours."""

from __future__ import annotations

import ctypes
import sys


def hand_back() -> None:
    """Give the system what the C library keeps for later, where it keeps any: after a fit that is a lot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
