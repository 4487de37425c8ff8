"""Chains of linear layers, and the number of channels that each keeps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

import neuron_merging as nm


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]


def kept(result: nm.Compressed) -> dict[str, tuple[int, ...]]:
    return {group.name: group.kept for group in result.plan.groups}


def counts(model: nn.Module, x: Tensor, **options: Any) -> dict[str, int]:
    result = nm.compress(model, x, merger="none", **options)
    return {group.name: group.after for group in result.summary.groups}
