"""The command line. Torch is imported inside the functions, so that `--help` is fast."""

from __future__ import annotations
