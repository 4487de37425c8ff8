"""bench: the measured latency of networks, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.inference_mode()
def latencies(
    networks: Mapping[str, nn.Module], inputs: tuple[Any, ...], batches: Sequence[int], runs: int
) -> dict[str, dict[int, float]]:
    """Median seconds of a forward pass, by network and batch size; the networks take turns."""
    found: dict[str, dict[int, float]] = {name: {} for name in networks}
    for size in batches:
        batch = tuple(_resized(value, size) for value in inputs)
        times: dict[str, list[float]] = {name: [] for name in networks}
        for network in networks.values():
            network(*batch)
        for _ in range(runs):
            for name, network in networks.items():
                times[name].append(_timed(network, batch))
        for name, seconds in times.items():
            found[name][size] = statistics.median(seconds)
    return found


def _timed(network: nn.Module, batch: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    network(*batch)
    return time.perf_counter() - start


def _resized(value: Any, size: int) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return value[:1].expand(size, *value.shape[1:]).contiguous()
