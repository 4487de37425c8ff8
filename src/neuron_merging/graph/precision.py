"""The precision that merging computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def working(tensor: Tensor) -> Tensor:
    """float64 stays, half precision is computed in float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
