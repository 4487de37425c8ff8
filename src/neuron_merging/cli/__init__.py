"""The command line. torch is imported inside the functions, so that `--help` is fast."""

from __future__ import annotations
