"""Compare the outputs of two networks."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Per entry, relative to its own scale; in double precision rounding is far below that."""
