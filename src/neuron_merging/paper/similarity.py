"""similarity: how alike the filters of each layer are (figure 5, left)."""

from __future__ import annotations

import re

from torch import Tensor

from neuron_merging import measuring
from neuron_merging.choosing.ratios import matches
from neuron_merging.paper.checkpoint import Checkpoint
from neuron_merging.paper.settings import FAMILIES


def similarities(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """By layer that the paper cuts, the largest cosine of every filter to another one."""
    found = measuring.max_similarities(checkpoint.model, checkpoint.example)
    patterns = FAMILIES[checkpoint.network.family].cut
    return {name: values for name, values in found.items() if any(matches(p, name) for p in patterns)}


def place(layer: str) -> str:
    """Stage and block as the paper counts them, or the layer's own name.

    >>> place("layer2.0.conv1"), place("block3.layer.5.conv1"), place("ip1")
    ('2-1', '3-6', 'ip1')
    """
    found = re.match(r"(?:layer|block)(\d+)\.(?:layer\.)?(\d+)\.", layer)
    return f"{found[1]}-{int(found[2]) + 1}" if found else layer
